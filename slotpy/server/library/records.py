"""Models made from others: a small record each of what they add, never a copy of weights.

Owns the files under `aliases` in slotpy's home. Knows no directories of models (library.py resolves the records).
"""

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slotpy.checkpoint.header import parse_json_object
from slotpy.checkpoint.writing import replace_durably
from slotpy.errors import CheckpointError
from slotpy.server.errors import ApiError
from slotpy.server.library.names import ServedName, parse_served

_SUFFIX = ".json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Say what one model adds to its base: a model of the library, or files that a client sent.

    `base` is the name of the first, never that of a record: making one from a record takes its contents over.
    `created` names the directory of the second. `parameters` are Ollama's options.
    """

    name: ServedName
    base: str = ""
    created: str = ""
    system: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    license: str = ""

    def contents(self) -> dict[str, Any]:
        """Give what makes up the record, without what is known of its file."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(Record)}

    def as_text(self) -> str:
        """Give the record as its file's text."""
        return json.dumps(self.contents() | {"name": str(self.name)}, indent=1)


@dataclass(frozen=True, kw_only=True)
class StoredRecord(Record):
    """A record with the time at which it was written."""

    modified_at: datetime


class Records:
    """All records of one directory, by key; read again when a file of it changed. Safe to use from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cache: dict[str, tuple[tuple[int, int], StoredRecord | None]] = {}
        self._saving = threading.Lock()  # two requests for one name would write the same temporary file

    def all(self) -> dict[str, StoredRecord]:
        """Give every record by the key of its name. One that cannot be read is left out, and logged once."""
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and (record := self._read(entry)):
                    found[record.name.key] = record
        return found

    def save(self, record: Record) -> None:
        """Write a record, in place of one with the same name. Raises: OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._saving:
            replace_durably(self._path(record.name), record.as_text().encode() + b"\n")

    def remove(self, name: ServedName) -> None:
        """Remove a record. Raises: OSError."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: ServedName) -> Path:
        return self._directory / (quote(name.key, safe="") + _SUFFIX)

    def _read(self, entry: os.DirEntry[str]) -> StoredRecord | None:
        try:
            status = entry.stat()
        except FileNotFoundError:  # removed meanwhile
            return None
        # A record is replaced by a new file, so the inode tells even two writes within one tick of the clock.
        state = (status.st_ino, status.st_mtime_ns)
        cached = self._cache.get(entry.name)
        if cached is None or cached[0] != state:
            record = None
            try:
                record = _parse(Path(entry.path), datetime.fromtimestamp(status.st_mtime, UTC))
            except (CheckpointError, OSError) as error:
                log.warning("left out: %s", error)
            cached = self._cache[entry.name] = (state, record)
        return cached[1]


def _parse(path: Path, modified_at: datetime) -> StoredRecord:
    fields = parse_json_object(path, path.read_bytes(), "the record")
    known = {each.name for each in dataclasses.fields(Record)}
    try:
        values = {key: value for key, value in fields.items() if key in known}
        values |= {"name": parse_served(fields["name"]), "messages": tuple(fields.get("messages", ()))}
        record = StoredRecord(**values, modified_at=modified_at)
        texts = (record.base, record.created, record.system, record.license)
        if not all(isinstance(text, str) for text in texts) or not (record.base or record.created):
            raise TypeError("base, created, system and license are texts, and one of the first two is there")
        if not isinstance(record.parameters, dict) or not all(isinstance(each, dict) for each in record.messages):
            raise TypeError("parameters and each message are objects")
        return record
    except (ApiError, KeyError, TypeError, AttributeError) as error:
        hint = "Remove it, and make the model again."
        raise CheckpointError("malformed record of a model", file=path, found=error, hint=hint) from error

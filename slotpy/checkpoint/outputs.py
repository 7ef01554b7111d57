"""The files of a directory that slotpy writes: their bytes in order, and the state of the source they come from.

Owns what `slotpy pack` and `slotpy convert` decide alike before a byte is written: headers, the small files that are
copied, what identifies the source. writing.py writes.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slotpy.checkpoint.index import INDEX_NAME, FileStamp, TensorIndex, read_exactly
from slotpy.errors import CheckpointError

# A page of Apple silicon, and a multiple of every drive's sector: direct reads need no bounce buffer.
DATA_ALIGNMENT = 16384
MAX_COPY_BYTES = 64 << 20


class Output(Protocol):
    """One file to write: `header`, then what `blocks` yields, `nbytes` in all."""

    @property
    def name(self) -> str: ...
    @property
    def header(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...

    def blocks(self, start: int) -> Iterator[memoryview]:
        """Yield the bytes after the header from `start` on. A block is valid until the next is asked for.

        Raises: ReadError when the source cannot be read or has changed.
        """
        ...


@dataclass(frozen=True)
class CopyOutput:
    """A small file (tokenizer, chat template) taken over byte for byte."""

    name: str
    path: Path
    stamp: FileStamp
    header: bytes = b""

    @property
    def nbytes(self) -> int:
        return self.stamp.nbytes

    def blocks(self, start: int) -> Iterator[memoryview]:
        data = memoryview(bytearray(self.nbytes - start))
        read_exactly(self.path, self.stamp, start, data)
        yield data


@dataclass(frozen=True)
class SourceFile:
    """Name one file that a directory was made from, in the state that was read."""

    name: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True)
class SourceState:
    """Identify what a directory was made from: every file as it was, and the SHA-256 of config.json in hex."""

    config_sha256: str
    files: tuple[SourceFile, ...]

    def to_json(self) -> dict[str, Any]:
        return {"config_sha256": self.config_sha256, "files": [vars(file) for file in self.files]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "SourceState":
        return cls(fields["config_sha256"], tuple(SourceFile(**file) for file in fields["files"]))


def describe_source(directory: Path, index: TensorIndex, copies: Sequence[CopyOutput]) -> SourceState:
    """Note the state of all files that are read. Raises: CheckpointError when there is no readable config.json."""
    path = directory / "config.json"
    try:
        config_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError("cannot read", file=path, found=error.strerror) from error
    stamps = [(path.name, stamp) for path, stamp in zip(index.files, index.stamps, strict=True)]
    stamps += [(file.name, file.stamp) for file in copies]
    return SourceState(config_sha256, tuple(SourceFile(name, stamp.nbytes, stamp.mtime_ns) for name, stamp in stamps))


def plan_copies(directory: Path) -> tuple[list[CopyOutput], tuple[str, ...]]:
    """List the files to copy, and the names of what stays behind: folders and large files of other formats.

    Raises: CheckpointError when the directory cannot be read.
    """
    copies, left_out = [], []
    try:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name.endswith(".safetensors") or entry.name == INDEX_NAME:
                continue
            if entry.is_file() and entry.stat().st_size <= MAX_COPY_BYTES:
                copies.append(CopyOutput(entry.name, directory / entry.name, FileStamp.of(entry.stat())))
            else:
                left_out.append(entry.name)
    except OSError as error:
        raise CheckpointError("cannot read", file=error.filename, found=error.strerror) from error
    return copies, tuple(left_out)


def make_header(entries: dict[str, dict[str, Any]], writer: str) -> bytes:
    """Make a safetensors header, padded with spaces so that the data begins at a multiple of DATA_ALIGNMENT.

    `writer` goes into its metadata as `format`.
    """
    text = json.dumps({"__metadata__": {"format": writer}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

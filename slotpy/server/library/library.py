"""The models that the server offers: pulled ones, the demo, directories it was given, and models made from those.

Owns what a name stands for and the facts shown about it, read from small files and kept until one changes. Loads no
weights. Safe to use from any thread; only a model's first look takes longer than a millisecond or two.
"""

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slotpy.checkpoint.writing import writing
from slotpy.demo import demo_directory
from slotpy.errors import CheckpointError, SlotpyError
from slotpy.hub.library import check_verified, remove_model
from slotpy.hub.manifest import MANIFEST_NAME, load_manifest, pinned_manifests
from slotpy.server.errors import ApiError
from slotpy.server.library.blobs import Blobs
from slotpy.server.library.creation import create_directory
from slotpy.server.library.facts import Facts, Fingerprint, ModelText, fingerprint, read_facts
from slotpy.server.library.names import InvalidName, ServedName, parse_served
from slotpy.server.library.pulls import Pulls
from slotpy.server.library.records import Record, Records, StoredRecord

__all__ = ["InvalidName", "Library", "Located", "Model", "UnknownModel"]

_DEMO = ServedName("demo")


class UnknownModel(ApiError):
    """Say that there is no such model, and `why` where it is not simply absent."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(404, f"model '{name}' not found" + (f": {why}" if why else ""))
        self.name, self.why = name, why


@dataclass(frozen=True, kw_only=True)
class Model(Facts):
    """Describe a model that can be loaded, under one of its names.

    `digest` is another for every name too. `system`, `parameters` (Ollama's options) and `messages` come from a record:
    defaults of each request.
    """

    name: str
    system: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Located:
    """Say what a name stands for, before anything is read of it."""

    name: ServedName
    directory: Path
    record: StoredRecord | None = None

    @property
    def takes_weights(self) -> bool:
        """Tell whether weights go when it is removed."""
        return self.record is None or bool(self.record.created)


@dataclass(frozen=True)
class _Unusable:
    """Remember why a directory's facts could not be read. One that is `unfinished` can still be pulled."""

    why: str
    unfinished: bool


class Library:
    """Find and list the models under `models_dir`, `directories` (each under its own name), and in records.

    `home` is slotpy's own directory: records, and the files of models that clients sent, lie there.
    """

    def __init__(self, models_dir: Path, home: Path, directories: Sequence[Path] = ()) -> None:
        self.models_dir, self.home = models_dir, home
        self.records = Records(home / "aliases")
        self.blobs = Blobs(home / "blobs")
        self.pulls = Pulls(models_dir)
        self.created_dir = home / "created"
        self._given = {ServedName(_as_part(path.resolve().name)): path.resolve() for path in directories}
        self._pinned = {name.replace(":", "-"): parse_served(name) for name in pinned_manifests()}
        self._creating = threading.Lock()
        self._facts: dict[Path, tuple[Fingerprint, Facts | _Unusable]] = {}

    def list(self) -> list[Model]:
        """Give all models that can be loaded, the newest first."""
        records, places = self.records.all(), self._places()
        located = [Located(name, directory) for key, (name, directory) in places.items() if key not in records]
        located += [self._follow(record, places) for record in records.values()]
        models = [self._describe(each, facts) for each in located if isinstance(facts := self._read(each), Facts)]
        return sorted(models, key=lambda model: (-model.modified_at.timestamp(), model.name))

    def find(self, name: str) -> Model:
        """Give the model that a client names.

        Raises: InvalidName; UnknownModel, also for one that is not completely pulled; ApiError for one that cannot be
        run, or that only ollama.com has.
        """
        located = self.locate(name)
        facts = self._read(located)
        if isinstance(facts, Facts):
            return self._describe(located, facts)
        if facts.unfinished:
            raise UnknownModel(name, facts.why)
        raise ApiError(400, facts.why)

    def locate(self, name: str) -> Located:
        """Say what a name stands for, complete or not. Raises: InvalidName, UnknownModel; ApiError for a remote one."""
        wanted = parse_served(name)
        records, places = self.records.all(), self._places()
        key = wanted.key
        if not wanted.tag and key not in records and key not in places:
            # Without a tag a name means its only variant.
            variants = [name for name, _ in places.values() if name.model.lower() == wanted.model.lower()]
            if len(variants) == 1:
                key = variants[0].key
        if key in records:
            return self._follow(records[key], places)
        if key in places:
            return Located(*places[key])
        if wanted.is_remote:
            raise ApiError(403, "ollama cloud is disabled: remote model is unavailable")
        raise UnknownModel(name)

    def copy(self, source: str, destination: str) -> None:
        """Give a model a second name. Raises: as `find`; InvalidName for the destination; OSError."""
        name = parse_served(destination)
        self.find(source)
        record = self.record_from(source)
        if record.name.key != name.key:
            self.save(replace(record, name=name))

    def record_from(self, source: str) -> Record:
        """Give a record that adds nothing to a model, to build on. Raises: as `locate`."""
        located = self.locate(source)
        if located.record is None:
            return Record(located.name, base=str(located.name))
        return Record(**located.record.contents())

    def create(self, files: Mapping[str, str]) -> tuple[str, ModelText]:
        """Make a directory of blobs, and give what a record calls it, and its text side. Raises: as creation.py."""
        with self._creating:
            created = create_directory(self.blobs, self.created_dir, files)
        return created, ModelText(self.created_dir / created)

    def save(self, record: Record) -> None:
        """Keep a record, in place of one with the same name. Raises: SlotpyError when it cannot be written."""
        with writing(self.home):
            before = self.records.all().get(record.name.key)
            self.records.save(record)
            if before is not None and before.created:
                self._remove_created(before.created)

    def refuse_removal(self, located: Located) -> None:
        """Raise ApiError for a model that must stay."""
        if located.record is not None:
            return
        if located.directory == demo_directory():
            raise ApiError(400, "the demo comes with slotpy and cannot be deleted")
        if load_manifest(located.directory) is None:
            raise ApiError(400, f"{located.directory} was not pulled by slotpy: remove it yourself if you want to")
        key = located.name.key
        built = sorted(str(each.name) for each in self.records.all().values() if each.base.lower() == key)
        if built:
            raise ApiError(400, f"{', '.join(built)} would be lost with {located.name}: delete first what builds on it")

    def remove(self, located: Located) -> None:
        """Remove a model from the disk: a record, or the files of a pulled model. May take seconds.

        Raises: ApiError for one that must stay; UsageError while a pull writes to it; SlotpyError.
        """
        self.refuse_removal(located)
        with writing(located.directory):
            if located.record is None:
                remove_model(located.directory)
                return
            self.records.remove(located.name)
            if located.record.created:
                self._remove_created(located.record.created)

    def _remove_created(self, created: str) -> None:
        """Remove the files of a model that a client sent, unless a record still has them."""
        if any(record.created == created for record in self.records.all().values()):
            return
        directory = self.created_dir / created
        inodes = [path.stat().st_ino for path in directory.iterdir()] if directory.is_dir() else []
        shutil.rmtree(directory, ignore_errors=True)
        self.blobs.forget(inodes)

    def _follow(self, record: StoredRecord, places: Mapping[str, tuple[ServedName, Path]]) -> Located:
        """Find the directory of a record's base, which may be gone."""
        if record.created:
            return Located(record.name, self.created_dir / record.created, record)
        place = places.get(record.base.lower())
        return Located(record.name, place[1] if place else self.models_dir / record.base, record)

    def _places(self) -> dict[str, tuple[ServedName, Path]]:
        """Give all directories of models, by the key of their name; the first of a name counts."""
        found: dict[str, tuple[ServedName, Path]] = {}
        for name, directory in [*self._given.items(), *self._stored(), (_DEMO, demo_directory())]:
            found.setdefault(name.key, (name, directory))
        return found

    def _stored(self) -> Iterator[tuple[ServedName, Path]]:
        """Go through the directories under `models_dir`, and those one folder further down."""
        for path in _directories(self.models_dir):
            for directory in [path] if _is_model(path) else filter(_is_model, _directories(path)):
                relative = str(directory.relative_to(self.models_dir))
                model, _, revision = relative.partition("@")
                plain = ServedName("/".join(map(_as_part, model.split("/"))), _as_part(revision) if revision else "")
                yield self._pinned.get(relative, plain), directory

    def _read(self, located: Located) -> Facts | _Unusable:
        """Give a directory's facts, from the cache while none of its files changed."""
        directory = located.directory
        try:
            state = fingerprint(directory)
        except OSError as error:
            if located.record is not None:
                base = located.record.base or "files"
                return _Unusable(f"it is built on {base}, which cannot be read: {error.strerror}", unfinished=True)
            return _Unusable(f"{directory} cannot be read: {error.strerror}", unfinished=False)
        cached = self._facts.get(directory)
        if cached is None or cached[0] != state:
            cached = (state, _read_facts(directory, state))
            self._facts[directory] = cached
        return cached[1]

    def _describe(self, located: Located, facts: Facts) -> Model:
        record = located.record
        added = record.as_text() if record else ""
        digest = hashlib.sha256(f"{located.name} {facts.digest} {added}".encode()).hexdigest()
        model = Model(**vars(facts) | {"name": str(located.name), "digest": digest})
        if record is None:
            return model
        return replace(
            model,
            modified_at=record.modified_at,
            details={**facts.details, "parent_model": record.base},
            license=record.license or facts.license,
            system=record.system,
            parameters=record.parameters,
            messages=record.messages,
        )


def _read_facts(directory: Path, state: Fingerprint) -> Facts | _Unusable:
    try:
        check_verified(directory)
    except CheckpointError as error:
        return _Unusable(str(error), unfinished=True)
    try:
        return read_facts(directory, state)
    except (SlotpyError, OSError) as error:
        return _Unusable(str(error), unfinished=False)


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(path / entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / MANIFEST_NAME).is_file()


def _as_part(text: str) -> str:
    """Make a directory's name one that a model can have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).lstrip("-.") or "model"

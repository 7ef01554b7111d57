"""The list of a model's files, `slotpy-model.json`: what each must be, where it comes from, and when it was verified.

Owns the form of that list, in the package (pinned models) and beside the files. Reads and writes the list, never the
files (transfer.py and verify.py do).
"""

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slotpy.checkpoint.header import parse_json_object
from slotpy.checkpoint.writing import replace_durably
from slotpy.errors import CheckpointError

MANIFEST_NAME = "slotpy-model.json"
JOURNAL_NAME = "slotpy-pull.journal"
PART_SUFFIX = ".part"
# A file of a model is a plain name: nothing that leaves the directory, hides in it, or is one of our own.
_FILE_NAME = re.compile(r"(?!slotpy-)[A-Za-z0-9_][A-Za-z0-9_.+ -]*(?<!\.part)")


@dataclass(frozen=True)
class Source:
    """Name one repository that has the files, at a revision that can never mean other bytes."""

    repo: str
    revision: str
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verified:
    """Record how a file was when its hash was found right, to notice later that it was touched."""

    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Verified":
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class FileEntry:
    """Describe one file. Either `sha256` or, for a small file of a hub repository, `git_sha1` is known beforehand.

    `marks` are shortened SHA-256 of the file's first 1, 2, 3... chunks, taken when the whole was found right: they
    find the place of a damage. A file that was right once has marks or `verified`.
    """

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""
    optional: bool = False
    verified: Verified | None = None
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.path):
            raise ValueError(f"{self.path!r} is no name for a model's file")
        if self.size < 0 or not (self.sha256 or self.git_sha1):
            raise ValueError(f"{self.path} has no size or no hash")

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}" if self.sha256 else f"git-sha1:{self.git_sha1}"


@dataclass(frozen=True)
class Manifest:
    """List a model's files and the repositories that have them, best first. `chunk_bytes` is what `marks` count."""

    model: str
    sources: tuple[Source, ...]
    files: tuple[FileEntry, ...]
    chunk_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def with_file(self, changed: FileEntry) -> "Manifest":
        """Give the manifest with one file's entry replaced."""
        files = tuple(changed if file.path == changed.path else file for file in self.files)
        return dataclasses.replace(self, files=files)

    def save(self, directory: Path) -> None:
        """Write `slotpy-model.json`, complete or not at all. Raises: OSError."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        replace_durably(directory / MANIFEST_NAME, text.encode() + b"\n")


def load_manifest(directory: Path) -> Manifest | None:
    """Read the manifest beside a model's files; None where there is none: the directory is not slotpy's.

    Raises: CheckpointError for one that cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError("cannot read", file=path, found=error.strerror) from error
    return _parse(path, text)


def pinned_manifests() -> dict[str, Manifest]:
    """Give the manifests that come with slotpy, by model name: `qwen3.8-flash-next:4bit`."""
    folder = resources.files("slotpy").joinpath("data", "manifests")
    found = [_parse(Path(item.name), item.read_bytes()) for item in folder.iterdir() if item.name.endswith(".json")]
    return {manifest.model: manifest for manifest in found}


def _parse(path: Path, text: bytes) -> Manifest:
    fields = parse_json_object(path, text, "the manifest")
    try:
        return Manifest(
            model=fields["model"],
            sources=tuple(Source(s["repo"], s["revision"], tuple(s.get("lacks", ()))) for s in fields["sources"]),
            files=tuple(_parse_file(entry) for entry in fields["files"]),
            chunk_bytes=fields.get("chunk_bytes", 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError("malformed manifest", file=path, found=error) from error


def _parse_file(fields: dict[str, Any]) -> FileEntry:
    verified = fields.get("verified")
    values = fields | {"verified": Verified(**verified) if verified else None, "marks": tuple(fields.get("marks", ()))}
    return FileEntry(**values)

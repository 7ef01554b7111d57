"""What a packed checkpoint says about itself: the manifest `slotpy-pack.json`.

Owns the manifest's form, the check of its files' sizes at every opening, and of their SHA-256 on request. Writes
nothing (writing.py does) and knows no tensor names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slotpy.checkpoint.formats import WeightFormat
from slotpy.checkpoint.index import parse_json_object, resolve_directory
from slotpy.checkpoint.outputs import SourceState
from slotpy.checkpoint.records import RecordSet, Role
from slotpy.checkpoint.writing import Progress, WrittenFile, verify_files
from slotpy.errors import CheckpointError

MANIFEST_NAME = "slotpy-pack.json"
# What a pack that is still being written has instead of a manifest.
JOURNAL_NAME = "slotpy-pack.journal"
FORMAT_VERSION = 1
_PACK_AGAIN = "Remove the directory and run `slotpy pack` again."


@dataclass(frozen=True)
class RecordFile:
    """Name one container: `num_records` records from byte `data_offset` on, following those of the file before."""

    name: str
    num_records: int
    data_offset: int


@dataclass(frozen=True)
class PackedRecords:
    """Describe the records of one kind.

    A record is its roles back to back, role `r` from byte `role_offsets[r]`, then zeros up to `stride` bytes. A shard
    of `rows_per_shard` records never crosses into the next file.
    """

    format: WeightFormat
    roles: tuple[Role, ...]
    role_offsets: tuple[int, ...]
    rows_per_shard: int
    stride: int
    files: tuple[RecordFile, ...]

    @property
    def num_records(self) -> int:
        return sum(file.num_records for file in self.files)

    def to_json(self) -> dict[str, Any]:
        roles = [
            {"name": role.name, "dtype": role.dtype, "shape": list(role.shape), "offset": offset}
            for role, offset in zip(self.roles, self.role_offsets, strict=True)
        ]
        return {
            "format": vars(self.format),
            "roles": roles,
            "rows_per_shard": self.rows_per_shard,
            "stride": self.stride,
            "files": [vars(file) for file in self.files],
        }


@dataclass(frozen=True)
class PackManifest:
    """Describe a packed checkpoint. The kinds of `records` are `experts`, `rows` and, where present, `mtp_experts`."""

    directory: Path
    layout: str
    row_scale: str | None
    source: SourceState
    records: dict[str, PackedRecords]
    files: tuple[WrittenFile, ...]
    left_out: tuple[str, ...]

    @property
    def record_files(self) -> tuple[Path, ...]:
        """Give the containers in the order in which `record_set` numbers them."""
        return tuple(self.directory / file.name for records in self.records.values() for file in records.files)

    def record_set(self, kind: str, file_base: int) -> RecordSet:
        """Locate the records of `kind`, with `record_files` numbered from `file_base` on."""
        for other, records in self.records.items():
            if other == kind:
                break
            file_base += len(records.files)
        records = self.records[kind]
        files, bases = [], []
        for number, file in enumerate(records.files):
            for first in range(0, file.num_records, records.rows_per_shard):
                files.append(file_base + number)
                bases.append(file.data_offset + first * records.stride)
        num_roles = len(records.roles)
        return RecordSet(
            roles=records.roles,
            rows_per_shard=records.rows_per_shard,
            files=np.repeat(np.array(files, np.int32)[:, None], num_roles, axis=1),
            bases=np.array(bases, np.int64)[:, None] + np.array(records.role_offsets, np.int64),
            strides=np.full(num_roles, records.stride, np.int64),
        )

    def to_json(self) -> dict[str, Any]:
        """Give what `slotpy-pack.json` holds."""
        return {
            "format_version": FORMAT_VERSION,
            "layout": self.layout,
            "row_scale": self.row_scale,
            "source": self.source.to_json(),
            "records": {kind: records.to_json() for kind, records in self.records.items()},
            "files": [vars(file) for file in self.files],
            "left_out": list(self.left_out),
        }


def is_pack(directory: Path) -> bool:
    """Tell whether a directory is a packed checkpoint, finished or not."""
    return (directory / MANIFEST_NAME).exists() or (directory / JOURNAL_NAME).exists()


def load_pack(directory: Path) -> PackManifest:
    """Read the manifest of a packed checkpoint and check that its files are there in full size.

    Raises: CheckpointError when the pack is unfinished, of another version, damaged, or a file's size is wrong.
    """
    directory = resolve_directory(directory)
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if is_pack(directory):
            raise CheckpointError(
                "unfinished pack", file=directory, hint="Run the same `slotpy pack` again: it goes on where it stopped."
            ) from error
        raise CheckpointError("not a packed checkpoint", file=directory, expected=MANIFEST_NAME) from error
    except OSError as error:
        raise CheckpointError("cannot read", file=path, found=error.strerror) from error
    fields = parse_json_object(path, text, "the manifest")
    version = fields.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            "pack of another version", file=path, expected=FORMAT_VERSION, found=version, hint=_PACK_AGAIN
        )
    try:
        manifest = _manifest_from_json(directory, fields)
        _check_geometry(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError("malformed manifest", file=path, found=error, hint=_PACK_AGAIN) from error
    _check_sizes(manifest)
    return manifest


def verify_pack(directory: Path, *, progress: Progress = lambda name, done, total: None) -> PackManifest:
    """Read every file of a packed checkpoint and compare its SHA-256 with the manifest.

    Raises: CheckpointError as `load_pack`, and for the first file whose bytes differ.
    """
    manifest = load_pack(directory)
    verify_files(manifest.directory, manifest.files, progress, hint=_PACK_AGAIN)
    return manifest


def _manifest_from_json(directory: Path, fields: dict[str, Any]) -> PackManifest:
    records = {
        kind: PackedRecords(
            format=WeightFormat(**entry["format"]),
            roles=tuple(Role(role["name"], role["dtype"], tuple(role["shape"])) for role in entry["roles"]),
            role_offsets=tuple(role["offset"] for role in entry["roles"]),
            rows_per_shard=entry["rows_per_shard"],
            stride=entry["stride"],
            files=tuple(RecordFile(**file) for file in entry["files"]),
        )
        for kind, entry in fields["records"].items()
    }
    return PackManifest(
        directory=directory,
        layout=fields["layout"],
        row_scale=fields["row_scale"],
        source=SourceState.from_json(fields["source"]),
        records=records,
        files=tuple(WrittenFile(**file) for file in fields["files"]),
        left_out=tuple(fields["left_out"]),
    )


def _check_geometry(manifest: PackManifest) -> None:
    """Raise ValueError where a record would not lie in its file."""
    nbytes = {file.name: file.nbytes for file in manifest.files}
    for kind, records in manifest.records.items():
        ends = np.cumsum([0, *(role.nbytes for role in records.roles)])
        if list(records.role_offsets) != ends[:-1].tolist() or ends[-1] > records.stride:
            raise ValueError(f"the roles of {kind} do not fill their record")
        for file in records.files:
            if file.num_records % records.rows_per_shard:
                raise ValueError(f"{file.name} holds a part of a shard")
            if file.data_offset + file.num_records * records.stride != nbytes[file.name]:
                raise ValueError(f"the records of {file.name} do not fill it")


def _check_sizes(manifest: PackManifest) -> None:
    for file in manifest.files:
        path = manifest.directory / file.name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                "missing file of a pack", file=path, found=error.strerror, hint=_PACK_AGAIN
            ) from error
        if found != file.nbytes:
            raise CheckpointError(
                "wrong size of a packed file",
                file=path,
                expected=f"{file.nbytes} bytes",
                found=f"{found} bytes",
                hint=_PACK_AGAIN,
            )

"""Which tensors a directory of safetensors files holds, and where their bytes lie.

Owns the directory: which files belong to it, each tensor once. One file is header.py's. Knows no model (a family's
layout does). Tensor data is read on request, one tensor at a time (the store reads records).
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slotpy.checkpoint.header import DOWNLOAD_AGAIN, FileStamp, Span, cannot_read, parse_json_object, read_spans
from slotpy.errors import CheckpointError, ReadError

INDEX_NAME = "model.safetensors.index.json"
_NUMPY_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "I16": np.int16, "U16": np.uint16, "F16": np.float16, "I32": np.int32, "U32": np.uint32, "F32": np.float32,
    "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """Map every tensor name of a directory to its span; `stamps` are the files as they were when opened."""

    files: tuple[Path, ...]
    spans: dict[str, Span]
    stamps: tuple[FileStamp, ...]

    @classmethod
    def open(cls, directory: Path) -> "TensorIndex":
        """Read the headers of all `*.safetensors` files of `directory`, which may be a link, or hold links.

        `model.safetensors.index.json`, where there is one, says which files and tensors must be there.

        Raises: CheckpointError for the first thing that is wrong, naming file, tensor, expected and found.
        """
        directory = resolve_directory(directory)
        files = tuple(_list_files(directory))
        weight_map = _read_weight_map(directory / INDEX_NAME)
        _check_files_present(directory, files, weight_map)
        spans: dict[str, Span] = {}
        stamps = []
        for number, path in enumerate(files):
            stamp, found = read_spans(path, number)
            if not spans.keys().isdisjoint(found):
                name = next(name for name in found if name in spans)
                _raise_twice(name, files[spans[name].file], path, weight_map)
            spans.update(found)
            stamps.append(stamp)
        _check_tensors_present(directory, files, spans, weight_map)
        return cls(files, spans, tuple(stamps))

    def read_into(self, file: int, offset: int, out: memoryview) -> None:
        """Fill the byte view `out` from `files[file]` at `offset`. Raises: as `read_exactly`."""
        read_exactly(self.files[file], self.stamps[file], offset, out)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor's bytes into a new (nbytes,) uint8 array.

        Raises: CheckpointError when there is no such tensor, ReadError when its bytes cannot be read in full.
        """
        span = self._span(name)
        data = np.empty(span.nbytes, np.uint8)
        self.read_into(span.file, span.offset, data.data)
        return data

    def read_array(self, name: str) -> np.ndarray:
        """Read one tensor as a new array of its own shape: BF16 widened to float32, 8-bit floats as uint8 codes.

        Raises: as `read`.
        """
        span = self._span(name)
        data = self.read(name)
        if span.dtype == "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(span.shape)
        return data.view(_NUMPY_DTYPES[span.dtype]).reshape(span.shape)

    def _span(self, name: str) -> Span:
        span = self.spans.get(name)
        if span is None:
            where = self.files[0].parent
            raise CheckpointError("missing tensor", file=where, tensor=name, hint="Is the download complete?")
        return span


def read_exactly(path: Path, stamp: FileStamp, offset: int, out: memoryview) -> None:
    """Fill the contiguous byte view `out` from `path` at `offset`.

    Raises: ReadError when the file cannot be read, ends early, or is no longer in the state of `stamp`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            now = FileStamp.of(os.fstat(descriptor))
            if now != stamp:
                raise ReadError(
                    f"{path} changed after it was opened: {stamp.nbytes} bytes then, {now.nbytes} now.",
                    hint="Start again once nothing writes to it.",
                )
            done = 0
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], offset + done)
                if count == 0:
                    raise ReadError(f"{path} ended at byte {offset + done}, {len(out) - done} bytes too early.")
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ReadError(f"Could not read {len(out)} bytes at {offset} of {path}: {error.strerror}.") from error


def resolve_directory(directory: Path) -> Path:
    """Follow links to the real directory, once, so that a link moved later cannot mix two checkpoints.

    Raises: CheckpointError when it is absent or no directory.
    """
    try:
        resolved = directory.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links, before Python 3.13
        found = getattr(error, "strerror", None) or "a circle of links"
        raise CheckpointError("cannot open the checkpoint directory", file=directory, found=found) from error
    if not resolved.is_dir():
        raise CheckpointError(
            "not a directory",
            file=directory,
            expected="a directory with safetensors files",
            hint="Name the directory, not a file in it.",
        )
    return resolved


def _list_files(directory: Path) -> list[Path]:
    """List the safetensors files by name, without hidden ones (macOS leaves `._name` beside files on foreign disks)."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise cannot_read(directory, error) from error
    return [directory / name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def _read_weight_map(path: Path) -> dict[str, str]:
    """Read tensor name -> file name from the index, or nothing where there is no index."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise cannot_read(path, error) from error
    weight_map = parse_json_object(path, text, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index has no weight_map",
            file=path,
            expected="an object of tensor name to file name",
            found=f"{weight_map!r:.80}",
            hint=DOWNLOAD_AGAIN,
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file:
            raise CheckpointError(
                "the index names something that is no file of this directory",
                file=path,
                tensor=name,
                expected="the name of a .safetensors file",
                found=f"{file!r:.80}",
                hint=DOWNLOAD_AGAIN,
            )
    return weight_map


def _check_files_present(directory: Path, files: tuple[Path, ...], weight_map: dict[str, str]) -> None:
    present = {path.name for path in files}
    required = set(weight_map.values())
    missing = sorted(required - present)
    if missing:
        raise CheckpointError(
            "missing shard",
            file=directory / missing[0],
            expected=f"{len(required)} files named by {INDEX_NAME}",
            found=f"{len(required) - len(missing)} of them",
            hint="Download the missing files.",
        )
    if not files:
        raise CheckpointError(
            "no safetensors files",
            file=directory,
            expected="at least one *.safetensors file",
            found="none",
            hint="Is this the directory of a downloaded model?",
        )


def _check_tensors_present(
    directory: Path, files: tuple[Path, ...], spans: dict[str, Span], weight_map: dict[str, str]
) -> None:
    for name, file in weight_map.items():
        span = spans.get(name)
        if span is None or files[span.file].name != file:
            raise CheckpointError(
                f"a tensor is not where {INDEX_NAME} says",
                file=directory / file,
                tensor=name,
                expected=f"it in {file}",
                found="it in no file" if span is None else f"it in {files[span.file].name}",
                hint="Download the index and this file again, from one revision.",
            )


def _raise_twice(name: str, first: Path, second: Path, weight_map: dict[str, str]) -> None:
    wanted = weight_map.get(name)
    other = second if wanted == first.name else first
    hint = f"Move {other.name} out of the directory." if wanted else "Keep one of the two files."
    raise CheckpointError(
        "the same tensor in two files",
        file=second,
        tensor=name,
        expected="every tensor once",
        found=f"it in {first.name} and {second.name}",
        hint=hint,
    )

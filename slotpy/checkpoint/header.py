"""What one safetensors file says it holds, and every check that it does.

Owns the container format: the header's form, spans that cover the file, and clear errors for everything else that a
download can leave behind. Reads the header, never tensor data.

Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotpy.checkpoint.records import DTYPE_BYTES
from slotpy.errors import CheckpointError

# The format's own limit: an honest header of 200,000 tensors takes about 30 MB.
MAX_HEADER_BYTES = 100_000_000
DOWNLOAD_AGAIN = "Download this file again."
# Far above any tensor, and small enough to multiply, add and print.
_MAX_NUMBER = 1 << 60
_LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Span:
    """Locate one tensor: `nbytes` bytes at the absolute byte `offset` of file number `file`."""

    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Tell one state of a file from another: a file that is rewritten gets another stamp."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def read_spans(path: Path, number: int) -> tuple[FileStamp, dict[str, Span]]:
    """Read the header of one file, and give the spans of its tensors as those of file `number`.

    Raises: CheckpointError for the first thing that is wrong, naming file, tensor, expected and found.
    """
    stamp, header, data_start = _read_header(path)
    spans = _parse_header(path, number, header, data_start)
    _check_coverage(path, spans, data_start, stamp.nbytes)
    return stamp, spans


def parse_json_object(path: Path, text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object in which no key may occur twice.

    Raises: CheckpointError naming `path` and `what`.
    """
    if text.startswith(_LFS_MARK):
        _raise_lfs(path)
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey as error:
        raise CheckpointError(
            f"{what} names one key twice", file=path, tensor=error.args[0], hint=DOWNLOAD_AGAIN
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON", file=path, found=error, hint=DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{what} is no JSON object", file=path, expected="{...}", found=type(value).__name__, hint=DOWNLOAD_AGAIN
        )
    return value


class _DuplicateKey(Exception):
    """Carry a key that a JSON object names twice (`json.loads` itself would keep the last in silence)."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _DuplicateKey(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return result


def _read_header(path: Path) -> tuple[FileStamp, dict[str, Any], int]:
    """Read one file's header; give it with the file's stamp and the offset of the first data byte."""
    try:
        # A pipe would block in open(), so look before opening.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError("not a regular file", file=path)
        with open(path, "rb", buffering=0) as file:
            stamp = FileStamp.of(os.fstat(file.fileno()))
            head = file.read(len(_LFS_MARK))
            text = _read_header_text(path, head, stamp.nbytes, file.fileno())
    except OSError as error:
        raise cannot_read(path, error) from error
    return stamp, parse_json_object(path, text, "the header"), 8 + len(text)


def _read_header_text(path: Path, head: bytes, file_nbytes: int, descriptor: int) -> bytes:
    if not head:
        raise CheckpointError("empty file", file=path, found="0 bytes", hint=DOWNLOAD_AGAIN)
    if head == _LFS_MARK:
        _raise_lfs(path)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(file_nbytes - 8, MAX_HEADER_BYTES):
        # Covers a file cut inside its header, and a file of another kind whose first bytes make a huge number.
        raise CheckpointError(
            "impossible header length: truncated, or not a safetensors file",
            file=path,
            expected=f"at most {max(0, min(file_nbytes - 8, MAX_HEADER_BYTES))} bytes of header",
            found=f"{length} in a file of {file_nbytes} bytes",
            hint=DOWNLOAD_AGAIN,
        )
    text = os.pread(descriptor, length, 8)
    if len(text) < length:
        raise CheckpointError("truncated header", file=path, expected=f"{length} bytes", found=f"{len(text)} bytes")
    return text


def _parse_header(path: Path, number: int, header: dict[str, Any], data_start: int) -> dict[str, Span]:
    spans = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            valid = (
                type(shape) is list
                and all(type(size) is int and 0 <= size < _MAX_NUMBER for size in (*shape, begin, end))
                and (count := math.prod(shape)) < _MAX_NUMBER
                and begin <= end
            )
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise CheckpointError(
                "malformed tensor entry",
                file=path,
                tensor=name,
                expected="dtype, a shape of integers >= 0, data_offsets [begin, end] with 0 <= begin <= end",
                found=f"{entry!r:.200}",
                hint=DOWNLOAD_AGAIN,
            )
        itemsize = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
        if itemsize is None:
            raise CheckpointError(
                "unknown dtype",
                file=path,
                tensor=name,
                expected=f"one of {', '.join(DTYPE_BYTES)}",
                found=f"{dtype!r:.80}",
                hint="This slotpy cannot read this model.",
            )
        if itemsize * count != end - begin:
            raise CheckpointError(
                "dtype and shape disagree with the number of bytes",
                file=path,
                tensor=name,
                expected=f"{itemsize * count} bytes for {dtype} {shape}",
                found=f"{end - begin} bytes at [{begin}, {end}]",
                hint=DOWNLOAD_AGAIN,
            )
        spans[name] = Span(number, data_start + begin, end - begin, sys.intern(dtype), tuple(shape))
    return spans


def _check_coverage(path: Path, spans: dict[str, Span], data_start: int, file_nbytes: int) -> None:
    """Check that the spans cover the file's data once and completely, as the format demands.

    Empty tensors cover nothing, so several may share an offset, inside another tensor too.
    """
    total = max((span.offset + span.nbytes for span in spans.values()), default=data_start)
    position = data_start
    before = "the header"
    for name, span in _by_offset(spans.items()):
        if span.offset + span.nbytes > file_nbytes:
            raise CheckpointError(
                "truncated file: a tensor lies beyond its end",
                file=path,
                tensor=name,
                expected=f"a file of {total} bytes",
                found=f"{file_nbytes} bytes",
                hint=DOWNLOAD_AGAIN,
            )
        if span.nbytes == 0:
            continue
        if span.offset != position:
            problem = "overlapping tensors" if span.offset < position else "unclaimed bytes before a tensor"
            raise CheckpointError(
                problem,
                file=path,
                tensor=name,
                expected=f"it at byte {position}, after {before}",
                found=f"it at byte {span.offset}",
                hint=DOWNLOAD_AGAIN,
            )
        position = span.offset + span.nbytes
        before = name
    if position != file_nbytes:
        raise CheckpointError(
            "trailing bytes after the last tensor",
            file=path,
            expected=f"a file of {position} bytes",
            found=f"{file_nbytes} bytes",
            hint=DOWNLOAD_AGAIN,
        )


def _by_offset(items: Iterable[tuple[str, Span]]) -> list[tuple[str, Span]]:
    return sorted(items, key=lambda item: (item[1].offset, item[1].nbytes))


def _raise_lfs(path: Path) -> None:
    raise CheckpointError(
        "a Git LFS pointer, not the file itself",
        file=path,
        hint="Run `git lfs pull` in the directory, or download the file.",
    )


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """Make the error for a file or directory that the system does not let us read."""
    if isinstance(error, PermissionError):
        return CheckpointError("no permission to read", file=path, hint="Give your user read access (chmod u+r).")
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return CheckpointError(
            "a link to a file that is not there", file=path, found=os.readlink(path), hint=DOWNLOAD_AGAIN
        )
    return CheckpointError("cannot read", file=path, found=error.strerror)

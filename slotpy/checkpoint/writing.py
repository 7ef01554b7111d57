"""Writing a directory of large files so that it can be finished after an interruption at any byte.

Owns the refusals before the first byte, the journal, what makes bytes durable, and their hashes. Which files they are
is decided by the caller (outputs.py); the source is only read.

The journal holds a line for every stretch of bytes known to be on the disk; a line is added only after the bytes were
synced, and a torn last line is ignored.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotpy.checkpoint.outputs import Output, SourceState
from slotpy.errors import CapacityError, CheckpointError, SlotpyError, UsageError
from slotpy.units import format_bytes

# How much work an interruption may cost.
_SYNC_BYTES = 1 << 30
# For the journal, the manifest and the file system's own blocks.
_SPARE_BYTES = 16 << 20
_HASH_BLOCK_BYTES = 8 << 20

Progress = Callable[[str, int, int], None]
"""Called with a file name, the bytes done so far and the bytes in all."""


@dataclass(frozen=True)
class WrittenFile:
    """Name one file that was written, with its size and its SHA-256 in hex."""

    name: str
    nbytes: int
    sha256: str


class Journal:
    """Keep how much of each file is durable, one JSON line each; hold a lock, so that one call writes at a time.

    `command` is the slotpy command that writes, for messages.
    """

    def __init__(self, path: Path, command: str) -> None:
        self._path, self._command = path, command
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise UsageError(
                f"Another `slotpy {command}` is writing to {path.parent}.",
                hint="Wait for it, or choose another directory.",
            ) from error
        self.durable: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def begin(self, source: SourceState, form: dict[str, Any], outputs: Sequence[Output]) -> None:
        """Take up the lines of an earlier call.

        `form` holds, in plain JSON values, whatever must be the same for this call to go on with that one's files.

        Raises: CheckpointError when that call worked from another source or wrote another form.
        """
        identity = {
            "source": source.to_json(),
            "form": form,
            "outputs": [[output.name, output.nbytes] for output in outputs],
        }
        lines = self._read_lines()
        if not lines:
            self._append(identity)
            sync_directory(self._path.parent)
            return
        if lines[0] != identity:
            refuse_other_source(self._path.parent, SourceState.from_json(lines[0]["source"]), source, self._command)
            raise CheckpointError(
                f"an earlier `slotpy {self._command}` began this directory in another form",
                file=self._path.parent,
                hint=_start_afresh(self._command),
            )
        self.durable = {line["name"]: (line["nbytes"], line["sha256"]) for line in lines[1:]}

    def mark(self, name: str, nbytes: int, sha256: str) -> None:
        """Record that the first `nbytes` bytes of a file are on the disk and have this hash."""
        self._append({"name": name, "nbytes": nbytes, "sha256": sha256})

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        write_all(self._descriptor, json.dumps(line).encode() + b"\n")
        sync(self._descriptor)

    def _read_lines(self) -> list[dict[str, Any]]:
        """Read the whole lines, and cut off what an interruption left of the last one."""
        text = self._path.read_bytes()
        lines = []
        end = 0
        for line in text.splitlines(keepends=True):
            try:
                parsed = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            lines.append(parsed)
            end += len(line)
        if end < len(text):
            os.ftruncate(self._descriptor, end)
        return lines


def write_outputs(
    out: Path, outputs: Sequence[Output], journal: Journal, progress: Progress
) -> tuple[WrittenFile, ...]:
    """Write every file, in order, or what is missing of it. Bytes of an earlier call are hashed again, not trusted.

    Raises: ReadError as `Output.blocks`; OSError when `out` cannot be written (see `writing`).
    """
    total = sum(output.nbytes for output in outputs)
    done = 0
    files = []
    for output in outputs:
        report = functools.partial(_report_position, progress, output.name, done, total)
        digest = _write_output(out / output.name, output, journal, report)
        files.append(WrittenFile(output.name, output.nbytes, digest))
        done += output.nbytes
    return tuple(files)


def _write_output(path: Path, output: Output, journal: Journal, report: Callable[[int], None]) -> str:
    """Write one file, or what is missing of it, reporting the bytes done; give its SHA-256 in hex."""
    position, hasher = _durable_prefix(path, journal, report)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        if os.fstat(descriptor).st_size != position:
            os.ftruncate(descriptor, position)
        os.lseek(descriptor, position, os.SEEK_SET)
        report(position)
        synced = position
        header = memoryview(output.header)[position:]
        for block in itertools.chain([header], output.blocks(max(0, position - len(output.header)))):
            write_all(descriptor, block)
            hasher.update(block)
            position += len(block)
            if position - synced >= _SYNC_BYTES or position == output.nbytes > synced:
                sync(descriptor)
                journal.mark(output.name, position, hasher.hexdigest())
                synced = position
            report(position)
    finally:
        os.close(descriptor)
    assert position == output.nbytes, f"{output.name} was planned as {output.nbytes} bytes and has {position}"
    return hasher.hexdigest()


def _durable_prefix(path: Path, journal: Journal, report: Callable[[int], None]) -> tuple[int, "hashlib._Hash"]:
    """Say from which byte on a file must be written, and give the hash state after the bytes before it."""
    nbytes, sha256 = journal.durable.get(path.name, (0, ""))
    if nbytes and path.exists():
        hasher = _hash_prefix(path, nbytes, report)
        if hasher.hexdigest() == sha256:
            return nbytes, hasher
    return 0, hashlib.sha256()


def replace_durably(path: Path, data: bytes) -> None:
    """Write a small file that appears complete or not at all, after everything else in its directory is durable."""
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        write_all(descriptor, data)
        sync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)
    temporary.rename(path)
    sync_directory(path.parent)


def verify_files(directory: Path, files: Sequence[WrittenFile], progress: Progress, *, hint: str) -> None:
    """Compare the SHA-256 of files with what was written.

    Raises: CheckpointError, with `hint`, for the first file that cannot be read or whose bytes differ.
    """
    total = sum(file.nbytes for file in files)
    before = 0
    for file in files:
        path = directory / file.name
        report = functools.partial(_report_position, progress, file.name, before, total)
        found = _hash_prefix(path, file.nbytes, report).hexdigest()
        if found != file.sha256:
            raise CheckpointError("bytes changed", file=path, expected=file.sha256, found=found, hint=hint)
        before += file.nbytes


def refuse_overlap(source: Path, out: Path) -> None:
    """Refuse a directory to write in that is the source, lies inside it or around it. Both paths are resolved."""
    if out == source or source in out.parents or out in source.parents:
        raise UsageError(
            f"{out} is or lies inside {source}, or around it, and slotpy never touches its source.",
            hint="Choose a directory elsewhere.",
        )


def refuse_foreign(out: Path, *ours: str) -> None:
    """Refuse to write among other files, unless one of the names `ours` says that they are from an earlier call."""
    if not out.exists() or any((out / name).exists() for name in ours):
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file.", hint="Name a new directory.")
    found = os.listdir(out)
    if found:
        raise UsageError(f"{out} holds other files, such as {min(found)}.", hint="Name a new or an empty directory.")


def refuse_full_disk(out: Path, outputs: Sequence[Output]) -> None:
    """Refuse to begin what the disk has no room for. Raises: CapacityError with both sizes."""
    needed = _SPARE_BYTES
    for output in outputs:
        path = out / output.name
        needed += max(0, output.nbytes - (path.stat().st_size if path.exists() else 0))
    available = _free_bytes(next(path for path in (out, *out.parents) if path.exists()))
    if needed > available:
        raise CapacityError(
            f"{out} needs {format_bytes(needed)} of disk, {format_bytes(available)} available there.",
            hint=f"Free {format_bytes(needed - available)}, or name a directory on another disk.",
        )


def refuse_other_source(out: Path, before: SourceState, now: SourceState, command: str) -> None:
    """Raise CheckpointError for the first file of the source that is not as it was."""
    then = {file.name: file for file in before.files}
    found = {file.name: file for file in now.files}
    for name in sorted(then.keys() | found.keys()):
        if then.get(name) != found.get(name):
            raise _other_source(out, name, then.get(name, "no such file"), found.get(name, "no such file"), command)
    if before.config_sha256 != now.config_sha256:
        raise _other_source(out, "config.json", before.config_sha256, now.config_sha256, command)


def _other_source(out: Path, name: str, expected: object, found: object, command: str) -> CheckpointError:
    problem = f"the source is not the one that {out} was made from"
    return CheckpointError(problem, file=name, expected=expected, found=found, hint=_start_afresh(command))


def _start_afresh(command: str) -> str:
    return f"Remove the directory and run `slotpy {command}` again."


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn a failure to write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        path = error.filename or out
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"No space left to write {path}.", hint="Free some and run the same command again: it goes on."
            ) from error
        raise SlotpyError(
            f"Could not write {path}: {error.strerror}.", hint="Check the directory, then run the same command again."
        ) from error


def _report_position(progress: Progress, name: str, before: int, total: int, position: int) -> None:
    """Report a position in one file, with `before` bytes in the files before it."""
    progress(name, before + position, total)


def _hash_prefix(path: Path, nbytes: int, report: Callable[[int], None]) -> "hashlib._Hash":
    """Give the SHA-256 state after the first `nbytes` bytes of a file (after all of them where there are fewer)."""
    hasher = hashlib.sha256()
    position = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(min(nbytes - position, _HASH_BLOCK_BYTES)):
                hasher.update(block)
                position += len(block)
                report(position)
    except OSError as error:
        raise CheckpointError("cannot read", file=path, found=error.strerror) from error
    return hasher


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync(descriptor: int) -> None:
    # On macOS fsync leaves the bytes in the drive's own cache; not every file system there can do better.
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full_sync)
            return
    os.fsync(descriptor)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Rewrite a checkpoint so that every routed expert and every n-gram row is one aligned, contiguous read.

Owns the writing: the refusals before it, the order, what makes it durable, and how it goes on after an interruption
at any byte. What is written is decided in pack_plan.py, how it is opened again in manifest.py. The source is only read.

Two files guide it. The journal holds a line for every stretch of bytes known to be on the disk; a line is added only
after the bytes were synced, and a torn last line is ignored. The manifest appears, complete, when all else is done.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.checkpoint.index import resolve_directory
from slotpy.checkpoint.manifest import (
    FORMAT_VERSION,
    JOURNAL_NAME,
    MANIFEST_NAME,
    PackedFile,
    PackManifest,
    Progress,
    SourceFile,
    hash_prefix,
    is_pack,
    load_pack,
    report_position,
    verify_pack,
)
from slotpy.checkpoint.pack_plan import Output, PackPlan, plan_pack
from slotpy.errors import CapacityError, CheckpointError, SlotpyError, UsageError
from slotpy.units import format_bytes

# How much work an interruption may cost.
_SYNC_BYTES = 1 << 30
# For the journal, the manifest and the file system's own blocks.
_SPARE_BYTES = 16 << 20
_START_AFRESH = "Remove the directory and run `slotpy pack` again."


def pack(checkpoint: Checkpoint, out: Path, *, progress: Progress = lambda name, done, total: None) -> PackManifest:
    """Write the packed form of `checkpoint` to the directory `out`, or finish what an earlier call began there.

    Bytes of an earlier call are hashed again, not trusted; on a finished pack that is all that happens. Memory use is
    bounded by a few blocks. May be killed at any time.

    Raises: UsageError for an `out` that must not be written to; CheckpointError when an earlier call packed another
    state of the source, or for a finished pack that is damaged; CapacityError when the disk is too small; ReadError
    when the source cannot be read or changes meanwhile; SlotpyError when `out` cannot be written.
    """
    if checkpoint.packed:
        raise UsageError(f"{checkpoint.directory} is packed already.")
    out = out.resolve()
    _refuse_overlap(resolve_directory(checkpoint.directory), out)
    plan = plan_pack(checkpoint)
    with _writing(out):
        if (out / MANIFEST_NAME).exists():
            return _check_finished(out, plan, progress)
        _refuse_foreign(out)
        _refuse_full_disk(out, plan)
        out.mkdir(parents=True, exist_ok=True)
        with _Journal(out / JOURNAL_NAME) as journal:
            if not (out / MANIFEST_NAME).exists():  # else another call finished while this one came to its lock
                journal.begin(plan)
                _write_pack(checkpoint, out, plan, journal, progress)
            journal.remove()
    return load_pack(out)


def _check_finished(out: Path, plan: PackPlan, progress: Progress) -> PackManifest:
    manifest = load_pack(out)
    _refuse_other_source(out, manifest.source, manifest.config_sha256, plan)
    verify_pack(out, progress=progress)
    (out / JOURNAL_NAME).unlink(missing_ok=True)
    return manifest


def _write_pack(checkpoint: Checkpoint, out: Path, plan: PackPlan, journal: "_Journal", progress: Progress) -> None:
    manifest = PackManifest(
        directory=out,
        layout=checkpoint.layout,
        row_scale=checkpoint.row_scale,
        config_sha256=plan.config_sha256,
        source=plan.source,
        records=plan.records,
        files=_write_outputs(out, plan, journal, progress),
        left_out=plan.left_out,
    )
    _write_manifest(out, manifest)


class _Journal:
    """Keep how much of each file is durable, one JSON line each; hold a lock, so that one pack writes at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise UsageError(
                f"Another `slotpy pack` is writing to {path.parent}.", hint="Wait for it, or choose another directory."
            ) from error
        self.durable: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def begin(self, plan: PackPlan) -> None:
        """Take up the lines of an earlier call.

        Raises: CheckpointError when that call worked from another source or wrote another form.
        """
        lines = self._read_lines()
        identity = _identity(plan)
        if not lines:
            self._append(identity)
            _sync_directory(self._path.parent)
            return
        found = lines[0]
        if found != identity:
            _refuse_other_source(
                self._path.parent,
                tuple(SourceFile(**file) for file in found["source"]),
                found["config_sha256"],
                plan,
            )
            raise CheckpointError(
                "an earlier slotpy began this pack in another form", file=self._path.parent, hint=_START_AFRESH
            )
        self.durable = {line["name"]: (line["nbytes"], line["sha256"]) for line in lines[1:]}

    def mark(self, name: str, nbytes: int, sha256: str) -> None:
        """Record that the first `nbytes` bytes of a file are on the disk and have this hash."""
        self._append({"name": name, "nbytes": nbytes, "sha256": sha256})

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        _write_all(self._descriptor, json.dumps(line).encode() + b"\n")
        _sync(self._descriptor)

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
        os.ftruncate(self._descriptor, end)
        return lines


def _write_outputs(out: Path, plan: PackPlan, journal: _Journal, progress: Progress) -> tuple[PackedFile, ...]:
    total = sum(output.nbytes for output in plan.outputs)
    done = 0
    files = []
    for output in plan.outputs:
        report = functools.partial(report_position, progress, output.name, done, total)
        digest = _write_output(out / output.name, output, journal, report)
        files.append(PackedFile(output.name, output.nbytes, digest))
        done += output.nbytes
    return tuple(files)


def _write_output(path: Path, output: Output, journal: _Journal, report: Callable[[int], None]) -> str:
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
            _write_all(descriptor, block)
            hasher.update(block)
            position += len(block)
            if position - synced >= _SYNC_BYTES or position == output.nbytes > synced:
                _sync(descriptor)
                journal.mark(output.name, position, hasher.hexdigest())
                synced = position
            report(position)
    finally:
        os.close(descriptor)
    assert position == output.nbytes, f"{output.name} was planned as {output.nbytes} bytes and has {position}"
    return hasher.hexdigest()


def _durable_prefix(path: Path, journal: _Journal, report: Callable[[int], None]) -> tuple[int, "hashlib._Hash"]:
    """Say from which byte on a file must be written, and give the hash state after the bytes before it."""
    nbytes, sha256 = journal.durable.get(path.name, (0, ""))
    if nbytes and path.exists():
        hasher = hash_prefix(path, nbytes, report)
        if hasher.hexdigest() == sha256:
            return nbytes, hasher
    return 0, hashlib.sha256()


def _write_manifest(out: Path, manifest: PackManifest) -> None:
    temporary = out / f"{MANIFEST_NAME}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        _write_all(descriptor, json.dumps(manifest.to_json(), indent=1).encode() + b"\n")
        _sync(descriptor)
    finally:
        os.close(descriptor)
    _sync_directory(out)
    temporary.rename(out / MANIFEST_NAME)
    _sync_directory(out)


def _identity(plan: PackPlan) -> dict[str, Any]:
    """Say in plain JSON values what is packed from what: equal means that a pack may go on."""
    return {
        "format_version": FORMAT_VERSION,
        "config_sha256": plan.config_sha256,
        "source": [vars(file) for file in plan.source],
        "records": {kind: records.to_json() for kind, records in plan.records.items()},
        "outputs": [[output.name, output.nbytes] for output in plan.outputs],
    }


def _refuse_overlap(source: Path, out: Path) -> None:
    if out == source or source in out.parents or out in source.parents:
        raise UsageError(
            f"{out} is or lies inside {source}, or around it, and packing never touches its source.",
            hint="Choose a directory elsewhere.",
        )


def _refuse_foreign(out: Path) -> None:
    """Refuse to write among files that are not a pack's."""
    if not out.exists() or is_pack(out):
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file.", hint="Name a new directory.")
    found = os.listdir(out)
    if found:
        raise UsageError(
            f"{out} holds other files, such as {min(found)}.", hint="Name a new or an empty directory for the pack."
        )


def _refuse_full_disk(out: Path, plan: PackPlan) -> None:
    needed = _SPARE_BYTES
    for output in plan.outputs:
        path = out / output.name
        needed += max(0, output.nbytes - (path.stat().st_size if path.exists() else 0))
    available = _free_bytes(next(path for path in (out, *out.parents) if path.exists()))
    if needed > available:
        raise CapacityError(
            f"Packing needs {format_bytes(needed)} of disk, {format_bytes(available)} available at {out}.",
            hint=f"Free {format_bytes(needed - available)}, or name a directory on another disk.",
        )


def _refuse_other_source(out: Path, packed: tuple[SourceFile, ...], config_sha256: str, plan: PackPlan) -> None:
    before = {file.name: file for file in packed}
    now = {file.name: file for file in plan.source}
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"the source is not the one that {out} was packed from",
                file=name,
                expected=before.get(name, "no such file"),
                found=now.get(name, "no such file"),
                hint=_START_AFRESH,
            )
    if config_sha256 != plan.config_sha256:
        raise CheckpointError(
            f"the source is not the one that {out} was packed from",
            file="config.json",
            expected=config_sha256,
            found=plan.config_sha256,
            hint=_START_AFRESH,
        )


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
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


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    # On macOS fsync leaves the bytes in the drive's own cache; not every file system there can do better.
    full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full_sync)
            return
    os.fsync(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

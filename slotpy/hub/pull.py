"""Get a model, whole: decide what is missing, have it fetched, and leave a directory that says it is verified.

Owns the order of the steps and the refusals before the first byte. May be killed at any time: the same call goes on.
"""

import contextlib
import dataclasses
import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slotpy.checkpoint.writing import writing
from slotpy.errors import CapacityError, CheckpointError, UsageError
from slotpy.hub.events import Event, FileProgress, Status
from slotpy.hub.journal import Journal, PartState
from slotpy.hub.library import is_verified, lock_directory
from slotpy.hub.listing import hub_address, list_repository, refuse_offline
from slotpy.hub.manifest import JOURNAL_NAME, PART_SUFFIX, FileEntry, Manifest, load_manifest
from slotpy.hub.names import ModelName
from slotpy.hub.part import PartFile, check_part
from slotpy.hub.ranges import Ranges
from slotpy.hub.transfer import Limits, Transfer
from slotpy.hub.verify import Checked, check_files
from slotpy.units import format_bytes

Report = Callable[[Event], None]


@dataclass(frozen=True)
class Pulled:
    """Describe a finished pull. `left_out` names optional files that no source has, with reasons."""

    directory: Path
    manifest: Manifest
    left_out: tuple[str, ...] = ()


def pull(name: ModelName, models: Path, limits: Limits, report: Report) -> Pulled:
    """Fetch what is missing or wrong of a model; with nothing missing this is a quick check. `report` is called here.

    Raises: UsageError for a directory or a name that will not do; CapacityError; SlotpyError when the files cannot be
    had; CheckpointError for files in the way; KeyboardInterrupt, with everything received kept.
    """
    directory = name.directory(models)
    report(Status("pulling manifest"))
    with writing(directory):
        _refuse_foreign(directory)
        manifest = load_manifest(directory) or _first_manifest(name)
        directory.mkdir(parents=True, exist_ok=True)
        with lock_directory(directory):
            manifest = _take_up(directory, load_manifest(directory), name.pinned or manifest, limits)
            return _complete(directory, manifest, limits, report)


def verify(name: str, directory: Path, report: Report) -> list[Checked]:
    """Read every byte of a pulled model; give what is wrong. Wrong files count as unverified from now on.

    Raises: UsageError for a directory without a manifest; KeyboardInterrupt.
    """
    manifest = load_manifest(directory)
    if manifest is None:
        raise UsageError(f"{name} was not pulled to {directory}.", hint=f"Run `slotpy pull {name}`.")
    with writing(directory), lock_directory(directory):
        report(Status("verifying sha256 digest"))
        checked = _check(directory, manifest, manifest.files, report)
        manifest = dataclasses.replace(manifest, files=tuple(result.updated() for result in checked))
        manifest.save(directory)
    return [result for result in checked if result.problem]


def _refuse_foreign(directory: Path) -> None:
    """Refuse to write among files that are not a pulled model's."""
    if directory.is_symlink() and not directory.exists():
        raise UsageError(f"{directory} is a link to nothing.", hint="Mount its disk, or remove the link.")
    if not directory.exists() or load_manifest(directory) is not None:
        return
    if not directory.is_dir() or any(not name.startswith("slotpy-") for name in os.listdir(directory)):
        raise UsageError(f"{directory} was not made by slotpy.", hint="Move it away, or set SLOTPY_MODELS.")


def _first_manifest(name: ModelName) -> Manifest:
    return name.pinned or list_repository(name.text, name.repo, name.revision)


def _take_up(directory: Path, stored: Manifest | None, wanted: Manifest, limits: Limits) -> Manifest:
    """Give the manifest to work from: the stored one, brought up to a newer pinned one, or the wanted one, stored."""
    if stored is None:
        manifest = dataclasses.replace(wanted, chunk_bytes=limits.chunk_bytes)
    else:
        before = {(file.path, file.digest): file for file in stored.files}
        files = tuple(before.get((file.path, file.digest), file) for file in wanted.files)
        manifest = dataclasses.replace(wanted, files=files, chunk_bytes=stored.chunk_bytes)
    if manifest != stored:
        manifest.save(directory)
    return manifest


def _complete(directory: Path, manifest: Manifest, limits: Limits, report: Report) -> Pulled:
    missing = [file for file in manifest.files if not is_verified(directory, file)]
    journal_path = directory / JOURNAL_NAME
    left_out: tuple[str, ...] = ()
    if missing:
        with contextlib.closing(Journal(journal_path)) as journal:
            manifest = _adopt(directory, manifest, missing, journal, report)
            missing = [file for file in manifest.files if not is_verified(directory, file)]
            if missing:
                left_out = _fetch(directory, manifest, missing, journal, limits, report)
    if not left_out:
        journal_path.unlink(missing_ok=True)
    report(Status("success"))
    return Pulled(directory, load_manifest(directory) or manifest, left_out)


def _adopt(directory: Path, manifest: Manifest, missing: list[FileEntry], journal: Journal, report: Report) -> Manifest:
    """Take files that lie there under their final names: right ones as they are, wrong ones of ours to be repaired.

    A wrong file that a pull never wrote is not touched: somebody else's.
    """
    ours: list[FileEntry] = []
    others: list[FileEntry] = []
    for entry in missing:
        path = directory / entry.path
        if not os.path.lexists(path):
            continue
        (ours if entry.verified or entry.marks else others).append(entry)
    if others:
        report(Status("verifying sha256 digest"))
    for result in _check(directory, manifest, others, report):
        if result.problem:
            raise CheckpointError(
                f"a file in the way {result.problem}",
                file=directory / result.entry.path,
                hint="slotpy did not write it, so it stays: move it away, then run the same command again.",
            )
        manifest = manifest.with_file(result.updated())
    if others:
        manifest.save(directory)
    for entry in ours:
        _take_back(directory, entry, manifest.chunk_bytes, journal)
    return manifest


def _take_back(directory: Path, entry: FileEntry, chunk_bytes: int, journal: Journal) -> None:
    """Make a finished file unfinished again: hashed against its marks, only its wrong chunks are fetched."""
    path, part = directory / entry.path, directory / (entry.path + PART_SUFFIX)
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        hint = "Remove the link, then run the same command again."
        raise CheckpointError("a wrong file is a link, and slotpy does not write through links", file=path, hint=hint)
    check_part(part, entry.path in journal.parts)
    positions = [min(entry.size, (number + 1) * chunk_bytes) for number in range(len(entry.marks))]
    have = Ranges([(0, min(status.st_size, entry.size))])
    state = PartState(entry.digest, have, dict(zip(positions, entry.marks, strict=True)))
    journal.append([state.to_line(entry.path, afresh=True)])
    journal.parts[entry.path] = state
    os.rename(path, part)


def _fetch(
    directory: Path, manifest: Manifest, missing: list[FileEntry], journal: Journal, limits: Limits, report: Report
) -> tuple[str, ...]:
    refuse_offline()
    parts = []
    for entry in missing:
        check_part(directory / (entry.path + PART_SUFFIX), entry.path in journal.parts)
        parts.append(PartFile(directory, entry, manifest.chunk_bytes, journal.parts.get(entry.path)))
    # Before the files: a file that the journal does not know is refused as somebody else's.
    new = [part.entry for part in parts if part.entry.path not in journal.parts]
    journal.append([PartState(entry.digest).to_line(entry.path, afresh=True) for entry in new])
    for part in parts:
        if part.path.exists():
            part.open()
    _refuse_full_disk(directory, parts, limits.spare_bytes)

    saving = threading.Lock()
    current = manifest

    def keep(entry: FileEntry) -> None:
        nonlocal current
        with saving:
            current = current.with_file(entry)
            current.save(directory)

    for entry in manifest.files:
        if is_verified(directory, entry):
            report(FileProgress(entry.path, entry.digest, entry.size, entry.size, entry.size))
    sources = [(source.repo, hub_address(source), source.lacks) for source in manifest.sources]
    transfer = Transfer(directory, parts, sources, journal, limits, keep=keep, report=report)
    for part in parts:
        transfer.report_progress(part)
    transfer.run()
    return tuple(transfer.left_out)


def _refuse_full_disk(directory: Path, parts: list[PartFile], spare_bytes: int) -> None:
    needed = spare_bytes + sum(part.entry.size - part.resumed_bytes for part in parts)
    available = shutil.disk_usage(directory).free
    if needed > available:
        raise CapacityError(
            f"{directory} needs {format_bytes(needed)} of disk, {format_bytes(spare_bytes)} of it to spare, "
            f"and {format_bytes(available)} are available.",
            hint=f"Free {format_bytes(needed - available)}, or set SLOTPY_MODELS to a directory on another disk.",
        )


def _check(
    directory: Path, manifest: Manifest, entries: tuple[FileEntry, ...] | list[FileEntry], report: Report
) -> list[Checked]:
    """Check files, reporting from their threads one at a time."""
    lock = threading.Lock()

    def show(entry: FileEntry, position: int) -> None:
        with lock:
            report(FileProgress(entry.path, entry.digest, entry.size, position, 0))

    return check_files(directory, entries, manifest.chunk_bytes, show)

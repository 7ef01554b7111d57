"""Read files again and compare their hashes, several at once. Changes nothing."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slotpy.hub.hashing import FileHash, next_mark
from slotpy.hub.manifest import FileEntry, Verified

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Checked:
    """Say what one file is: `problem` is empty when it is right. `marks` are as FileEntry's."""

    entry: FileEntry
    problem: str
    verified: Verified | None = None
    sha256: str = ""
    marks: tuple[str, ...] = ()

    def updated(self) -> FileEntry:
        """Give the file's entry with what was found. A wrong file keeps its marks: they help to repair it."""
        changed: dict[str, object] = {"verified": self.verified}
        if not self.problem:
            changed |= {"sha256": self.sha256, "marks": self.marks}
        return FileEntry(**(vars(self.entry) | changed))


def check_files(
    directory: Path, entries: Sequence[FileEntry], chunk_bytes: int, report: Callable[[FileEntry, int], None]
) -> list[Checked]:
    """Hash files with all cores; `report` gets each file's bytes so far, from several threads.

    Files are the unit: one file is hashed by one core. On KeyboardInterrupt all stop at once.
    """
    stop = threading.Event()
    largest_first = sorted(entries, key=lambda entry: -entry.size)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        try:
            tasks = [pool.submit(_check, directory, entry, chunk_bytes, report, stop) for entry in largest_first]
            found = {task.result().entry.path: task.result() for task in tasks}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [found[entry.path] for entry in entries]


def _check(
    directory: Path,
    entry: FileEntry,
    chunk_bytes: int,
    report: Callable[[FileEntry, int], None],
    stop: threading.Event,
) -> Checked:
    try:
        with open(directory / entry.path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != entry.size:
                return Checked(entry, f"has {status.st_size} bytes, not {entry.size}")
            return _hash(file.readinto, entry, chunk_bytes, lambda position: report(entry, position), stop, status)
    except FileNotFoundError:
        return Checked(entry, "" if entry.optional else "is missing")
    except OSError as error:
        return Checked(entry, f"cannot be read: {error.strerror}")


def _hash(
    readinto: Callable[[memoryview], int | None],
    entry: FileEntry,
    chunk_bytes: int,
    report: Callable[[int], None],
    stop: threading.Event,
    status: os.stat_result,
) -> Checked:
    """Hash one open file, noting where its marks begin to differ from those of the entry."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    found = FileHash(entry)
    marks: list[str] = []
    position, wrong_from = 0, -1
    while position < entry.size and not stop.is_set():
        mark = next_mark(position, chunk_bytes, entry.size)
        count = readinto(buffer[: min(len(buffer), mark - position)])
        if not count:
            return Checked(entry, f"ended at byte {position} while it was read")
        found.update(buffer[:count])
        position += count
        if position == mark:
            if wrong_from < 0 and len(marks) < len(entry.marks) and entry.marks[len(marks)] != found.mark:
                wrong_from = len(marks) * chunk_bytes
            marks.append(found.mark)
        report(position)
    if not found.is_right():
        where = f", first in the {chunk_bytes} bytes from {wrong_from} on" if wrong_from >= 0 else ""
        return Checked(entry, f"has other bytes{where} (found {found.digest})")
    return Checked(entry, "", Verified.of(status), found.sha256, tuple(marks))

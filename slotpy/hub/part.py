"""One file on its way: the bytes received so far under `NAME.part`, and their hash as far as they are contiguous.

Bytes arrive in any order, from several threads. The hash follows behind, reading them back from the page cache, where
they are still: no second pass over the disk. Owns one descriptor. transfer.py decides who fetches what.
"""

import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotpy.checkpoint.writing import sync, sync_directory
from slotpy.errors import CheckpointError, ReadError
from slotpy.hub.hashing import FileHash, next_mark
from slotpy.hub.journal import PartState
from slotpy.hub.manifest import PART_SUFFIX, FileEntry, Verified

_BLOCK_BYTES = 1 << 20


@dataclass(eq=False)
class Claim:
    """Name bytes `start` to `end` of a file that one connection fetches, from the source numbered `source`."""

    part: "PartFile"
    start: int
    end: int
    source: int


class PartFile:
    """Collect one file. All methods may be called from any thread, `advance` from one at a time."""

    def __init__(self, directory: Path, entry: FileEntry, chunk_bytes: int, state: PartState | None) -> None:
        self.entry = entry
        self.path = directory / (entry.path + PART_SUFFIX)
        self._final = directory / entry.path
        self._chunk_bytes = chunk_bytes
        known = state is not None and state.digest == entry.digest
        self._state = state if state is not None and known else PartState(entry.digest)
        self._claims: list[Claim] = []
        self._lock = threading.Lock()
        self._descriptor = -1
        self._dirty = self._afresh = not known
        self._new_marks: dict[int, str] = {}
        self._cursor, self._hash = 0, FileHash(entry)
        self._good = (0, self._hash.copy())  # the last place where a mark was right, to go back to
        self._mismatches = 0
        self.contributors: set[int] = set()
        self.resumed_bytes = 0
        self.hashing = False

    def open(self) -> None:
        """Open the partial file, or make it. Bytes that the journal knows but the disk does not have are forgotten.

        Raises: CheckpointError for something under its name that must not be written to; OSError.
        """
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        for start, end in _holes(self._descriptor, self.entry.size):
            self._state.have.remove(start, end)
        self.resumed_bytes = self._state.have.num_bytes

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    @property
    def completed_bytes(self) -> int:
        with self._lock:
            return self._state.have.num_bytes

    @property
    def is_received(self) -> bool:
        """Tell whether all bytes are there, though not all are hashed yet."""
        return self.completed_bytes == self.entry.size

    def claim(self, source: int, lead_bytes: int, whole: bool) -> Claim | None:
        """Hand out missing bytes, at most to the next chunk's end and `lead_bytes` ahead of the hash.

        `whole` is for a source that cannot send ranges: all of the file, to one connection.
        """
        with self._lock:
            taken = self._state.have.copy()
            for other in self._claims:
                taken.add(other.start, other.end)
            gap = taken.next_gap(0, self.entry.size)
            if gap is None or gap[0] > self._cursor + lead_bytes or (whole and self._claims):
                return None
            start, end = gap[0], min(gap[1], next_mark(gap[0], self._chunk_bytes, self.entry.size))
            claim = Claim(self, 0, self.entry.size, source) if whole else Claim(self, start, end, source)
            self._claims.append(claim)
            return claim

    def release(self, claim: Claim) -> None:
        """End a claim; what it did not bring is missing again."""
        with self._lock:
            self._claims.remove(claim)

    def write(self, claim: Claim, offset: int, data: bytes) -> int:
        """Keep those of `data` that are claimed and missing; give their number. Raises: OSError."""
        view = memoryview(data)
        kept = 0
        with self._lock:
            stop = min(claim.end, offset + len(view))
            while self._descriptor >= 0 and (gap := self._state.have.next_gap(max(offset, claim.start), stop)):
                start, end = gap
                while start < end:
                    start += os.pwrite(self._descriptor, view[start - offset : end - offset], start)
                self._state.have.add(*gap)
                kept += gap[1] - gap[0]
            if kept:
                self.contributors.add(claim.source)
                self._dirty = True
        return kept

    def needs_hash(self) -> bool:
        """Tell whether enough bytes follow the hashed ones for `advance` to be worth it."""
        with self._lock:
            return self._hashable() > self._cursor or (self._cursor == self.entry.size and self.is_open)

    def advance(self, stop: threading.Event) -> bool | None:
        """Hash what can be hashed: True when the file is complete and right, False when it is complete and wrong.

        Where a mark from before disagrees, the chunk before it is forgotten, to be fetched again.

        Raises: ReadError when bytes that were written cannot be read back.
        """
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(1, self.entry.size))))
        while not stop.is_set():
            with self._lock:
                end = min(self._hashable(), self._cursor + len(buffer))
            if end > self._cursor:
                block = buffer[: end - self._cursor]
                if os.preadv(self._descriptor, [block], self._cursor) != len(block):
                    raise ReadError(f"{self.path} ended before byte {end}.", hint="Does something else write to it?")
                self._hash.update(block)
                self._cursor = end
                if end == next_mark(end - 1, self._chunk_bytes, self.entry.size) and not self._check_mark():
                    continue
            elif self._cursor < self.entry.size:
                return None
            if self._cursor == self.entry.size:
                return self._hash.is_right()
        return None

    def begin_afresh(self) -> None:
        """Forget all bytes."""
        with self._lock:
            self._state = PartState(self.entry.digest)
            self._new_marks = {}
            self._dirty = self._afresh = True
            self._cursor, self._hash, self._mismatches = 0, FileHash(self.entry), 0
            self._good = (0, self._hash.copy())

    def sync(self) -> dict[str, Any] | None:
        """Make what was written durable; give the journal line that says so, None where nothing is new."""
        with self._lock:
            if not self._dirty:
                return None
            state = PartState(self.entry.digest, self._state.have.copy(), self._new_marks)
            line = state.to_line(self.entry.path, afresh=self._afresh)
            self._new_marks = {}
            self._dirty = self._afresh = False
            # Not the original: the file may be closed, and its number given to another, while this one syncs.
            descriptor = os.dup(self._descriptor) if self.is_open else -1
        if descriptor >= 0:
            try:
                sync(descriptor)
            finally:
                os.close(descriptor)
        return line

    def seal(self) -> FileEntry:
        """Make all of the file durable; give its entry, verified."""
        os.ftruncate(self._descriptor, self.entry.size)  # a damaged file may have been longer
        sync(self._descriptor)
        verified = Verified.of(os.fstat(self._descriptor))
        marks = tuple(mark for _, mark in sorted(self._state.marks.items()))
        fields = vars(self.entry) | {"sha256": self._hash.sha256, "verified": verified, "marks": marks}
        return FileEntry(**fields)

    def publish(self) -> None:
        """Give the file its final name. Its entry must be saved before: a final name without one is not ours."""
        os.rename(self.path, self._final)
        sync_directory(self._final.parent)
        self.close()

    def close(self) -> None:
        with self._lock:
            if self.is_open:
                os.close(self._descriptor)
            self._descriptor = -1

    def _hashable(self) -> int:
        """Give how far the hash can go now: whole blocks, or to the next mark."""
        end = self._state.have.end_of(self._cursor)
        mark = next_mark(self._cursor, self._chunk_bytes, self.entry.size)
        return min(end, mark) if end >= mark or end - self._cursor >= _BLOCK_BYTES else self._cursor

    def _check_mark(self) -> bool:
        """Compare with the mark taken here before, or take one. On a difference, go back to the last right one."""
        found = self._hash.mark
        with self._lock:
            expected = self._state.marks.setdefault(self._cursor, found)
            if expected == found:
                self._good = (self._cursor, self._hash.copy())
                self._mismatches = 0
                self._new_marks[self._cursor] = found
                self._dirty = True
                return True
            self._mismatches += 1
            if self._mismatches == 1:
                position, good = self._good
                self._state.have.remove(position, self._cursor)
                self._cursor, self._hash, self._dirty = position, good.copy(), True
                return False
        # The same chunk differs when fetched again: the mark itself is wrong.
        self.begin_afresh()
        return False


def check_part(path: Path, known: bool) -> None:
    """Refuse what must not be written to: a link, a file with a second name, or one that no journal knows.

    Raises: CheckpointError.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        found = "a link" if stat.S_ISLNK(status.st_mode) or stat.S_ISREG(status.st_mode) else "no regular file"
        hint = "Move it away, then run the same command again."
        raise CheckpointError("slotpy only writes to files of its own", file=path, found=found, hint=hint)
    if not known:
        hint = "Move it away, then run the same command again."
        raise CheckpointError("a partial file that slotpy did not begin", file=path, hint=hint)


def _holes(descriptor: int, size: int) -> list[tuple[int, int]]:
    """List the parts of the first `size` bytes that no data was ever written to, or that lie behind the file's end."""
    end = os.fstat(descriptor).st_size
    holes = []
    position = 0
    try:
        while position < end:
            hole = os.lseek(descriptor, position, os.SEEK_HOLE)
            try:
                data = os.lseek(descriptor, hole, os.SEEK_DATA)
            except OSError:  # no data after it
                data = end
            holes.append((hole, data))
            position = data
    except OSError:  # the file system cannot tell; the hash will
        holes = []
    return [*holes, (end, max(end, size))]

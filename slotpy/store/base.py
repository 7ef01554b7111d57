"""The contract of a store, and what every store shares: opened files, checks before a read, errors after it.

A store fills buffers with bytes of files, completely, or raises. It serves slots and layers. It knows no tensors and no
records (checkpoint does) and keeps no bytes (slots do).
"""

import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from slotpy.errors import ReadError

# A longer run of bytes is cut, so that idle threads can share it. As in native/pread_batch.c, which says why 960 KiB.
PIECE_BYTES = 960 << 10
BLOCK_BYTES = 4096  # pieces are cut where this divides the file offset, so that neighbours share no page

_REPLACED_HINT = "Start slotpy again to read the new file, or put the old one back."


class Ticket(Protocol):
    """Stand for one submitted batch. One thread waits for it."""

    def wait(self) -> None:
        """Return when the buffers hold every byte asked for.

        Returns or raises only after all reads of the batch ended: no thread writes to the buffers afterwards. After an
        error their contents are undefined.

        Raises: ReadError for the first row, in the order submitted, that could not be read in full, or for a file that
        changed since the store opened it.
        """


@dataclass(frozen=True)
class StoreCounters:
    """Count what a store did since it was opened. `busy_s` is wall time with at least one batch unfinished."""

    num_reads: int
    read_bytes: int
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.busy_s if self.busy_s > 0 else 0.0

    def __sub__(self, earlier: "StoreCounters") -> "StoreCounters":
        return StoreCounters(
            self.num_reads - earlier.num_reads, self.read_bytes - earlier.read_bytes, self.busy_s - earlier.busy_s
        )


class Store(Protocol):
    """Read many byte ranges at once, on threads of its own. Any thread may submit."""

    kind: str
    num_threads: int
    direct: bool

    def submit(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> Ticket:
        """Start a batch and return at once.

        `reads` is (n, 5) int64, columns file index, file offset, buffer index, buffer offset, nbytes. A row that
        continues the row before it in the same file joins its system call. `buffers` are writable memoryviews of bytes
        ("B"); the caller owns them and leaves them alone until the ticket's `wait` returned or raised. Rows of
        unfinished batches must not overlap in memory: nobody checks that.

        Raises: ValueError for a row or buffer that does not fit, ReadError for a range outside its file. Nothing was
        read then.
        """

    def read(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> None:
        """Submit a batch and wait for it."""

    def counters(self) -> StoreCounters:
        """Report the totals so far."""

    def close(self) -> None:
        """End all batches, then the threads, then close the files. May be called twice.

        No other thread may be submitting. Waiting for a ticket is a ValueError afterwards.
        """


@dataclass(frozen=True)
class StoreFile:
    """Keep an open descriptor with what its file was when opened: a later difference means that it changed.

    The descriptor pins device and inode, so those cannot differ; `linked` is false once no directory names the file.
    """

    path: Path
    fd: int
    nbytes: int
    mtime_ns: int
    linked: bool

    def changes(self) -> str:
        """Say what is different now, or nothing."""
        try:
            now = os.fstat(self.fd)
        except OSError as error:
            return f"it can no longer be examined ({error.strerror})"
        found = []
        if now.st_size != self.nbytes:
            found.append(f"it had {self.nbytes} bytes and has {now.st_size}")
        if now.st_mtime_ns != self.mtime_ns:
            found.append("it was written to")
        if self.linked and now.st_nlink == 0:
            found.append("it was replaced or deleted")
        return ", ".join(found)


class OpenFiles:
    """Own the descriptors of a store and judge its reads. Used by one store; any thread may call."""

    def __init__(self, paths: Sequence[Path], *, direct: bool) -> None:
        self.align = 0
        """0, or what O_DIRECT asks of file offsets, lengths and memory, in bytes."""
        self._closed = False
        self._files: list[StoreFile] = []
        try:
            for path in paths:
                self._files.append(_open_file(path, direct))
                if direct and sys.platform != "darwin":
                    self.align = max(self.align, _direct_alignment(self._files[-1]))
        except BaseException:
            self.close()
            raise
        self._sizes = np.array([file.nbytes for file in self._files], dtype=np.int64)

    @property
    def fds(self) -> list[int]:
        return [file.fd for file in self._files]

    def check(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> np.ndarray:
        """Return `reads` as C-contiguous (n, 5) int64 after checking every row and buffer; raises as Store.submit."""
        self._refuse_if_closed()
        if reads.dtype != np.int64 or reads.ndim != 2 or reads.shape[1] != 5:
            raise ValueError(f"reads must be (n, 5) int64, not {reads.shape} {reads.dtype}")
        for index, buffer in enumerate(buffers):
            if buffer.readonly or buffer.format != "B" or buffer.ndim != 1 or not buffer.c_contiguous:
                raise ValueError(f"buffer {index} is not a writable, contiguous memoryview of bytes")
        if len(reads) == 0:
            return reads
        file, offset, buffer_index, start, nbytes = reads.T
        if reads.min() < 0:
            raise ValueError(f"reads has a negative number in row {int(np.argmax((reads < 0).any(axis=1)))}")
        if file.max() >= len(self._files) or buffer_index.max() >= len(buffers):
            raise ValueError(
                f"reads names a file or buffer beyond the {len(self._files)} files, {len(buffers)} buffers"
            )
        lengths = np.array([len(buffer) for buffer in buffers], dtype=np.int64)
        outside = nbytes > lengths[buffer_index] - start
        if outside.any():
            row = int(np.argmax(outside))
            raise ValueError(f"row {row} ends outside its buffer of {lengths[buffer_index[row]]} bytes: {reads[row]}")
        beyond = nbytes > self._sizes[file] - offset
        if beyond.any():
            row = int(np.argmax(beyond))
            raise self._error(reads[row], max(0, int(self._sizes[file[row]] - offset[row])), 0)
        return np.ascontiguousarray(reads)

    def finish(self, reads: np.ndarray, failure: tuple[int, int, int] | None) -> None:
        """Raise ReadError if a batch of `reads`, all ended, failed or met a file that has changed.

        `failure` is the row where the failed piece began, the file offset of the first byte not read, and an errno
        value (0: the file ended). The look at the files comes after the reads, where it sees a change before as well as
        during them. It costs 1-2 us a file: one `fstat`, no path is walked.
        """
        self._refuse_if_closed()
        if failure is not None:
            row, missing, code = failure
            file = reads[row, 0]
            while reads[row, 0] != file or not 0 <= missing - reads[row, 1] < reads[row, 4]:
                row += 1  # a piece joins rows: find the one that holds the missing byte
            raise self._error(reads[row], missing - int(reads[row, 1]), code)
        if len(reads) == 0:
            return
        for index in np.flatnonzero(np.bincount(reads[:, 0])):
            changes = self._files[index].changes()
            if changes:
                path = self._files[index].path
                raise ReadError(f"{path} changed since slotpy opened it: {changes}.", hint=_REPLACED_HINT)

    def close(self) -> None:
        """Close the descriptors. No read may be running."""
        self._closed = True
        while self._files:
            os.close(self._files.pop().fd)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")

    def _error(self, read: np.ndarray, got_bytes: int, code: int) -> ReadError:
        index, offset, _, _, nbytes = read.tolist()
        file = self._files[index]
        message = f"{file.path}: wanted {nbytes} bytes at offset {offset}, got {got_bytes}: "
        message += os.strerror(code) if code else "the file ends there"
        changes = file.changes()
        if changes:
            return ReadError(f"{message}. It changed since slotpy opened it: {changes}.", hint=_REPLACED_HINT)
        if code:
            return ReadError(
                f"{message}.", hint="Check the disk (`dmesg | tail`), then download or copy the file again."
            )
        return ReadError(f"{message} ({file.nbytes} bytes).", hint="Download or copy the file again.")


def _open_file(path: Path, direct: bool) -> StoreFile:
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct and sys.platform != "darwin":
        flags |= os.O_DIRECT
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise _no_direct(path) from error
        raise ReadError(f"{path} cannot be opened: {error.strerror}.", hint=f"Check it with `ls -l {path}`.") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise ReadError(f"{path} is not a regular file.", hint="Name the files of a checkpoint.")
    if sys.platform == "darwin":
        if direct:
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    elif not direct:
        # Reads are whole records at random places: what the kernel would read ahead is not wanted.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return StoreFile(path, fd, found.st_size, found.st_mtime_ns, found.st_nlink > 0)


def _direct_alignment(file: StoreFile) -> int:
    """Find by trial what the file system asks for: the block size of the device, or of a page. In bytes."""
    memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
    for align in (512, BLOCK_BYTES):
        try:
            os.preadv(file.fd, [memory[align : 2 * align]], 0)
        except OSError:
            continue
        return align
    raise _no_direct(file.path)


def _no_direct(path: Path) -> ReadError:
    return ReadError(
        f"{path} cannot be read past the page cache: its file system refuses O_DIRECT.",
        hint="Open it without direct reads, or move it to a local disk (ext4, xfs, btrfs).",
    )

"""The Python store: the same contract over `os.preadv` and a thread pool, for a machine without the native library."""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slotpy.store.base import BLOCK_BYTES, PIECE_BYTES, OpenFiles, StoreCounters, Ticket

_MAX_VIEWS = min(1024, os.sysconf("SC_IOV_MAX"))


@dataclass
class _Piece:
    """Bytes that lie together in one file: one preadv, unless the kernel returns fewer."""

    row: int
    fd: int
    offset: int
    nbytes: int = 0
    views: list[memoryview] = field(default_factory=list)


class PythonStore:
    """Read with Python threads, which hold the GIL between system calls. See Store for the contract."""

    kind = "python"

    def __init__(self, files: Sequence[Path], *, num_threads: int, direct: bool = False) -> None:
        self.num_threads = num_threads
        self.direct = direct
        self._files = OpenFiles(files, direct=direct)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="slotpy-read")
        self._own = threading.local()  # direct reads: a thread's aligned memory
        self._lock = threading.Lock()  # guards what follows, and the batches
        self._num_reads = self._read_bytes = self._num_active = 0
        self._busy_s = self._busy_since = 0.0

    def submit(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> Ticket:
        reads = self._files.check(reads, buffers)
        batch = _Batch(_plan_pieces(reads, buffers, self._files.fds))
        num_jobs = min(self.num_threads, len(batch.todo))
        with self._lock:
            self._num_reads += len(reads)
            if num_jobs and self._num_active == 0:
                self._busy_since = time.perf_counter()
            self._num_active += num_jobs
        return _PythonTicket(
            self._files, reads, batch, [self._threads.submit(self._work, batch) for _ in range(num_jobs)]
        )

    def read(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> None:
        self.submit(reads, buffers).wait()

    def counters(self) -> StoreCounters:
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._num_active else 0.0
            return StoreCounters(self._num_reads, self._read_bytes, self._busy_s + running)

    def close(self) -> None:
        self._threads.shutdown()
        self._files.close()

    def _work(self, batch: "_Batch") -> None:
        """Take pieces until none is left. Runs on a thread of the pool."""
        read_bytes = 0
        try:
            while batch.todo:
                try:
                    index, piece = batch.todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                done, error = self._read_piece(piece)
                read_bytes += done
                if error is not None:
                    batch.todo.clear()  # spare a failing disk the rest; lower pieces were all taken already
                    with self._lock:
                        batch.failures[index] = (piece.row, piece.offset + done, error)
        finally:
            with self._lock:
                self._read_bytes += read_bytes
                self._num_active -= 1
                if self._num_active == 0:
                    self._busy_s += time.perf_counter() - self._busy_since

    def _read_piece(self, piece: _Piece) -> tuple[int, int | None]:
        if not self._files.align:
            return _read_fully(piece.fd, piece.views, piece.offset)
        lead = piece.offset % self._files.align
        want = lead + piece.nbytes
        memory = self._direct_memory()
        done, error = _read_fully(piece.fd, [memory[: want + -want % self._files.align]], piece.offset - lead)
        if done < want:
            return max(0, done - lead), error
        start = lead
        for view in piece.views:
            view[:] = memory[start : start + len(view)]
            start += len(view)
        return piece.nbytes, None

    def _direct_memory(self) -> memoryview:
        if not hasattr(self._own, "memory"):
            self._own.memory = memoryview(mmap.mmap(-1, PIECE_BYTES))
        memory: memoryview = self._own.memory
        return memory


class _Batch:
    """Hold the pieces no thread has taken yet, and the failures, by index of the piece."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self.todo = deque(enumerate(pieces))
        self.failures: dict[int, tuple[int, int, int]] = {}


class _PythonTicket:
    def __init__(self, files: OpenFiles, reads: np.ndarray, batch: _Batch, jobs: list[Future[None]]) -> None:
        self._files = files
        self._reads = reads
        self._batch = batch
        self._jobs = jobs

    def wait(self) -> None:
        wait(self._jobs)
        for job in self._jobs:
            job.result()
        failures = self._batch.failures
        self._files.finish(self._reads, failures[min(failures)] if failures else None)


def _plan_pieces(reads: np.ndarray, buffers: Sequence[memoryview], fds: list[int]) -> list[_Piece]:
    """Cut and join rows: those that continue each other in one file become one piece, up to PIECE_BYTES."""
    pieces: list[_Piece] = []
    for row, (file, offset, buffer, start, nbytes) in enumerate(reads.tolist()):
        end = offset + nbytes
        while offset < end:
            piece = pieces[-1] if pieces else None
            if (
                piece is None
                or piece.fd != fds[file]
                or piece.offset + piece.nbytes != offset
                or piece.nbytes >= PIECE_BYTES - piece.offset % BLOCK_BYTES
                or len(piece.views) == _MAX_VIEWS
            ):
                piece = _Piece(row, fds[file], offset)
                pieces.append(piece)
            taken = min(end - offset, PIECE_BYTES - piece.offset % BLOCK_BYTES - piece.nbytes)
            piece.views.append(buffers[buffer][start : start + taken])
            piece.nbytes += taken
            offset += taken
            start += taken
    return pieces


def _read_fully(fd: int, views: list[memoryview], offset: int) -> tuple[int, int | None]:
    """Read until the views are full. Gives the bytes that arrived, and None, an errno, or 0 if the file ended."""
    done = 0
    while views:
        try:
            count = os.preadv(fd, views, offset + done)
        except OSError as error:
            return done, error.errno
        if count == 0:
            return done, 0
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return done, None

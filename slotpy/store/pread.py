"""The native store: batches go to the worker threads of native/pread_batch.c. The product's store."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slotpy.native import NativeLibrary, ReadBatch
from slotpy.store.base import OpenFiles, StoreCounters, Ticket


class PreadStore:
    """Read with C threads, without the GIL. See Store for the contract."""

    kind = "native"

    def __init__(
        self, files: Sequence[Path], *, library: NativeLibrary, num_threads: int, direct: bool = False
    ) -> None:
        self.num_threads = num_threads
        self.direct = direct
        self._files = OpenFiles(files, direct=direct)
        try:
            self._pool = library.open_pool(self._files.fds, num_threads, self._files.align)
        except BaseException:
            self._files.close()
            raise

    def submit(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> Ticket:
        reads = self._files.check(reads, buffers)
        return _PreadTicket(self._files, reads, self._pool.submit(reads, buffers))

    def read(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> None:
        self.submit(reads, buffers).wait()

    def counters(self) -> StoreCounters:
        return StoreCounters(*self._pool.counters())

    def close(self) -> None:
        self._pool.close()
        self._files.close()


class _PreadTicket:
    def __init__(self, files: OpenFiles, reads: np.ndarray, batch: ReadBatch) -> None:
        self._files = files
        self._reads = reads
        self._batch = batch

    def wait(self) -> None:
        self._files.finish(self._reads, self._batch.wait())

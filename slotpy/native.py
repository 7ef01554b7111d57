"""Finds, loads and calls the native library (native/pread_batch.c) through ctypes; nobody else uses ctypes.

Knows the C functions and who owns which memory. Knows no store, no files and no errors of files: slotpy/store does. The
library may be absent, and then the Python store serves.
"""

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import slotpy
from slotpy.errors import SlotpyError

LIBRARY_NAME = "libslotpy_native.so"  # on macOS too: the build names it
_ABI = 1  # as in native/pread_batch.c
_BUILD_HINT = "Run `make native` in a checkout, or install slotpy again where a C compiler is on the PATH."

_Pointer = ctypes.c_void_p


class NativeAbsentError(SlotpyError):
    """Report that the native library is not there or cannot be used, and how to build it."""


class _Failure(ctypes.Structure):
    _fields_ = [("row", ctypes.c_int64), ("offset", ctypes.c_int64)]


class _Counters(ctypes.Structure):
    _fields_ = [("num_reads", ctypes.c_int64), ("read_bytes", ctypes.c_int64), ("busy_ns", ctypes.c_int64)]


def find() -> Path | None:
    """Look for the library inside the package, where a wheel, an editable install and `make native` put it.

    An editable install has two package folders; the newest library wins.
    """
    places = [Path(place, LIBRARY_NAME) for place in slotpy.__path__]
    return max((place for place in places if place.is_file()), key=lambda place: place.stat().st_mtime, default=None)


def load(path: Path | None = None) -> "NativeLibrary":
    """Load the library at `path`, or the one that `find` finds.

    Raises: NativeAbsentError, whose text is what `doctor` shows.
    """
    path = path or find()
    if path is None:
        raise NativeAbsentError(f"The native reader is not built: no {LIBRARY_NAME} in the package.", hint=_BUILD_HINT)
    try:
        functions = ctypes.CDLL(str(path))
        abi = functions.slotpy_abi()
    except (OSError, AttributeError) as error:
        raise NativeAbsentError(f"The native reader cannot be loaded: {error}.", hint=_BUILD_HINT) from error
    if abi != _ABI:
        raise NativeAbsentError(
            f"The native reader {path} has version {abi}, this slotpy needs {_ABI}.", hint=_BUILD_HINT
        )
    return NativeLibrary(path, functions)


class NativeLibrary:
    """Hold the loaded library at `path`. Its calls release the GIL."""

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path = path
        int64, int_, out = ctypes.c_int64, ctypes.c_int, ctypes.POINTER
        functions.slotpy_pool_open.argtypes = [_Pointer, int_, int_, int64, out(_Pointer)]
        functions.slotpy_pool_counters.argtypes = [_Pointer, out(_Counters)]
        functions.slotpy_pool_counters.restype = None
        functions.slotpy_pool_close.argtypes = [_Pointer]
        functions.slotpy_pool_close.restype = None
        functions.slotpy_batch_submit.argtypes = [_Pointer, _Pointer, int64, _Pointer]
        functions.slotpy_batch_submit.restype = _Pointer
        functions.slotpy_batch_wait.argtypes = [_Pointer, _Pointer, out(_Failure)]
        self._functions = functions

    def open_pool(self, fds: Sequence[int], num_threads: int, align: int) -> "ReadPool":
        """Start worker threads that read from `fds`, which the caller keeps open until the pool is closed.

        `align` is 0, or the bytes that direct descriptors ask of offsets, lengths and memory (a power of two, at most
        4096).

        Raises: OSError if threads or memory are out.
        """
        handle = _Pointer()
        error = self._functions.slotpy_pool_open(
            (ctypes.c_int * len(fds))(*fds), len(fds), num_threads, align, ctypes.byref(handle)
        )
        if error:
            raise OSError(error, os.strerror(error))
        return ReadPool(self._functions, handle)


class ReadPool:
    """Run batches of reads on the worker threads of the library. Any thread may submit."""

    def __init__(self, functions: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._functions = functions
        self._handle = handle
        self._batches: weakref.WeakSet[ReadBatch] = weakref.WeakSet()
        self._final_counters = (0, 0, 0.0)

    def submit(self, reads: np.ndarray, buffers: Sequence[memoryview]) -> "ReadBatch":
        """Start C-contiguous (n, 5) int64 `reads`, already checked, into writable `buffers`.

        The batch keeps the exporters of `buffers` alive and unresizable until it ended.
        """
        if not self._handle:
            raise ValueError("the pool is closed")
        # A zero-length view of each buffer gives its address, also where the buffer itself is empty.
        exports = [(ctypes.c_char * 0).from_buffer(buffer) for buffer in buffers]
        addresses = (_Pointer * len(exports))(*map(ctypes.addressof, exports))
        batch = self._functions.slotpy_batch_submit(
            self._handle, reads.__array_interface__["data"][0], len(reads), addresses
        )
        if not batch:
            raise MemoryError(f"no memory for a batch of {len(reads)} reads")
        made = ReadBatch(self, batch, exports)
        self._batches.add(made)
        return made

    def counters(self) -> tuple[int, int, float]:
        """Give reads, bytes and seconds with a batch unfinished, since the pool was opened."""
        if not self._handle:
            return self._final_counters
        found = _Counters()
        self._functions.slotpy_pool_counters(self._handle, ctypes.byref(found))
        return found.num_reads, found.read_bytes, found.busy_ns / 1e9

    def close(self) -> None:
        """End all batches and the threads. No other thread may be calling."""
        if not self._handle:
            return
        for batch in list(self._batches):
            batch.wait()
        self._final_counters = self.counters()
        self._functions.slotpy_pool_close(self._handle)
        self._handle = _Pointer()


class ReadBatch:
    """Own one submitted batch. Dropping it waits, so that no thread writes to memory nobody holds."""

    def __init__(self, pool: ReadPool, handle: int, exports: list[ctypes.Array[ctypes.c_char]]) -> None:
        self._pool = pool
        self._handle: int | None = handle
        self._exports = exports
        self._failure: tuple[int, int, int] | None = None

    def wait(self) -> tuple[int, int, int] | None:
        """Return after every read ended: None, or a failure's row, file offset and errno (0: the file ended).

        The row is where the failed piece began; the offset is that of the first byte not read.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            failure = _Failure()
            error = self._pool._functions.slotpy_batch_wait(self._pool._handle, handle, ctypes.byref(failure))
            self._exports.clear()
            if error:
                self._failure = failure.row, failure.offset, max(0, error)
        return self._failure

    def __del__(self) -> None:
        self.wait()

"""Picks a store: the native one where its library is built, the Python one elsewhere. Owns nothing else."""

import logging
from collections.abc import Sequence
from pathlib import Path

from slotpy import config
from slotpy.native import NativeAbsentError, load
from slotpy.store.base import Store
from slotpy.store.pread import PreadStore
from slotpy.store.python import PythonStore

_log = logging.getLogger(__name__)


def open_store(
    files: Sequence[Path],
    *,
    num_threads: int = config.READ_THREADS,
    direct: bool = False,
    native: bool | None = None,
) -> Store:
    """Open `files` for reading on `num_threads` threads; a read names a file by its index here.

    `direct` passes by the page cache (O_DIRECT; F_NOCACHE on macOS): right when the slots leave the cache no memory to
    live in, slower when it would have had the bytes. `native` None takes the native store if its library is there, and
    logs why not; True insists on it; False takes the Python store.

    Raises: ReadError for a file that cannot be opened so, NativeAbsentError.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, not {num_threads}")
    if native is False:
        return PythonStore(files, num_threads=num_threads, direct=direct)
    try:
        library = load()
    except NativeAbsentError as error:
        if native:
            raise
        _log.warning("Reading with Python threads, which is slower. %s", error)
        return PythonStore(files, num_threads=num_threads, direct=direct)
    return PreadStore(files, library=library, num_threads=num_threads, direct=direct)

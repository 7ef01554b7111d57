"""How fast the disk gives random records at the depth that a run uses, through the store that a run uses.

Reads a model's own records, or a scratch file where the model will be. Past the page cache where the file system allows
it: a page cache answers a benchmark at memory speed.
"""

import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slotpy import config
from slotpy.checkpoint.records import RecordSet
from slotpy.errors import ReadError
from slotpy.machine import hardware
from slotpy.store.base import Store
from slotpy.store.open import open_store

BATCH_RECORDS = 10
"""What one layer of the published model asks for at once."""

BUDGET_S = 1.0
SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """Say what was read and how fast. `direct`: past the page cache; otherwise it may have answered."""

    bytes_per_s: int
    read_bytes: int
    record_bytes: int
    num_threads: int
    direct: bool
    what: str


def measure_model(files: tuple[Path, ...], records: RecordSet, *, budget_s: float = BUDGET_S) -> DiskSpeed:
    """Read random records of a model for about a second, none twice. Raises ReadError."""
    keys = np.random.default_rng().permutation(records.num_records)[: 512 * BATCH_RECORDS]
    found, offsets = records.locate(keys)
    nbytes = np.array([role.nbytes for role in records.roles], dtype=np.int64)
    return _measure(files, found, offsets, nbytes, budget_s, "this model's records")


def measure_directory(directory: Path, record_bytes: int, *, budget_s: float = BUDGET_S) -> DiskSpeed | None:
    """Write a scratch file where a model would go, read it, remove it; None where there is no room. Raises OSError."""
    while not directory.is_dir():
        directory = directory.parent
    if hardware.free_disk_bytes(directory) < 4 * SCRATCH_BYTES:
        return None
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".slotpy-speed-") as scratch:
        block = os.urandom(1 << 20)  # incompressible within a block, which file systems compress by
        for _ in range(SCRATCH_BYTES // len(block)):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        count = SCRATCH_BYTES // record_bytes
        offsets = np.random.default_rng().permutation(count)[:, None] * record_bytes
        nbytes = np.array([record_bytes], dtype=np.int64)
        files = np.zeros_like(offsets)
        return _measure((Path(scratch.name),), files, offsets, nbytes, budget_s, f"a scratch file in {directory}")


def _measure(
    paths: tuple[Path, ...], files: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray, budget_s: float, what: str
) -> DiskSpeed:
    store, direct = _open(paths)
    record_bytes = int(nbytes.sum())
    memory = mmap.mmap(-1, BATCH_RECORDS * record_bytes)
    buffers = [memoryview(memory)]
    starts = np.cumsum(nbytes) - nbytes
    num_records, started = 0, time.perf_counter()
    try:
        for first in range(0, len(offsets), BATCH_RECORDS):
            batch = slice(first, first + BATCH_RECORDS)
            reads = np.empty((*offsets[batch].shape, 5), dtype=np.int64)
            reads[..., 0], reads[..., 1], reads[..., 2] = files[batch], offsets[batch], 0
            reads[..., 3] = np.arange(len(reads))[:, None] * record_bytes + starts
            reads[..., 4] = nbytes
            store.read(reads.reshape(-1, 5), buffers)
            num_records += len(reads)
            if time.perf_counter() - started > budget_s:
                break
        elapsed = time.perf_counter() - started
    finally:
        store.close()
    read_bytes = num_records * record_bytes
    return DiskSpeed(round(read_bytes / elapsed), read_bytes, record_bytes, config.READ_THREADS, direct, what)


def _open(paths: tuple[Path, ...]) -> tuple[Store, bool]:
    try:
        return open_store(paths, direct=True), True
    except ReadError:
        return open_store(paths, direct=False), False

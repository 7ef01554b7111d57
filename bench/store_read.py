"""Compares slotpy's stores with fio: random reads of one file at the block sizes of real records.

    python bench/store_read.py                          # makes a 2 GB file, 7 interleaved runs, about 20 minutes
    python bench/store_read.py --file F --block 307200  # an existing file, one block size

Modes: `direct` passes by the page cache, `cold` reads through an emptied one (checked with mincore), `warm` through a
full one. Reads go to random blocks, none twice in a run. fio runs as many psync threads, each on its own part of the
file, so that none of them repeats a block either; in direct mode also one io_uring of that depth. Our arms:
  native, python   one batch into page-aligned memory of a few blocks, used over and over, as fio does
  slots            native, batches into 64 MiB of slots 24 bytes off a page, as MLX gives on CPUs; bytes compared
Prints the ceiling first, one JSON object last, and appends to bench/results/<host>.csv.
"""

import argparse
import csv
import ctypes
import datetime
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import slotpy
from slotpy.store.base import Store
from slotpy.store.open import open_store

# An n-gram row's page, the scales of one Flash-Next 4-bit expert tensor, a packed piece, a whole expert.
BLOCKS = (4096, 51_200, 307_200, 2_764_800)
THREADS = (1, 4, 8, 16, 32)
MODES = ("direct", "cold", "warm")
ARMS = ("native", "slots", "python", "fio", "io_uring")
SLOTS_BYTES = 64 << 20  # more than the processor's caches hold
SLOTS_START = 24


@dataclass(frozen=True)
class Setup:
    """Fix what one run reads."""

    file: Path
    mode: str
    block: int
    threads: int
    num_reads: int


def main() -> None:
    options = parse_options()
    folder = None if options.file else tempfile.TemporaryDirectory(dir=options.dir, prefix="store_read-")
    file = options.file or make_file(Path(folder.name, "incompressible.bin"), options.size_gb)
    arms = [arm for arm in ARMS if arm not in ("fio", "io_uring") or shutil.which("fio")]
    print_machine(file, arms)
    ceiling = print_ceiling(file, arms)
    table = []
    for mode in options.mode:
        for block in options.block:
            for threads in options.threads:
                table += compare(file, mode, block, threads, arms, options.runs)
    save(table, options)
    ratios = [row["ratio_to_fio"] for row in table if row["arm"] == "native" and row["ratio_to_fio"]]
    summary = {
        "bench": "store_read",
        "host": options.host,
        "slotpy": slotpy.__version__,
        "ceiling_bytes_per_s": ceiling,
        "native_to_fio_median": round(statistics.median(ratios), 3) if ratios else None,
        "native_to_fio_lowest": min(ratios, default=None),
        "rows": table,
    }
    if folder:
        folder.cleanup()
    print(json.dumps(summary))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="read this file instead of making one")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="make the file here: the disk to measure")
    parser.add_argument("--size-gb", type=float, default=2.0)
    parser.add_argument("--block", type=int, nargs="+", default=BLOCKS, help="bytes a read")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--host", default="linux-x86_64-2core", help="name of the results file")
    return parser.parse_args()


def make_file(path: Path, size_gb: float) -> Path:
    chunk = 64 << 20
    random = np.random.default_rng(0)
    with open(path, "wb") as out:
        for _ in range(max(1, round(size_gb * 1e9 / chunk))):
            out.write(random.bytes(chunk))
        os.fsync(out.fileno())
    return path


def print_machine(file: Path, arms: list[str]) -> None:
    fio = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip() if "fio" in arms else ""
    print(
        f"machine  {platform.platform()}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"versions slotpy {slotpy.__version__}, Python {platform.python_version()}, numpy {np.__version__}, {fio}")
    print(f"file     {file.stat().st_size / 1e9:.2f} GB, file system {file_system(file)}")
    print(f"command  {' '.join(['python', *sys.argv])}")
    if not fio:
        print("fio is absent, nothing to compare with: `apt-get install fio`, or `brew install fio` on macOS")


def file_system(file: Path) -> str:
    found = subprocess.run(["df", "-PT", file], capture_output=True, text=True)
    return found.stdout.split("\n")[1].split()[1] if found.returncode == 0 else "unknown"


def print_ceiling(file: Path, arms: list[str]) -> dict[str, float]:
    """Measure what the disk and the memory give without slotpy. In bytes per second."""
    source = np.ones(256 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    ceiling = {"memcpy, 1 thread": source.nbytes / min(seconds(lambda: np.copyto(target, source)) for _ in range(3))}
    if "fio" in arms:
        count = file.stat().st_size // (1 << 20)
        ceiling["disk, fio, sequential 1 MiB, 8 threads"] = max(
            run_fio(Setup(file, "direct", 1 << 20, 8, count), "--rw=read", "--ioengine=psync", "--numjobs=8")
            for _ in range(3)
        )
    for name, rate in ceiling.items():
        print(f"ceiling  {rate / 1e9:.2f} GB/s: {name}")
    return {name: round(rate) for name, rate in ceiling.items()}


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(file: Path, mode: str, block: int, threads: int, arms: list[str], runs: int) -> list[dict[str, object]]:
    """Run the arms in turn, `runs` times, and print a line for each."""
    # Short turns, so that whatever else the machine does falls on all arms alike.
    budget = (24 << 20 if block < 16_384 else 200 << 20) * (8 if mode == "warm" else 1)
    setup = Setup(file, mode, block, threads, min(budget, file.stat().st_size) // block // threads * threads)
    arms = [arm for arm in arms if arm != "io_uring" or (mode == "direct" and sys.platform == "linux")]
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_ in range(runs):
        for arm in arms[round_ % len(arms) :] + arms[: round_ % len(arms)]:
            rates[arm].append(run_arm(arm, setup, seed=round_))
    table = []
    for arm, found in rates.items():
        ratio = None
        if "fio" in rates:
            ratio = round(statistics.median(a / b for a, b in zip(found, rates["fio"], strict=True)), 3)
        median, p90 = statistics.median(found), float(np.percentile(found, 10))  # p90 of time is p10 of rate
        print(
            f"{mode:6} {block:8} B {threads:3} threads {arm:9} {median / 1e9:6.3f} GB/s  p90 {p90 / 1e9:6.3f}"
            f"  {median / block:9.0f} reads/s  {f'{ratio:.2f} of fio' if ratio and arm != 'fio' else ''}",
            flush=True,
        )
        table.append(
            {
                "mode": mode, "block_bytes": block, "threads": threads, "arm": arm, "runs": runs,
                "median_bytes_per_s": round(median), "p90_bytes_per_s": round(p90), "ratio_to_fio": ratio,
            }
        )  # fmt: skip
    return table


def run_arm(arm: str, setup: Setup, seed: int) -> float:
    if setup.mode == "cold":
        drop_cache(setup.file)
    elif setup.mode == "warm":
        fill_cache(setup.file)
    if arm == "fio":
        return run_fio(setup, "--rw=randread", "--ioengine=psync", f"--numjobs={setup.threads}")
    if arm == "io_uring":
        one_job = Setup(setup.file, setup.mode, setup.block, 1, setup.num_reads)
        return run_fio(one_job, "--rw=randread", "--ioengine=io_uring", "--numjobs=1", f"--iodepth={setup.threads}")
    store = open_store([setup.file], num_threads=setup.threads, direct=setup.mode == "direct", native=arm != "python")
    try:
        # Small Python reads are slow enough for an eighth of them to tell.
        num_reads = setup.num_reads // 8 if arm == "python" and setup.block < 16_384 else setup.num_reads
        num_blocks = setup.file.stat().st_size // setup.block
        reads = np.zeros((num_reads, 5), dtype=np.int64)
        reads[:, 1] = np.random.default_rng(seed).permutation(num_blocks)[:num_reads] * setup.block
        reads[:, 4] = setup.block
        elapsed = read_slots(store, setup, reads) if arm == "slots" else read_reused(store, setup, reads)
    finally:
        store.close()
    return num_reads * setup.block / elapsed


def read_reused(store: Store, setup: Setup, reads: np.ndarray) -> float:
    """Read all in one batch; reads that are in flight together share no memory, others do. Returns seconds."""
    num_places = 2 * setup.threads
    reads[:, 3] = np.arange(len(reads)) % num_places * setup.block
    memory = make_memory(num_places * setup.block)
    return seconds(lambda: store.read(reads, [memory]))


def read_slots(store: Store, setup: Setup, reads: np.ndarray) -> float:
    """Fill slots, half of them a batch, two batches in flight, and compare the last with the file. Returns seconds."""
    half = max(setup.threads, SLOTS_BYTES // setup.block // 2)
    reads[:, 3] = np.arange(len(reads)) % (2 * half) * setup.block
    memory = make_memory(SLOTS_START + 2 * half * setup.block)[SLOTS_START:]
    started = time.perf_counter()
    before = store.submit(reads[:half], [memory])
    for first in range(half, len(reads), half):
        ticket = store.submit(reads[first : first + half], [memory])
        before.wait()
        before = ticket
    before.wait()
    elapsed = time.perf_counter() - started
    with open(setup.file, "rb") as file:
        for _, offset, _, start, nbytes in reads[-min(3, 2 * half) :].tolist():
            file.seek(offset)
            assert file.read(nbytes) == memory[start : start + nbytes], "the store read wrong bytes"
    return elapsed


def make_memory(nbytes: int) -> memoryview:
    """Give page-aligned memory whose pages exist before the clock starts."""
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    np.frombuffer(memory, dtype=np.uint8)[:] = 1
    return memory


def run_fio(setup: Setup, *arguments: str) -> float:
    """Return fio's bytes per second for the same number of reads, each job in a part of the file of its own."""
    part = setup.file.stat().st_size // setup.block // setup.threads * setup.block
    command = [
        "fio", "--name=read", f"--filename={setup.file}", f"--bs={setup.block}", f"--size={part}",
        f"--offset_increment={part}", f"--io_size={setup.num_reads // setup.threads * setup.block}", "--thread",
        f"--direct={int(setup.mode == 'direct')}", "--invalidate=0", "--randrepeat=0", "--gtod_reduce=1",
        "--group_reporting", "--output-format=json", *arguments,
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read = json.loads(found[found.index("{") :])["jobs"][0]["read"]
    return float(read["bw_bytes"])


def drop_cache(file: Path) -> None:
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_pages(file)
    if left > 64:
        raise SystemExit(f"{left} pages of {file} stay in the page cache: another process maps the file; stop it")


def fill_cache(file: Path) -> None:
    with open(file, "rb", buffering=0) as opened:
        scratch = bytearray(16 << 20)
        while opened.readinto(scratch):
            pass


def resident_pages(file: Path) -> int:
    """Count the pages of `file` in the page cache. Mapping it touches none of them."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * num_pages)()
        place = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(mapped)), states)
        del place
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return int((np.frombuffer(states, dtype=np.uint8) & 1).sum())


def save(table: list[dict[str, object]], options: argparse.Namespace) -> None:
    path = Path(__file__).parent / "results" / f"{options.host}.csv"
    path.parent.mkdir(exist_ok=True)
    fixed = {
        "bench": "store_read",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()} {os.cpu_count()} cores",
        "slotpy": slotpy.__version__,
    }
    new = not path.exists()
    with open(path, "a", newline="") as out:
        writer = csv.DictWriter(out, [*fixed, *table[0]])
        if new:
            writer.writeheader()
        writer.writerows({**fixed, **row} for row in table)


if __name__ == "__main__":
    main()

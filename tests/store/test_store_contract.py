"""What every store promises, run for the native and the Python store, through the page cache and past it."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import slotpy.store.open
from slotpy.errors import ReadError
from slotpy.native import NativeAbsentError
from slotpy.store.base import PIECE_BYTES, Store
from slotpy.store.open import open_store
from slotpy.store.pread import PreadStore
from slotpy.store.python import PythonStore

NBYTES = 3 * (1 << 20) + 777  # not a multiple of any block
SLOW_NBYTES, SLOW_S = 4099, 0.05  # as in conftest.py

MakeStore = Callable[..., Store]


@pytest.fixture(params=["native", "python"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def direct_works(tmp_path: Path) -> None:
    if sys.platform == "linux":
        try:
            os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip("the file system of the temporary folder refuses O_DIRECT")


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def direct(request: pytest.FixtureRequest) -> bool:
    if request.param:
        request.getfixturevalue("direct_works")
    return request.param


@pytest.fixture
def make_store(kind: str, request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    made: list[Store] = []

    def make(files: list[Path], num_threads: int = 4, direct: bool = False) -> Store:
        if kind == "python":
            made.append(PythonStore(files, num_threads=num_threads, direct=direct))
        else:
            library = request.getfixturevalue("native_library")
            made.append(PreadStore(files, library=library, num_threads=num_threads, direct=direct))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def make_faulty_store(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
    """Open a store over a preadv that gives at most 1,000 bytes a call and sleeps SLOW_S for SLOW_NBYTES."""
    if kind == "native":
        library = request.getfixturevalue("faulty_library")
        return lambda files: PreadStore(files, library=library, num_threads=4)
    preadv = os.preadv

    def faulty_preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if len(views[0]) % SLOW_NBYTES == 0:
            time.sleep(len(views[0]) // SLOW_NBYTES * SLOW_S)
        return preadv(fd, [views[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", faulty_preadv)
    return lambda files: PythonStore(files, num_threads=4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(1).bytes(NBYTES))
    return path


def rows(*reads: tuple[int, int, int, int, int]) -> np.ndarray:
    return np.array(reads, dtype=np.int64).reshape(-1, 5)


def views(*buffers: bytearray) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers]


def num_read_calls() -> int:
    """Count the read system calls of this process so far."""
    with open("/proc/self/io") as lines:
        return int(next(line for line in lines if line.startswith("syscr")).split()[1])


def swap_descriptor(store: Store, path: Path, flags: int) -> None:
    """Put another open file under the store's first descriptor, so that the kernel itself fails its reads."""
    fd = os.open(path, flags)
    os.dup2(fd, store._files.fds[0])
    os.close(fd)


# --- what is read


def test_read_fills_the_ranges_asked_for_and_nothing_else(make_store: MakeStore, file: Path, direct: bool) -> None:
    data = file.read_bytes()
    first, second = bytearray(b"#" * 5000), bytearray(b"#" * 300)
    store = make_store([file], direct=direct)
    store.read(rows((0, 1001, 0, 10, 4001), (0, NBYTES - 100, 1, 99, 100), (0, 0, 1, 7, 1)), views(first, second))
    assert first == b"#" * 10 + data[1001:5002] + b"#" * 989
    assert second == b"#" * 7 + data[:1] + b"#" * 91 + data[-100:] + b"#" * 101


def test_random_batches_equal_slices_of_the_files(make_store: MakeStore, tmp_path: Path, direct: bool) -> None:
    random = np.random.default_rng(2)
    data = [random.bytes(n) for n in (1, 4096, 70_001, 2_500_000)]
    files = [tmp_path / str(index) for index in range(len(data))]
    for path, content in zip(files, data, strict=True):
        path.write_bytes(content)
    store = make_store(files, num_threads=3, direct=direct)
    for _ in range(25):
        expected = [bytearray(400_000) for _ in range(3)]
        found = [bytearray(400_000) for _ in range(3)]
        starts = [0, 0, 0]
        reads = []
        for _ in range(random.integers(1, 40)):
            index, buffer = int(random.integers(len(files))), int(random.integers(3))
            offset = int(random.integers(len(data[index]) + 1))
            if reads and random.random() < 0.4:  # go on where the row before ended
                index, offset = reads[-1][0], reads[-1][1] + reads[-1][4]
            size = int(random.integers(10) ** random.integers(6))
            size = min(size, len(data[index]) - offset, 400_000 - starts[buffer])
            reads.append((index, offset, buffer, starts[buffer], size))
            expected[buffer][starts[buffer] : starts[buffer] + size] = data[index][offset : offset + size]
            starts[buffer] += size
        store.read(rows(*reads), views(*found))
        assert found == expected, reads


@pytest.mark.usefixtures("direct_works")
def test_direct_reads_equal_cached_reads_at_any_offset_and_size(make_store: MakeStore, file: Path) -> None:
    edges = [0, 1, 511, 512, 513, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]
    cached, direct = make_store([file]), make_store([file], direct=True)
    for offset in edges:
        for size in edges:
            expected, found = bytearray(size), bytearray(size)
            cached.read(rows((0, offset, 0, 0, size)), views(expected))
            direct.read(rows((0, offset, 0, 0, size)), views(found))
            assert found == expected == file.read_bytes()[offset : offset + size]


@pytest.mark.usefixtures("direct_works")
def test_direct_reads_into_aligned_memory_give_the_same_bytes(make_store: MakeStore, file: Path) -> None:
    memory = np.zeros(3 * 8192, dtype=np.uint8)
    start = -memory.__array_interface__["data"][0] % 4096
    make_store([file], direct=True).read(rows((0, 8192, 0, start, 8192)), [memoryview(memory)])
    assert memory[start : start + 8192].tobytes() == file.read_bytes()[8192:16384]


@pytest.mark.usefixtures("direct_works")
@pytest.mark.parametrize("size", [1, 5000])
def test_file_smaller_than_a_block_is_read_directly(make_store: MakeStore, tmp_path: Path, size: int) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(range(1, 251)) * 20)
    found = bytearray(size)
    make_store([path], direct=True).read(rows((0, 5000 - size, 0, 0, size)), views(found))
    assert found == path.read_bytes()[5000 - size :]


def test_reads_of_no_bytes_and_batches_of_no_rows_succeed(make_store: MakeStore, file: Path, direct: bool) -> None:
    store = make_store([file], direct=direct)
    found = bytearray(b"##")
    store.read(rows((0, 5, 0, 0, 0), (0, NBYTES, 1, 0, 0), (0, 9, 0, 0, 1), (0, 9, 0, 2, 0)), views(found, bytearray()))
    store.read(rows(), [])
    assert found == file.read_bytes()[9:10] + b"#"


@pytest.mark.skipif(sys.platform != "linux", reason="counts system calls through /proc")
@pytest.mark.parametrize(
    ("num_rows", "size", "gap", "calls"),
    [
        (9, 1000, 0, 1),
        (9, 1000, 1, 9),
        (2500, 8, 0, 3),
        (1, 2 * PIECE_BYTES, 0, 2),
        (2, PIECE_BYTES // 2, 0, 1),
        (3, PIECE_BYTES // 2, 0, 2),
    ],
    ids=["joined", "apart", "more than IOV_MAX", "cut", "exactly a piece", "joined, then cut"],
)
def test_rows_that_continue_each_other_share_a_system_call(
    make_store: MakeStore, file: Path, num_rows: int, size: int, gap: int, calls: int
) -> None:
    store = make_store([file])
    found = bytearray(num_rows * size)
    # Each row to another place: rows in reverse order in memory.
    reads = [(0, i * (size + gap), 0, (num_rows - 1 - i) * size, size) for i in range(num_rows)]
    before = num_read_calls()
    own_calls = num_read_calls() - before
    before = num_read_calls()
    store.read(rows(*reads), views(found))
    assert num_read_calls() - before - own_calls == calls
    data = file.read_bytes()
    for _, offset, _, start, nbytes in reads:
        assert found[start : start + nbytes] == data[offset : offset + nbytes]


def test_rows_of_two_files_never_join(make_store: MakeStore, file: Path, direct: bool) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[::-1])
    found = bytearray(3000)
    make_store([file, other], direct=direct).read(rows((0, 0, 0, 0, 1500), (1, 1500, 0, 1500, 1500)), views(found))
    assert found == file.read_bytes()[:1500] + other.read_bytes()[1500:3000]


def test_partial_results_and_interrupts_are_continued(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file])
    first, second = bytearray(12_345), bytearray(700)
    store.read(rows((0, 50, 0, 5, 12_340), (0, 12_390, 1, 0, 700), (0, 13_090, 0, 0, 5)), views(first, second))
    store.close()
    data = file.read_bytes()
    assert first == data[13_090:13_095] + data[50:12_390]
    assert second == data[12_390:13_090]


def test_threads_share_one_store(make_store: MakeStore, file: Path, direct: bool) -> None:
    store = make_store([file], num_threads=8, direct=direct)
    data = file.read_bytes()
    wrong: list[int] = []

    def read_many(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(10):
            offsets = random.integers(0, NBYTES - 3000, 20)
            found = bytearray(20 * 3000)
            store.read(rows(*[(0, int(at), 0, i * 3000, 3000) for i, at in enumerate(offsets)]), views(found))
            wrong.extend(at for i, at in enumerate(offsets) if found[i * 3000 : (i + 1) * 3000] != data[at : at + 3000])

    threads = [threading.Thread(target=read_many, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.counters().num_reads == 6 * 10 * 20


# --- when it is read


def test_batches_run_while_the_caller_goes_on(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file])
    found = bytearray(SLOW_NBYTES)
    started = time.perf_counter()
    ticket = store.submit(rows((0, 0, 0, 0, SLOW_NBYTES)), views(found))
    assert time.perf_counter() - started < SLOW_S
    ticket.wait()
    assert time.perf_counter() - started >= SLOW_S
    assert found == file.read_bytes()[:SLOW_NBYTES]
    store.close()


def test_waiting_lets_other_threads_run(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file])
    ran_at: list[float] = []
    other = threading.Timer(SLOW_S / 5, lambda: ran_at.append(time.perf_counter()))
    other.start()
    store.read(rows((0, 0, 0, 0, SLOW_NBYTES)), views(bytearray(SLOW_NBYTES)))
    ended = time.perf_counter()
    other.join()
    assert ran_at[0] < ended
    store.close()


def test_wait_raises_only_after_all_reads_of_the_batch_ended(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file, file])
    swap_descriptor(store, file.parent, os.O_RDONLY)  # file 0 fails at once
    found = bytearray(SLOW_NBYTES + 10)
    ticket = store.submit(rows((1, 0, 0, 0, SLOW_NBYTES), (0, 0, 0, SLOW_NBYTES, 10)), views(found))
    time.sleep(SLOW_S / 5)  # row 1 has failed, row 0 is asleep
    with pytest.raises(ReadError):
        ticket.wait()
    assert found[:SLOW_NBYTES] == file.read_bytes()[:SLOW_NBYTES]
    store.close()


def test_a_dropped_ticket_leaves_no_thread_writing_to_its_buffer(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file])
    found = bytearray(SLOW_NBYTES)
    store.submit(rows((0, 0, 0, 0, SLOW_NBYTES)), views(found))
    # Either the drop waited, or the buffer is still held and cannot be resized.
    if found != file.read_bytes()[:SLOW_NBYTES]:
        with pytest.raises(BufferError):
            found.clear()
    store.close()


def test_close_ends_unfinished_batches_and_may_be_repeated(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file])
    found = bytearray(SLOW_NBYTES)
    ticket = store.submit(rows((0, 0, 0, 0, SLOW_NBYTES)), views(found))
    store.close()
    assert found == file.read_bytes()[:SLOW_NBYTES]
    assert store.counters().read_bytes == SLOW_NBYTES
    store.close()
    for late in (ticket.wait, lambda: store.read(rows((0, 0, 0, 0, 1)), views(found))):
        with pytest.raises(ValueError, match="closed"):
            late()


def test_close_of_an_idle_store_returns_descriptors_and_threads(make_store: MakeStore, file: Path) -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()

    threads_before, descriptors_before = num_threads(), len(os.listdir("/dev/fd"))
    store = make_store([file, file], num_threads=5)
    store.read(rows((0, 0, 0, 0, 1)), views(bytearray(1)))
    assert len(os.listdir("/dev/fd")) == descriptors_before + 2
    store.close()
    assert len(os.listdir("/dev/fd")) == descriptors_before
    deadline = time.monotonic() + 1
    while num_threads() > threads_before and time.monotonic() < deadline:
        time.sleep(0.001)  # the kernel lists a thread for a moment after it was joined
    assert num_threads() <= threads_before


def test_counters_count_reads_bytes_and_busy_time(make_faulty_store: MakeStore, file: Path) -> None:
    store = make_faulty_store([file])
    assert store.counters().bytes_per_s == 0
    store.read(rows((0, 0, 0, 0, 10)), views(bytearray(10)))
    earlier = store.counters()
    time.sleep(SLOW_S)  # idle: does not count
    started = time.perf_counter()
    slow = store.submit(rows((0, 0, 0, 0, SLOW_NBYTES)), views(bytearray(SLOW_NBYTES)))
    time.sleep(SLOW_S / 2)
    store.read(rows((0, 9000, 0, 0, SLOW_NBYTES)), views(bytearray(SLOW_NBYTES)))  # time with both counts once
    slow.wait()
    elapsed = time.perf_counter() - started
    spent = store.counters() - earlier
    store.close()
    assert (spent.num_reads, spent.read_bytes) == (2, 2 * SLOW_NBYTES)
    assert SLOW_S * 1.5 <= spent.busy_s <= elapsed
    assert spent.bytes_per_s == spent.read_bytes / spent.busy_s


# --- what is refused before any byte is read


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((2, 0, 0, 0, 1), "file or buffer beyond"),
        ((0, 0, 1, 0, 1), "file or buffer beyond"),
        ((-1, 0, 0, 0, 1), "negative number in row 1"),
        ((0, -1, 0, 0, 1), "negative number in row 1"),
        ((0, 0, -1, 0, 1), "negative number in row 1"),
        ((0, 0, 0, -1, 1), "negative number in row 1"),
        ((0, 0, 0, 0, -1), "negative number in row 1"),
        ((0, 0, 0, 91, 10), "row 1 ends outside its buffer of 100 bytes"),
        ((0, 0, 0, 101, 0), "row 1 ends outside its buffer of 100 bytes"),
        ((0, 0, 0, 1 << 62, 1 << 62), "row 1 ends outside its buffer of 100 bytes"),
    ],
)
def test_row_that_does_not_fit_is_refused_before_any_byte_is_read(
    make_store: MakeStore, file: Path, bad: tuple[int, int, int, int, int], message: str
) -> None:
    found = bytearray(b"#" * 100)
    store = make_store([file, file])
    with pytest.raises(ValueError, match=message):
        store.submit(rows((0, 0, 0, 0, 50), bad), views(found))
    assert found == b"#" * 100
    assert store.counters().num_reads == 0


@pytest.mark.parametrize(
    "buffer",
    [memoryview(bytes(100)), memoryview(bytearray(400)).cast("i"), memoryview(bytearray(200))[::2]],
    ids=["read-only", "not bytes", "strided"],
)
def test_buffer_that_is_not_writable_bytes_is_refused(make_store: MakeStore, file: Path, buffer: memoryview) -> None:
    with pytest.raises(ValueError, match="buffer 0 is not a writable"):
        make_store([file]).submit(rows((0, 0, 0, 0, 1)), [buffer])


@pytest.mark.parametrize("reads", [np.zeros((1, 4), np.int64), np.zeros((1, 5), np.int32), np.zeros(5, np.int64)])
def test_reads_of_another_shape_or_dtype_are_refused(make_store: MakeStore, file: Path, reads: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_store([file]).submit(reads, views(bytearray(1)))


def test_reads_may_be_a_strided_array(make_store: MakeStore, file: Path) -> None:
    found = bytearray(20)
    reads = np.asfortranarray(rows((0, 5, 0, 10, 10), (0, 90, 0, 0, 10)))
    make_store([file]).read(reads, views(found))
    data = file.read_bytes()
    assert found == data[90:100] + data[5:15]


@pytest.mark.parametrize(("offset", "got"), [(NBYTES - 4, 4), (NBYTES, 0), (NBYTES + 50, 0)])
def test_range_beyond_the_file_is_refused_before_any_byte_is_read(
    make_store: MakeStore, file: Path, offset: int, got: int
) -> None:
    found = bytearray(b"#" * 100)
    with pytest.raises(ReadError) as caught:
        make_store([file]).submit(rows((0, 0, 0, 0, 50), (0, offset, 0, 50, 10)), views(found))
    assert f"{file}: wanted 10 bytes at offset {offset}, got {got}: the file ends there ({NBYTES} bytes)" in str(
        caught.value
    )
    assert caught.value.hint
    assert found == b"#" * 100


# --- what fails while it is read


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/mem")
def test_failing_disk_names_file_offset_bytes_and_reason(make_store: MakeStore, file: Path) -> None:
    store = make_store([file])
    swap_descriptor(store, Path("/proc/self/mem"), os.O_RDONLY)  # address 4096 is never mapped: EIO
    with pytest.raises(ReadError) as caught:
        store.read(rows((0, 4096, 0, 0, 10)), views(bytearray(10)))
    assert f"{file}: wanted 10 bytes at offset 4096, got 0: Input/output error." in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)], ids=["fails first", "fails last"])
def test_first_failing_row_is_reported(make_faulty_store: MakeStore, file: Path, first: int, second: int) -> None:
    store = make_faulty_store([file, file])
    swap_descriptor(store, file, os.O_WRONLY)
    found = bytearray(4 * SLOW_NBYTES)
    bad = [(0, 50, 0, 0, first * SLOW_NBYTES), (0, 90_000, 0, 2 * SLOW_NBYTES, second * SLOW_NBYTES)]
    with pytest.raises(ReadError, match=f"{first * SLOW_NBYTES} bytes at offset 50, got 0: Bad file descriptor"):
        store.read(rows((1, 0, 0, 0, 10), *bad), views(found))
    store.read(rows((1, 0, 0, 0, 10)), views(found))  # the store still works
    store.close()


def test_reads_after_a_failed_one_are_spared(make_store: MakeStore, file: Path) -> None:
    store = make_store([file, file], num_threads=1)
    swap_descriptor(store, file, os.O_WRONLY)
    good = [(1, i * 2000, 0, i * 1000, 1000) for i in range(100)]
    with pytest.raises(ReadError):
        store.read(rows(good[0], (0, 0, 0, 0, 10), *good), views(bytearray(100_000)))
    assert store.counters().read_bytes == 1000


@pytest.mark.parametrize("kept", [8192, 9000, 9216])
def test_truncated_file_is_reported_with_both_sizes(make_store: MakeStore, file: Path, direct: bool, kept: int) -> None:
    store = make_store([file], direct=direct)
    os.truncate(file, kept)
    # The rows join into one call: the row that holds the first missing byte is the one to name.
    reads = rows((0, 8000, 0, 0, 100), (0, 8100, 0, 200, 0), (0, 8100, 0, 100, 2000))
    with pytest.raises(ReadError) as caught:
        store.read(reads, views(bytearray(2100)))
    assert f"{file}: wanted 2000 bytes at offset 8100, got {kept - 8100}: the file ends there" in str(caught.value)
    assert f"it had {NBYTES} bytes and has {kept}" in str(caught.value)
    with pytest.raises(ReadError, match=f"{file} changed since slotpy opened it"):
        store.read(rows((0, 0, 0, 0, 1)), views(bytearray(1)))  # what is left of it is not to be trusted


def test_file_written_to_is_reported(make_store: MakeStore, file: Path) -> None:
    store = make_store([file])
    reads, found = rows((0, 0, 0, 0, 10)), bytearray(10)
    store.read(reads, views(found))
    with open(file, "r+b") as opened:
        opened.write(b"other")
    # A file system's clock may tick in milliseconds: a write in the tick of the one before leaves no mark.
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    with pytest.raises(ReadError, match="changed since slotpy opened it: it was written to"):
        store.read(reads, views(found))


def test_file_replaced_is_reported(make_store: MakeStore, file: Path, tmp_path: Path) -> None:
    store = make_store([file])
    (tmp_path / "new").write_bytes(file.read_bytes())
    os.replace(tmp_path / "new", file)
    with pytest.raises(ReadError, match="it was replaced or deleted") as caught:
        store.read(rows((0, 0, 0, 0, 10)), views(bytearray(10)))
    assert caught.value.hint


def test_change_of_a_file_that_the_batch_does_not_read_goes_unnoticed(make_store: MakeStore, file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"x" * 10)
    store = make_store([file, other])
    other.unlink()
    store.read(rows((0, 0, 0, 0, 10)), views(bytearray(10)))


# --- what cannot be opened


def test_missing_file_and_folder_are_refused(make_store: MakeStore, file: Path) -> None:
    num_open = len(os.listdir("/dev/fd"))
    with pytest.raises(ReadError, match="cannot be opened: No such file"):
        make_store([file, file.with_name("absent")])
    with pytest.raises(ReadError, match="is not a regular file"):
        make_store([file, file.parent])
    assert len(os.listdir("/dev/fd")) == num_open


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that refuses O_DIRECT: procfs")
def test_file_system_without_direct_reads_is_named(make_store: MakeStore) -> None:
    with pytest.raises(ReadError, match="/proc/self/status cannot be read past the page cache") as caught:
        make_store([Path("/proc/self/status")], direct=True)
    assert "without direct reads" in caught.value.hint


# --- which store is opened


def test_open_store_takes_the_native_store_where_it_can(
    file: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library")
    monkeypatch.setattr(slotpy.store.open, "load", lambda: library)
    for native, kind in ((None, "native"), (True, "native"), (False, "python")):
        store = open_store([file], num_threads=2, native=native)
        store.close()
        assert (store.kind, store.num_threads, store.direct) == (kind, 2, False)


def test_open_store_without_the_library_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> None:
        raise NativeAbsentError("The native reader is not built.", hint="Run `make native`.")

    monkeypatch.setattr(slotpy.store.open, "load", absent)
    store = open_store([file])
    store.close()
    assert store.kind == "python"
    assert "Run `make native`." in caplog.text
    with pytest.raises(NativeAbsentError):
        open_store([file], native=True)
    with pytest.raises(ValueError, match="num_threads"):
        open_store([file], num_threads=0)

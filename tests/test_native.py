"""The native library is found, refused with a reason, and survives rough handling of its batches."""

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import slotpy
from slotpy.native import LIBRARY_NAME, NativeAbsentError, NativeLibrary, find, load

SOURCE = Path(__file__).parents[1] / "native" / "pread_batch.c"


def compile_c(source: Path, library: Path, *flags: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc): the native library cannot be built")
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", *flags, source, "-o", library], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    return load(compile_c(SOURCE, tmp_path_factory.mktemp("native") / "reader.so", "-std=c11"))


def test_absent_library_is_reported_with_the_command_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slotpy, "__path__", [str(tmp_path)])
    assert find() is None
    with pytest.raises(NativeAbsentError, match="not built") as caught:
        load()
    assert "make native" in caught.value.hint


def test_newest_library_of_the_package_folders_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / name / LIBRARY_NAME for name in ("installed", "checkout", "empty")]
    for age, place in enumerate(places[:2]):
        place.parent.mkdir()
        place.touch()
        os.utime(place, (1000 + age, 1000 + age))
    for order in (places, places[::-1]):
        monkeypatch.setattr(slotpy, "__path__", [str(place.parent) for place in order])
        assert find() == places[1]


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / LIBRARY_NAME
    path.write_text("no library")
    with pytest.raises(NativeAbsentError, match="cannot be loaded"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("int slotpy_abi(void) { return 99; }", "has version 99, this slotpy needs"), ("int other;", "cannot be loaded")],
)
def test_library_of_another_version_is_refused(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "other.c"
    source.write_text(text)
    with pytest.raises(NativeAbsentError, match=message) as caught:
        load(compile_c(source, tmp_path / LIBRARY_NAME))
    assert "make native" in caught.value.hint


def test_pool_reads_and_reports_the_place_of_a_failure(library: NativeLibrary) -> None:
    with open(SOURCE, "rb") as file:
        pool = library.open_pool([file.fileno()], 2, 0)
        found = bytearray(30)
        reads = np.array([[0, 5, 0, 10, 20]], dtype=np.int64)
        batch = pool.submit(reads, [memoryview(found)])
        assert batch.wait() is None
        assert found[10:] == SOURCE.read_bytes()[5:25]
        size = SOURCE.stat().st_size
        beyond = np.array([[0, 0, 0, 0, 4], [0, size - 3, 0, 0, 20]], dtype=np.int64)
        batch = pool.submit(beyond, [memoryview(found)])
        assert batch.wait() == (1, size, 0)
        assert batch.wait() == (1, size, 0)  # again: the batch is gone, its outcome is kept
        assert pool.counters()[:2] == (3, 20 + 4 + 3)
        pool.close()
        with pytest.raises(ValueError, match="closed"):
            pool.submit(reads, [memoryview(found)])


def test_buffer_of_an_unfinished_batch_cannot_be_resized(library: NativeLibrary) -> None:
    with open(SOURCE, "rb") as file:
        pool = library.open_pool([file.fileno()], 1, 0)
        found = bytearray(10)
        batch = pool.submit(np.array([[0, 0, 0, 0, 10]], dtype=np.int64), [memoryview(found)])
        with pytest.raises(BufferError):
            found.clear()
        batch.wait()
        found.clear()
        pool.close()


def test_signals_stay_with_the_callers_threads(library: NativeLibrary) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("reads signal masks from /proc")
    before = set(os.listdir("/proc/self/task"))
    with open(SOURCE, "rb") as file:
        pool = library.open_pool([file.fileno()], 2, 0)
        for task in set(os.listdir("/proc/self/task")) - before:
            lines = Path("/proc/self/task", task, "status").read_text().splitlines()
            blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
            assert blocked >> (signal.SIGINT - 1) & 1, "SIGINT may reach a reader thread"
        pool.close()


def test_threads_that_cannot_start_are_an_os_error(library: NativeLibrary) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        library.open_pool([], 1 << 30, 512)  # a MiB for each is more than an address space holds

"""Builds the native reader for the store tests: as it ships, and with a preadv that dawdles and is interrupted."""

import shutil
import subprocess
from pathlib import Path

import pytest

from slotpy.native import NativeLibrary, load

SOURCE = Path(__file__).parents[2] / "native" / "pread_batch.c"
SLOW_NBYTES = 4099  # a read of this size takes SLOW_S first, of twice the size twice as long
SLOW_S = 0.05

# At most 1,000 bytes a call, into the first iovec only; every third call is interrupted.
FAULTY_SOURCE = f"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <sys/uio.h>
#include <unistd.h>
static ssize_t faulty_pread(int fd, void *to, size_t nbytes, off_t offset) {{
    static atomic_int calls;
    if (nbytes % {SLOW_NBYTES} == 0) usleep(nbytes / {SLOW_NBYTES} * {int(SLOW_S * 1e6)});
    if (++calls % 3 == 0) return errno = EINTR, -1;
    return pread(fd, to, nbytes < 1000 ? nbytes : 1000, offset);
}}
#define pread faulty_pread
#define preadv(fd, iov, num_iov, offset) faulty_pread(fd, (iov)->iov_base, (iov)->iov_len, offset)
#include "{SOURCE}"
"""


def compile_library(source: Path, library: Path) -> NativeLibrary:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc): the native store cannot be built")
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, source, "-o", library], check=True)
    return load(library)


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    return compile_library(SOURCE, tmp_path_factory.mktemp("native") / "reader.so")


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    folder = tmp_path_factory.mktemp("faulty")
    source = folder / "faulty.c"
    source.write_text(FAULTY_SOURCE)
    return compile_library(source, folder / "faulty.so")

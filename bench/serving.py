"""Starts `slotpy serve` for a benchmark, on a free port and with a home of its own."""

import os
import socket
import subprocess
import sys
import time
from typing import IO


def start(model: str, home: str, options: list[str], log: int | IO[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server and wait until it listens; give the process and its port. What it logs goes to `log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    call = "from slotpy.cli.main import main; main()"
    command = [sys.executable, "-c", call, "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, env=os.environ | {"SLOTPY_HOME": home}, stderr=log)
    for _ in range(1200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, port
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def slots_option(slots: int | None) -> list[str]:
    return [] if slots is None else ["--slots", str(slots)]

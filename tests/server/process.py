"""The scripted server in a process of its own, for tests that count what it holds or end it: `started()`.

`python -m tests.server.process` is tests.fake_server with its patience shortened by options, and with a signal,
SIGUSR1, at which it writes the number of its asyncio tasks into its log.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slotpy import config
from slotpy.server import bodies, serve
from tests import fake_server

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Held:
    """What a server holds at one moment."""

    tasks: int
    connections: int
    threads: int
    files: int


class ServerProcess:
    """A running server. `log` is all that it wrote."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self._log = process, log
        wait_for(lambda: "listening on" in self.log or process.poll() is not None, 30, "it never listened")
        assert process.poll() is None, self.log
        self.port = int(re.search(r"listening on http://[^\n]*:(\d+)", self.log)[1])  # type: ignore[index]

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def rss_bytes(self) -> int:
        """Give the memory that it occupies."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def held(self) -> Held:
        """Count what it holds; its listening socket is one of the files and none of the connections."""
        told = len(re.findall(r"tasks: \d+", self.log))
        self.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: len(re.findall(r"tasks: \d+\n", self.log)) > told, 10, "it does not tell its tasks")
        process = psutil.Process(self.process.pid)
        open_ = [each for each in process.net_connections("tcp") if each.status not in ("LISTEN", "TIME_WAIT")]
        tasks = int(re.findall(r"tasks: (\d+)\n", self.log)[-1])
        return Held(tasks, len(open_), process.num_threads(), process.num_fds())

    def left_files(self, pattern: str) -> list[Path]:
        """Find files by name in what the server has written."""
        return sorted(self._log.parent.rglob(pattern))

    def settled(self, timeout_s: float = 10.0) -> Held:
        """Count once nobody is connected any more."""
        wait_for(lambda: self.held().connections == 0, timeout_s, "connections stay open")
        return self.held()


@contextlib.contextmanager
def started(**options: Any) -> Iterator[ServerProcess]:
    """Start one with options of `main`, by their names, and end it hard if it does not end itself."""
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-u", "-W", "default", "-m", "tests.server.process", *arguments],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TMPDIR": directory},
            )
        try:
            yield ServerProcess(process, log)
        finally:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait until something holds. Raises: AssertionError with `what` when it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def _tell(*_: Any) -> None:
    os.write(2, f"tasks: {len(asyncio.all_tasks())}\n".encode())


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle-s", type=float, default=serve.IDLE_S)
    parser.add_argument("--body-s", type=float, default=bodies.PATIENCE_S)
    parser.add_argument("--bytes-per-s", type=float, default=bodies.BYTES_PER_S)
    parser.add_argument("--drain-s", type=float, default=config.DRAIN_S)
    mine, theirs = parser.parse_known_args()
    serve.IDLE_S, config.DRAIN_S = mine.idle_s, mine.drain_s
    bodies.PATIENCE_S, bodies.BYTES_PER_S = mine.body_s, mine.bytes_per_s
    sys.argv[1:] = theirs
    signal.signal(signal.SIGUSR1, _tell)
    fake_server.main()


if __name__ == "__main__":
    main()

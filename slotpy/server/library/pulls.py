"""Pulls that clients asked for: one for a model at a time, however many clients wait for it.

Owns the threads they run in. A pull ends when nobody waits for it any more; all it received is kept for the next one.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slotpy.hub.events import Event, FileProgress
from slotpy.hub.names import ModelName
from slotpy.hub.pull import pull
from slotpy.hub.transfer import Limits

_REPORT_S = 0.1


class Pulls:
    """Run pulls into `models_dir` and tell any number of clients how each goes. Use it from one event loop."""

    def __init__(self, models_dir: Path, limits: Limits | None = None) -> None:
        self._models_dir, self._limits = models_dir, limits or Limits()
        self._running: dict[Path, _Pull] = {}

    async def follow(self, name: ModelName) -> AsyncGenerator[Event]:
        """Begin a pull, or join the one that runs, and give its events; of a file's progress only the newest.

        Whoever closes the generator last ends the pull. Raises: as `hub.pull.pull`.
        """
        directory = name.directory(self._models_dir)
        while (running := self._running.get(directory)) is not None and running.is_over:
            await running.ended()  # a cancelled one holds the directory for a moment more
            if self._running.get(directory) is running:
                del self._running[directory]
        if running is None:
            running = self._running[directory] = _Pull(name, self._models_dir, self._limits)
        running.followers += 1
        try:
            async for event in running.events():
                yield event
        finally:
            running.followers -= 1
            if running.followers == 0:
                running.cancel()


class _Cancelled(BaseException):
    """End a pull from inside `report`. No Exception: nothing on the way may take it for a failure to try again."""


class _Pull:
    """One running pull. Its reports are kept, of each file the newest, so that a client can join at any time."""

    def __init__(self, name: ModelName, models_dir: Path, limits: Limits) -> None:
        self.followers = 0
        self._name, self._models_dir, self._limits = name, models_dir, limits
        self._cancel = threading.Event()
        self._lock = threading.Lock()
        self._count = 0
        self._latest: dict[str, tuple[int, Event]] = {}
        executor = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._done = asyncio.wrap_future(executor.submit(self._run))
        executor.shutdown(wait=False)

    @property
    def is_over(self) -> bool:
        return self._cancel.is_set() or self._done.done()

    def cancel(self) -> None:
        self._cancel.set()

    async def ended(self) -> None:
        if not self._done.done():
            await asyncio.wait({self._done})

    async def events(self) -> AsyncGenerator[Event]:
        """Give the newest of what was reported so far, then everything new."""
        seen = 0
        while True:
            await asyncio.wait({self._done}, timeout=_REPORT_S if seen else _REPORT_S / 10)
            is_done = self._done.done()
            with self._lock:
                new = sorted((each for each in self._latest.values() if each[0] > seen), key=lambda each: each[0])
            for number, event in new:
                seen = number
                yield event
            if is_done:
                error = self._done.result()
                if error is not None:
                    raise error
                return

    def _run(self) -> Exception | None:
        """Pull; give the error rather than raise it, as there may be nobody left to take it."""
        try:
            pull(self._name, self._models_dir, self._limits, self._report)
        except _Cancelled:
            return None
        except Exception as error:  # raised by `events`, for the client
            return error
        return None

    def _report(self, event: Event) -> None:
        if self._cancel.is_set():
            raise _Cancelled
        with self._lock:
            self._count += 1
            key = event.path if isinstance(event, FileProgress) else f"/{self._count}"
            self._latest[key] = (self._count, event)

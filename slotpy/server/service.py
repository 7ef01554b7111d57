"""The bridge between the event loop and the engine's thread: what every handler calls.

Never blocks the loop. A request that its handler leaves is cancelled.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from slotpy.engine.generation import FINAL, Event, Failed, Request, TextDelta, ToolCall
from slotpy.engine.worker import Worker
from slotpy.server.library.library import Library, Model
from slotpy.server.metrics import Metrics


@dataclass(frozen=True)
class Idle:
    """Say that nothing came for a while: time for a keep-alive where a dialect has one."""


class Events:
    """The events of one request, in order, ending after a final one. Raises what a Failed carries."""

    def __init__(self, queue: "asyncio.Queue[Event]", metrics: Metrics) -> None:
        self._queue, self._metrics, self._submitted_s = queue, metrics, time.monotonic()
        self._begun = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self.with_idle(None):
            assert not isinstance(event, Idle)
            yield event

    async def with_idle(self, seconds: float | None) -> AsyncIterator[Event | Idle]:
        """The same, with an Idle whenever nothing came for so long."""
        while True:
            try:
                async with asyncio.timeout(seconds):
                    event = await self._queue.get()
            except TimeoutError:
                yield Idle()
                continue
            if isinstance(event, Failed):
                raise event.error
            if not self._begun and isinstance(event, TextDelta | ToolCall):
                self._begun = True
                self._metrics.first_token(time.monotonic() - self._submitted_s)
            if isinstance(event, FINAL):
                self._metrics.finished(event)
                yield event
                return
            yield event


class Service:
    """What a server is made of: its models and its one worker, and the numbers kept about them."""

    def __init__(self, library: Library, worker: Worker) -> None:
        self.library, self.worker = library, worker
        self.metrics = Metrics(worker.status)

    @contextlib.contextmanager
    def submit(self, model: Model, request: Request, keep_alive_s: float | None = None) -> Iterator[Events]:
        """Queue a request and give its events; leaving the block cancels what still runs.

        `keep_alive_s` counts from the end of the last request: 0 unloads, inf is for ever, None keeps what holds.
        Raises: BusyError.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(queue.put_nowait, event)

        job = self.worker.submit(model.name, model.directory, request, deliver, keep_alive_s)
        try:
            yield Events(queue, self.metrics)
        finally:
            job.cancel()

    async def run_to_end(self, model: Model, request: Request, keep_alive_s: float | None = None) -> Event:
        """Run a request that has nothing to say meanwhile, and give the event that ends it. Raises as `submit`."""
        with self.submit(model, request, keep_alive_s) as events:
            async for event in events:
                if isinstance(event, FINAL):
                    return event
        raise AssertionError("events end with a final one")

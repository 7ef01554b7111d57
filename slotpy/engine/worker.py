"""The engine's thread: it alone touches MLX and what is loaded, and serves one request after the other.

Owns the queue, loading and unloading, and how long an idle model stays. Handlers of any number talk to it through
`submit`, `Job.cancel` and `status`, none of which ever waits for it.
"""

import contextlib
import dataclasses
import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import mlx.core as mx

from slotpy import budget, config
from slotpy.engine.answer import Work, answer, embed
from slotpy.engine.engine import Engine
from slotpy.engine.generation import (
    EmbedRequest,
    Event,
    Failed,
    GenerationRequest,
    Loaded,
    LoadRequest,
    Request,
    Unloaded,
    UnloadRequest,
)
from slotpy.engine.loader import EngineOptions
from slotpy.engine.session import Session
from slotpy.errors import BusyError, SlotpyError
from slotpy.lock import ModelLock

IDLE_CHECK_S = 5.0
"""How often an idle engine's governor looks. It measures every 15 seconds, and asks for memory pressure each time."""

FOREVER_S = 1e9
"""A keep-alive beyond this, 30 years, is shown as for ever: a date would overflow."""

_FULL = "server busy, please try again.  maximum pending requests exceeded"
_ENDING = "the server is shutting down"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedStatus:
    """Show the model that is loaded. `expires_at` is None while a request runs, and for one that stays for ever."""

    name: str
    directory: Path
    expires_at: datetime | None
    forever: bool
    context_tokens: int
    plan: budget.Plan
    governor: dict[str, object]
    slots: dict[str, int]


@dataclass(frozen=True)
class WorkerStatus:
    """Show the worker at one moment. `num_queued` does not count the request that runs."""

    loaded: LoadedStatus | None
    num_queued: int
    running: bool


class Job:
    """One request on its way through the worker."""

    def __init__(
        self,
        worker: "Worker",
        name: str,
        directory: Path,
        request: Request,
        deliver: Callable[[Event], None],
        keep_alive_s: float | None,
    ) -> None:
        self.name, self.directory, self.request, self.keep_alive_s = name, directory, request, keep_alive_s
        self.submitted_ns = time.perf_counter_ns()
        self.cancelled = False
        self.error: Exception | None = None
        """Why the worker ends it before its time."""
        self._worker, self._deliver = worker, deliver

    def cancel(self) -> None:
        """Take the request back: out of the queue, or ended within one token. Any thread, any number of times."""
        self.cancelled = True
        self._worker._interrupt(self)

    def is_over(self) -> bool:
        """Tell whether working on it has become useless."""
        return self.cancelled or self.error is not None

    def deliver(self, event: Event) -> None:
        """Hand over an event, unless nobody wants it any more."""
        if self.cancelled:
            return
        try:
            self._deliver(event)
        except Exception:  # whatever a handler does wrong must not end the engine's thread
            _log.exception("an event could not be delivered")
            self.cancelled = True


@dataclass
class _Model:
    """What is loaded, and how long it stays after `idle_since_s`. `closing` undoes the loading."""

    name: str
    directory: Path
    engine: Engine
    closing: contextlib.ExitStack
    keep_alive_s: float = math.inf
    idle_since_s: float = 0.0
    session: Session | None = None

    def shared_session(self) -> Session:
        """Give the one session: a request that extends the last one's tokens goes on from there."""
        if self.session is None:
            self.session = self.engine.new_session()
        return self.session

    def serves(self, directory: Path, context_tokens: int | None) -> bool:
        """Tell whether a request can run on it as it is loaded."""
        enough = context_tokens is None or context_tokens <= self.engine.context_tokens
        return self.directory == directory and (enough or self.engine.context_tokens >= self.engine.max_context_tokens)

    def remaining_s(self) -> float:
        return self.idle_since_s + self.keep_alive_s - time.monotonic()

    def status(self, running: bool) -> LoadedStatus:
        forever = self.keep_alive_s > FOREVER_S
        expires_at = None
        if not running and not forever:
            expires_at = datetime.now(UTC) + timedelta(seconds=self.remaining_s())
        return LoadedStatus(
            name=self.name,
            directory=self.directory,
            expires_at=expires_at,
            forever=forever,
            context_tokens=self.engine.context_tokens,
            plan=self.engine.loaded.plan,
            governor=self.engine.governor.as_dict(),
            slots=self.engine.counters(),
        )


class Worker:
    """Serve requests in the order of their submission, on a thread of its own."""

    def __init__(
        self,
        open_engine: Callable[[Path, EngineOptions], Engine],
        options: EngineOptions,
        *,
        max_queue: int = 512,
        keep_alive_s: float = 300.0,
        lock: Callable[[str], ModelLock] | None = None,
    ) -> None:
        """`open_engine` loads a model, on the worker's thread; `lock` takes the user's lock for one by that name.

        `max_queue` requests may wait. `keep_alive_s` is how long a model stays that no request said so about.
        """
        self._open_engine, self._options, self._lock = open_engine, options, lock
        self._max_queue, self._keep_alive_s = max_queue, keep_alive_s
        self._changed = threading.Condition()
        # Changed under the condition, read anywhere.
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._closing = False
        # Changed by the thread alone, read anywhere.
        self._model: _Model | None = None
        self._thread = threading.Thread(target=self._run, name="slotpy-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(
        self,
        name: str,
        directory: Path,
        request: Request,
        deliver: Callable[[Event], None],
        keep_alive_s: float | None = None,
    ) -> Job:
        """Queue a request for the model in `directory`, which status shows as `name`. Any thread.

        `deliver` gets the events, on the worker's thread mostly; the last one, and only that, is a FINAL one. A job
        that was cancelled gets none. `keep_alive_s` counts from the end of the last request: 0 unloads when nothing
        waits, inf is for ever, None keeps what holds.

        Raises: BusyError when the queue is full or the worker is closing.
        """
        job = Job(self, name, directory, request, deliver, keep_alive_s)
        with self._changed:
            if self._closing:
                raise BusyError(_ENDING)
            heading = 0 if self._running else 1  # with nothing running, the first in the queue does not wait
            if len(self._queue) >= self._max_queue + heading:
                raise BusyError(_FULL)
            self._queue.append(job)
            self._changed.notify()
        return job

    def status(self) -> WorkerStatus:
        """Show what is loaded and waiting. Any thread; never waits."""
        model, running = self._model, self._running is not None
        return WorkerStatus(None if model is None else model.status(running), len(self._queue), running)

    def close(self, drain_s: float) -> None:
        """Refuse new requests, fail the waiting ones, give the running one `drain_s`, unload, and end the thread.

        Waits for all that; for a model that is just loading, too.
        """
        with self._changed:
            self._closing = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify()
        for job in waiting:
            job.deliver(Failed(BusyError(_ENDING)))
        if not self._thread.is_alive():
            return
        self._thread.join(drain_s)
        running = self._running
        if running is not None:
            running.error = BusyError(_ENDING)
            self._interrupt(running)
        self._thread.join()

    def _interrupt(self, job: Job) -> None:
        """Have a job that is over leave the queue, or the session that works on it."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
            model = self._model
            if job is self._running and model is not None and model.session is not None:
                model.session.cancel()

    # From here on: the worker's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._take_turn()
        self._unload()

    def _take_turn(self) -> None:
        # A method, so that nothing holds on to a job, which may be large, while the next one is waited for.
        job = self._next()
        if job is not None:
            self._serve(job)
        else:
            self._idle()

    def _next(self) -> Job | None:
        """Take the next job, waiting for one as long as nothing else is to be done."""
        pause_s = None if self._model is None else max(0.0, min(self._model.remaining_s(), IDLE_CHECK_S))
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing, pause_s)
            self._running = self._queue.popleft() if self._queue else None
            return self._running

    def _idle(self) -> None:
        """Unload a model whose time is over, or see to its size."""
        if self._model is None:
            return
        if self._model.remaining_s() <= 0:
            self._unload()
            return
        try:
            self._model.engine.governor.check(True)
        except Exception:  # what a resize left behind is not known: the next request loads the model anew
            _log.exception("%s is unloaded: its size could not be changed", self._model.name)
            self._unload()

    def _serve(self, job: Job) -> None:
        try:
            final = self._result(job)
        except Exception as error:
            if not isinstance(error, SlotpyError):
                _log.error("a request for %s failed", job.name, exc_info=error)
            final = Failed(error.with_traceback(None))  # whose frames would hold on to the model
        if self._model is not None:
            self._model.idle_since_s = time.monotonic()
        with self._changed:
            self._running = None
        if job.error is not None:
            final = Failed(job.error)
        if final is not None:
            job.deliver(final)

    def _result(self, job: Job) -> Event | None:
        """Do what a job asks; None for one that is over."""
        request = job.request
        if job.is_over():
            return None
        if isinstance(request, UnloadRequest):
            if self._model is not None and self._model.directory == job.directory:
                self._unload()
            return Unloaded()
        started_ns = time.perf_counter_ns()
        loaded_now = self._require(job, request.context_tokens)
        load_ns = time.perf_counter_ns() - started_ns if loaded_now else 0
        if isinstance(request, LoadRequest):
            return Loaded(load_ns)
        return None if job.is_over() else self._generate(job, request, load_ns)

    def _generate(self, job: Job, request: GenerationRequest | EmbedRequest, load_ns: int) -> Event | None:
        model = self._model
        assert model is not None
        work = Work(model.engine, model.shared_session(), job.deliver, job.is_over, job.submitted_ns, load_ns)
        try:
            return embed(work, request) if isinstance(request, EmbedRequest) else answer(work, request)
        except BaseException:
            model.session = None  # some layers may have consumed tokens that others have not
            raise

    def _require(self, job: Job, context_tokens: int | None) -> bool:
        """Have the job's model loaded, with the context it asks for; tells whether it had to be loaded."""
        keep_alive_s = job.keep_alive_s
        if keep_alive_s is None:
            same = self._model is not None and self._model.directory == job.directory
            keep_alive_s = self._model.keep_alive_s if self._model is not None and same else self._keep_alive_s
        must_load = self._model is None or not self._model.serves(job.directory, context_tokens)
        if must_load:
            self._unload()
            self._load(job, context_tokens)
        assert self._model is not None
        self._model.name, self._model.keep_alive_s = job.name, keep_alive_s
        return must_load

    def _load(self, job: Job, context_tokens: int | None) -> None:
        options = self._options
        if context_tokens is not None and context_tokens > (options.context_tokens or config.CONTEXT_TOKENS):
            options = dataclasses.replace(options, context_tokens=context_tokens)
        with contextlib.ExitStack() as stack:
            if self._lock is not None:
                stack.enter_context(self._lock(job.name))
            engine = stack.enter_context(self._open_engine(job.directory, options))
            _log.info("%s is loaded, with a context of %d tokens", job.name, engine.context_tokens)
            for note in engine.notes:
                _log.info("%s: %s", job.name, note)
            self._model = _Model(job.name, job.directory, engine, stack.pop_all())

    def _unload(self) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        try:
            model.closing.close()
        except Exception:  # nothing of it is used again
            _log.exception("%s could not be closed in order", model.name)
        _log.info("%s is unloaded", model.name)
        del model
        gc.collect()
        mx.clear_cache()  # else the next plan would take what was freed for taken

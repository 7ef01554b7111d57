"""Fetch many files over several connections, hash them on the way, and survive what networks and servers do.

Owns the threads and the choice of who fetches what from where. Worker threads fetch, each over its own connection; a
pool hashes, a file each; one thread makes bytes durable and journals them; the caller's thread watches and reports.
Bytes on the disk are part.py's, answers of servers fetch.py's, what follows from them origin.py's.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slotpy import config
from slotpy.errors import CapacityError, SlotpyError
from slotpy.hub.events import Event, FileProgress, Waiting
from slotpy.hub.fetch import Blame, Connection, FetchError, SlowWatch
from slotpy.hub.growth import Growth
from slotpy.hub.journal import Journal
from slotpy.hub.listing import HubAddress
from slotpy.hub.manifest import FileEntry
from slotpy.hub.origin import Origin
from slotpy.hub.part import Claim, PartFile
from slotpy.units import format_bytes

_TICK_S = 0.1
# A connection this much slower than the best mean per connection so far drips.
_DRIP_SHARE = 1 / 20
_LEAST_BYTES_PER_S = 1024.0
_MAX_OPEN_FILES = 8
# A request that brought less than this, and not all it was for, has failed; one that brought more was cut off.
_PROGRESS_BYTES = 64 << 10


@dataclass(frozen=True)
class Limits:
    """What bounds a transfer; tests shorten them. `connections` fixes their number, None lets it grow."""

    connections: int | None = None
    chunk_bytes: int = config.PULL_CHUNK_BYTES
    lead_bytes: int = config.PULL_LEAD_BYTES
    stall_s: float = config.PULL_STALL_S
    patience_s: tuple[float, float] = config.PULL_PATIENCE_S
    sync_s: float = config.PULL_SYNC_S
    backoff_s: float = 0.5
    spare_bytes: int = config.PULL_SPARE_BYTES


class Transfer:
    """Fetch `parts`, calling `keep` with each entry once its file is complete, right and durable. Run once."""

    def __init__(
        self,
        directory: Path,
        parts: Iterable[PartFile],
        sources: Iterable[tuple[str, HubAddress, tuple[str, ...]]],
        journal: Journal,
        limits: Limits,
        *,
        keep: Callable[[FileEntry], None],
        report: Callable[[Event], None],
    ) -> None:
        self._directory, self._journal, self._limits = directory, journal, limits
        self._all = tuple(sorted(parts, key=lambda part: part.entry.size))
        self._waiting = [part for part in self._all if not part.is_open]
        self._active = [part for part in self._all if part.is_open]  # begun by an earlier call
        self._origins = [Origin(*source, limits.backoff_s) for source in sources]
        self._keep, self._report = keep, report
        self._lock = threading.Condition()
        self._disk_lock = threading.Lock()  # held while bytes are synced or files renamed
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._reason = ""
        self._pauses: list[Waiting] = []
        self._received = 0
        self._began = self._last_byte = time.monotonic()
        self._ended: list[PartFile] = []
        self._allowed = limits.connections or config.PULL_CONNECTIONS[0]
        self._least_rate = _LEAST_BYTES_PER_S
        self._locations: dict[str, str] = {}
        self._etags: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="hash")
        self._threads: list[threading.Thread] = []
        self.left_out: list[str] = []

    def run(self) -> None:
        """Fetch everything. On any way out, what was received is durable, journalled, and closed.

        Raises: SlotpyError when a file cannot be had, the disk is full or nothing comes for too long; OSError when the
        disk cannot be written; KeyboardInterrupt.
        """
        growth = Growth(self._limits.connections)
        try:
            self._start(threading.Thread(target=self._sync_often, name="sync", daemon=True))
            for part in [*self._active]:
                self._hash(part)
            while not self._finished():
                with self._lock:
                    self._allowed = growth.next(self._allowed, self._received)
                self._least_rate = max(_LEAST_BYTES_PER_S, growth.best_rate_per_connection * _DRIP_SHARE)
                while len(self._threads) <= self._allowed:
                    number = len(self._threads)
                    self._start(threading.Thread(target=self._work, args=(number,), name=f"get-{number}", daemon=True))
                self._look_after()
                with self._lock:
                    self._lock.wait(_TICK_S)
        finally:
            self._stop.set()
            self._close()
        self._look_after()
        if self._error is not None:
            raise self._error

    def _close(self) -> None:
        """End the threads and make durable what was received. On a full disk the journal says less than there is."""
        deadline = time.monotonic() + 1
        for thread in self._threads:
            # One that is stuck in a read writes nothing any more: its file is closed below.
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._pool.shutdown(wait=True)
        try:
            self._sync()
        except OSError as error:
            self._error = self._error or error
        finally:
            for part in self._all:
                part.close()

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _finished(self) -> bool:
        with self._lock:
            return self._error is not None or not (self._waiting or self._active)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()
        self._stop.set()

    # The caller's thread

    def _look_after(self) -> None:
        """Report progress; raise when there is no hope or no room."""
        with self._lock:
            parts, pauses = [*self._active, *self._ended], self._pauses
            self._pauses, self._ended = [], []
        for part in parts:
            self.report_progress(part)
        for pause in pauses:
            self._report(pause)
        if any(part.hashing for part in parts):
            self._last_byte = time.monotonic()
        patience_s = self._limits.patience_s[1 if self._received else 0]
        if not self._stop.is_set() and time.monotonic() - self._last_byte > patience_s:
            raise SlotpyError(
                f"No byte came for {patience_s:.0f} s: {self._reason or 'no answer'}.",
                hint="Check the connection, then run the same command again: it goes on where it stopped.",
            )
        free = shutil.disk_usage(self._directory).free
        if not self._stop.is_set() and free < self._limits.spare_bytes:
            raise CapacityError(
                f"The disk of {self._directory} has {format_bytes(free)} left.",
                hint="Free some and run the same command again: it goes on where it stopped.",
            )

    def report_progress(self, part: PartFile) -> None:
        """Report how far one file is; only from the caller's thread."""
        entry = part.entry
        self._report(FileProgress(entry.path, entry.digest, entry.size, part.completed_bytes, part.resumed_bytes))

    # Worker threads

    def _work(self, number: int) -> None:
        connection = Connection(self._locations, self._etags, self._limits.stall_s)
        try:
            while not self._stop.is_set():
                claim = self._next_claim() if number <= self._allowed else None
                if claim is not None:
                    self._fetch(connection, claim)
                elif not self._finished():
                    with self._lock:
                        self._lock.wait(_TICK_S)
                else:
                    return
        except BaseException as error:  # whatever it is, the caller's thread raises it
            self._fail(error)
        finally:
            connection.close()

    def _next_claim(self) -> Claim | None:
        """Take the first missing bytes of the first file that has some, opening another file when none has."""
        with self._lock:
            for part in [*self._active]:
                if (claim := self._claim(part)) is not None:
                    return claim
            if self._waiting and len(self._active) < _MAX_OPEN_FILES:
                part = self._waiting.pop(0)
                part.open()
                self._active.append(part)
                self._hash(part)  # an empty file, or bytes from before
                return self._claim(part)
        return None

    def _claim(self, part: PartFile) -> Claim | None:
        if part.is_received:
            return None
        path = part.entry.path
        able = [number for number, origin in enumerate(self._origins) if origin.may_have(path)]
        if not able:
            self._give_up(part)
            return None
        now = time.monotonic()
        ready = [number for number in able if self._origins[number].paused_until <= now]
        if not ready:
            return None
        best = min(ready, key=lambda number: self._origins[number].wrong_bytes[path])
        return part.claim(best, self._limits.lead_bytes, path in self._origins[best].whole_only)

    def _give_up(self, part: PartFile) -> None:
        """Leave a file out that no source will send, or fail where the model needs it."""
        path = part.entry.path
        reasons = [f"{origin.name} {origin.refused.get(path, 'lacks it')}" for origin in self._origins]
        if part.entry.optional:
            self.left_out.append(f"{path}: {'; '.join(reasons)}")
            self._active.remove(part)
            part.close()
            return
        self._fail(
            SlotpyError(
                f"{path} cannot be had: {'; '.join(reasons)}.",
                hint="What was received is kept: run the same command again later, and it goes on.",
            )
        )

    def _fetch(self, connection: Connection, claim: Claim) -> None:
        part, origin = claim.part, self._origins[claim.source]
        watch = SlowWatch(self._limits.stall_s)
        received = 0
        try:
            blocks = connection.blocks(origin.address, part.entry, claim.start, claim.end)
            with contextlib.closing(blocks):
                for offset, block in blocks:
                    if self._stop.is_set():
                        return
                    kept = part.write(claim, offset, block)
                    received += kept
                    with self._lock:
                        self._received += kept
                        if kept:
                            self._last_byte = time.monotonic()
                    self._hash(part)
                    watch.add(len(block), self._least_rate)
            with self._lock:
                origin.succeeded(part.entry.path)
        except FetchError as error:
            if error.blame is not Blame.NETWORK or received < _PROGRESS_BYTES:
                self._note(origin, part.entry.path, error)
        finally:
            part.release(claim)
            with self._lock:
                self._lock.notify_all()

    def _note(self, origin: Origin, path: str, error: FetchError) -> None:
        """Draw the consequences of a failed request."""
        now = time.monotonic()
        with self._lock:
            self._reason = f"{origin.name} {error.reason}"
            seconds = origin.failed(path, error, now)
            if seconds is None:
                return
            self._pauses.append(Waiting(self._reason, seconds))
            if error.blame is Blame.PAUSE:
                # Patience does not run out while a server says when to come back, unless it never ends.
                first, later = self._limits.patience_s
                self._last_byte = max(self._last_byte, min(now + seconds - first / 2, self._began + later))
                if self._limits.connections is None:
                    self._allowed = max(1, self._allowed // 2)

    # Hashing

    def _hash(self, part: PartFile) -> None:
        """See to it that a file's hash goes on; one task a file at a time, which looks again before it ends."""
        if part.hashing:
            return
        with self._lock:
            if part.hashing or self._stop.is_set() or not part.needs_hash():
                return
            part.hashing = True
            with contextlib.suppress(RuntimeError):  # the pool is shut down: the transfer ends
                self._pool.submit(self._advance, part)

    def _advance(self, part: PartFile) -> None:
        try:
            right = part.advance(self._stop)
            if right:
                with self._disk_lock:
                    self._keep(part.seal())
                    part.publish()
            with self._lock:
                part.hashing = False
                if right:
                    self._active.remove(part)
                    self._ended.append(part)
                elif right is False:
                    self._blame(part)
                    part.begin_afresh()  # only now: bytes are missing again, and who sends them is decided
                self._lock.notify_all()
            if not right:
                self._hash(part)  # bytes that came after the last look
        except BaseException as error:  # whatever it is, the caller's thread raises it
            self._fail(error)

    def _blame(self, part: PartFile) -> None:
        """Hold wrong bytes against the sources that sent them; a file that was wrong on the disk blames none."""
        for number in part.contributors:
            self._origins[number].sent_wrong_bytes(part.entry.path)
            self._reason = f"{self._origins[number].name} sends wrong bytes"
        part.contributors.clear()

    # Making bytes durable

    def _sync_often(self) -> None:
        while not self._stop.wait(self._limits.sync_s):
            try:
                self._sync()
            except BaseException as error:  # whatever it is, the caller's thread raises it
                self._fail(error)

    def _sync(self) -> None:
        with self._disk_lock:
            lines = [line for part in self._all if part.is_open and (line := part.sync()) is not None]
            if lines:
                self._journal.append(lines)

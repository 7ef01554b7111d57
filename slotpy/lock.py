"""One model process for each user: two that were planned for the same memory would swap the machine.

The lock is the kernel's (`flock`), so a process that dies in any way gives it back; the text in the file only names the
holder. Metadata commands never take it.
"""

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from slotpy.errors import BusyError, SlotpyError

LOCK_NAME = "model.lock"


@dataclass(frozen=True)
class Holder:
    """Say which process holds the lock, or held it last."""

    pid: int
    model: str
    since_s: float

    def __str__(self) -> str:
        minutes = max(0, int(time.time() - self.since_s)) // 60
        since = f"for {minutes} min" if minutes else "since just now"
        return f"process {self.pid} with {self.model}, {since}"


class ModelLock:
    """Hold the user's lock from `acquire` to `release`; a context manager."""

    def __init__(self, file: IO[str], stale: Holder | None) -> None:
        self._file = file
        self.stale = stale
        """A former holder that ended without releasing: it was killed, or crashed."""

    @classmethod
    def acquire(cls, directory: Path, model: str) -> "ModelLock":
        """Take the lock in `directory`, or raise BusyError naming who holds it, SlotpyError where it cannot be had."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / LOCK_NAME).open("a+", encoding="utf-8")
        except OSError as error:
            raise SlotpyError(
                f"{directory / LOCK_NAME} cannot be written: {error.strerror}.",
                hint="Set SLOTPY_HOME to a directory of yours.",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _read(file)
            file.close()
            end = f"kill {holder.pid}" if holder else f"fuser {directory / LOCK_NAME}"
            raise BusyError(
                f"A model is already loaded by {holder or 'another slotpy'}: two would not fit the memory.",
                hint=f"End it first (`{end}`).",
            ) from error
        stale = _read(file)
        holder = Holder(os.getpid(), model, time.time())
        file.seek(0)
        file.truncate()
        file.write(json.dumps(asdict(holder)))
        file.flush()
        return cls(file, stale)

    def release(self) -> None:
        """Give the lock back. May be called twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def __enter__(self) -> "ModelLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def holder(directory: Path) -> tuple[Holder | None, bool]:
    """Say who holds the lock or held it last, and whether it is held now. Takes nothing."""
    try:
        with (directory / LOCK_NAME).open(encoding="utf-8") as file:
            found = _read(file)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return found, True
            return found, False
    except FileNotFoundError:
        return None, False


def _read(file: IO[str]) -> Holder | None:
    """Read the holder; None for a file that is empty or no longer what we wrote."""
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError):
        return Holder(**json.loads(file.read()))
    return None

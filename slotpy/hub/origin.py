"""How one source of files has behaved, and what follows: wait, ask in another way, or ask for no more.

No network and no threads: transfer.py asks it under its lock.
"""

from collections import Counter
from dataclasses import dataclass, field

from slotpy.hub.fetch import Blame, FetchError
from slotpy.hub.listing import HubAddress

_MAX_WRONG_ANSWERS = 4
_MAX_WRONG_BYTES = 2
_LONGEST_BACKOFF_S = 60.0
_MAX_DOUBLINGS = 10
# Without a word on how long: windows of rate limits are seconds to minutes, not milliseconds.
_SILENT_PAUSE = 10


@dataclass(eq=False)
class Origin:
    """Keep the record of one source. `refused` gives, by path, why a file is not asked for any more."""

    name: str
    address: HubAddress
    lacks: tuple[str, ...]
    backoff_s: float
    paused_until: float = 0.0
    failures: int = 0
    wrong_answers: Counter[str] = field(default_factory=Counter)
    wrong_bytes: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    whole_only: set[str] = field(default_factory=set)

    def may_have(self, path: str) -> bool:
        return path not in self.lacks and path not in self.refused

    def succeeded(self, path: str) -> None:
        """Forget failures after a request that brought all it was for."""
        self.failures = self.wrong_answers[path] = 0

    def failed(self, path: str, error: FetchError, now: float) -> float | None:
        """Take note of a failed request; give how long nothing should be asked, None where it may be at once."""
        if error.blame is Blame.RANGES:
            self.whole_only.add(path)
            return None
        if error.blame is Blame.REFUSED:
            self.refused[path] = error.reason
            return None
        if error.blame is Blame.STALE:
            return None
        if now >= self.paused_until:  # several connections meet one trouble at the same time: it counts once
            self.failures += 1
            if error.blame is Blame.ANSWER:
                self.wrong_answers[path] += 1
                if self.wrong_answers[path] >= _MAX_WRONG_ANSWERS:
                    self.refused[path] = error.reason
        seconds = self._pause_s(error)
        if now + seconds <= self.paused_until:
            return None
        self.paused_until = now + seconds
        return seconds

    def sent_wrong_bytes(self, path: str) -> None:
        """Take note that a file's hash differed after this source had sent some of it."""
        self.wrong_bytes[path] += 1
        if self.wrong_bytes[path] >= _MAX_WRONG_BYTES:
            self.refused[path] = "sends wrong bytes: their SHA-256 differs"

    def _pause_s(self, error: FetchError) -> float:
        doublings = min(max(self.failures - 1, 0), _MAX_DOUBLINGS)
        seconds = min(self.backoff_s * 2**doublings, _LONGEST_BACKOFF_S)
        if error.blame is not Blame.PAUSE:
            return seconds
        if error.pause_s is None:
            return max(seconds, _SILENT_PAUSE * self.backoff_s)
        return max(error.pause_s, self.backoff_s)

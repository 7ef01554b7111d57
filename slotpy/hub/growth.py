"""How many connections to use: twice as many while that makes the whole faster."""

import time

from slotpy import config

_WINDOW_S = 3.0
# Another step is worth it while it makes the whole this much faster.
_GAIN = 1.1


class Growth:
    """Measure a transfer's rate in windows of a few seconds. `fixed` is a number that a user chose."""

    def __init__(self, fixed: int | None) -> None:
        self._growing = fixed is None
        self._since, self._bytes = time.monotonic(), 0
        self._best_rate = 0.0
        self.best_rate_per_connection = 0.0

    def next(self, connections: int, received: int) -> int:
        """Give the number of connections to use, given the bytes received so far."""
        now = time.monotonic()
        if now - self._since < _WINDOW_S:
            return connections
        rate = (received - self._bytes) / (now - self._since)
        self._since, self._bytes = now, received
        self.best_rate_per_connection = max(self.best_rate_per_connection, rate / connections)
        if not self._growing or rate == 0:  # what is here may have to be hashed first
            return connections
        if rate > self._best_rate * _GAIN:
            self._best_rate = rate
            return min(connections * 2, config.PULL_CONNECTIONS[1])
        self._growing = False
        return max(config.PULL_CONNECTIONS[0], connections // 2)

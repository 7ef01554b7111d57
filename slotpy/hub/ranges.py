"""Which bytes of a file are there: a sorted list of intervals that never touch. Pure; knows no files."""

from collections.abc import Iterable, Iterator


class Ranges:
    """Keep a set of byte positions as half-open intervals. Not safe for threads: the owner locks."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._list: list[tuple[int, int]] = []
        for start, end in intervals:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._list == other._list

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self._list)

    def copy(self) -> "Ranges":
        return Ranges(self._list)

    def add(self, start: int, end: int) -> None:
        """Add an interval, merging it with those it touches."""
        if start >= end:
            return
        kept = []
        for low, high in self._list:
            if high < start or low > end:
                kept.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        self._list = sorted([*kept, (start, end)])

    def remove(self, start: int, end: int) -> None:
        """Take an interval out; parts of it may be absent."""
        if start >= end:
            return
        kept = []
        for low, high in self._list:
            kept += [(low, min(high, start)), (max(low, end), high)]
        self._list = [(low, high) for low, high in kept if low < high]

    def end_of(self, position: int) -> int:
        """Give where the interval holding `position` ends; `position` itself where none does."""
        return next((high for low, high in self._list if low <= position < high), position)

    def next_gap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Find the first gap at or after `start`, cut off at `stop`."""
        start = self.end_of(start)
        if start >= stop:
            return None
        return start, min([stop, *(low for low, _ in self._list if low > start)])

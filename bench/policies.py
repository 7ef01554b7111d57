"""Eviction policies that do not ship, for `slot_replay.py` to compare the shipped one with.

Each replays one trace: `access(token, layer, keys)` makes the keys of one layer's step resident, all at once, and
returns how many were missing. None may evict a key of the same step. Nothing here is imported by slotpy.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Trace:
    """A recorded run of a router: `steps` are (token, layer, keys), key = layer * keys_per_layer + expert."""

    name: str
    num_layers: int
    keys_per_layer: int
    steps: tuple[tuple[int, int, np.ndarray], ...]

    @property
    def num_keys(self) -> int:
        return self.num_layers * self.keys_per_layer

    @property
    def num_uses(self) -> int:
        return sum(len(keys) for _, _, keys in self.steps)


class Policy(Protocol):
    def access(self, token: int, layer: int, keys: np.ndarray) -> int: ...


def belady_misses(trace: Trace, num_slots: int) -> list[int]:
    """Give the misses of each step under Belady's rule: evict what is used again last, knowing the future."""
    next_use: dict[int, int] = {}
    following: list[list[int]] = []
    for index in reversed(range(len(trace.steps))):
        keys = trace.steps[index][2].tolist()
        following.append([next_use.get(key, len(trace.steps)) for key in keys])
        next_use.update(dict.fromkeys(keys, index))
    following.reverse()

    resident: set[int] = set()
    latest: list[tuple[int, int]] = []  # outdated entries come after all others: their use has passed
    misses = []
    for (_, _, step_keys), uses in zip(trace.steps, following, strict=True):
        keys = step_keys.tolist()
        misses.append(sum(key not in resident for key in keys))
        resident.update(keys)
        while len(resident) > num_slots:
            resident.remove(heapq.heappop(latest)[1])
        for key, use in zip(keys, uses, strict=True):
            heapq.heappush(latest, (-use, key))
    return misses


class Lru:
    """Least recently used, in single accesses."""

    def __init__(self, trace: Trace, num_slots: int) -> None:
        self._num_slots = num_slots
        self._order: OrderedDict[int, None] = OrderedDict()

    def access(self, token: int, layer: int, keys: np.ndarray) -> int:
        wanted = keys.tolist()
        missing = sum(key not in self._order for key in wanted)
        for key in wanted:
            self._order[key] = None
            self._order.move_to_end(key)
        while len(self._order) > self._num_slots:
            self._order.popitem(last=False)
        return missing


class Clock:
    """Second chance: one bit a slot, one hand over all slots."""

    def __init__(self, trace: Trace, num_slots: int) -> None:
        self._slots: list[int | None] = [None] * num_slots
        self._used: dict[int, bool] = {}
        self._hand = 0

    def access(self, token: int, layer: int, keys: np.ndarray) -> int:
        wanted = set(keys.tolist())
        missing = sorted(wanted - self._used.keys())
        for key in wanted - set(missing):
            self._used[key] = True
        for key in missing:
            while (held := self._slots[self._hand]) is not None and (held in wanted or self._used[held]):
                self._used[held] = False
                self._hand = (self._hand + 1) % len(self._slots)
            if held is not None:
                del self._used[held]
            self._slots[self._hand] = key
            self._used[key] = True
            self._hand = (self._hand + 1) % len(self._slots)
        return len(missing)


class Lfu:
    """Least frequently used, counts kept for evicted keys; with `ageing`, LFUDA with counts halved by an eviction."""

    def __init__(self, trace: Trace, num_slots: int, ageing: bool) -> None:
        self._num_slots = num_slots
        self._ageing = ageing
        self._age = 0.0
        self._count: dict[int, float] = {}
        self._priority: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def access(self, token: int, layer: int, keys: np.ndarray) -> int:
        wanted = set(keys.tolist())
        missing = sum(key not in self._priority for key in wanted)
        for key in sorted(wanted):
            self._count[key] = self._count.get(key, 0.0) + 1.0
            self._priority[key] = self._count[key] + self._age
        while len(self._priority) > self._num_slots:
            priority, key = heapq.heappop(self._heap)
            if key in wanted or self._priority.get(key) != priority:
                continue
            del self._priority[key]
            if self._ageing:
                self._age = priority
                self._count[key] /= 2.0
        for key in sorted(wanted):
            heapq.heappush(self._heap, (self._priority[key], key))
        return missing


class S3Fifo:
    """Three queues: a small one (a tenth) on trial, a main one, and the names of what the trial threw out."""

    def __init__(self, trace: Trace, num_slots: int) -> None:
        self._num_slots = num_slots
        self._small_size = max(1, num_slots // 10)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def access(self, token: int, layer: int, keys: np.ndarray) -> int:
        wanted = set(keys.tolist())
        missing = sorted(wanted - self._uses.keys())
        for key in wanted - set(missing):
            self._uses[key] = min(3, self._uses[key] + 1)
        for key in missing:
            if len(self._uses) >= self._num_slots:
                self._evict(wanted)
            self._uses[key] = 0
            if key in self._ghosts:
                del self._ghosts[key]
                self._main.append(key)
            else:
                self._small.append(key)
        return len(missing)

    def _evict(self, wanted: set[int]) -> None:
        while True:
            from_small = len(self._small) >= self._small_size and not wanted.issuperset(self._small)
            if not from_small and wanted.issuperset(self._main):
                from_small = True
            queue = self._small if from_small else self._main
            key = queue.popleft()
            if key in wanted:
                queue.append(key)
            elif from_small and self._uses[key] > 1:
                self._uses[key] = 0
                self._main.append(key)
            elif not from_small and self._uses[key] > 0:
                self._uses[key] -= 1
                self._main.append(key)
            else:
                del self._uses[key]
                if from_small:
                    self._ghosts[key] = None
                    if len(self._ghosts) > self._num_slots:
                        self._ghosts.popitem(last=False)
                return


class ExpectedWait:
    """Evict the longest expected wait, computed afresh for every resident key at every step: slow and obvious.

    A subclass gives `turns`, the expected number of turns of its layer until a key is used (1: at the next one). The
    `age` of a key is the number of turns, the next one included, since its last use (1: used at the last one).
    """

    half_lives: Sequence[float] = (32.0,)

    def __init__(self, trace: Trace, num_slots: int) -> None:
        self._num_layers = trace.num_layers
        self._num_slots = num_slots
        self._layer = np.arange(trace.num_keys) // trace.keys_per_layer
        self._decay = np.array([2.0 ** (-1.0 / half_life) for half_life in self.half_lives])[:, None]
        self._frequency = np.zeros((len(self.half_lives), trace.num_keys))  # at the last use
        self._last = np.zeros(trace.num_keys)
        self._resident = np.zeros(trace.num_keys, dtype=bool)

    def turns(self, frequency: np.ndarray, last: np.ndarray, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give the expected turns, and what breaks ties inside a layer (smaller goes first), of n keys.

        `frequency` is (number of half-lives, n), at the last use; `last` the token of last use.
        """
        raise NotImplementedError

    def access(self, token: int, layer: int, keys: np.ndarray) -> int:
        self._frequency[:, keys] *= self._decay ** (token - self._last[keys])
        self._frequency[:, keys] += 1.0 - self._decay
        self._last[keys] = token
        missing = int((~self._resident[keys]).sum())
        evictable = self._resident.copy()
        evictable[keys] = False
        self._resident[keys] = True
        surplus = int(self._resident.sum()) - self._num_slots
        if surplus > 0:
            self._resident[self._coldest(token, layer, np.flatnonzero(evictable), surplus)] = False
        return missing

    def _coldest(self, token: int, layer: int, keys: np.ndarray, count: int) -> np.ndarray:
        distance = self._layer[keys] - layer
        next_turn = np.where(distance > 0, token, token + 1)
        distance = np.where(distance > 0, distance, distance + self._num_layers)
        turns, tie = self.turns(self._frequency[:, keys], self._last[keys], next_turn - self._last[keys])
        wait = distance + self._num_layers * (turns - 1.0)
        longest = np.flatnonzero(wait >= np.partition(wait, -count)[-count])
        order = np.lexsort((keys[longest], tie[longest], self._layer[keys[longest]], -wait[longest]))
        return keys[longest[order[:count]]]


class TokenLru(ExpectedWait):
    """LRU in tokens; of keys equally old the one whose layer comes last goes first."""

    def turns(self, frequency: np.ndarray, last: np.ndarray, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return age, last


class Ewma(ExpectedWait):
    """Chance of use = the mean of exponentially weighted use frequencies of one or more half-lives."""

    def __init__(self, trace: Trace, num_slots: int, half_lives: Sequence[float]) -> None:
        self.half_lives = half_lives
        super().__init__(trace, num_slots)

    def turns(self, frequency: np.ndarray, last: np.ndarray, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chance = np.mean(frequency * self._decay ** (age - 1.0), axis=0)
        return 1.0 / np.maximum(chance, 1e-9), last


class FrequencyOverAge(ExpectedWait):
    """Chance of use = sqrt(frequency / age), the frequency decaying. Keys of a layer overtake each other: no heaps."""

    def turns(self, frequency: np.ndarray, last: np.ndarray, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chance = np.sqrt(frequency[0] * self._decay[0] ** (age - 1.0) / age)
        return 1.0 / np.maximum(chance, 1e-9), last


class NextUse(ExpectedWait):
    """The shipped policy, simulated: chance = frequency^exponent * 2^(-age / half-life)."""

    def __init__(
        self,
        trace: Trace,
        num_slots: int,
        frequency_half_life: float = 32.0,
        chance_half_life: float = 6.0,
        exponent: float = 0.5,
    ) -> None:
        self.half_lives = (frequency_half_life,)
        self._chance_half_life = chance_half_life
        self._exponent = exponent
        super().__init__(trace, num_slots)

    def turns(self, frequency: np.ndarray, last: np.ndarray, age: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rank = last + self._exponent * self._chance_half_life * np.log2(frequency[0])
        exponent = (last + age - 1.0 - rank) / self._chance_half_life
        return 2.0 ** np.minimum(exponent, 1000.0), rank

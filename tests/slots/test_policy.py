"""The eviction order against a slow, obvious calculation from the whole history of uses."""

import csv
import gzip
import math
from collections import defaultdict
from pathlib import Path

import pytest

from slotpy.slots import policy
from slotpy.slots.policy import NextUse

TRACES = Path(__file__).parents[2] / "bench" / "traces"


class ObviousNextUse:
    """The rule as docs/slots.md states it: sum over all past uses, weigh every resident key, sort."""

    def __init__(self, num_layers: int, keys_per_layer: int) -> None:
        self.num_layers, self.keys_per_layer = num_layers, keys_per_layer
        self.use_tokens: dict[int, list[int]] = defaultdict(list)
        self.frequency: dict[int, float] = {}
        self.resident: set[int] = set()

    def use(self, token: int, keys: list[int]) -> None:
        for key in keys:
            self.use_tokens[key].append(token)
            ages = [token - use for use in self.use_tokens[key]]
            self.frequency[key] = (1 - 2 ** (-1 / 32)) * sum(2 ** (-age / 32) for age in ages)

    def wait(self, token: int, layer: int, key: int) -> float:
        turns_ahead = key // self.keys_per_layer - layer
        passed = turns_ahead <= 0
        age = token + passed - self.use_tokens[key][-1]
        chance = math.sqrt(self.frequency[key]) * 2 ** (-(age - 1) / 6)
        return turns_ahead + passed * self.num_layers + self.num_layers * (1 / chance - 1)

    def evict(self, token: int, layer: int, count: int, keys: list[int]) -> list[int]:
        waits = {key: self.wait(token, layer, key) for key in self.resident.difference(keys)}
        evicted = sorted(waits, key=lambda key: (-waits[key], key))[:count]
        self.resident.difference_update(evicted)
        return evicted


def read_steps(name: str, num_tokens: int) -> list[tuple[int, int, list[int]]]:
    steps: dict[tuple[int, int], list[int]] = defaultdict(list)
    with gzip.open(TRACES / f"{name}.route.csv.gz", "rt") as lines:
        for row in csv.reader(line for line in lines if line[0].isdigit()):
            token, layer, expert = int(row[2]), int(row[3]), int(row[5])
            if token < num_tokens:
                steps[token, layer].append(layer * 128 + expert)
    return [(token, layer, keys) for (token, layer), keys in sorted(steps.items())]


@pytest.mark.parametrize("num_slots", [40, 150])
def test_evictions_equal_the_obvious_calculation_on_a_real_trace(num_slots: int) -> None:
    fast, obvious = NextUse(36, 128), ObviousNextUse(36, 128)
    num_evicted = 0
    for token, layer, keys in read_steps("gptoss", num_tokens=40):
        fast.use(layer, keys)
        obvious.use(token, keys)
        missing = [key for key in keys if key not in obvious.resident]
        surplus = len(obvious.resident) + len(missing) - num_slots
        expected = obvious.evict(token, layer, max(0, surplus), keys)
        assert fast.evict(max(0, surplus), set(keys)) == expected
        for key in missing:
            fast.admit(key)
        obvious.resident.update(missing)
        num_evicted += len(expected)
    assert num_evicted > 300
    assert sum(fast.occupancy()) == num_slots


def resident_after(*tokens: list[int]) -> NextUse:
    """Make a table of one layer, use the given keys token by token, and admit them all."""
    order = NextUse(1, 10)
    for keys in tokens:
        order.use(0, keys)
    for key in sorted({key for keys in tokens for key in keys}):
        order.admit(key)
    return order


def test_a_layer_just_passed_loses_its_key_before_the_layers_to_come() -> None:
    order = NextUse(3, 10)
    for layer in range(3):
        order.use(layer, [layer * 10])
        order.admit(layer * 10)
    order.use(0, [1])
    # Equally frequent and recent, but layers 1 and 2 are still to come in this token, 1 first.
    assert order.evict(3, leased=()) == [0, 20, 10]


def test_twice_the_frequency_is_worth_three_tokens_of_age() -> None:
    assert resident_after([0], [0], [], [1]).evict(1, leased=()) == [1]
    assert resident_after([0], [0], [], [], [1]).evict(1, leased=()) == [0]


def test_evict_passes_over_leased_keys_and_keeps_them_in_order() -> None:
    order = resident_after([0], [1], [2], [3])
    assert order.evict(2, leased={0, 2}) == [1, 3]
    assert order.evict(2, leased=()) == [0, 2]


def test_uses_of_evicted_keys_are_remembered() -> None:
    order = resident_after(*[[0]] * 8, [1])
    assert order.evict(2, leased=()) == [1, 0]
    order.use(0, [2])
    order.use(0, [0])
    order.use(0, [3])
    for key in (0, 2, 3):
        order.admit(key)
    assert order.evict(3, leased=()) == [2, 3, 0]


def test_memory_of_evicted_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_MAX_EVICTED_USES", 5)
    order = NextUse(1, 1000)
    for key in range(50):
        order.use(0, [key])
        order.admit(key)
        order.evict(1, leased=())
    assert len(order._evicted_uses) == 5 and not order._uses


def test_the_same_layer_again_is_the_same_token() -> None:
    in_waves, in_one = NextUse(2, 10), NextUse(2, 10)
    for _ in range(3):
        for layer in (0, 1):
            for key in (0, 1, 2):
                in_waves.use(layer, [layer * 10 + key])
            in_waves.use(layer, [layer * 10 + 1])
            in_one.use(layer, [layer * 10 + key for key in (0, 1, 2)])
    assert in_waves._uses == in_one._uses


def test_a_key_unused_for_a_very_long_time_is_still_ordered() -> None:
    order = resident_after([0], [1])
    for _ in range(20_000):
        order.use(0, [2])
    assert order.evict(2, leased=()) == [0, 1]

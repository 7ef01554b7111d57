"""The replay against references written out in the test, and the shipped table against LRU on the recorded traces."""

import csv
import itertools
import json
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from bench import policies, slot_replay
from bench.policies import Trace
from bench.slot_replay import ShippedTable, hit_rate, load_trace, replay
from slotpy.slots import policy

load_recorded = cache(load_trace)


def small_trace(*steps: tuple[int, ...]) -> Trace:
    """Make a one-layer trace of the given key sets, a token each."""
    return Trace("small", 1, 10, tuple((token, 0, np.array(keys)) for token, keys in enumerate(steps)))


@pytest.mark.parametrize(
    ("name", "num_layers", "keys_per_token", "num_tokens"),
    [("qwen", 48, 6, 156), ("gemma", 30, 6, 157), ("gptoss", 36, 2, 149)],
)
def test_recorded_traces_are_read_in_order(name: str, num_layers: int, keys_per_token: int, num_tokens: int) -> None:
    trace = load_recorded(name)
    order = [(token, layer) for token, layer, _ in trace.steps]
    assert (trace.num_layers, trace.keys_per_layer) == (num_layers, 128)
    assert order == sorted(order) and order[0] == (0, 0) and order[-1] == (num_tokens - 1, num_layers - 1)
    for _, layer, keys in trace.steps:
        assert len(set(keys.tolist())) == keys_per_token and set((keys // 128).tolist()) == {layer}


def fewest_misses(steps: list[frozenset[int]], num_slots: int, resident: frozenset[int] = frozenset()) -> int:
    """Try every choice of what to keep."""
    if not steps:
        return 0
    wanted, rest = steps[0], steps[1:]
    room = num_slots - len(wanted)
    others = resident - wanted
    choices = itertools.combinations(others, min(room, len(others)))
    return len(wanted - resident) + min(fewest_misses(rest, num_slots, wanted | set(kept)) for kept in choices)


def test_belady_bound_equals_the_best_of_all_choices() -> None:
    generator = np.random.default_rng(7)
    for num_slots in (2, 3, 4):
        steps = [tuple(generator.choice(6, size=2, replace=False).tolist()) for _ in range(8)]
        misses = policies.belady_misses(small_trace(*steps), num_slots)
        assert sum(misses) == fewest_misses([frozenset(step) for step in steps], num_slots)


def test_lru_evicts_the_least_recently_used() -> None:
    trace = small_trace((0,), (1,), (2,), (0,), (3,), (0,), (1,))
    assert replay(trace, policies.Lru(trace, 3)) == [1, 1, 1, 0, 1, 0, 1]


def test_clock_gives_a_second_chance() -> None:
    trace = small_trace((0,), (1,), (2,), (3,), (1,), (4,), (1,))
    # Key 3 sweeps all bits and takes 0's slot; 1 is used again and survives 4, which takes 2's.
    assert replay(trace, policies.Clock(trace, 3)) == [1, 1, 1, 1, 0, 1, 0]


def test_lfu_keeps_the_frequent_and_ageing_lets_it_go() -> None:
    steps = [(0,)] * 6 + [(1,), (2,), (1,), (2,), (1,), (2,), (1,), (2,), (0,)]
    trace = small_trace(*steps)
    assert replay(trace, policies.Lfu(trace, 2, ageing=False))[-1] == 0
    assert replay(trace, policies.Lfu(trace, 2, ageing=True))[-1] == 1


def test_s3_fifo_throws_out_what_was_used_once_and_takes_it_back_to_the_main_queue() -> None:
    # Key 3 throws out 0, which comes back to the main queue, where 4, 5 and 6 on trial do not reach it.
    trace = small_trace((0,), (1,), (2,), (3,), (0,), (4,), (5,), (6,), (0,))
    assert replay(trace, policies.S3Fifo(trace, 3)) == [1, 1, 1, 1, 1, 1, 1, 1, 0]
    # A key used twice on trial goes to the main queue instead of out.
    trace = small_trace((0,), (0,), (0,), (1,), (2,), (3,), (4,), (0,))
    assert replay(trace, policies.S3Fifo(trace, 3)) == [1, 0, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("make", [*slot_replay.POLICIES.values()], ids=[*slot_replay.POLICIES])
def test_no_policy_beats_belady_or_misses_with_room_for_all(make: slot_replay.MakePolicy) -> None:
    whole = load_recorded("gptoss")
    trace = Trace("head", whole.num_layers, whole.keys_per_layer, whole.steps[: 12 * 36])
    misses = replay(trace, make(trace, 100))
    assert sum(misses) >= sum(policies.belady_misses(trace, 100))
    distinct = len(set(np.concatenate([keys for _, _, keys in trace.steps]).tolist()))
    assert sum(replay(trace, make(trace, distinct))) == distinct


@pytest.mark.parametrize(
    ("name", "size", "margin"),
    [
        ("qwen", 0.0625, 0.05),
        ("qwen", 0.10, 0.05),
        ("gemma", 0.0625, 0.09),
        ("gemma", 0.20, 0.02),
        ("gptoss", 0.023, 0.10),
        ("gptoss", 0.10, 0.01),
        ("gptoss", 0.20, 0.0),
    ],
)
def test_shipped_table_hits_more_than_lru(name: str, size: float, margin: float) -> None:
    trace = load_recorded(name)
    num_slots = int(size * trace.num_keys)
    shipped = hit_rate(trace, replay(trace, ShippedTable(trace, num_slots)))
    lru = hit_rate(trace, replay(trace, policies.Lru(trace, num_slots)))
    assert shipped >= lru + margin


def test_shipped_table_works_below_the_keys_of_one_token() -> None:
    trace = load_recorded("gptoss")
    num_slots = 60  # a token uses 72
    assert hit_rate(trace, replay(trace, policies.Lru(trace, num_slots))) < 0.01
    assert hit_rate(trace, replay(trace, ShippedTable(trace, num_slots))) > 0.15


def test_remembering_evicted_keys_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = load_recorded("qwen")
    remembering = hit_rate(trace, replay(trace, ShippedTable(trace, 141)))
    monkeypatch.setattr(policy, "_MAX_EVICTED_USES", 0)
    assert remembering > hit_rate(trace, replay(trace, ShippedTable(trace, 141))) + 0.03


def test_topic_switch_renames_experts_one_to_one_inside_their_layer() -> None:
    whole = load_recorded("gptoss")
    trace = slot_replay.switch_topic(whole)
    first, second, third = (trace.steps[i * len(whole.steps) : (i + 1) * len(whole.steps)] for i in range(3))
    assert [keys.tolist() for _, _, keys in first] == [keys.tolist() for _, _, keys in third]
    renamed: dict[int, int] = {}
    for (_, layer, before), (_, _, after) in zip(first, second, strict=True):
        assert set((after // 128).tolist()) == {layer}
        for old, new in zip(before.tolist(), after.tolist(), strict=True):
            assert renamed.setdefault(old, new) == new
    assert len(set(renamed.values())) == len(renamed)


def test_main_prints_the_ceiling_first_and_json_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ("LRU", slot_replay.SIMULATED, slot_replay.SHIPPED)
    monkeypatch.setattr(slot_replay, "POLICIES", {name: slot_replay.POLICIES[name] for name in shown})
    slot_replay.main(["--trace", "gptoss", "--sizes", "0.05", "--csv", str(tmp_path / "new" / "out.csv")])
    lines = capsys.readouterr().out.splitlines()
    tables = [line.split()[0] for line in lines if line.startswith("  ")]
    assert tables[0] == "Belady"
    result = json.loads(lines[-1])
    with (tmp_path / "new" / "out.csv").open() as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert rows[slot_replay.SHIPPED]["slots"] == "230"
    assert result["hit_rate"]["gptoss"][slot_replay.SHIPPED]["0.05"] == float(rows[slot_replay.SHIPPED]["hit_rate"])
    assert set(result["plan_us"]) == {"0 misses", "3 misses", "10 misses"}


def test_a_table_that_departs_from_its_simulation_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    departed = partial(policies.NextUse, chance_half_life=3.0)
    shown = {slot_replay.SIMULATED: departed, slot_replay.SHIPPED: slot_replay.POLICIES[slot_replay.SHIPPED]}
    monkeypatch.setattr(slot_replay, "POLICIES", shown)
    with pytest.raises(SystemExit, match="disagree"):
        slot_replay.compare(load_recorded("gptoss"), [0.05])

"""SlotTable's promises: what is leased stays, what is not complete is not found, what fails leaves nothing behind."""

import copy
import tracemalloc
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotpy.errors import CapacityError
from slotpy.slots.table import Plan, SlotTable


def keys(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def load(table: SlotTable, *values: int) -> Plan:
    """Plan, commit and release."""
    plan = table.plan(keys(*values))
    if plan.miss.any():
        table.commit(plan)
    table.release(plan)
    return plan


def contents(table: SlotTable) -> dict[int, int]:
    resident, slots = table.residents()
    return dict(zip(resident.tolist(), slots.tolist(), strict=True))


def test_plan_gives_a_hit_its_slot_and_a_miss_a_free_one() -> None:
    table = SlotTable(4, 2, 8)
    first = load(table, 3, 5)
    assert first.slots.tolist() == [0, 1] and first.miss.tolist() == [True, True]
    second = table.plan(keys(5, 6, 3))
    assert second.slots.tolist() == [1, 2, 0] and second.miss.tolist() == [False, True, False]
    assert (first.keys.dtype, first.slots.dtype, first.miss.dtype) == (np.int64, np.int32, np.bool_)


def test_plan_of_no_keys_is_empty() -> None:
    table = SlotTable(1, 1, 8)
    plan = load(table)
    assert len(plan.keys) == len(plan.slots) == len(plan.miss) == len(plan.evicted) == 0


def test_a_key_being_read_is_not_resident_and_cannot_be_planned_again() -> None:
    table = SlotTable(4, 1, 8)
    plan = table.plan(keys(1))
    assert contents(table) == {}
    assert table.is_reading(keys(0, 1)).tolist() == [False, True]
    with pytest.raises(ValueError, match="still being read"):
        table.plan(keys(0, 1))
    table.commit(plan)
    assert contents(table) == {1: 0}
    assert not table.plan(keys(1)).miss.any()


def test_plan_never_evicts_a_leased_slot() -> None:
    table = SlotTable(3, 1, 8)
    load(table, 0, 1, 2)
    held = table.plan(keys(0))
    for wave in ((3, 4), (5, 6), (1, 2)):
        load(table, *wave)
        assert contents(table)[0] == held.slots[0]
    with pytest.raises(CapacityError):
        table.plan(keys(5, 6, 7))


def test_a_slot_leased_twice_needs_two_releases() -> None:
    table = SlotTable(1, 1, 8)
    load(table, 0)
    first, second = table.plan(keys(0)), table.plan(keys(0))
    table.release(first)
    assert table.capacity == 0
    table.release(second)
    assert table.capacity == 1


def test_plan_that_does_not_fit_changes_nothing() -> None:
    table = SlotTable(4, 2, 8)
    load(table, 0, 1, 2)
    held = table.plan(keys(0, 1))

    def state() -> dict[str, object]:
        parts = {name: value for name, value in vars(table).items() if name not in ("_open", "_policy")}
        return copy.deepcopy(parts | {"_policy": vars(table._policy)}) | {"_open": set(table._open)}

    before = state()
    with pytest.raises(CapacityError, match="3 records wanted at once, 3 of them to be read; room for 2"):
        table.plan(keys(8, 9, 10))
    # Two hits fit, but held they leave no room for the miss that a free slot and key 2 would have made room for.
    with pytest.raises(CapacityError, match="room for 1"):
        table.plan(keys(2, 3, 4))
    assert state() == before
    table.release(held)
    assert load(table, 8, 9, 10).miss.all()


def test_abort_leaves_nothing_mapped_and_gives_every_slot_back() -> None:
    table = SlotTable(3, 1, 8)
    load(table, 0, 1, 2)
    plan = table.plan(keys(0, 3, 4))
    assert plan.miss.tolist() == [False, True, True] and sorted(plan.evicted.tolist()) == [1, 2]
    table.abort(plan)
    assert contents(table) == {0: 0}
    assert (table.num_free, table.capacity) == (2, 3)
    assert set(table._policy._uses) == {0}
    assert load(table, 3, 4, 5).miss.all()


def test_one_slot_serves_any_number_of_keys_in_waves() -> None:
    table = SlotTable(1, 2, 8)
    for key in (0, 1, 2, 8, 9, 0):
        assert table.capacity == 1
        assert load(table, key).slots.tolist() == [0]
        assert contents(table) == {key: 0}


@pytest.mark.parametrize("wanted", [[2, 2], [-1], [16], [7, 8]], ids=["twice", "negative", "beyond", "two layers"])
def test_keys_that_no_plan_can_hold_are_refused(wanted: list[int]) -> None:
    table = SlotTable(4, 2, 8)
    with pytest.raises(ValueError):
        table.plan(keys(*wanted))
    with pytest.raises(ValueError):
        table.plan_prefetch(keys(*wanted))


def test_a_plan_ends_once() -> None:
    table = SlotTable(2, 1, 8)
    plan = table.plan(keys(0, 1))
    with pytest.raises(ValueError, match="not committed"):
        table.release(plan)
    table.commit(plan)
    for end in (table.commit, table.abort):
        with pytest.raises(ValueError, match="is committed"):
            end(plan)
    table.release(plan)
    with pytest.raises(ValueError, match="has ended"):
        table.release(plan)


def test_an_ended_plan_cannot_end_the_next_plan_of_its_keys() -> None:
    table = SlotTable(2, 1, 8)
    failed = table.plan(keys(0, 1))
    table.abort(failed)
    again = table.plan(keys(0, 1))
    with pytest.raises(ValueError, match="has ended"):
        table.commit(failed)
    table.commit(again)
    with pytest.raises(ValueError, match="has ended"):
        table.release(failed)
    assert table.capacity == 0


def test_a_plan_of_hits_needs_no_commit() -> None:
    table = SlotTable(2, 1, 8)
    load(table, 0, 1)
    table.release(table.plan(keys(1, 0)))
    assert table.capacity == 2


def test_prefetch_takes_free_slots_only() -> None:
    table = SlotTable(4, 2, 8)
    load(table, 0, 1)
    plan = table.plan_prefetch(keys(1, 2, 3, 4))
    assert plan.keys.tolist() == [2, 3] and plan.miss.all() and len(plan.evicted) == 0
    assert table.plan_prefetch(keys(2, 5)).keys.tolist() == []
    assert table.capacity == 2
    table.commit(plan)
    assert table.capacity == 4
    assert not load(table, 2).miss.any()
    load(table, 2)
    load(table, 8, 9, 10, 11)
    counters = table.counters
    assert (counters.prefetches, counters.prefetch_hits, counters.hits) == (2, 1, 2)


def test_an_unused_prefetch_is_evicted_first() -> None:
    table = SlotTable(3, 1, 8)
    table.commit(table.plan_prefetch(keys(0)))
    load(table, 1, 2)
    assert load(table, 3).evicted.tolist() == [0]
    load(table, 0)
    load(table, 0)
    assert table.counters.prefetch_hits == 0


def test_a_committed_prefetch_has_ended() -> None:
    table = SlotTable(2, 1, 8)
    prefetch = table.plan_prefetch(keys(0))
    table.commit(prefetch)
    for end in (table.commit, table.abort, table.release):
        with pytest.raises(ValueError, match="has ended"):
            end(prefetch)


def test_an_aborted_prefetch_frees_its_slots() -> None:
    table = SlotTable(3, 1, 8)
    table.abort(table.plan_prefetch(keys(0, 1)))
    assert table.num_free == 3 and contents(table) == {}


def test_grow_keeps_every_key_in_its_slot() -> None:
    table = SlotTable(2, 1, 8)
    load(table, 4, 5)
    before = contents(table)
    old_slots, new_slots = table.resize(5)
    assert old_slots.tolist() == new_slots.tolist() == [0, 1]
    assert contents(table) == before and table.capacity == 5
    assert load(table, 0, 1, 2).evicted.tolist() == []


def test_shrink_keeps_the_hottest_and_says_what_moves() -> None:
    table = SlotTable(6, 1, 8)
    load(table, 0, 1, 2, 3, 4)
    for _ in range(3):
        load(table, 1, 4)
    before = contents(table)
    old_slots, new_slots = table.resize(2)
    after = contents(table)
    assert set(after) == {1, 4}
    assert sorted(after.values()) == new_slots.tolist() == [0, 1]
    moves = dict(zip(old_slots.tolist(), new_slots.tolist(), strict=True))
    assert {key: moves[before[key]] for key in after} == after
    assert after[1] == before[1]
    assert (table.num_slots, table.capacity, table.counters.evictions) == (2, 2, 3)


def test_resize_refuses_while_slots_are_in_use() -> None:
    table = SlotTable(4, 1, 8)
    plan = table.plan(keys(0))
    with pytest.raises(RuntimeError, match="1 being read"):
        table.resize(8)
    table.commit(plan)
    with pytest.raises(RuntimeError, match="1 slots leased"):
        table.resize(8)
    table.release(plan)
    with pytest.raises(ValueError):
        table.resize(0)
    table.resize(8)


def test_occupancy_counts_the_ready_keys_of_each_layer() -> None:
    table = SlotTable(6, 3, 8)
    load(table, 0, 1, 2)
    load(table, 16, 17)
    table.plan(keys(9))
    assert table.occupancy().tolist() == [3, 0, 2]


def test_memory_follows_the_slots_not_the_keys() -> None:
    tracemalloc.start()
    table = SlotTable(64, 1, 320_001_536)
    for token in range(20):
        load(table, *range(token * 15_000_000, token * 15_000_000 + 16))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 18


class TableAgainstModel(RuleBasedStateMachine):
    """Random calls, with a memory beside the table: whatever a lease promises must lie in its slot, always."""

    num_layers, keys_per_layer = 3, 6

    @initialize(num_slots=st.integers(1, 9))
    def start(self, num_slots: int) -> None:
        self.table = SlotTable(num_slots, self.num_layers, self.keys_per_layer)
        self.memory: list[int | None] = [None] * num_slots
        self.ready: set[int] = set()
        self.open: list[Plan] = []
        self.held: list[Plan] = []
        self.counts: Counter[str] = Counter()

    def leased(self) -> set[int]:
        hits = {key for plan in self.open for key in plan.keys[~plan.miss].tolist()}
        return hits | {key for plan in self.held for key in plan.keys.tolist()}

    def reading(self) -> set[int]:
        return {key for plan in self.open for key in plan.keys[plan.miss].tolist()}

    def fill(self, plan: Plan) -> None:
        for key, slot in zip(plan.keys[plan.miss].tolist(), plan.slots[plan.miss].tolist(), strict=True):
            self.memory[slot] = key

    @rule(layer=st.integers(0, 2), experts=st.lists(st.integers(0, 5), max_size=5, unique=True))
    def plan(self, layer: int, experts: list[int]) -> None:
        wanted = {layer * self.keys_per_layer + expert for expert in experts}
        if wanted & self.reading():
            with pytest.raises(ValueError):
                self.table.plan(keys(*wanted))
            return
        fits = len(wanted | self.leased()) + len(self.reading()) <= len(self.memory)
        if not fits:
            with pytest.raises(CapacityError):
                self.table.plan(keys(*wanted))
            return
        leased, num_free = self.leased(), self.table.num_free
        plan = self.table.plan(keys(*wanted))
        evicted = set(plan.evicted.tolist())
        assert set(plan.keys[plan.miss].tolist()) == wanted - self.ready
        assert evicted <= self.ready - leased - wanted
        assert len(evicted) == max(0, len(wanted - self.ready) - num_free)
        for key, slot in zip(plan.keys[~plan.miss].tolist(), plan.slots[~plan.miss].tolist(), strict=True):
            assert self.memory[slot] == key
        self.counts.update(hits=len(wanted & self.ready), misses=len(wanted - self.ready), evictions=len(evicted))
        self.ready -= evicted
        self.fill(plan)
        self.open.append(plan)

    @rule(wanted=st.lists(st.integers(0, 5), max_size=5, unique=True))
    def prefetch(self, wanted: list[int]) -> None:
        num_free = self.table.num_free
        plan = self.table.plan_prefetch(keys(*wanted))
        absent = [key for key in wanted if key not in self.ready | self.reading()]
        assert plan.keys.tolist() == absent[:num_free]
        self.counts.update(prefetches=len(plan.keys))
        self.fill(plan)
        self.open.append(plan)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        plan = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if data.draw(st.booleans()):
            if plan.miss.any() or plan.is_prefetch:
                self.table.commit(plan)
            self.ready |= set(plan.keys.tolist())
            if not plan.is_prefetch:
                self.held.append(plan)
        else:
            self.table.abort(plan)
            self.counts.update(aborted=int(plan.miss.sum()))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.table.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(num_slots=st.integers(1, 12))
    def resize(self, num_slots: int) -> None:
        if self.leased() or self.reading():
            with pytest.raises(RuntimeError):
                self.table.resize(num_slots)
            return
        num_evicted = max(0, len(self.ready) - num_slots)
        old_slots, new_slots = self.table.resize(num_slots)
        memory: list[int | None] = [None] * num_slots
        for old, new in zip(old_slots.tolist(), new_slots.tolist(), strict=True):
            assert new == old or old >= num_slots
            memory[new] = self.memory[old]
        self.memory = memory
        self.counts.update(evictions=num_evicted)
        kept = set(contents(self.table))
        assert kept <= self.ready and len(kept) == len(self.ready) - num_evicted
        self.ready = kept

    @invariant()
    def what_is_mapped_lies_in_its_slot_once(self) -> None:
        mapped = contents(self.table)
        assert set(mapped) == self.ready
        assert len(set(mapped.values())) == len(mapped)
        assert all(self.memory[slot] == key for key, slot in mapped.items())
        for plan in self.held:
            assert [self.memory[slot] for slot in plan.slots.tolist()] == plan.keys.tolist()

    @invariant()
    def counts_add_up(self) -> None:
        table, counters = self.table, self.table.counters
        for name in ("hits", "misses", "evictions", "prefetches"):
            assert getattr(counters, name) == self.counts[name], name
        brought = counters.misses + counters.prefetches - self.counts["aborted"]
        assert brought == len(self.ready) + len(self.reading()) + counters.evictions
        assert table.num_free + len(self.ready) + len(self.reading()) == table.num_slots == len(self.memory)
        assert table.capacity == len(self.memory) - len(self.reading()) - len(self.leased())
        layers = np.bincount([key // self.keys_per_layer for key in self.ready], minlength=self.num_layers)
        assert table.occupancy().tolist() == layers.tolist()


TestTableAgainstModel = TableAgainstModel.TestCase
TestTableAgainstModel.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, database=None, derandomize=True
)

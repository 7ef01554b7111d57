"""The memory plan: its sums, its refusals, and that more memory never plans less."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpy.budget import Sizes, plan
from slotpy.errors import CapacityError

GIB = 1 << 30
SIZES = Sizes(
    resident_bytes=3 * GIB,
    record_bytes=2_764_800,
    num_records=24_576,
    row_cache_bytes=64 << 20,
    state_bytes=GIB,
    workspace_bytes=GIB // 2,
    allocator_cache_bytes=GIB // 2,
)


def test_total_is_the_sum_of_the_ledger():
    made = plan(SIZES, 48 * GIB)
    ledger = {k: v for k, v in dataclasses.asdict(made).items() if k.endswith("_bytes")}
    assert made.total_bytes == sum(ledger.values())
    assert made.slots_bytes == made.num_slots * SIZES.record_bytes
    assert made.total_bytes <= 48 * GIB * 70 // 100


def test_named_slots_are_taken_as_named_up_to_all():
    assert plan(SIZES, 48 * GIB, num_slots=7).num_slots == 7
    assert plan(SIZES, 48 * GIB, num_slots=10**9).num_slots == SIZES.num_records


def test_cache_bytes_become_whole_slots():
    assert plan(SIZES, 48 * GIB, cache_bytes=10 * SIZES.record_bytes + 1).num_slots == 10


def test_too_little_memory_is_refused_with_what_would_fit():
    with pytest.raises(CapacityError, match=r"Needs .* GiB of available memory .* 4 GiB is available"):
        plan(SIZES, 4 * GIB)


def test_a_cache_below_one_expert_is_refused():
    with pytest.raises(CapacityError, match="holds no expert"):
        plan(SIZES, 48 * GIB, cache_bytes=SIZES.record_bytes - 1)


@given(st.integers(8 * GIB, 600 * GIB), st.integers(0, 64 * GIB))
def test_more_memory_never_plans_fewer_slots(available, more):
    assert plan(SIZES, available + more).num_slots >= plan(SIZES, available).num_slots

"""Resizing a cache role by role: what is kept, that it is right, and what exists at most at once."""

import numpy as np
import pytest

from slotpy.checkpoint.records import RecordSet, Role
from slotpy.slots import resizing
from slotpy.slots.backings.unified import UnifiedBacking
from slotpy.slots.cache import SlotCache
from slotpy.slots.resizing import resize_within
from slotpy.store.open import open_store

NUM_LAYERS, PER_LAYER = 4, 16
ROLES = (Role("a.weight", "U32", (8, 4)), Role("b.scales", "BF16", (8,)), Role("c.weight", "U32", (16, 4)))
NUM_RECORDS = NUM_LAYERS * PER_LAYER
RECORD_BYTES = sum(role.nbytes for role in ROLES)
ALL = 1 << 30


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, (NUM_RECORDS, RECORD_BYTES), dtype=np.uint8)


@pytest.fixture
def cache(tmp_path, content):
    path = tmp_path / "records"
    path.write_bytes(content.tobytes())
    starts = np.cumsum([0, *(role.nbytes for role in ROLES[:-1])])
    records = RecordSet(
        roles=ROLES,
        rows_per_shard=PER_LAYER,
        files=np.zeros((NUM_LAYERS, len(ROLES)), np.int32),
        bases=np.arange(NUM_LAYERS)[:, None] * PER_LAYER * RECORD_BYTES + starts,
        strides=np.full(len(ROLES), RECORD_BYTES),
    )
    store = open_store((path,), num_threads=2, native=False)
    yield SlotCache(records, store, num_slots=24, num_layers=NUM_LAYERS)
    store.close()


def use(cache, tokens=6):
    for token in range(tokens):
        for layer in range(NUM_LAYERS):
            for expert in (0, 1 + token % 5, 6 + token % 7):
                cache.acquire(np.array([layer * PER_LAYER + expert]))
                cache.retire()


def held(cache):
    """Give each resident key's bytes, as the kernels would read them."""
    keys, slots = cache.table.residents()
    parts = [
        np.frombuffer(memoryview(cache.arrays[role.name]).cast("B"), np.uint8).reshape(-1, role.nbytes)[slots]
        for role in ROLES
    ]
    return keys, np.concatenate(parts, axis=1)


@pytest.mark.parametrize("sizes", [[40], [5], [1], [64, 3, 30], [24], [200]])
def test_every_record_that_is_kept_is_the_right_one(cache, content, sizes):
    use(cache)
    for size in sizes:
        resize_within(cache, size, ALL)
        assert cache.num_slots == min(size, NUM_RECORDS)
        assert cache.arrays["a.weight"].shape == (cache.num_slots, 8, 4)
        keys, data = held(cache)
        assert (data == content[keys]).all()
    use(cache)
    keys, data = held(cache)
    assert (data == content[keys]).all()


def test_growing_with_room_keeps_everything_and_shrinking_the_hottest(cache):
    use(cache)
    before = set(held(cache)[0].tolist())
    assert resize_within(cache, 60, ALL) == len(before)
    assert set(held(cache)[0].tolist()) == before
    hottest = {layer * PER_LAYER for layer in range(NUM_LAYERS)}  # used for every token
    assert resize_within(cache, 8, ALL) == 8
    assert hottest <= set(held(cache)[0].tolist()) < before


@pytest.mark.parametrize("size", [4, 12, 23, 24, 25, 30, 64])
@pytest.mark.parametrize("spare", [0, 300, 1000, 5000])
def test_never_more_exists_at_once_than_the_larger_size_and_the_allowance(cache, content, size, spare, monkeypatch):
    use(cache)
    old = cache.num_slots
    limit = max(old, size) * RECORD_BYTES + spare
    peaks = []

    def watch(roles, num_slots):
        made = UnifiedBacking(roles, num_slots)
        # All arrays of the cache, the one just made, and the records carried beside it.
        present = sum(array.nbytes for array in cache.arrays.values()) + made.arrays[roles[0].name].nbytes
        peaks.append(present + carried(roles[0]))
        return made

    def carried(role):
        return len(cache.table.residents()[0]) * role.nbytes

    monkeypatch.setattr(resizing, "UnifiedBacking", watch)
    kept = resize_within(cache, size, spare)
    assert len(peaks) == len(ROLES)
    slack = ROLES[2].nbytes if kept == 1 else 0  # one record is always kept
    assert max(peaks) <= limit + slack
    keys, data = held(cache)
    assert len(keys) == kept
    assert (data == content[keys]).all()


def test_without_an_allowance_next_to_nothing_is_kept_and_with_one_as_much_as_fits(cache):
    use(cache)
    assert resize_within(cache, 24, 0) == 1
    use(cache)
    assert resize_within(cache, 23, 5 * ROLES[2].nbytes) == 5


def test_growth_pays_for_most_of_its_copies_out_of_what_it_grows_into(cache):
    resize_within(cache, 6, ALL)
    use(cache)
    smallest = ROLES[1].nbytes  # goes last, when everything else has its new size
    assert resize_within(cache, 64, 6 * smallest) == 6

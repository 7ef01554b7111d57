"""The slot cache over real files: what is read, what a lease protects, and what a failed read leaves behind."""

import os

import mlx.core as mx
import numpy as np
import pytest

from slotpy.checkpoint.records import RecordSet, Role
from slotpy.errors import CapacityError, ReadError
from slotpy.slots.cache import SlotCache
from slotpy.slots.resizing import resize_within
from slotpy.store.open import open_store

LAYERS, PER_LAYER = 3, 8
RECORDS = LAYERS * PER_LAYER
SPARE_BYTES = 1 << 20  # enough to carry every record over
ROLES = (Role("gate.weight", "U32", (4, 6)), Role("gate.scales", "BF16", (4, 3)), Role("gate.scale_2", "F32", ()))


@pytest.fixture
def content():
    """The bytes of every record, role by role: {role: (RECORDS, nbytes)}."""
    rng = np.random.default_rng(0)
    return {role.name: rng.integers(0, 256, (RECORDS, role.nbytes), dtype=np.uint8) for role in ROLES}


@pytest.fixture
def path(tmp_path, content):
    path = tmp_path / "records.bin"
    path.write_bytes(b"".join(content[role.name].tobytes() for role in ROLES))
    return path


def record_set() -> RecordSet:
    """Roles lie one after another; a shard is a layer."""
    starts = np.cumsum([0] + [role.nbytes * RECORDS for role in ROLES])[:-1]
    strides = np.array([role.nbytes for role in ROLES])
    bases = starts + np.arange(LAYERS)[:, None] * PER_LAYER * strides
    return RecordSet(ROLES, PER_LAYER, np.zeros((LAYERS, len(ROLES)), dtype=np.int32), bases, strides)


@pytest.fixture
def make_cache(path):
    stores = []

    def make(num_slots):
        stores.append(open_store([path], num_threads=2))
        return SlotCache(record_set(), stores[-1], num_slots=num_slots, num_layers=LAYERS)

    yield make
    for store in stores:
        store.close()


def bytes_at(cache, slot):
    """Read a record back the way a kernel would: from the MLX arrays."""
    return {name: np.array(array[slot].reshape(-1).view(mx.uint8)) for name, array in cache.arrays.items()}


def assert_holds(cache, content, keys, slots):
    for key, slot in zip(keys, slots, strict=True):
        for name, found in bytes_at(cache, int(slot)).items():
            assert np.array_equal(found, content[name][key]), f"record {key}, {name}"


def test_acquired_slots_hold_their_records(make_cache, content):
    cache = make_cache(10)
    for layer in range(LAYERS):
        keys = layer * PER_LAYER + np.array([5, 0, 3])
        assert_holds(cache, content, keys, cache.acquire(keys))
        cache.retire()


def test_random_use_at_every_size_always_gives_the_right_bytes(make_cache, content):
    for num_slots in (1, 2, 3, 7, RECORDS):
        cache, rng = make_cache(num_slots), np.random.default_rng(num_slots)
        for step in range(60):
            wanted = rng.choice(PER_LAYER, size=min(num_slots, int(rng.integers(1, 4))), replace=False)
            keys = (step % LAYERS) * PER_LAYER + wanted
            assert_holds(cache, content, keys, cache.acquire(keys))
            cache.retire()


def test_hits_read_nothing(make_cache):
    cache, keys = make_cache(4), np.array([1, 2])
    cache.acquire(keys)
    cache.retire()
    before = cache.bytes_read
    cache.acquire(keys)
    assert cache.bytes_read == before == 2 * cache.records.record_nbytes
    assert (cache.table.counters.hits, cache.table.counters.misses) == (2, 2)


def test_leased_slots_are_not_overwritten_until_retired(make_cache, content):
    cache = make_cache(3)
    held = np.array([0, 1])
    slots = cache.acquire(held)
    with pytest.raises(CapacityError):
        cache.begin(np.array([8, 9]))
    assert_holds(cache, content, held, slots)
    cache.retire()
    assert_holds(cache, content, [8, 9], cache.acquire(np.array([8, 9])))


def test_more_slots_than_records_are_not_allocated(make_cache):
    assert make_cache(1000).num_slots == RECORDS


def test_failed_read_maps_nothing_and_the_cache_goes_on(make_cache, content, path):
    cache = make_cache(4)
    cache.acquire(np.array([0]))
    cache.retire()
    stamp = path.stat()
    os.truncate(path, 100)
    with pytest.raises(ReadError):
        cache.acquire(np.array([1, 2]))
    cache.abandon()
    keys, _ = cache.table.residents()
    assert keys.tolist() == [0]
    path.write_bytes(b"".join(content[role.name].tobytes() for role in ROLES))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert_holds(cache, content, [1, 2], cache.acquire(np.array([1, 2])))


def test_a_read_that_cannot_even_start_leaves_the_cache_as_it_was(make_cache, content):
    cache = make_cache(2)
    cache.store.close()
    with pytest.raises((ReadError, ValueError)):
        cache.begin(np.array([1, 2]))
    assert cache.table.capacity == 2
    assert not cache.table.is_reading(np.array([1, 2])).any()


def test_abandon_waits_for_reads_under_way_and_maps_none_of_them(make_cache, content):
    cache = make_cache(4)
    cache.acquire(np.array([3]))
    cache.begin(np.array([4, 5]))
    cache.abandon()
    assert cache.table.residents()[0].tolist() == [3]
    assert_holds(cache, content, [4, 5], cache.acquire(np.array([4, 5])))


def test_prefetch_fills_free_slots_only_and_the_next_request_hits(make_cache, content):
    cache = make_cache(4)
    cache.acquire(np.array([0, 1]))
    cache.retire()
    cache.prefetch(np.array([8, 9, 10]))
    assert_holds(cache, content, [8, 9], cache.acquire(np.array([8, 9])))
    counters = cache.table.counters
    assert (counters.prefetches, counters.prefetch_hits, counters.evictions) == (2, 2, 0)
    assert cache.records_read == 4


def test_failed_prefetch_is_silent_until_its_record_is_asked_for(make_cache, path):
    cache = make_cache(4)
    os.truncate(path, 100)
    cache.prefetch(np.array([3]))
    with pytest.raises(ReadError):
        cache.acquire(np.array([3]))
    assert len(cache.table.residents()[0]) == 0


def test_growing_keeps_every_record(make_cache, content):
    cache, keys = make_cache(3), np.array([0, 1, 2])
    cache.acquire(keys)
    cache.retire()
    resize_within(cache, 9, SPARE_BYTES)
    before = cache.bytes_read
    assert_holds(cache, content, keys, cache.acquire(keys))
    assert (cache.num_slots, cache.bytes_read) == (9, before)


def test_shrinking_keeps_the_most_used_records(make_cache, content):
    cache = make_cache(6)
    for key in [0, 1, 2, 3, 0, 1, 0, 1]:
        for one in (key, 16):  # a lower layer after a higher one begins the next token
            cache.acquire(np.array([one]))
            cache.retire()
    resize_within(cache, 3, SPARE_BYTES)
    assert sorted(cache.table.residents()[0].tolist()) == [0, 1, 16]
    assert_holds(cache, content, [0, 1], cache.acquire(np.array([0, 1])))


def test_resize_is_refused_while_a_lease_is_out(make_cache):
    cache = make_cache(3)
    cache.acquire(np.array([0]))
    with pytest.raises(RuntimeError):
        resize_within(cache, 5, SPARE_BYTES)

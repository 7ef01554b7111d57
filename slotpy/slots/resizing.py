"""Change the size of a slot cache without ever holding it twice.

New arrays beside the old ones would take twice the cache, just when memory is short. Instead each role's array is
dropped before its successor is made, and only as many records are carried over as fit a given allowance, the hottest
first. The rest is read again when wanted. Serves the slots layer, on the thread that uses the cache.
"""

import mlx.core as mx
import numpy as np

from slotpy.slots.backings.unified import UnifiedBacking
from slotpy.slots.cache import SlotCache


def resize_within(cache: SlotCache, num_slots: int, spare_bytes: int) -> int:
    """Resize, and give how many records were kept: the hottest. No graph may be unevaluated.

    The cache takes at most the larger of its old and new size plus `spare_bytes` at any moment. Raises RuntimeError
    while a lease is out.
    """
    cache.settle()
    num_slots = min(num_slots, cache.records.num_records)
    resident = len(cache.table.residents()[0])
    kept = min(resident, num_slots, _affordable(cache, num_slots, spare_bytes))
    if kept < min(resident, num_slots):
        # The table forgets the coldest: down to the few that are carried over, then to the size asked for.
        source, target = cache.table.resize(max(kept, 1))
        cache.table.resize(num_slots)
    else:
        source, target = cache.table.resize(num_slots)
    backing = cache.backing
    for index in _largest_first(backing):
        role = backing.roles[index]
        carried = np.frombuffer(backing.buffers[index], dtype=np.uint8).reshape(-1, role.nbytes)[source]
        backing.buffers[index] = memoryview(b"")
        del backing.arrays[role.name]
        mx.clear_cache()  # else MLX keeps the old array until the new one exists
        one = UnifiedBacking((role,), num_slots)
        np.frombuffer(one.buffers[0], dtype=np.uint8).reshape(-1, role.nbytes)[target] = carried
        backing.arrays[role.name], backing.buffers[index] = one.arrays[role.name], one.buffers[0]
    return len(source)


def _largest_first(backing: UnifiedBacking) -> list[int]:
    return sorted(range(len(backing.roles)), key=lambda index: -backing.roles[index].nbytes)


def _affordable(cache: SlotCache, num_slots: int, spare_bytes: int) -> int:
    """Count the records that can be carried over: one role at a time is copied aside while its array is replaced."""
    old, backing = cache.num_slots, cache.backing
    limit = max(old, num_slots) * cache.records.record_nbytes + spare_bytes
    before = old * cache.records.record_nbytes
    counts = []
    for index in _largest_first(backing):
        nbytes = backing.roles[index].nbytes
        after = before + (num_slots - old) * nbytes
        counts.append((limit - max(before, after)) // nbytes)
        before = after
    return max(0, min(counts))

"""Which record lies in which slot: keys, states, leases and counters of one pool of slots.

Owns the map from key to slot and decides, through `policy.py`, what is evicted. Moves no bytes and knows no arrays or
files: `cache.py` and the backings do. The routed experts of all layers share one table; the n-gram rows have another.
Serves the slots layer; single thread.

A slot is FREE, READING (its bytes are under way) or READY. A key can be found only while READY, and a READY slot can be
evicted only while no plan holds a lease on it:

    plan = table.plan(keys)           # hits and misses get slots; misses READING; all held
    try:                              # read plan.keys[plan.miss] into plan.slots[plan.miss]
        ...
    except BaseException:
        table.abort(plan)             # misses FREE again, nothing mapped
        raise
    table.commit(plan)                # misses READY
    ...                               # run the graph that reads the slots, until it is evaluated
    table.release(plan)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from slotpy.errors import CapacityError
from slotpy.slots.policy import NextUse


@dataclass
class SlotCounters:
    """Count what a table did since it was made; a caller that wants rates keeps an older copy.

    `hits` and `misses` count planned keys. `prefetch_hits` are those hits that a prefetch had brought in and that were
    not used before. `evictions` include those of a shrink.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    prefetches: int = 0
    prefetch_hits: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """Give each of n keys its slot: what to read (where `miss`) and what the slots will hold then.

    `keys` (n,) int64; `slots` (n,) int32; `miss` (n,) bool. `evicted` int64 lists the keys that lost their slots to
    this plan, so that a copy of the map (a device table) can be kept in step.
    """

    keys: np.ndarray
    slots: np.ndarray
    miss: np.ndarray
    evicted: np.ndarray
    is_prefetch: bool = False


class SlotTable:
    """Map record keys to the slots of one pool; key // keys_per_layer is the key's layer.

    Memory and time follow `num_slots` and the keys asked for, never the number of keys there are.
    """

    def __init__(self, num_slots: int, num_layers: int, keys_per_layer: int) -> None:
        if min(num_slots, num_layers, keys_per_layer) < 1:
            raise ValueError(f"a slot table of {num_slots} slots, {num_layers} layers, {keys_per_layer} keys per layer")
        self._num_slots = num_slots
        self._num_layers = num_layers
        self._keys_per_layer = keys_per_layer
        self._policy = NextUse(num_layers, keys_per_layer)
        self._ready: dict[int, int] = {}  # key -> slot
        self._reading: dict[int, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end: low slots first
        self._leases: dict[int, int] = {}  # key -> number of plans that hold it; READY keys only
        self._open: set[Plan] = set()  # not ended by release or abort (a prefetch: by commit or abort)
        self._prefetched: set[int] = set()  # brought in by a prefetch, not used yet
        self.counters = SlotCounters()

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """How many distinct keys one plan can hold now, whichever they are: slots FREE, or READY without a lease."""
        return len(self._free) + len(self._ready) - len(self._leases)

    def occupancy(self) -> np.ndarray:
        """Count the READY keys of each layer: (num_layers,) int64."""
        return np.array(self._policy.occupancy(), dtype=np.int64)

    def residents(self) -> tuple[np.ndarray, np.ndarray]:
        """List the READY keys (int64) and their slots (int32), in no particular order."""
        return _int64(self._ready), _int32(self._ready.values())

    def is_reading(self, keys: np.ndarray) -> np.ndarray:
        """Say which keys are under way: (n,) bool. Their plan must be committed or aborted before they are planned."""
        return np.array([key in self._reading for key in keys.tolist()], dtype=bool)

    def plan(self, keys: np.ndarray) -> Plan:
        """Give every key a slot and hold it: what is READY is a hit, the rest is to be read and then committed.

        `keys` is (n,) int64, distinct, all of one layer. Hits are leased at once, misses when committed; until then
        they cannot be evicted either. The policy takes the order of these calls for the passing of layers and tokens:
        plan the layers of a token in order, each once, or in waves of at most `capacity` keys.

        Raises `CapacityError`, and changes nothing, when the misses do not fit.
        Raises `ValueError` for keys out of range, repeated, of several layers, or being read: wait for the ticket of
        the plan or prefetch that reads them and commit it first.
        """
        wanted = keys.tolist()
        if not wanted:
            return self._make_plan([], [], [], [])
        layer = self._check(wanted)
        if not self._reading.keys().isdisjoint(wanted):
            raise ValueError("a key is still being read: commit the plan or prefetch that reads it first")
        hits = [key for key in wanted if key in self._ready]
        missing = [key for key in wanted if key not in self._ready]
        room = self.capacity - sum(key not in self._leases for key in hits)
        if len(missing) > room:
            raise CapacityError(
                f"{len(wanted)} records wanted at once, {len(missing)} of them to be read; room for {room}: of "
                f"{self._num_slots} slots {len(self._leases)} are leased and {len(self._reading)} being read.",
                hint=f"Plan at most {self.capacity} at a time, or release plans first.",
            )
        self._policy.use(layer, wanted)
        for key in hits:
            self._leases[key] = self._leases.get(key, 0) + 1
        evicted = self._evict(len(missing) - len(self._free))
        for key in missing:
            self._reading[key] = self._free.pop()
        self.counters.hits += len(hits)
        self.counters.misses += len(missing)
        self.counters.prefetch_hits += len(self._prefetched.intersection(hits))
        self._prefetched.difference_update(hits)
        miss = [key in self._reading for key in wanted]
        slots = [self._reading[key] if new else self._ready[key] for key, new in zip(wanted, miss, strict=True)]
        return self._make_plan(wanted, slots, miss, evicted)

    def plan_prefetch(self, keys: np.ndarray) -> Plan:
        """Give FREE slots to those of `keys`, the first ones first, that are neither READY nor being read.

        Evicts nothing, takes no lease, and does not count as a use. The plan lists only the keys that got a slot,
        perhaps none; `commit` or `abort` ends it. A key that is wanted while its prefetch still reads must be committed
        before it is planned.
        """
        wanted = keys.tolist()
        if wanted:
            self._check(wanted)
        absent = [key for key in wanted if key not in self._ready and key not in self._reading]
        taken = absent[: len(self._free)]
        for key in taken:
            self._reading[key] = self._free.pop()
        self.counters.prefetches += len(taken)
        slots = [self._reading[key] for key in taken]
        return self._make_plan(taken, slots, [True] * len(taken), [], is_prefetch=True)

    def commit(self, plan: Plan) -> None:
        """Make the misses of a plan READY, their bytes being complete; once. A plan without misses needs none."""
        missing = self._misses(plan, reading=True)
        for key in missing:
            self._ready[key] = self._reading.pop(key)
            self._policy.admit(key)
        if plan.is_prefetch:
            self._prefetched.update(missing)
            self._open.remove(plan)
        else:
            self._leases.update(dict.fromkeys(missing, 1))

    def abort(self, plan: Plan) -> None:
        """Undo a plan whose read failed: its misses are FREE again, its leases ended. Instead of commit and release.

        The keys it evicted stay evicted: their bytes may be overwritten.
        """
        for key in self._misses(plan, reading=True):
            self._free.append(self._reading.pop(key))
            if not plan.is_prefetch:
                self._policy.forget(key)
        self._open.remove(plan)
        self._end_leases(plan.keys[~plan.miss].tolist())

    def release(self, plan: Plan) -> None:
        """End the leases of a plan that is committed or had no misses: nothing reads its slots any more."""
        self._misses(plan, reading=False)
        self._open.remove(plan)
        self._end_leases(plan.keys.tolist())

    def resize(self, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Change the number of slots; a shrink keeps the keys that the policy would evict last.

        Returns where the kept records lie and where they must be: two (n,) int32 arrays, old slots and new slots, in
        the order of the new ones. They differ only for records above the new end, which move to FREE slots below it.

        Raises `RuntimeError` while a lease is out or a read under way: settle these first.
        """
        if num_slots < 1:
            raise ValueError(f"a slot table cannot have {num_slots} slots")
        if self._leases or self._reading:
            raise RuntimeError(f"resize with {len(self._leases)} slots leased and {len(self._reading)} being read")
        self._evict(len(self._ready) - num_slots)
        kept = sorted(self._ready.items(), key=lambda item: item[1])
        free = sorted(set(range(num_slots)).difference(self._ready.values()), reverse=True)
        moves = [(slot if slot < num_slots else free.pop(), slot, key) for key, slot in kept]
        moves.sort()
        self._ready = {key: new for new, _, key in moves}
        self._free = free
        self._num_slots = num_slots
        return _int32(old for _, old, _ in moves), _int32(new for new, _, _ in moves)

    def _check(self, keys: list[int]) -> int:
        """Refuse keys that no plan can hold; give their layer."""
        first, last = min(keys), max(keys)
        layer = first // self._keys_per_layer
        if layer < 0 or layer >= self._num_layers or layer != last // self._keys_per_layer:
            raise ValueError(f"keys {first} to {last} are not of one of {self._num_layers} x {self._keys_per_layer}")
        if len(set(keys)) < len(keys):
            raise ValueError("a key was asked for twice in one plan")
        return layer

    def _evict(self, count: int) -> list[int]:
        """Free `count` slots, if positive, and give the keys that lost them."""
        if count <= 0:
            return []
        evicted = self._policy.evict(count, self._leases)
        self._free.extend(self._ready.pop(key) for key in evicted)
        self._prefetched.difference_update(evicted)
        self.counters.evictions += len(evicted)
        return evicted

    def _misses(self, plan: Plan, reading: bool) -> list[int]:
        """Give the misses of a plan, refusing one that has ended or whose misses are in the other state."""
        missing = plan.keys[plan.miss].tolist()
        if plan not in self._open or (missing and (missing[0] in self._reading) != reading):
            raise ValueError(f"the plan has ended, or is {'committed' if reading else 'not committed'}")
        return missing

    def _end_leases(self, keys: list[int]) -> None:
        for key in keys:
            self._leases[key] -= 1
            if not self._leases[key]:
                del self._leases[key]

    def _make_plan(
        self, keys: list[int], slots: list[int], miss: list[bool], evicted: list[int], is_prefetch: bool = False
    ) -> Plan:
        plan = Plan(_int64(keys), _int32(slots), np.array(miss, dtype=bool), _int64(evicted), is_prefetch)
        self._open.add(plan)
        return plan


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


def _int64(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)

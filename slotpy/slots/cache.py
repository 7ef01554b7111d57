"""The global slot cache: records by key, read from SSD into slots that MLX kernels gather from.

Joins the table (which key is where), the store (bytes by offset) and the backing (memory). One thread uses a cache.

MLX graphs are lazy: a graph that gathers from a slot reads its memory when it is evaluated, so a slot that is
overwritten in between gives a silently wrong result. Leases prevent that: every slot handed out stays leased until
`retire()`, which the caller invokes only after evaluating something that depends on all it built from those slots.
"""

import contextlib

import mlx.core as mx
import numpy as np

from slotpy.checkpoint.records import RecordSet
from slotpy.errors import ReadError
from slotpy.slots.backings.unified import UnifiedBacking
from slotpy.slots.table import Plan, SlotTable
from slotpy.store.base import Store, Ticket


class Lease:
    """Hold the slots of one `begin`, their missing records on the way."""

    def __init__(self, cache: "SlotCache", plan: Plan, ticket: Ticket | None) -> None:
        self._cache, self.plan, self.ticket = cache, plan, ticket

    def wait(self) -> np.ndarray:
        """Return the slots (n,) int32, in the order of the keys, once their records are complete.

        Raises ReadError when a record cannot be read; `abandon` the cache then, and none of the missing ones is mapped.
        """
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
            self._cache._commit(self.plan)
        return self.plan.slots


class SlotCache:
    """Keep the most useful records of one geometry in a fixed number of slots, shared by all layers."""

    def __init__(self, records: RecordSet, store: Store, *, num_slots: int, num_layers: int) -> None:
        """`num_layers` is how many layers take turns in asking; the records divide evenly among them."""
        self.records, self.store = records, store
        num_slots = min(num_slots, records.num_records)
        self.table = SlotTable(num_slots, num_layers, records.num_records // num_layers)
        self.backing = UnifiedBacking(records.roles, num_slots)
        self.records_read = self.bytes_read = 0
        self._leases: list[Lease] = []
        self._prefetches: list[tuple[Plan, Ticket]] = []
        self._role_nbytes = np.array([role.nbytes for role in records.roles], dtype=np.int64)

    @property
    def num_slots(self) -> int:
        return self.table.num_slots

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Give the slot arrays by role, each (num_slots, *role shape). Ask anew after a resize."""
        return self.backing.arrays

    def begin(self, keys: np.ndarray) -> Lease:
        """Lease slots for distinct keys (n,) and start reading what is missing.

        Waits for prefetches first. Raises CapacityError when more keys are asked for than slots are free of leases.
        """
        self.settle()
        plan = self.table.plan(keys)
        try:
            ticket = self._submit(keys[plan.miss], plan.slots[plan.miss]) if plan.miss.any() else None
        except BaseException:
            self.table.abort(plan)
            raise
        self._leases.append(Lease(self, plan, ticket))
        return self._leases[-1]

    def acquire(self, keys: np.ndarray) -> np.ndarray:
        """Lease slots for distinct keys and wait for their records: `begin(keys).wait()`."""
        return self.begin(keys).wait()

    def prefetch(self, keys: np.ndarray) -> None:
        """Start reading records into FREE slots, as many as there are; evicts nothing and holds nothing.

        For records that are certain to be asked for soon: the next `begin` waits for them.
        """
        self.settle()
        plan = self.table.plan_prefetch(keys)
        if len(plan.keys):
            self._prefetches.append((plan, self._submit(plan.keys, plan.slots)))

    def settle(self) -> None:
        """Wait for all prefetches. One that failed is forgotten: asking for its records raises."""
        for plan, ticket in self._prefetches:
            try:
                ticket.wait()
            except ReadError:
                self.table.abort(plan)
            else:
                self._commit(plan)
        self._prefetches.clear()

    def retire(self) -> None:
        """End all leases. Call it after a sync on something that depends on every graph built from their slots."""
        for lease in self._leases:
            self.table.release(lease.plan)
        self._leases.clear()

    def abandon(self) -> None:
        """End all leases after a failure, when no graph built from them will be evaluated.

        Waits for what is still being read, and maps none of it but prefetches.
        """
        self.settle()
        for lease in self._leases:
            if lease.ticket is None:
                self.table.release(lease.plan)
                continue
            with contextlib.suppress(ReadError):
                lease.ticket.wait()
            self.table.abort(lease.plan)
        self._leases.clear()

    def _submit(self, keys: np.ndarray, slots: np.ndarray) -> Ticket:
        files, offsets = self.records.locate(keys)
        reads = np.empty((*files.shape, 5), dtype=np.int64)
        reads[..., 0] = files
        reads[..., 1] = offsets
        reads[..., 2] = np.arange(files.shape[1])
        reads[..., 3] = slots[:, None] * self._role_nbytes
        reads[..., 4] = self._role_nbytes
        return self.store.submit(reads.reshape(-1, 5), self.backing.buffers)

    def _commit(self, plan: Plan) -> None:
        self.table.commit(plan)
        self.records_read += int(plan.miss.sum())
        self.bytes_read += int(plan.miss.sum()) * self.records.record_nbytes

"""The memory plan: a ledger of what a model will need, in bytes, before anything is allocated.

Pure integers: no I/O, no MLX, no clock.
"""

from dataclasses import dataclass, fields

from slotpy.errors import CapacityError
from slotpy.units import format_bytes

RUNTIME_BYTES = 320 << 20
"""Python, numpy, MLX and their libraries, before any model: 190 MiB measured on Linux, with room for the tokenizer."""

TARGET_PERCENT = 70
"""How much of the memory available at start the plan may fill when the user names no size."""


@dataclass(frozen=True)
class Sizes:
    """What one model needs: `state_bytes` for the context asked for, `workspace_bytes` for one prefill pass."""

    resident_bytes: int
    record_bytes: int
    num_records: int
    row_cache_bytes: int
    state_bytes: int
    workspace_bytes: int
    allocator_cache_bytes: int


@dataclass(frozen=True)
class Plan:
    """The ledger. `num_slots` is a count; everything else is bytes, and `total_bytes` is their sum."""

    num_slots: int
    resident_bytes: int
    slots_bytes: int
    row_cache_bytes: int
    state_bytes: int
    workspace_bytes: int
    allocator_cache_bytes: int
    runtime_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name.endswith("_bytes"))


def plan(sizes: Sizes, available_bytes: int, *, num_slots: int | None = None, cache_bytes: int | None = None) -> Plan:
    """Choose the number of slots: the one named, what `cache_bytes` holds, or what fits the available memory.

    Raises CapacityError, before anything is allocated, when not even one slot fits.
    """
    fixed = Plan(
        num_slots=0,
        resident_bytes=sizes.resident_bytes,
        slots_bytes=0,
        row_cache_bytes=sizes.row_cache_bytes,
        state_bytes=sizes.state_bytes,
        workspace_bytes=sizes.workspace_bytes,
        allocator_cache_bytes=sizes.allocator_cache_bytes,
        runtime_bytes=RUNTIME_BYTES,
    )
    if num_slots is None:
        room = available_bytes * TARGET_PERCENT // 100 - fixed.total_bytes if cache_bytes is None else cache_bytes
        num_slots = room // sizes.record_bytes
        if num_slots < 1:
            _refuse(sizes, fixed, available_bytes, cache_bytes)
    num_slots = min(num_slots, sizes.num_records)
    values = {f.name: getattr(fixed, f.name) for f in fields(fixed)}
    values |= {"num_slots": num_slots, "slots_bytes": num_slots * sizes.record_bytes}
    return Plan(**values)


def _refuse(sizes: Sizes, fixed: Plan, available_bytes: int, cache_bytes: int | None) -> None:
    one = format_bytes(sizes.record_bytes)
    if cache_bytes is not None:
        raise CapacityError(
            f"A cache of {format_bytes(cache_bytes)} holds no expert: one is {one}.",
            hint=f"Ask for at least --cache-gb {sizes.record_bytes / (1 << 30):.3f}.",
        )
    needed = (fixed.total_bytes + sizes.record_bytes) * 100 // TARGET_PERCENT
    raise CapacityError(
        f"Needs {format_bytes(needed)} of available memory (weights {format_bytes(fixed.resident_bytes)}, state"
        f" {format_bytes(fixed.state_bytes)}, runtime {format_bytes(fixed.runtime_bytes)}, one expert {one});"
        f" {format_bytes(available_bytes)} is available.",
        hint="Close other programs, or name a size with --slots to go below the safety margin.",
    )

"""What a plan is made of: a model's sizes, a user's wishes, the ledger, the limits. Data and sums, no decisions."""

import math
from dataclasses import asdict, dataclass, fields, replace

from slotpy.errors import UsageError
from slotpy.machine.machines import GIB, Machine

_SANE_BYTES = 1 << 60


@dataclass(frozen=True)
class Sizes:
    """What one model needs, from its headers or published constants.

    The state of one sequence is `state_bytes` plus `state_token_bytes` for each token of context. One prefill pass
    works in `workspace_bytes` plus `workspace_token_bytes` for each token of context, but at most
    `workspace_limit_bytes`; loading, before that, in `loading_bytes`. `table_bytes` is the n-gram table on disk.
    `prefix_cache_bytes` are for the places that a session can go back to; `draft_bytes` is 0 until that part exists.
    """

    resident_bytes: int
    record_bytes: int
    num_records: int
    num_layers: int
    experts_per_token: int
    row_cache_bytes: int
    table_bytes: int
    state_bytes: int
    state_token_bytes: int
    workspace_bytes: int
    workspace_token_bytes: int
    workspace_limit_bytes: int
    loading_bytes: int
    allocator_cache_bytes: int
    max_context_tokens: int
    prefix_cache_bytes: int = 0
    draft_bytes: int = 0

    @property
    def floor_slots(self) -> int:
        """The fewest slots planned unasked: one token's use. With fewer nearly all experts are read each time."""
        return min(self.num_layers * self.experts_per_token, self.num_records)

    def state_at(self, context_tokens: int) -> int:
        return self.state_bytes + self.state_token_bytes * context_tokens

    def workspace_at(self, context_tokens: int) -> int:
        passing = self.workspace_bytes + self.workspace_token_bytes * context_tokens
        return max(self.loading_bytes, min(passing, self.workspace_limit_bytes))


@dataclass(frozen=True)
class Request:
    """What the user asked for; None where nothing was said.

    The first of `num_slots`, `cache_bytes` and `memory_bytes` (the whole process) that is given fixes the size.
    `memory_limit_bytes` is a ceiling, under which an automatic plan may move.
    """

    num_slots: int | None = None
    cache_bytes: int | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True)
class Ledger:
    """Bytes in the memory that the model computes from: a GPU's own, or the one pool of a unified machine."""

    resident_bytes: int
    slots_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    prefix_cache_bytes: int
    workspace_bytes: int
    draft_bytes: int
    row_cache_bytes: int
    allocator_cache_bytes: int
    runtime_bytes: int
    margin_bytes: int


@dataclass(frozen=True)
class Limit:
    """One upper limit on the plan, and why it is there. `binding` marks the one that decided."""

    name: str
    limit_bytes: int
    why: str
    binding: bool = False


@dataclass(frozen=True)
class Placement:
    """Say where some bytes live."""

    what: str
    where: str
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What will be allocated, and why not more.

    `is_managed`: the governor may resize it; a named size never changes. `placements` lists what lies outside the
    ledger: system RAM beside a GPU, and NVMe. `unused_knobs` names what was asked for and lost to another knob.
    """

    machine: str
    simulated: bool
    num_slots: int
    num_records: int
    num_layers: int
    context_tokens: int
    ledger: Ledger
    limits: tuple[Limit, ...]
    placements: tuple[Placement, ...]
    is_managed: bool
    unused_knobs: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """The ledger's sum, margin included: what the limits were compared with."""
        return sum(getattr(self.ledger, f.name) for f in fields(self.ledger))

    @property
    def expected_peak_bytes(self) -> int:
        """The most the process should ever take: everything but the margin."""
        return self.total_bytes - self.ledger.margin_bytes

    @property
    def experts_per_layer(self) -> float:
        return self.num_slots / self.num_layers

    @property
    def is_fully_resident(self) -> bool:
        return self.num_slots == self.num_records

    @property
    def binding(self) -> Limit:
        return next(limit for limit in self.limits if limit.binding)

    def as_dict(self) -> dict[str, object]:
        """Give all of it as JSON values, sums included."""
        return asdict(self) | {
            "total_bytes": self.total_bytes,
            "expected_peak_bytes": self.expected_peak_bytes,
            "experts_per_layer": round(self.experts_per_layer, 2),
        }


def resized(made: Plan, num_slots: int) -> Plan:
    """Give the plan with another number of slots."""
    record_bytes = made.ledger.slots_bytes // made.num_slots
    ledger = replace(made.ledger, slots_bytes=num_slots * record_bytes)
    return replace(made, num_slots=num_slots, ledger=ledger)


def gib_to_bytes(gib: float, knob: str) -> int:
    """Turn a user's GiB into bytes. Raises UsageError for what is not a positive number of a possible size."""
    if not 0 < gib * GIB < _SANE_BYTES:  # not a number compares as false
        raise UsageError(f"{knob} {gib} is no amount of memory.", hint=f"Give GiB, as in {knob} 12.5.")
    return int(gib * GIB)


def refuse_nonsense(machine: Machine, sizes: Sizes, request: Request) -> None:
    """Raise UsageError unless every number is a whole one of a possible size."""
    for owner in (machine, sizes, request):
        for field in fields(owner):
            value = getattr(owner, field.name)
            if value is None or isinstance(value, str | bool):
                continue
            if not isinstance(value, int) or not 0 <= value < _SANE_BYTES:
                raise UsageError(
                    f"{field.name} is {value!r}, not a whole number from 0 to 2^60.", hint="Give a smaller, whole one."
                )
    for name in ("num_slots", "context_tokens", "memory_bytes", "memory_limit_bytes"):
        if getattr(request, name) == 0:
            raise UsageError(f"{name} is 0.", hint="Leave it out, or ask for at least 1.")
    if min(sizes.record_bytes, sizes.num_records, sizes.num_layers, sizes.max_context_tokens) < 1:
        raise UsageError("A model has experts, layers and a context.", hint="Check its config.json.")


def ceil_gib(num_bytes: int, digits: int) -> float:
    """Round up to so many decimal digits of a GiB, for a number that a user can ask for."""
    scale = 10**digits
    return float(math.ceil(num_bytes * scale / GIB) / scale)

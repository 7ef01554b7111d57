"""Decides slots and context for a machine, or refuses with the number that would fit."""

import math
from collections.abc import Iterator

from slotpy import config
from slotpy.budget.limits import CUDA_RUNTIME_BYTES, KNEE_PERCENT, RUNTIME_BYTES, hard_limits, place, soft_limits
from slotpy.budget.types import Ledger, Limit, Plan, Request, Sizes, ceil_gib, refuse_nonsense
from slotpy.errors import CapacityError
from slotpy.machine.machines import GIB, Machine
from slotpy.units import format_bytes


def plan(machine: Machine, sizes: Sizes, request: Request | None = None) -> Plan:
    """Choose slots and context for a machine, or refuse.

    An automatic plan spends memory in this order: slots up to `KNEE_PERCENT` of the experts at the default context,
    then context up to the model's, then all experts if they fit. Under a ceiling of the user's, and on a GPU with its
    own memory, which nothing else wants, all experts come before context.

    Raises UsageError for numbers that are none, CapacityError with the number that would fit.
    """
    request = request or Request()
    refuse_nonsense(machine, sizes, request)
    planner = _Planner(machine, sizes, request)
    if request.num_slots is None and request.cache_bytes is None:
        return planner.fill()
    return planner.named()


def pass_tokens(position: int, chunk_tokens: int, product: int) -> int:
    """Give the tokens of a prefill pass that starts at `position`: halved while pass x context exceeds `product`.

    Attention's memory follows that product, so this bounds it for any context. It must never follow the memory there
    is: the pass decides which kernels run, and so the last bits of the result.
    """
    tokens = chunk_tokens
    while tokens > 16 and tokens * (position + tokens) > product:
        tokens //= 2
    return tokens


class _Planner:
    """Hold what one call to `plan` works with."""

    def __init__(self, machine: Machine, sizes: Sizes, request: Request) -> None:
        self.machine, self.sizes, self.request = machine, sizes, request
        self.context = min(request.context_tokens or config.CONTEXT_TOKENS, sizes.max_context_tokens)
        self.hard = list(hard_limits(machine))
        self.soft = list(soft_limits(machine, request))

    def fill(self) -> Plan:
        """Plan what the tightest limit holds."""
        sizes, request = self.sizes, self.request
        limits = self.hard + self.soft
        tightest = min(limits, key=lambda limit: limit.limit_bytes)
        if request.memory_bytes is not None and tightest.name != "--memory-gb":
            self._refuse_named(request.memory_bytes, tightest)
        target = tightest.limit_bytes
        if self._room(target, self.context) < sizes.floor_slots:
            self._refuse(tightest)
        knee = self._knee()
        num_slots = min(self._room(target, self.context), knee)
        context = self._longest_context(target, knee)
        if num_slots == knee < sizes.num_records:
            whole_context = context == sizes.max_context_tokens or request.context_tokens is not None
            if whole_context and self._room(target, context) >= sizes.num_records:
                num_slots = sizes.num_records
            else:
                why = f"past {KNEE_PERCENT} % of the experts nothing was measured to gain, until all fit"
                tightest = Limit("measured gain", self._total(knee, context), why)
                limits.append(tightest)
        if num_slots == sizes.num_records:
            why = f"all {num_slots} experts have a slot"
            tightest = Limit("all experts", self._total(num_slots, context), why)
            limits.append(tightest)
        return self._make(num_slots, context, limits, tightest, [])

    def named(self) -> Plan:
        """Plan the size that was named; only what the machine can never hold is refused."""
        knob, num_slots = self._named_slots()
        needed = self._fixed(self.context) + num_slots * self.sizes.record_bytes
        ceilings = self.hard + [limit for limit in self.soft if limit.name == "--memory-limit-gb"]
        tightest = min(ceilings, key=lambda limit: limit.limit_bytes)
        if needed > tightest.limit_bytes:
            fits = (tightest.limit_bytes - needed) // self.sizes.record_bytes + num_slots
            raise CapacityError(
                f"{knob}: {num_slots} slots need {format_bytes(needed)} in all; {tightest.name} is"
                f" {format_bytes(tightest.limit_bytes)} ({tightest.why}).",
                hint=f"Ask for at most --slots {fits}." if fits > 0 else self._smaller(tightest),
            )
        named = Limit(knob, self._total(num_slots, self.context), "named by you, never resized")
        notes = []
        available = next(limit for limit in self.soft if limit.name == "available now")
        if needed > available.limit_bytes:
            notes.append(
                f"{format_bytes(needed)} is more than {format_bytes(max(0, available.limit_bytes))}, what is available"
                " now less a reserve: other programs may be pushed into swap"
            )
        if num_slots < self.sizes.floor_slots:
            notes.append(
                f"{num_slots} slots are fewer than one token uses ({self.sizes.floor_slots}): nearly every expert is"
                " read for every token"
            )
        return self._make(num_slots, self.context, [*self.hard, *self.soft, named], named, notes)

    def _named_slots(self) -> tuple[str, int]:
        """Give the knob that names the slots, and how many."""
        sizes, request = self.sizes, self.request
        if request.num_slots is not None:
            return "--slots", min(request.num_slots, sizes.num_records)
        assert request.cache_bytes is not None
        num_slots = request.cache_bytes // sizes.record_bytes
        if num_slots < 1:
            raise CapacityError(
                f"A cache of {format_bytes(request.cache_bytes)} holds no expert: one is"
                f" {format_bytes(sizes.record_bytes)}.",
                hint=f"Ask for at least --cache-gb {ceil_gib(sizes.record_bytes, 6):g}.",
            )
        return "--cache-gb", min(num_slots, sizes.num_records)

    def _knee(self) -> int:
        """Give the slots past which memory goes to context first; all of them where the user or the machine says so."""
        sizes, request = self.sizes, self.request
        automatic = request.memory_bytes is None and request.memory_limit_bytes is None
        if self.machine.is_discrete or not automatic:
            return sizes.num_records
        return max(sizes.floor_slots, sizes.num_records * KNEE_PERCENT // 100)

    def _longest_context(self, target: int, knee: int) -> int:
        """Double the context while the slots up to the knee still fit; a context that was named stays."""
        context, most = self.context, self.sizes.max_context_tokens
        while self.request.context_tokens is None and context < most:
            longer = min(2 * context, most)
            if self._room(target, longer) < knee:
                break
            context = longer
        return context

    def _fixed(self, context: int) -> int:
        s = self.sizes
        runtime = CUDA_RUNTIME_BYTES if self.machine.is_discrete else RUNTIME_BYTES
        return (
            s.resident_bytes
            + s.row_cache_bytes
            + s.state_at(context)
            + s.workspace_at(context)
            + s.allocator_cache_bytes
            + s.prefix_cache_bytes
            + s.draft_bytes
            + runtime
        )

    def _margin(self, context: int) -> int:
        """Cover what the ledger does not name: a tenth of everything but the slots, at most 1 GiB."""
        return min(GIB, self._fixed(context) // 10)

    def _total(self, num_slots: int, context: int) -> int:
        return self._fixed(context) + self._margin(context) + num_slots * self.sizes.record_bytes

    def _room(self, target: int, context: int) -> int:
        """Count the slots that fit; negative where not even the rest does."""
        return min((target - self._total(0, context)) // self.sizes.record_bytes, self.sizes.num_records)

    def _make(self, num_slots: int, context: int, limits: list[Limit], binding: Limit, notes: list[str]) -> Plan:
        s = self.sizes
        runtime = CUDA_RUNTIME_BYTES if self.machine.is_discrete else RUNTIME_BYTES
        ledger = Ledger(
            resident_bytes=s.resident_bytes,
            slots_bytes=num_slots * s.record_bytes,
            kv_bytes=s.state_token_bytes * context,
            recurrent_bytes=s.state_bytes,
            prefix_cache_bytes=s.prefix_cache_bytes,
            workspace_bytes=s.workspace_at(context),
            draft_bytes=s.draft_bytes,
            row_cache_bytes=s.row_cache_bytes,
            allocator_cache_bytes=s.allocator_cache_bytes,
            runtime_bytes=runtime,
            margin_bytes=self._margin(context),
        )
        placements, placed = place(self.machine, s, num_slots)
        request = self.request
        if request.context_tokens is not None and request.context_tokens > context:
            placed.append(f"the context is {context} tokens, the model's own limit, not {request.context_tokens}")
        return Plan(
            machine=self.machine.name,
            simulated=self.machine.simulated,
            num_slots=num_slots,
            num_records=s.num_records,
            num_layers=s.num_layers,
            context_tokens=context,
            ledger=ledger,
            limits=tuple(Limit(x.name, x.limit_bytes, x.why, x.name == binding.name) for x in limits),
            placements=placements,
            is_managed=request.num_slots is None and request.cache_bytes is None and request.memory_bytes is None,
            unused_knobs=tuple(_unused_knobs(request)),
            notes=(*notes, *placed),
        )

    def _refuse_named(self, memory_bytes: int, tightest: Limit) -> None:
        fits = math.floor(max(0, tightest.limit_bytes) / GIB * 10) / 10
        raise CapacityError(
            f"--memory-gb asks for {format_bytes(memory_bytes)}; {tightest.name} is"
            f" {format_bytes(max(0, tightest.limit_bytes))} ({tightest.why}).",
            hint=f"Ask for at most --memory-gb {fits:g}.",
        )

    def _refuse(self, tightest: Limit) -> None:
        s = self.sizes
        needed = self._total(s.floor_slots, self.context)
        raise CapacityError(
            f"Needs {format_bytes(needed)} with a context of {self.context} tokens (weights"
            f" {format_bytes(s.resident_bytes)}, state {format_bytes(s.state_at(self.context))}, workspace"
            f" {format_bytes(s.workspace_at(self.context))}, one token's {s.floor_slots} experts"
            f" {format_bytes(s.floor_slots * s.record_bytes)}, the rest"
            f" {format_bytes(needed - self._accounted())}); {tightest.name} is"
            f" {format_bytes(max(0, tightest.limit_bytes))} ({tightest.why}).",
            hint=self._smaller(tightest),
        )

    def _accounted(self) -> int:
        s = self.sizes
        activity = s.state_at(self.context) + s.workspace_at(self.context)
        return s.resident_bytes + activity + s.floor_slots * s.record_bytes

    def _smaller(self, tightest: Limit) -> str:
        """Say what would fit instead: a shorter context, a larger knob, fewer slots, or how much memory it takes."""
        context = self.context // 2
        while context >= 1024:
            if self._room(tightest.limit_bytes, context) >= self.sizes.floor_slots:
                needed = self._total(self.sizes.floor_slots, context)
                return f"Use --context {context} (needs {format_bytes(needed)})."
            context //= 2
        needed = self._total(self.sizes.floor_slots, self.context)
        wanted = f"{ceil_gib(needed, 1):g} GiB"
        if tightest.name.startswith("--"):
            return f"Ask for at least {tightest.name} {wanted.removesuffix(' GiB')}."
        ceiling = min(limit.limit_bytes for limit in self.hard)
        slots = (ceiling - self._total(0, self.context)) // self.sizes.record_bytes
        if slots >= 1:
            few = min(slots, self.sizes.floor_slots)
            return f"Free memory until {wanted} fit, or go past the reserves with --slots {few}, slowly."
        return f"It takes a limit of {wanted}: no size fits this machine."


def _unused_knobs(request: Request) -> Iterator[str]:
    """Name the knobs that another one overrules."""
    sizing = [
        ("--slots", request.num_slots),
        ("--cache-gb", request.cache_bytes),
        ("--memory-gb", request.memory_bytes),
    ]
    given = [name for name, value in sizing if value is not None]
    for loser in given[1:]:
        yield f"{loser} is not used: {given[0]} sizes the plan"
    if given and request.memory_limit_bytes is not None:
        yield f"--memory-limit-gb only caps: {given[0]} sizes the plan, and it is never resized"

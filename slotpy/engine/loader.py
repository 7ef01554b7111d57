"""Composition root: wires checkpoint, store, slot caches and model. The only place that does."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from slotpy import budget, config
from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.engine import device, sizes
from slotpy.errors import CapacityError
from slotpy.layers.ngram import StreamedRows
from slotpy.layers.switch import StreamedExperts
from slotpy.machine.machines import Machine
from slotpy.models.qwen4_exp import Qwen4Exp
from slotpy.models.weights import Weights
from slotpy.slots.cache import SlotCache
from slotpy.slots.resizing import resize_within
from slotpy.store.base import Store
from slotpy.store.open import open_store


@dataclass(frozen=True)
class EngineOptions:
    """What a user may choose about loading. The first four size it, see `budget.Request`; none: what fits the memory.

    `native` picks the reader: True demands the C library, False the pure-Python one, None takes C where it is built.
    `float32` computes in float32 throughout, to compare with references.
    """

    slots: int | None = None
    cache_bytes: int | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    direct_io: bool = False
    native: bool | None = None
    context_tokens: int | None = None
    float32: bool = False

    def request(self) -> budget.Request:
        """Give the part that the planner wants."""
        return budget.Request(
            num_slots=self.slots,
            cache_bytes=self.cache_bytes,
            memory_bytes=self.memory_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
            context_tokens=self.context_tokens,
        )


@dataclass
class LoadedModel:
    """A model ready to run, with the parts whose counters and limits the engine shows."""

    checkpoint: Checkpoint
    model: Qwen4Exp
    store: Store
    experts: SlotCache
    rows: SlotCache
    machine: Machine
    plan: budget.Plan
    sizes: budget.Sizes
    request: budget.Request
    notes: tuple[str, ...]

    @property
    def context_tokens(self) -> int:
        return self.plan.context_tokens

    def desired_plan(self) -> budget.Plan:
        """Plan as a fresh start would now, were this model not loaded. Raises CapacityError."""
        machine = device.this_machine()
        held = device.held_bytes(machine)
        if machine.is_discrete:
            machine = dataclasses.replace(machine, gpu_available_bytes=machine.gpu_available_bytes + held)
        else:
            available = min(machine.available_bytes + held, machine.ram_bytes)
            machine = dataclasses.replace(machine, available_bytes=available)
        request = dataclasses.replace(self.request, context_tokens=self.context_tokens)
        return budget.plan(machine, self.sizes, request)

    def resize(self, num_slots: int) -> int:
        """Change the number of slots within the plan; gives how many records were kept. Between two steps only.

        The workspace, which no step uses then, pays for what exists twice for a moment.
        """
        kept = resize_within(self.experts, num_slots, self.plan.ledger.workspace_bytes)
        self.plan = budget.resized(self.plan, self.experts.num_slots)
        device.apply_limits(self.plan, self.machine)
        return kept

    def retire(self) -> None:
        """End all slot leases; only after the step's outputs and states were evaluated."""
        self.experts.retire()
        self.rows.retire()

    def abandon(self) -> None:
        """End all slot leases after a step that failed; its graphs must not be evaluated any more."""
        self.experts.abandon()
        self.rows.abandon()

    def close(self) -> None:
        self.store.close()


def load(directory: Path, options: EngineOptions) -> LoadedModel:
    """Open a checkpoint directory and build its model, within a memory plan made first.

    Raises CheckpointError for files that are not what the config says, CapacityError for a plan that does not fit.
    """
    config.prepare_mlx_environment()
    checkpoint = open_checkpoint(directory)
    on_cpu = device.backend() == "cpu"
    wide = sizes.is_wide(checkpoint, on_cpu)
    dtype = mx.float32 if options.float32 else mx.bfloat16
    machine, measured = device.this_machine(), sizes.measure(checkpoint, on_cpu=on_cpu, float32=options.float32)
    plan = budget.plan(machine, measured, options.request())
    if plan.simulated:
        raise CapacityError(f"The plan is for a simulated machine, {plan.machine}.", hint="Plan for this one.")
    device.apply_limits(plan, machine)
    store = open_store(
        checkpoint.files, num_threads=config.READ_THREADS, direct=options.direct_io, native=options.native
    )
    num_layers = checkpoint.config.num_hidden_layers
    experts = SlotCache(checkpoint.experts, store, num_slots=plan.num_slots, num_layers=num_layers)
    rows = SlotCache(checkpoint.rows, store, num_slots=sizes.num_row_slots(checkpoint), num_layers=1)
    model = Qwen4Exp(
        checkpoint.config,
        Weights(checkpoint, dtype, wide),
        # MLX's CPU kernels are several times faster in float32, and its gather_mm knows nothing else there.
        StreamedExperts(experts, checkpoint.expert_format, mx.float32 if on_cpu else dtype),
        StreamedRows(rows, checkpoint.row_format, row_scale(checkpoint), dtype),
    )
    notes = (*checkpoint.notes, *kernel_notes(), *plan.unused_knobs, *plan.notes)
    return LoadedModel(checkpoint, model, store, experts, rows, machine, plan, measured, options.request(), notes)


def kernel_notes() -> tuple[str, ...]:
    """Say what to expect where MLX has no compiled kernels yet."""
    directory = config.kernel_cache_dir()
    if not mx.cuda.is_available() or (directory.is_dir() and any(directory.iterdir())):
        return ()
    return (f"MLX compiles its CUDA kernels at first use, which takes minutes; they are kept in {directory}",)


def row_scale(checkpoint: Checkpoint) -> float:
    """Read the global scale of an FP8 n-gram table; 1 where there is none."""
    if checkpoint.row_scale is None:
        return 1.0
    return float(checkpoint.index.read_array(checkpoint.row_scale).reshape(-1)[0])

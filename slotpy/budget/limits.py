"""What may be taken of a machine, and why not more: the limits on a plan, and where the rest of a model lives."""

from collections.abc import Iterator

from slotpy.budget.types import Limit, Placement, Plan, Request, Sizes
from slotpy.machine.machines import GIB, Machine, slack_bytes
from slotpy.units import format_bytes

RUNTIME_BYTES = 320 << 20
"""Python, numpy, MLX and their libraries, before any model: 190 MiB measured on Linux, with room for the tokenizer."""

CUDA_RUNTIME_BYTES = 1 << 30
"""A CUDA context with its kernels and libraries, in GPU memory. Not measured: a bound."""

RAM_PERCENT = 70
"""How much of the RAM an automatic plan may take: the rest is for the system, other programs and the page cache."""

GPU_PERCENT = 90
"""How much of a GPU's own memory a plan may take. Peers that took more ran up to eight times slower."""

WORKING_SET_MARGIN_BYTES = 2 * GIB
"""What a plan stays below Metal's recommended working set: beyond it, pages are evicted under the GPU."""

KNEE_PERCENT = 50
"""Share of the experts past which no gain was measured, short of holding them all: on the three recorded traces the
table is then within 0.8 points of Belady's bound (bench/results/slot_replay.csv)."""


def wired_limit_bytes(made: Plan, machine: Machine) -> int:
    """Give what Metal should keep resident: the plan, but not all that it recommends; 0 leaves MLX's default.

    Left at MLX's default, macOS may page weights out between tokens: a public report has decode 23 times slower.
    """
    if machine.backend != "metal":
        return 0
    return max(0, min(made.total_bytes, machine.working_set_bytes * 8 // 10))


def hard_limits(machine: Machine) -> Iterator[Limit]:
    """Yield the limits that no knob lifts."""
    if machine.is_discrete:
        yield Limit("GPU memory", machine.gpu_bytes * GPU_PERCENT // 100, f"{GPU_PERCENT} % of one GPU's own memory")
        return
    yield Limit("RAM", machine.ram_bytes - machine.page_cache_bytes, _ram_why(machine))
    if machine.working_set_bytes:
        yield Limit(
            "working set",
            machine.working_set_bytes - WORKING_SET_MARGIN_BYTES,
            f"what Metal recommends, less {format_bytes(WORKING_SET_MARGIN_BYTES)}",
        )


def _ram_why(machine: Machine) -> str:
    if machine.page_cache_bytes:
        return f"all there is, less {format_bytes(machine.page_cache_bytes)} for the page cache of the n-gram table"
    return "all that this process may have"


def soft_limits(machine: Machine, request: Request) -> Iterator[Limit]:
    """Yield the limits that what was asked for moves."""
    if machine.is_discrete:
        reserve = GIB // 2
        yield Limit("available now", machine.gpu_available_bytes - reserve, "free GPU memory, less 512 MiB")
    else:
        reserve = slack_bytes(machine.ram_bytes)
        yield Limit(
            "available now",
            machine.available_bytes - reserve - machine.page_cache_bytes,
            f"reclaimable memory, less {format_bytes(reserve)}",
        )
    if request.memory_limit_bytes is not None:
        yield Limit("--memory-limit-gb", request.memory_limit_bytes, "your ceiling")
    if request.memory_bytes is not None:
        yield Limit("--memory-gb", request.memory_bytes, "named by you, never resized")
    elif request.memory_limit_bytes is None and not machine.is_discrete:
        yield Limit("share of RAM", machine.ram_bytes * RAM_PERCENT // 100, f"{RAM_PERCENT} % of RAM")


def place(machine: Machine, sizes: Sizes, num_slots: int) -> tuple[tuple[Placement, ...], list[str]]:
    """Say where the n-gram table and the experts without a slot live, and what of that is not built yet."""
    experts_bytes = (sizes.num_records - num_slots) * sizes.record_bytes
    if not machine.is_discrete:
        notes = ["pinning frees nothing here: CPU and GPU share the memory"] if machine.backend == "cuda" else []
        return (
            *_placement("experts without a slot", "NVMe", experts_bytes),
            *_placement("n-gram table", "NVMe", sizes.table_bytes),
            *_placement("kept free for the page cache", "RAM", machine.page_cache_bytes),
        ), notes
    room = max(0, machine.available_bytes - slack_bytes(machine.ram_bytes) - RUNTIME_BYTES)
    table_in_ram = sizes.table_bytes if sizes.table_bytes <= room else 0
    room -= table_in_ram
    experts_in_ram = min(experts_bytes, room // sizes.record_bytes * sizes.record_bytes)
    placements = (
        *_placement("experts without a slot", "system RAM", experts_in_ram),
        *_placement("experts without a slot", "NVMe", experts_bytes - experts_in_ram),
        *_placement("n-gram table", "system RAM" if table_in_ram else "NVMe", sizes.table_bytes),
        Placement("runtime and load buffers", "system RAM", RUNTIME_BYTES),
    )
    notes = []
    if table_in_ram or experts_in_ram:
        notes.append("system RAM holds them as the operating system's page cache: slotpy pins nothing yet")
    if machine.num_gpus > 1:
        notes.append(f"slotpy computes on one GPU; the memory of the other {machine.num_gpus - 1} stays unused")
    return placements, notes


def _placement(what: str, where: str, nbytes: int) -> tuple[Placement, ...]:
    return (Placement(what, where, nbytes),) if nbytes else ()

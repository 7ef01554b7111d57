"""What MLX computes on, and the limits it is given there."""

import mlx.core as mx

from slotpy.budget import Plan, wired_limit_bytes
from slotpy.machine import hardware
from slotpy.machine.machines import Backend, Machine


def backend() -> Backend:
    """Name the backend of MLX's default device."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def this_machine() -> Machine:
    """Measure this machine as the planner wants it."""
    return hardware.this_machine(backend(), mx.device_info(mx.default_device()))


def held_bytes(machine: Machine) -> int:
    """Give the memory that this process holds of what the machine has available: it counts as free for a new plan."""
    if machine.is_discrete:
        return int(mx.get_active_memory() + mx.get_cache_memory())
    return hardware.process_bytes()


def apply_limits(plan: Plan, machine: Machine) -> None:
    """Cap what MLX keeps of freed memory, and have Metal keep the plan resident."""
    mx.set_cache_limit(plan.ledger.allocator_cache_bytes)
    wired = wired_limit_bytes(plan, machine)
    if wired:
        mx.set_wired_limit(wired)

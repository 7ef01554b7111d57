"""The memory plan: a ledger of what a model will need, in bytes, before anything is allocated.

`doctor`, `run` and the governor all call `plan`, so what doctor prints is what runs. Pure integers: no I/O, no MLX, no
clock. More memory never plans fewer slots or a shorter context.
"""

from slotpy.budget.limits import wired_limit_bytes
from slotpy.budget.planner import pass_tokens, plan
from slotpy.budget.types import Ledger, Limit, Placement, Plan, Request, Sizes, gib_to_bytes, resized

__all__ = [
    "Ledger",
    "Limit",
    "Placement",
    "Plan",
    "Request",
    "Sizes",
    "gib_to_bytes",
    "pass_tokens",
    "plan",
    "resized",
    "wired_limit_bytes",
]

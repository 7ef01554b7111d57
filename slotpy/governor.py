"""Decides while a model runs whether its slots should be fewer or more, and has it done. Knows no MLX and no files.

Compares every 15 seconds with what a fresh start would plan, between requests; sheds at once, also between two tokens,
when the operating system is pressed for memory. Sizes that a user named never change. What is resized is slots alone:
the context stays, and there is no prefix cache yet that could go first.

Never does anything by itself: `check` is called by whoever runs the model, on the thread that owns it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slotpy.budget import Plan
from slotpy.errors import CapacityError
from slotpy.machine.pressure import Pressure
from slotpy.units import format_bytes

POLL_S = 15.0
PRESSURE_S = 1.0
"""How often the operating system is asked. A look takes a few ms on a busy machine."""

SETTLE_S = 10.0
"""After shedding under pressure, the time until it counts again: the kernel's own averages span ten seconds."""

CALM_S = 60.0
"""Growth waits this long after pressure, and after the last resize; the start counts as one."""

SHRINK_BYTES = 1_000_000_000
GROW_BYTES = 2_000_000_000
"""Differences below these are left alone, else the size would follow every other program's breath."""

SHED = {Pressure.WARNING: (2_000_000_000, 15), Pressure.CRITICAL: (4_000_000_000, 50)}
"""What pressure takes from the slots: so many bytes or per cent of them, whichever is more."""

_log = logging.getLogger(__name__)


class Resizable(Protocol):
    """A loaded model, as the governor sees it."""

    plan: Plan

    def desired_plan(self) -> Plan:
        """Plan as a fresh start would now, were this model not loaded. Raises CapacityError."""

    def resize(self, num_slots: int) -> int:
        """Change the number of slots, `plan` with it; give how many records were kept. Between two steps only."""


class PressureProbe(Protocol):
    def level(self) -> Pressure: ...


@dataclass(frozen=True)
class Resize:
    """Record one change of size: what, when and why."""

    reason: str
    from_slots: int
    to_slots: int
    record_bytes: int
    kept: int
    at_s: float

    def __str__(self) -> str:
        before, after = (format_bytes(slots * self.record_bytes) for slots in (self.from_slots, self.to_slots))
        return (
            f"slots resized: {self.reason}: {before} to {after} ({self.from_slots} to {self.to_slots} slots,"
            f" {self.kept} records kept)"
        )


class Governor:
    """Watch one loaded model. `resizes` is its history, oldest first."""

    def __init__(
        self,
        model: Resizable,
        *,
        floor_slots: int,
        probe: PressureProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`floor_slots` is the size that always works: nothing shrinks below it, unless it started there."""
        self._model, self._probe, self._clock = model, probe, clock
        self._floor = min(floor_slots, model.plan.num_slots)
        self.resizes: list[Resize] = []
        self._polled_at = self._asked_at = self._resized_at = clock()
        self._pressed_at = self._shed_at = float("-inf")

    @property
    def plan(self) -> Plan:
        return self._model.plan

    def check(self, between_requests: bool) -> Resize | None:
        """Look whether it is time, and resize if need be. Cheap when it is not: call it before every step.

        No graph may be unevaluated and no lease out. Contents change, never the bytes of a reply.
        """
        if not self.plan.is_managed:
            return None
        now = self._clock()
        if now - self._asked_at >= PRESSURE_S:
            self._asked_at = now
            level = self._probe.level()
            if level > Pressure.NORMAL:
                self._pressed_at = now
                return self._shed(level, now)
        if not between_requests or now - self._polled_at < POLL_S:
            return None
        self._polled_at = now
        return self._follow(now)

    def as_dict(self) -> dict[str, object]:
        """Give what an API shows."""
        return {
            "managed": self.plan.is_managed,
            "num_slots": self.plan.num_slots,
            "floor_slots": self._floor,
            "resizes": [vars(resize) for resize in self.resizes],
        }

    def _shed(self, level: Pressure, now: float) -> Resize | None:
        """Give memory back at once; again only after the kernel has had time to notice."""
        if now - self._shed_at < SETTLE_S:
            return None
        self._shed_at = now
        least_bytes, percent = SHED[level]
        shed_bytes = max(least_bytes, self.plan.ledger.slots_bytes * percent // 100)
        target = self.plan.num_slots - shed_bytes // self._record_bytes
        desired, _ = self._desired()
        return self._resize(min(target, desired), f"memory pressure is {level.name.lower()}", now)

    def _follow(self, now: float) -> Resize | None:
        """Move to what a fresh start would plan, if that is far enough away."""
        desired, limit = self._desired()
        difference = (desired - self.plan.num_slots) * self._record_bytes
        if difference <= -SHRINK_BYTES:
            return self._resize(desired, f"{limit} is the limit now", now)
        calm = now - self._pressed_at >= CALM_S and now - self._resized_at >= CALM_S
        # Once availability is no longer what limits, recovery is finished however small the step.
        recovered = difference > 0 and limit != "available now"
        if calm and (difference >= GROW_BYTES or recovered):
            return self._resize(desired, "memory is free again", now)
        return None

    def _desired(self) -> tuple[int, str]:
        """Give the slots of a fresh plan and what limits them; the floor where no plan fits."""
        try:
            fresh = self._model.desired_plan()
        except CapacityError:
            return self._floor, "available now"
        return fresh.num_slots, fresh.binding.name

    def _resize(self, num_slots: int, reason: str, now: float) -> Resize | None:
        before = self.plan.num_slots
        num_slots = max(self._floor, min(num_slots, self.plan.num_records))
        if num_slots == before:
            return None
        record_bytes = self._record_bytes
        kept = self._model.resize(num_slots)
        self._resized_at = now
        self.resizes.append(Resize(reason, before, num_slots, record_bytes, kept, now))
        _log.warning("%s", self.resizes[-1])
        return self.resizes[-1]

    @property
    def _record_bytes(self) -> int:
        return self.plan.ledger.slots_bytes // self.plan.num_slots

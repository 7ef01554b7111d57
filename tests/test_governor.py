"""When slots are resized, by how much and why: a scripted model, machine and clock."""

import dataclasses
import logging

import pytest

from slotpy import budget
from slotpy.budget import Request, plan
from slotpy.doctor import published
from slotpy.errors import CapacityError
from slotpy.governor import Governor
from slotpy.machine.machines import GIB, NAMED
from slotpy.machine.pressure import Pressure

FLASH = published.find("qwen3.8-flash-next").sizes
GB = 1_000_000_000


class Model:
    """A loaded model without memory: remembers what it was told."""

    def __init__(self, request: Request | None = None, available: int = 40 * GIB) -> None:
        self.request, self.available = request or Request(), available
        self.plan = self.desired_plan()

    def desired_plan(self) -> budget.Plan:
        machine = dataclasses.replace(NAMED["mac-48"], available_bytes=self.available)
        return plan(machine, FLASH, dataclasses.replace(self.request, context_tokens=32_768))

    def resize(self, num_slots: int) -> int:
        kept = min(num_slots, self.plan.num_slots)
        self.plan = budget.resized(self.plan, num_slots)
        return kept


class World:
    """A model under a governor, with time and pressure in the test's hands."""

    def __init__(self, request: Request | None = None, available: int = 40 * GIB) -> None:
        self.now, self.pressure = 1000.0, Pressure.NORMAL
        self.model = Model(request, available)
        self.governor = Governor(self.model, floor_slots=480, probe=self, clock=lambda: self.now)

    def level(self) -> Pressure:
        return self.pressure

    def after(self, seconds: float, *, between_requests: bool = True):
        self.now += seconds
        return self.governor.check(between_requests=between_requests)

    @property
    def slots(self) -> int:
        return self.model.plan.num_slots

    @property
    def slots_bytes(self) -> int:
        return self.model.plan.ledger.slots_bytes


def test_nothing_happens_while_nothing_changes():
    world = World()
    assert [world.after(20) for _ in range(20)] == [None] * 20


def test_less_available_memory_shrinks_at_the_next_poll_between_requests():
    world = World()
    before = world.slots_bytes
    world.model.available = 20 * GIB
    assert world.after(14) is None
    assert world.after(1, between_requests=False) is None
    resize = world.after(1)
    assert (resize.to_slots, "available now" in resize.reason) == (world.slots, True)
    assert world.slots_bytes < before - GB
    assert world.model.plan.total_bytes <= 20 * GIB


@pytest.mark.parametrize(("less", "shrinks"), [(int(0.9 * GB), False), (int(1.1 * GB), True)])
def test_a_shrink_is_worth_a_gigabyte(less, shrinks):
    world = World(available=30 * GIB)
    world.model.available -= less
    assert (world.after(15) is not None) == shrinks


@pytest.mark.parametrize(("more", "grows"), [(int(1.8 * GB), False), (int(2.2 * GB), True)])
def test_growth_is_worth_two(more, grows):
    world = World(available=20 * GIB)
    world.model.available += more
    assert world.after(45) is None  # the start counts as a resize
    assert (world.after(15) is not None) == grows


def test_recovery_is_finished_however_small_the_step():
    world = World()
    whole = world.slots
    world.model.resize(whole - 300)
    assert world.after(60).to_slots == whole


def test_growth_waits_for_a_minute_after_a_shrink():
    world = World()
    world.after(300)
    world.model.available = 20 * GIB
    assert world.after(15)
    world.model.available = 40 * GIB
    assert [world.after(15) is not None for _ in range(4)] == [False, False, False, True]


def test_growth_waits_for_a_minute_of_calm():
    world = World(available=20 * GIB)
    world.after(100)
    world.pressure = Pressure.WARNING
    world.after(15)
    world.pressure, world.model.available = Pressure.NORMAL, 40 * GIB
    assert [world.after(15) is not None for _ in range(5)] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("level", "available", "shed"),
    [
        (Pressure.WARNING, 20 * GIB, 2 * GB),
        (Pressure.WARNING, 40 * GIB, 0.15),
        (Pressure.CRITICAL, 15 * GIB, 4 * GB),
        (Pressure.CRITICAL, 40 * GIB, 0.5),
    ],
)
def test_pressure_sheds_at_once_between_tokens_too(level, available, shed):
    world = World(available=available)
    before = world.slots_bytes
    world.pressure = level
    resize = world.after(1, between_requests=False)
    assert level.name.lower() in resize.reason
    expected = shed if shed > 1 else shed * before
    assert before - world.slots_bytes == pytest.approx(expected, abs=2 * FLASH.record_bytes)


def test_pressure_that_goes_on_sheds_again_but_not_before_it_can_have_noticed():
    world = World()
    world.pressure = Pressure.WARNING
    resized = [world.after(1, between_requests=False) is not None for _ in range(21)]
    assert [second for second, did in enumerate(resized) if did] == [0, 10, 20]


def test_pressure_goes_down_to_what_a_fresh_start_would_plan():
    world = World()
    world.model.available = 12 * GIB
    world.pressure = Pressure.WARNING
    world.after(1)
    assert world.slots == world.model.desired_plan().num_slots


def test_nothing_shrinks_below_the_floor_even_where_no_plan_fits():
    world = World()
    world.model.available = 4 * GIB
    with pytest.raises(CapacityError):
        world.model.desired_plan()
    assert world.after(15).to_slots == 480
    world.pressure = Pressure.CRITICAL
    assert world.after(100) is None


@pytest.mark.parametrize(
    "request_", [Request(num_slots=5000), Request(cache_bytes=GIB), Request(memory_bytes=20 * GIB)]
)
def test_named_sizes_are_never_resized(request_):
    world = World(request_)
    world.pressure, world.model.available = Pressure.CRITICAL, 15 * GIB
    assert [world.after(15) for _ in range(10)] == [None] * 10


def test_a_limit_of_the_users_is_kept_while_it_moves():
    world = World(Request(memory_limit_bytes=24 * GIB), available=14 * GIB)
    world.model.available = 45 * GIB
    assert world.after(60)
    assert 23 * GIB < world.model.plan.total_bytes <= 24 * GIB


def test_each_resize_is_one_log_line_with_reason_and_sizes(caplog):
    world = World()
    world.model.available = 20 * GIB
    with caplog.at_level(logging.WARNING):
        resize = world.after(15)
    assert [record.getMessage() for record in caplog.records] == [str(resize)]
    assert str(resize).startswith("slots resized: available now is the limit now: 26.8 GiB to ")
    assert f"({resize.from_slots} to {resize.to_slots} slots" in str(resize)
    shown = world.governor.as_dict()
    assert (shown["num_slots"], len(shown["resizes"])) == (world.slots, 1)

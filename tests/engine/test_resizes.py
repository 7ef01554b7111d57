"""A loaded model that is resized while it talks: the same bytes, the plan kept, by the real governor."""

import dataclasses

import pytest

from slotpy import budget, config
from slotpy.doctor.sizing import find_subject, judge
from slotpy.engine import device
from slotpy.engine.engine import Engine
from slotpy.engine.loader import EngineOptions, load
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.errors import CapacityError
from slotpy.governor import Governor
from slotpy.machine.machines import Machine
from slotpy.machine.pressure import Pressure
from slotpy.slots.resizing import resize_within
from tests.golden_model import GOLDEN, TOKENS, load_golden

GREEDY = SamplingParams(temperature=0)
PROMPT = TOKENS[:20].tolist()


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Plan for a fixed machine, whatever the one that runs the tests has free."""
    fixed = Machine("this machine", device.backend(), 16 << 30, 12 << 30)
    monkeypatch.setattr(device, "this_machine", lambda: fixed)
    return fixed


@pytest.fixture
def loaded():
    model = load_golden()
    yield model
    model.close()


def greedy(session, tokens, count):
    return [token for token, _ in session.generate(tokens, GREEDY, count, frozenset())]


def turns(session, resize=lambda: None):
    """Hold a conversation of three turns."""
    tokens, replies = PROMPT, []
    for extra in ([], [9, 10], [11]):
        resize()
        tokens = tokens + extra
        replies.append(greedy(session, tokens, 6))
        tokens = tokens + replies[-1]
    return replies


def test_resizing_between_tokens_and_between_turns_changes_no_byte(loaded):
    plain = turns(Session(loaded, num_valid_ids=256))
    sizes = iter([40, 3, 11, 1, 30, 7, 128, 2] * 10)
    seen = []

    def check(between_requests):
        seen.append(between_requests)
        loaded.resize(next(sizes))

    assert turns(Session(loaded, num_valid_ids=256, check=check)) == plain
    assert seen.count(True) == 3
    assert seen.count(False) == 15


def test_the_plan_follows_the_size_and_the_copies_fit_the_workspace(loaded, monkeypatch):
    allowed = []

    def watched(cache, num_slots, spare_bytes):
        allowed.append(spare_bytes)
        return resize_within(cache, num_slots, spare_bytes)

    monkeypatch.setattr("slotpy.engine.loader.resize_within", watched)
    loaded.resize(17)
    assert (loaded.plan.num_slots, loaded.experts.num_slots) == (17, 17)
    assert loaded.plan.ledger.slots_bytes == 17 * loaded.experts.records.record_nbytes
    assert allowed == [loaded.plan.ledger.workspace_bytes]


def test_metal_is_told_of_the_new_size(loaded, monkeypatch):
    given = []
    monkeypatch.setattr(device.mx, "set_wired_limit", given.append)
    loaded.machine = dataclasses.replace(loaded.machine, backend="metal", working_set_bytes=20 << 30)
    loaded.resize(11)
    assert given == [loaded.plan.total_bytes]


def test_passes_shorten_along_a_prompt_and_the_reply_is_the_same(loaded, monkeypatch):
    whole = greedy(Session(loaded, num_valid_ids=256), TOKENS.tolist(), 6)
    monkeypatch.setattr(config, "PREFILL_PRODUCT", 32 * 64)
    session = Session(loaded, num_valid_ids=256)
    step, sizes = session.step, []

    def count(tokens, **more):
        sizes.append((len(tokens), len(more.get("upcoming", ()))))
        return step(tokens, **more)

    monkeypatch.setattr(session, "step", count)
    assert greedy(session, TOKENS.tolist(), 6) == whole
    passes = [size for size, _ in sizes[:-5]]
    assert passes[0] == 32
    assert passes == sorted(passes, reverse=True)
    assert len(set(passes)) > 1
    assert sum(passes) == len(TOKENS)


class Calls:
    """Pressure that comes and goes with the calls."""

    def __init__(self, levels):
        self.levels = iter(levels)

    def level(self):
        return next(self.levels, Pressure.NORMAL)


def test_a_governor_sheds_between_tokens_and_the_reply_is_the_same():
    model = load(GOLDEN, EngineOptions(float32=True, context_tokens=256))
    assert model.plan.is_managed
    plain = greedy(Session(model, num_valid_ids=256), PROMPT, 12)
    time = iter(range(0, 10_000, 20))
    levels = [Pressure.NORMAL, Pressure.WARNING, Pressure.NORMAL, Pressure.CRITICAL]
    governor = Governor(model, floor_slots=3, probe=Calls(levels), clock=lambda: float(next(time)))
    before = model.plan.num_slots
    assert greedy(Session(model, num_valid_ids=256, check=governor.check), PROMPT, 12) == plain
    assert [(r.from_slots, r.to_slots) for r in governor.resizes] == [(before, 3)]
    assert governor.check(True) or governor.check(True) or governor.check(True) or governor.check(True)
    assert model.plan.num_slots == before
    assert greedy(Session(model, num_valid_ids=256, check=governor.check), PROMPT, 12) == plain
    model.close()


def test_a_fresh_plan_counts_our_own_memory_as_available(loaded, machine, monkeypatch):
    loaded.request = budget.Request()
    monkeypatch.setattr(device, "this_machine", lambda: dataclasses.replace(machine, available_bytes=1 << 20))
    monkeypatch.setattr(device, "held_bytes", lambda machine: 1 << 40)
    assert loaded.desired_plan().num_slots == loaded.plan.num_records
    assert loaded.desired_plan().context_tokens == loaded.context_tokens
    monkeypatch.setattr(device, "held_bytes", lambda machine: 0)
    with pytest.raises(CapacityError):
        loaded.desired_plan()


def test_a_simulated_machine_is_never_loaded_on(machine, monkeypatch):
    monkeypatch.setattr(device, "this_machine", lambda: dataclasses.replace(machine, simulated=True))
    with pytest.raises(CapacityError, match="simulated"):
        load(GOLDEN, EngineOptions(slots=4))


def test_a_refused_plan_allocates_nothing(monkeypatch):
    monkeypatch.setattr("slotpy.engine.loader.SlotCache", None)
    with pytest.raises(CapacityError, match="--memory-gb"):
        load(GOLDEN, EngineOptions(memory_bytes=1 << 59))


def test_losing_knobs_are_told():
    model = load(GOLDEN, EngineOptions(slots=4, memory_bytes=4 << 30, context_tokens=256))
    assert any(note.startswith("--memory-gb is not used") for note in model.notes)
    model.close()


def test_mlx_is_given_the_plans_limits(machine, monkeypatch):
    given = {}
    monkeypatch.setattr(device.mx, "set_cache_limit", lambda limit: given.update(cache=limit))
    monkeypatch.setattr(device.mx, "set_wired_limit", lambda limit: given.update(wired=limit))
    machine = dataclasses.replace(machine, backend="metal", working_set_bytes=20 << 30)
    made = budget.plan(machine, find_subject(str(GOLDEN), on_cpu=True).sizes)
    device.apply_limits(made, machine)
    assert given == {"cache": config.ALLOCATOR_CACHE_BYTES, "wired": made.total_bytes}
    given.clear()
    device.apply_limits(made, dataclasses.replace(machine, backend="cpu"))
    assert "wired" not in given


def test_what_doctor_plans_is_what_a_run_uses(machine):
    request = budget.Request(memory_limit_bytes=1600 << 20, context_tokens=1000)
    verdict = judge(find_subject("demo", on_cpu=machine.backend == "cpu"), machine, request)
    with Engine.open("demo", EngineOptions(memory_limit_bytes=1600 << 20, context_tokens=1000)) as engine:
        assert engine.loaded.plan == verdict.plan
        assert engine.new_session()._loaded.context_tokens == 1000


def test_a_conversation_asks_the_governor(monkeypatch):
    asked = []
    monkeypatch.setattr(Governor, "check", lambda self, between_requests: asked.append(between_requests))
    with Engine.open("demo", EngineOptions(slots=64)) as engine:
        greedy(engine.new_session(), [5, 6, 7], 3)
    assert asked == [True, False, False]

"""The memory plan: its sums, its limits and their reasons, its refusals, and that more memory never plans less."""

import dataclasses
import random

import pytest

from slotpy import budget
from slotpy.budget import Request, Sizes, gib_to_bytes, pass_tokens, plan, wired_limit_bytes
from slotpy.doctor import published
from slotpy.errors import CapacityError, UsageError
from slotpy.machine.machines import GIB, NAMED, Machine, slack_bytes

FLASH = published.find("qwen3.8-flash-next").sizes
MAC = NAMED["mac-48"]
GPU = NAMED["rtx-pro-6000"]


def machine(**changes: object) -> Machine:
    return dataclasses.replace(MAC, **changes)


def size(made: budget.Plan) -> tuple[int, int]:
    return made.num_slots, made.context_tokens


def planned(where: Machine, sizes: Sizes, request: Request | None = None) -> tuple[int, int]:
    """Give the size of a plan, (0, 0) where it is refused."""
    try:
        return size(plan(where, sizes, request))
    except CapacityError:
        return (0, 0)


def test_total_is_the_sum_of_the_ledger_and_the_peak_leaves_out_the_margin():
    made = plan(MAC, FLASH)
    ledger = dataclasses.asdict(made.ledger)
    assert made.total_bytes == sum(ledger.values())
    assert made.expected_peak_bytes == made.total_bytes - made.ledger.margin_bytes
    assert made.ledger.slots_bytes == made.num_slots * FLASH.record_bytes
    assert made.total_bytes <= min(limit.limit_bytes for limit in made.limits)


@pytest.mark.parametrize(
    ("changes", "decides"),
    [
        ({}, "share of RAM"),
        ({"working_set_bytes": 20 * GIB}, "working set"),
        ({"available_bytes": 20 * GIB}, "available now"),
        ({"ram_bytes": 72 * GIB, "available_bytes": 68 * GIB, "working_set_bytes": 60 * GIB}, "measured gain"),
        ({"ram_bytes": 128 * GIB, "available_bytes": 120 * GIB, "working_set_bytes": 100 * GIB}, "all experts"),
    ],
)
def test_the_least_limit_decides_and_says_why(changes, decides):
    made = plan(machine(**changes), FLASH)
    assert made.binding.name == decides
    assert made.binding.why
    assert sum(limit.binding for limit in made.limits) == 1
    assert made.is_managed


def test_a_mac_leaves_the_margins_that_are_written_down():
    limits = {limit.name: limit.limit_bytes for limit in plan(MAC, FLASH).limits}
    assert limits["share of RAM"] == 48 * GIB * 70 // 100
    assert limits["working set"] == MAC.working_set_bytes - 2 * GIB
    assert limits["available now"] == MAC.available_bytes - 48 * GIB // 20


def test_the_reserve_is_small_on_small_machines():
    assert slack_bytes(GIB) == GIB // 5
    assert slack_bytes(16 * GIB) == 3 * GIB // 2
    assert slack_bytes(100 * GIB) == 5 * GIB


def test_memory_past_the_knee_goes_to_context_and_then_to_all_experts():
    sizes = [size(plan(machine(ram_bytes=ram, available_bytes=ram, working_set_bytes=0), FLASH))
             for ram in range(40 * GIB, 140 * GIB, GIB // 2)]  # fmt: skip
    knee = FLASH.num_records // 2
    assert {slots for slots, context in sizes if context > 32_768} == {knee, FLASH.num_records}
    assert {context for slots, context in sizes if slots == knee} == {32_768, 65_536, 131_072, 262_144}
    assert sizes[-1] == (FLASH.num_records, 262_144)
    assert sizes == sorted(sizes)


def test_named_slots_are_taken_as_named_up_to_all_and_never_managed():
    made = plan(MAC, FLASH, Request(num_slots=7))
    assert (made.num_slots, made.is_managed, made.binding.name) == (7, False, "--slots")
    assert any("fewer than one token uses" in note for note in made.notes)
    assert plan(NAMED["mac-128"], FLASH, Request(num_slots=10**9)).num_slots == FLASH.num_records


def test_cache_bytes_become_whole_slots():
    assert plan(MAC, FLASH, Request(cache_bytes=10 * FLASH.record_bytes + 1)).num_slots == 10
    with pytest.raises(CapacityError, match=r"holds no expert.*--cache-gb 0\.00257"):
        plan(MAC, FLASH, Request(cache_bytes=FLASH.record_bytes - 1))


def test_named_slots_may_go_past_what_is_free_with_a_note_but_not_past_what_there_is():
    busy = machine(available_bytes=6 * GIB)
    assert any("swap" in note for note in plan(busy, FLASH, Request(num_slots=3000)).notes)
    with pytest.raises(CapacityError, match=r"working set.*--slots (\d+)") as refused:
        plan(MAC, FLASH, Request(num_slots=20_000))
    fits = int(str(refused.value).rpartition(" ")[2].rstrip("."))
    assert plan(MAC, FLASH, Request(num_slots=fits)).num_slots == fits
    with pytest.raises(CapacityError):
        plan(MAC, FLASH, Request(num_slots=fits + 1))


def test_memory_gb_is_the_whole_process_and_is_never_resized():
    made = plan(MAC, FLASH, Request(memory_bytes=12 * GIB))
    assert 12 * GIB - FLASH.record_bytes < made.total_bytes <= 12 * GIB
    assert not made.is_managed
    with pytest.raises(CapacityError, match=r"--memory-gb asks for 60 GiB.*at most --memory-gb 35\.4"):
        plan(MAC, FLASH, Request(memory_bytes=60 * GIB))
    assert plan(MAC, FLASH, Request(memory_bytes=gib_to_bytes(35.4, "--memory-gb")))


def test_a_limit_replaces_the_share_and_the_knee_but_not_what_is_available():
    roomy = machine(ram_bytes=96 * GIB, available_bytes=90 * GIB, working_set_bytes=80 * GIB)
    made = plan(roomy, FLASH, Request(memory_limit_bytes=60 * GIB))
    assert (made.binding.name, made.is_managed) == ("--memory-limit-gb", True)
    assert made.num_slots > FLASH.num_records // 2
    busy = dataclasses.replace(roomy, available_bytes=30 * GIB)
    assert plan(busy, FLASH, Request(memory_limit_bytes=60 * GIB)).binding.name == "available now"
    with pytest.raises(CapacityError, match="--memory-limit-gb is 9 GiB"):
        plan(roomy, FLASH, Request(num_slots=5000, memory_limit_bytes=9 * GIB))


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (Request(num_slots=600, cache_bytes=GIB, memory_bytes=12 * GIB), ["--cache-gb", "--memory-gb"]),
        (Request(cache_bytes=2 * GIB, memory_bytes=12 * GIB), ["--memory-gb"]),
        (Request(memory_bytes=12 * GIB, memory_limit_bytes=20 * GIB), ["--memory-limit-gb"]),
        (Request(memory_limit_bytes=20 * GIB), []),
    ],
)
def test_losing_knobs_are_named(request_, names):
    assert [knob.split()[0] for knob in plan(MAC, FLASH, request_).unused_knobs] == names


def test_a_context_beyond_the_models_own_is_cut_with_a_note():
    made = plan(NAMED["mac-128"], FLASH, Request(context_tokens=10**6))
    assert made.context_tokens == 262_144
    assert any("262144" in note for note in made.notes)


def test_too_little_is_refused_with_a_context_that_fits():
    with pytest.raises(CapacityError, match=r"Needs .* GiB .*--context (\d+)") as refused:
        plan(MAC, FLASH, Request(memory_limit_bytes=gib_to_bytes(7.4, "x")))
    context = int(str(refused.value).partition("--context ")[2].split()[0])
    made = plan(MAC, FLASH, Request(memory_limit_bytes=gib_to_bytes(7.4, "x"), context_tokens=context))
    assert made.num_slots >= FLASH.floor_slots


def test_a_knob_that_asks_for_too_little_is_told_the_least():
    with pytest.raises(CapacityError, match=r"at least --memory-gb (\S+)") as refused:
        plan(MAC, FLASH, Request(memory_bytes=5 * GIB))
    least = float(str(refused.value).rpartition(" ")[2].rstrip("."))
    assert plan(MAC, FLASH, Request(memory_bytes=gib_to_bytes(least, "x"))).num_slots >= FLASH.floor_slots
    with pytest.raises(CapacityError):
        plan(MAC, FLASH, Request(memory_bytes=gib_to_bytes(least - 0.1, "x")))


def test_far_too_little_is_refused_with_the_memory_it_takes():
    with pytest.raises(CapacityError, match=r"takes a limit of (\S+) GiB"):
        plan(NAMED["mac-8"], FLASH)
    small = machine(available_bytes=3 * GIB)
    with pytest.raises(CapacityError, match=r"Free memory until (\S+) GiB fit.*--slots 480") as refused:
        plan(small, FLASH)
    wanted = gib_to_bytes(float(str(refused.value).partition("until ")[2].split()[0]), "x")
    enough = machine(available_bytes=wanted + slack_bytes(small.ram_bytes))
    assert plan(enough, FLASH).num_slots >= FLASH.floor_slots


@pytest.mark.parametrize("value", [-1, 2**60, 1.5, float("nan"), float("inf"), True])
def test_numbers_that_are_none_are_refused(value):
    if value is not True:  # a flag among the facts is no number
        with pytest.raises(UsageError):
            plan(machine(available_bytes=value), FLASH)
        with pytest.raises(UsageError):
            plan(MAC, dataclasses.replace(FLASH, resident_bytes=value))
    with pytest.raises(UsageError):
        plan(MAC, FLASH, Request(num_slots=0 if value is True else value))


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf"), 1e300])
def test_gib_that_are_no_amount_are_refused(gib):
    with pytest.raises(UsageError, match="--memory-gb"):
        gib_to_bytes(gib, "--memory-gb")


def test_gpu_memory_and_system_ram_are_kept_apart():
    made = plan(GPU, FLASH)
    assert made.total_bytes <= GPU.gpu_bytes * 90 // 100
    assert made.binding.name == "all experts"
    assert {(p.what, p.where) for p in made.placements} == {
        ("n-gram table", "system RAM"),
        ("runtime and load buffers", "system RAM"),
    }
    poor = dataclasses.replace(GPU, ram_bytes=32 * GIB, available_bytes=28 * GIB)
    assert size(plan(poor, FLASH)) == size(made)
    assert ("n-gram table", "NVMe") in {(p.what, p.where) for p in plan(poor, FLASH).placements}


def test_a_small_gpu_keeps_experts_in_ram_as_far_as_it_goes():
    small = dataclasses.replace(GPU, gpu_bytes=24 * GIB, gpu_available_bytes=23 * GIB)
    made = plan(small, FLASH)
    outside = (FLASH.num_records - made.num_slots) * FLASH.record_bytes
    assert sum(p.nbytes for p in made.placements if p.what == "experts without a slot") == outside
    where = {p.where: p.nbytes for p in made.placements if p.what == "experts without a slot"}
    assert where["system RAM"] == outside
    less = dataclasses.replace(small, ram_bytes=64 * GIB, available_bytes=60 * GIB)
    where = {p.where: p.nbytes for p in plan(less, FLASH).placements if p.what == "experts without a slot"}
    assert where["system RAM"] > 0
    assert where["NVMe"] > 0


def test_on_one_shared_pool_the_page_cache_counts_and_pinning_frees_nothing():
    spark = NAMED["dgx-spark"]
    made = plan(spark, FLASH)
    assert ("kept free for the page cache", "RAM", 8 * GIB) in {(p.what, p.where, p.nbytes) for p in made.placements}
    assert any("pinning" in note for note in made.notes)
    without = dataclasses.replace(spark, page_cache_bytes=0, available_bytes=40 * GIB)
    reserved = dataclasses.replace(without, page_cache_bytes=8 * GIB)
    assert plan(reserved, FLASH).total_bytes <= plan(without, FLASH).total_bytes - 7 * GIB


def test_everything_is_resident_on_a_b300():
    made = plan(NAMED["b300x4"], FLASH)
    assert made.is_fully_resident
    assert any("one GPU" in note for note in made.notes)


def test_metal_is_told_to_keep_the_plan_but_not_all_that_it_recommends():
    made = plan(MAC, FLASH)
    assert wired_limit_bytes(made, MAC) == MAC.working_set_bytes * 8 // 10
    small = plan(MAC, FLASH, Request(memory_bytes=12 * GIB))
    assert wired_limit_bytes(small, MAC) == small.total_bytes
    assert wired_limit_bytes(plan(GPU, FLASH), GPU) == 0


def test_passes_shrink_with_the_context_and_not_with_memory():
    product = 1 << 23
    taken, position = [], 0
    while position < 262_144:
        tokens = pass_tokens(position, 512, product)
        assert tokens == 16 or tokens * (position + tokens) <= product
        taken.append(tokens)
        position += tokens
    assert taken == sorted(taken, reverse=True)
    assert (taken[0], taken[-1]) == (512, 32)


def test_resized_moves_only_the_slots():
    made = plan(MAC, FLASH)
    other = budget.resized(made, 1000)
    assert other.num_slots * FLASH.record_bytes == other.ledger.slots_bytes
    assert dataclasses.replace(other.ledger, slots_bytes=made.ledger.slots_bytes) == made.ledger


def random_sizes(rng: random.Random) -> Sizes:
    """Draw a model, from tiny to several times the published one."""
    layers, experts = rng.randint(1, 96), rng.randint(1, 1024)
    workspace = rng.randrange(1 << rng.randint(16, 32))
    return Sizes(
        resident_bytes=rng.randrange(1 << rng.randint(20, 36)),
        record_bytes=rng.randint(1, 1 << rng.randint(10, 25)),
        num_records=layers * experts,
        num_layers=layers,
        experts_per_token=rng.randint(1, experts),
        row_cache_bytes=rng.randrange(1 << 27),
        table_bytes=rng.randrange(1 << rng.randint(20, 37)),
        state_bytes=rng.randrange(1 << 28),
        state_token_bytes=rng.randrange(1 << 17),
        workspace_bytes=workspace,
        workspace_token_bytes=rng.randrange(1 << 17),
        workspace_limit_bytes=workspace + rng.randrange(1 << 31),
        loading_bytes=rng.randrange(1 << 31),
        allocator_cache_bytes=rng.randrange(1 << 30),
        max_context_tokens=rng.choice([256, 4096, 40_000, 262_144, 1_048_576]),
        prefix_cache_bytes=rng.randrange(1 << 30),
        draft_bytes=rng.randrange(1 << 31),
    )


def random_machine(rng: random.Random) -> Machine:
    ram = rng.randrange(1 << rng.randint(28, 42))
    kind = rng.choice(["metal", "cpu", "shared", "discrete"])
    gpu = rng.randrange(1 << rng.randint(30, 39)) if kind == "discrete" else 0
    return Machine(
        name="random",
        backend="metal" if kind == "metal" else "cpu" if kind == "cpu" else "cuda",
        ram_bytes=ram,
        available_bytes=rng.randint(0, ram),
        gpu_bytes=gpu,
        gpu_available_bytes=rng.randint(0, gpu),
        num_gpus=rng.randint(1, 8) if gpu else 0,
        working_set_bytes=rng.randint(0, ram) if kind == "metal" else 0,
        page_cache_bytes=rng.randrange(8 * GIB) if kind == "shared" else 0,
    )


def grown(where: Machine, rng: random.Random) -> Machine:
    """Give the machine with more of something and less of nothing."""
    more = rng.randrange(1 << rng.randint(20, 38))
    changes = {
        "ram": {"ram_bytes": where.ram_bytes + more, "available_bytes": where.available_bytes + more},
        "available": {"available_bytes": min(where.ram_bytes, where.available_bytes + more)},
    }
    if where.gpu_bytes:
        changes["gpu"] = {
            "gpu_bytes": where.gpu_bytes + more,
            "gpu_available_bytes": where.gpu_available_bytes + more,
        }
    if where.working_set_bytes:
        changes["working set"] = {"working_set_bytes": where.working_set_bytes + more}
    return dataclasses.replace(where, **rng.choice(list(changes.values())))


def test_more_memory_never_plans_a_smaller_thing_on_thousands_of_machines():
    rng = random.Random(4)
    compared = 0
    for _ in range(4000):
        where, sizes = random_machine(rng), FLASH if rng.random() < 0.3 else random_sizes(rng)
        request = Request(context_tokens=rng.choice([None, None, 2048, 65_536]))
        if rng.random() < 0.3:
            request = dataclasses.replace(request, memory_limit_bytes=rng.randint(1, 1 << 38))
        small = planned(where, sizes, request)
        large = planned(grown(where, rng), sizes, request)
        assert large[0] >= small[0]
        assert large[1] >= small[1]
        compared += small[0] > 0
    assert compared > 800


def test_a_larger_knob_never_plans_a_smaller_thing():
    rng = random.Random(5)
    for _ in range(2000):
        sizes = FLASH if rng.random() < 0.5 else random_sizes(rng)
        where = dataclasses.replace(random_machine(rng), ram_bytes=1 << 42, available_bytes=1 << 42)
        low, high = sorted(rng.randint(1, 1 << 38) for _ in range(2))
        for knob in ("memory_bytes", "memory_limit_bytes"):
            small, large = (planned(where, sizes, Request(**{knob: value})) for value in (low, high))
            # Beyond what the machine has, a named size is refused rather than cut.
            assert (large[0] >= small[0] and large[1] >= small[1]) or (knob == "memory_bytes" and large == (0, 0))


def test_every_plan_keeps_below_every_limit_and_counts_every_expert():
    rng = random.Random(6)
    for _ in range(2000):
        where, sizes = random_machine(rng), random_sizes(rng)
        try:
            made = plan(where, sizes)
        except CapacityError as refused:
            assert refused.hint
            continue
        assert made.total_bytes <= min(limit.limit_bytes for limit in made.limits)
        assert sizes.floor_slots <= made.num_slots <= sizes.num_records
        outside = sum(p.nbytes for p in made.placements if p.what == "experts without a slot")
        assert outside == (sizes.num_records - made.num_slots) * sizes.record_bytes

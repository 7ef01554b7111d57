"""Estimates: their numbers are those in bench/results, they end where these do, and they say what they are from."""

import csv
import dataclasses
from pathlib import Path

import pytest

from slotpy import budget, config
from slotpy.budget import Request
from slotpy.doctor import published, speed
from slotpy.machine.machines import GIB, NAMED

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FLASH = published.find("qwen3.8-flash-next").sizes
TOKEN_BYTES = 48 * 10 * FLASH.record_bytes


def planned(num_slots: int) -> budget.Plan:
    return budget.plan(NAMED["h200"], FLASH, Request(num_slots=num_slots))


def test_hit_rates_are_the_recorded_ones_of_the_shipped_table():
    with (RESULTS / "slot_replay.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["policy"].startswith("SlotTable")]
    for trace, rates in speed.HIT_RATES.items():
        recorded = {float(row["size"]): float(row["hit_rate"]) for row in rows if row["trace"] == trace}
        assert recorded == dict(zip(speed.SHARES, rates, strict=True))


def test_layer_times_are_the_recorded_ones():
    with (RESULTS / "decode.csv").open() as file:
        resident = [row for row in csv.DictReader(file) if row["host"] == "h200" and row["slots"] == row["records"]]
    assert speed.LAYER_S["H200"] in [float(row["decode_ms_median"]) / 1000 / 8 for row in resident]


def test_hit_rates_are_read_off_between_measurements_and_never_beyond():
    assert speed.hit_rate(0.1) == (0.5574, 0.58)
    low, high = speed.hit_rate(0.125)
    assert low == pytest.approx((0.5574 + 0.6685) / 2)
    assert high == pytest.approx((0.5785 + 0.6774) / 2)
    assert speed.hit_rate(0.023) == (0.2378, 0.3054)
    assert speed.hit_rate(0.5) == (0.7853, 0.9132)
    assert speed.hit_rate(0.0229) is None
    assert speed.hit_rate(0.501) is None


def test_an_estimate_is_bytes_missed_over_the_disk_plus_the_layers_time():
    made = planned(FLASH.num_records // 10)
    found = speed.estimate(made, FLASH, 10**10, "NVIDIA H200")
    low, high = speed.hit_rate(made.num_slots / made.num_records)
    assert found.read_bytes_per_token == (round(TOKEN_BYTES * (1 - high)), round(TOKEN_BYTES * (1 - low)))
    seconds = 48 * speed.LAYER_S["H200"] + found.read_bytes_per_token[0] / 10**10
    assert found.tokens_per_s[1] == pytest.approx(1 / seconds)
    assert found.tokens_per_s[0] < found.tokens_per_s[1]
    assert any("traces of other models" in basis for basis in found.basis)
    assert any("10.00 GB/s" in basis for basis in found.basis)


@pytest.mark.parametrize(
    ("num_slots", "ssd", "device", "says"),
    [
        (2000, 10**10, "Apple M5 Pro", "computing was not measured"),
        (2000, 0, "NVIDIA H200", "disk was not measured"),
        (300, 10**10, "NVIDIA H200", "no hit rate was measured"),
        (16_000, 10**10, "NVIDIA H200", "no hit rate was measured"),
    ],
)
def test_what_was_not_measured_is_not_estimated(num_slots, ssd, device, says):
    found = speed.estimate(planned(num_slots), FLASH, ssd, device)
    assert found.tokens_per_s is None
    assert any(says in basis for basis in found.basis)


def test_with_all_experts_in_slots_nothing_is_read():
    found = speed.estimate(planned(10**6), FLASH, 0, "NVIDIA H200")
    assert found.read_bytes_per_token == (0, 0)
    assert found.tokens_per_s == pytest.approx((1 / (48 * speed.LAYER_S["H200"]),) * 2)


def wait(made: budget.Plan, tokens: int, ssd: int = 0) -> speed.Wait:
    return speed.wait(made, FLASH, tokens, config.PREFILL_CHUNK_TOKENS, config.PREFILL_PRODUCT, ssd)


def test_a_cold_prompt_reads_each_expert_at_most_once_a_pass():
    made = planned(2000)
    assert wait(made, 1).read_bytes == TOKEN_BYTES
    assert wait(made, 512).read_bytes == FLASH.num_records * FLASH.record_bytes
    assert wait(made, 513).read_bytes == FLASH.num_records * FLASH.record_bytes + TOKEN_BYTES
    assert wait(made, 32_768).num_passes == 32 + 64
    found = wait(made, 2048, ssd=10**9)
    assert found.read_s == found.read_bytes / 10**9
    assert wait(planned(10**6), 16_384).read_bytes == FLASH.num_records * FLASH.record_bytes


def test_machines_are_simulated_and_consistent():
    for name, machine in NAMED.items():
        assert machine.name == name
        assert machine.simulated
        assert machine.about
        assert machine.available_bytes < machine.ram_bytes
        assert machine.working_set_bytes < machine.ram_bytes
        assert not dataclasses.replace(machine, gpu_bytes=0).is_discrete
        assert machine.ram_bytes % GIB == 0

"""The tables of plans in the documents are what the planner says, and the peer's side is as it published it."""

import re
from pathlib import Path

import pytest

from slotpy import budget
from slotpy.doctor import published
from slotpy.errors import CapacityError
from slotpy.machine.machines import GIB, NAMED, Machine

DOCS = Path(__file__).parents[2] / "docs"
FLASH = published.find("qwen3.8-flash-next").sizes
GB = 10**9

# RAM in GB -> (GB in all, context, experts a layer where published), slotstream 0.2.25.
PEER = {
    16: (10.0, 32_768, None), 24: (16.0, 32_768, None), 32: (22.0, 32_768, 73.8), 36: (25.0, 65_536, 74.8),
    48: (33.6, 32_768, None), 64: (43.2, 131_072, None), 96: (54.7, 262_144, None), 128: (54.7, 262_144, None),
}  # fmt: skip
REAL_MAC = Machine("real", "metal", 51_539_607_552, 51_539_607_552, working_set_bytes=40_200_896_512)


def table(document: str, mark: str) -> list[str]:
    text = (DOCS / document).read_text()
    return re.search(rf"<!-- {mark} -->\n\|[^\n]*\n\|---[^\n]*\n(.*?)<!-- end -->", text, re.DOTALL)[1].splitlines()


def machine_rows() -> list[str]:
    rows = []
    for machine in NAMED.values():
        try:
            made = budget.plan(machine, FLASH)
        except CapacityError:
            rows.append(f"| {machine.name} | refused | | | |")
            continue
        rows.append(
            f"| {machine.name} | {made.total_bytes / GIB:.1f} | {made.num_slots:,} | {made.context_tokens:,}"
            f" | {made.binding.name} |"
        )
    return rows


def comparison_row(name: str, theirs: tuple[float, int, float | None], machine: Machine) -> str:
    total, context, experts = theirs
    made = budget.plan(machine, FLASH)
    return (
        f"| {name} | {total:.1f}, {context:,}, {experts or '-'}"
        f" | {made.total_bytes / GB:.1f}, {made.context_tokens:,}, {made.experts_per_layer:.1f} | {made.binding.name} |"
    )


def comparison_rows() -> list[str]:
    rows = []
    for ram, theirs in PEER.items():
        machine = Machine("simulated", "metal", ram * GB, ram * GB, working_set_bytes=ram * GB * 3 // 4)
        rows.append(comparison_row(str(ram), theirs, machine))
    return [*rows, comparison_row("48, real", (34.6, 32_768, 148.7), REAL_MAC)]


def test_the_table_of_named_machines_is_what_the_planner_says():
    assert table("machines.md", "machines") == machine_rows()


def test_the_comparison_is_what_the_planner_says():
    assert table("memory.md", "comparison") == comparison_rows()


def test_what_the_text_says_about_the_real_mac_is_right():
    made = budget.plan(REAL_MAC, FLASH, budget.Request(memory_bytes=int(34.6 * GB)))
    assert round(made.experts_per_layer) == 206


@pytest.mark.parametrize("ram", [16, 24, 32, 36, 48])
def test_totals_agree_with_the_peers_up_to_48_gb(ram):
    machine = Machine("simulated", "metal", ram * GB, ram * GB, working_set_bytes=ram * GB * 3 // 4)
    assert budget.plan(machine, FLASH).total_bytes == pytest.approx(PEER[ram][0] * GB, abs=0.2 * GB)

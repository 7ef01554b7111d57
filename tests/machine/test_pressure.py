"""Memory pressure from recorded files and values: stalls, group events, macOS's level."""

import pytest
from test_cgroup import v1, v1_group, v2, v2_group, write

from slotpy.machine import hardware
from slotpy.machine.machines import GIB
from slotpy.machine.pressure import DarwinProbe, LinuxProbe, Pressure, read_stalls

STALLS = "some avg10={some} avg60=5.86 avg300=2.50 total=10161906\nfull avg10={full} avg60=1.68 avg300=0.96 total=469\n"


def probe(root, *, available: int = GIB) -> LinuxProbe:
    return LinuxProbe(root, lambda: hardware.Memory(16 * GIB, available, 0, 0, "machine"))


def with_stalls(root, some: float, full: float):
    return write(root, {"proc/pressure/memory": STALLS.format(some=some, full=full)})


def test_stalls_are_read_and_their_absence_is_calm(tmp_path):
    root = with_stalls(tmp_path, 6.32, 0.16)
    assert read_stalls(root / "proc/pressure/memory") == (6.32, 0.16)
    assert read_stalls(root / "no such file") == (0.0, 0.0)
    assert read_stalls(None) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("some", "full", "level"),
    [(6.3, 0.2, Pressure.NORMAL), (20.0, 2.0, Pressure.WARNING), (40.0, 10.0, Pressure.CRITICAL)],
)
def test_stalls_make_levels(tmp_path, some, full, level):
    assert probe(with_stalls(tmp_path, some, full)).level() is level


def test_stalls_with_memory_to_spare_are_page_cache_traffic(tmp_path):
    assert probe(with_stalls(tmp_path, 90, 90), available=4 * GIB).level() is Pressure.NORMAL


def test_next_to_nothing_available_is_critical_without_stalls(tmp_path):
    assert probe(tmp_path, available=GIB // 4).level() is Pressure.CRITICAL


@pytest.mark.parametrize("version", [1, 2])
def test_new_events_at_the_groups_limit_are_pressure(tmp_path, version):
    if version == 1:
        root = v1(tmp_path, {"pod/app": v1_group(2 * GIB, 0, **{"memory.failcnt": 5})})
        counter, more = root / "sys/fs/cgroup/memory/pod/app/memory.failcnt", "6\n"
    else:
        root = v2(tmp_path, {"system.slice/app.service": v2_group(2 * GIB, 0, **{"memory.events": "max 5\noom 0\n"})})
        counter, more = root / "sys/fs/cgroup/system.slice/app.service/memory.events", "max 6\noom 0\n"
    looking = probe(root)
    assert looking.level() is Pressure.NORMAL  # what was before is not new
    counter.write_text(more)
    assert looking.level() is Pressure.WARNING
    assert looking.level() is Pressure.NORMAL


def test_a_kill_in_the_group_is_critical_whatever_is_available(tmp_path):
    root = v2(tmp_path, {"system.slice/app.service": v2_group(2 * GIB, 0, **{"memory.events": "max 5\noom 0\n"})})
    looking = probe(root, available=12 * GIB)
    looking.level()
    (root / "sys/fs/cgroup/system.slice/app.service/memory.events").write_text("max 5\noom 1\n")
    assert looking.level() is Pressure.CRITICAL


@pytest.mark.parametrize(
    ("said", "level"),
    [("1\n", Pressure.NORMAL), ("2\n", Pressure.WARNING), ("4\n", Pressure.CRITICAL), ("", Pressure.NORMAL)],
)
def test_macos_says_it_in_its_own_numbers(said, level):
    asked = []
    assert DarwinProbe(lambda command: asked.append(command) or said).level() is level
    assert asked == [["sysctl", "-n", "kern.memorystatus_vm_pressure_level"]]

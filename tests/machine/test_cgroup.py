"""Control groups from recorded trees: version 1 and 2, nested, in a container, and none."""

from pathlib import Path

import pytest

from slotpy.machine import cgroup

GIB = 1 << 30
V1_MOUNT = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 23 0:38 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if not str(content).endswith("\n") else str(content))
    return root


def v1(root: Path, groups: dict[str, dict[str, object]], own: str = "/pod/app", inside: str = "/") -> Path:
    files: dict[str, object] = {
        "proc/self/cgroup": f"8:pids:/\n4:memory:{own}\n2:cpu,cpuacct:/\n0::/\n",
        "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        + V1_MOUNT.format(inside=inside)
        + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    }
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup/memory/{group}/{name}": value for name, value in values.items()}
    return write(root, files)


def v1_group(limit: int, usage: int, file: int = 0, **more: object) -> dict[str, object]:
    stat = f"cache {file}\ntotal_inactive_file {file}\ntotal_active_file 0\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat} | more


def v2(root: Path, groups: dict[str, dict[str, object]], own: str = "/system.slice/app.service") -> Path:
    files: dict[str, object] = {
        "proc/self/cgroup": f"0::{own}\n",
        "proc/self/mountinfo": V2_MOUNT.format(inside="/"),
    }
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup/{group}/{name}": value for name, value in values.items()}
    return write(root, files)


def v2_group(limit: object, usage: int, file: int = 0, **more: object) -> dict[str, object]:
    stat = f"anon {usage - file}\ninactive_file {file // 2}\nactive_file {file - file // 2}\n"
    return {"memory.max": limit, "memory.high": "max", "memory.current": usage, "memory.stat": stat} | more


def test_version_1_gives_the_limit_and_counts_file_pages_as_available(tmp_path):
    root = v1(tmp_path, {"pod/app": v1_group(4 * GIB, 3 * GIB, file=GIB)})
    group = cgroup.find(root)
    assert (group.version, group.directories[0].name) == (1, "app")
    assert cgroup.limits(group) == cgroup.GroupLimits(4 * GIB, 2 * GIB)


def test_the_tightest_group_around_counts(tmp_path):
    root = v1(tmp_path, {"pod/app": v1_group(0x7FFFFFFFFFFFF000, GIB), "pod": v1_group(2 * GIB, GIB)})
    assert cgroup.limits(cgroup.find(root)) == cgroup.GroupLimits(2 * GIB, GIB)


def test_version_2_takes_the_lower_of_max_and_high(tmp_path):
    root = v2(tmp_path, {"system.slice/app.service": v2_group(8 * GIB, 5 * GIB, file=2 * GIB)})
    assert cgroup.limits(cgroup.find(root)) == cgroup.GroupLimits(8 * GIB, 5 * GIB)
    high = tmp_path / "sys/fs/cgroup/system.slice/app.service/memory.high"
    high.write_text(f"{6 * GIB}\n")
    assert cgroup.limits(cgroup.find(root)) == cgroup.GroupLimits(6 * GIB, 3 * GIB)


def test_no_limit_is_none(tmp_path):
    root = v2(tmp_path, {"system.slice/app.service": v2_group("max", GIB)})
    assert cgroup.limits(cgroup.find(root)) is None


def test_in_a_container_the_mount_itself_is_the_group(tmp_path):
    root = v1(tmp_path, {"": v1_group(GIB, 0)}, own="/docker/abc", inside="/docker/abc")
    assert cgroup.limits(cgroup.find(root)).limit_bytes == GIB
    other = v1(tmp_path / "b", {"": v1_group(GIB, 0, **{"memory.failcnt": 3})}, own="/docker/abc")
    assert cgroup.limits(cgroup.find(other)).limit_bytes == GIB
    assert cgroup.events(cgroup.find(other)).throttled == 3


def test_a_machine_without_groups_has_none(tmp_path):
    assert cgroup.find(tmp_path) is None
    assert cgroup.find(write(tmp_path, {"proc/self/cgroup": "", "proc/self/mountinfo": "odd line\n"})) is None


def test_usage_above_the_limit_leaves_nothing_rather_than_less(tmp_path):
    root = v1(tmp_path, {"pod/app": v1_group(GIB, 2 * GIB)})
    assert cgroup.limits(cgroup.find(root)).available_bytes == 0


@pytest.mark.parametrize("version", [1, 2])
def test_events_tell_held_up_from_failed(tmp_path, version):
    if version == 1:
        more = {"memory.failcnt": 7, "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}
        root = v1(tmp_path, {"pod/app": v1_group(GIB, 0, **more)})
    else:
        more = {"memory.events": "low 9\nhigh 3\nmax 4\noom 2\noom_kill 1\n"}
        root = v2(tmp_path, {"system.slice/app.service": v2_group(GIB, 0, **more)})
    assert cgroup.events(cgroup.find(root)) == cgroup.GroupEvents(7, 2)


def test_stalls_are_the_groups_own_where_it_keeps_them(tmp_path):
    root = v2(tmp_path, {"system.slice/app.service": v2_group("max", GIB)})
    assert cgroup.stall_file(cgroup.find(root), root) is None
    write(root, {"proc/pressure/memory": "some avg10=0.00"})
    assert cgroup.stall_file(cgroup.find(root), root) == root / "proc/pressure/memory"
    write(root, {"sys/fs/cgroup/memory.pressure": "some avg10=0.00"})
    assert cgroup.stall_file(cgroup.find(root), root) == root / "sys/fs/cgroup/memory.pressure"

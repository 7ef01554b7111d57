"""What a Linux control group allows this process, versions 1 and 2: a container's RAM is not the machine's.

Reads files under /proc and the mounted hierarchies; every function takes the root directory, so that recorded trees can
stand in for it. Knows nothing of plans.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class MemoryGroup:
    """Name a memory group, innermost directory first, up to where its hierarchy is mounted."""

    version: int
    directories: tuple[Path, ...]


@dataclass(frozen=True)
class GroupLimits:
    """The tightest limit of a group and those around it, and the least that is left. Bytes."""

    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class GroupEvents:
    """Count, since the group began, allocations held up at the limit and those that failed for good."""

    throttled: int
    out_of_memory: int


def find(root: Path = Path("/")) -> MemoryGroup | None:
    """Find the group that accounts for this process's memory; None where there is none to see.

    Inside a container the path that /proc names may not exist: the mount itself is then the group.
    """
    paths = _own_paths(root)
    for version, mount, mount_root in _mounts(root):
        path = paths.get("memory" if version == 1 else "")
        if path is None:
            continue
        inside = path.removeprefix(mount_root.rstrip("/")).strip("/")
        own = mount / inside
        if not own.is_dir():
            own = mount
        directories = [own, *(parent for parent in own.parents if parent == mount or mount in parent.parents)]
        limit_file = "memory.limit_in_bytes" if version == 1 else "memory.current"
        if any((directory / limit_file).exists() for directory in directories):
            return MemoryGroup(version, tuple(directories))
    return None


def limits(group: MemoryGroup) -> GroupLimits | None:
    """Give the tightest limit; None where nothing limits. File pages count as available: they yield on demand."""
    found = []
    for directory in group.directories:
        limit = _limit(group.version, directory)
        if limit is None:
            continue
        usage = _read_int(directory / ("memory.usage_in_bytes" if group.version == 1 else "memory.current")) or 0
        stat = _read_table(directory / "memory.stat")
        prefix = "total_" if group.version == 1 else ""
        reclaimable = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        found.append((limit, max(0, limit - max(0, usage - reclaimable))))
    if not found:
        return None
    return GroupLimits(min(limit for limit, _ in found), min(available for _, available in found))


def events(group: MemoryGroup) -> GroupEvents:
    """Count what happened at the limits of the innermost group."""
    own = group.directories[0]
    if group.version == 1:
        killed = _read_table(own / "memory.oom_control").get("oom_kill", 0)
        return GroupEvents(_read_int(own / "memory.failcnt") or 0, killed)
    counts = _read_table(own / "memory.events")
    return GroupEvents(counts.get("high", 0) + counts.get("max", 0), counts.get("oom", 0))


def stall_file(group: MemoryGroup | None, root: Path = Path("/")) -> Path | None:
    """Find the file that tells how much of the time tasks waited for memory: the group's, else the machine's."""
    own = [directory / "memory.pressure" for directory in group.directories] if group else []
    return next((path for path in [*own, root / "proc/pressure/memory"] if path.is_file()), None)


def _limit(version: int, directory: Path) -> int | None:
    names = ("memory.limit_in_bytes",) if version == 1 else ("memory.max", "memory.high")
    values = [value for name in names if (value := _read_int(directory / name)) is not None and value < _UNLIMITED]
    return min(values, default=None)


def _own_paths(root: Path) -> dict[str, str]:
    """Read which group each controller puts this process in; the key is empty for version 2."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3:
            paths |= dict.fromkeys(fields[1].split(","), fields[2])
    return paths


def _mounts(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield (version, mount point, root inside the hierarchy) of hierarchies that may account memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        mount = root / fields[4].lstrip("/")
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, mount, fields[3]
        elif kind[0] == "cgroup2":
            yield 2, mount, fields[3]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_int(path: Path) -> int | None:
    """Read a number; None for `max`, an absent file, or anything else."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None


def _read_table(path: Path) -> dict[str, int]:
    words = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}

"""How hard the operating system is pressed for memory, behind one probe: Linux stalls and group events, macOS's level.

A level is a fact; what to do about it is governor.py's.
"""

import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slotpy.machine import cgroup, hardware
from slotpy.machine.machines import slack_bytes

WARNING_PERCENT = 20.0
"""Of the last ten seconds, in which some task waited for memory."""

CRITICAL_PERCENT = 10.0
"""Of the last ten seconds, in which every task did."""

_DARWIN_LEVELS = {"1": 0, "2": 1, "4": 2}  # kern.memorystatus_vm_pressure_level: normal, warning, critical


class Pressure(enum.IntEnum):
    """Name how scarce memory is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


@dataclass
class LinuxProbe:
    """Read stalls (PSI) and the group's counters. Keeps the last counters, to see what is new.

    Page-cache traffic alone fills a group to its limit and makes tasks wait, with nothing for us to give: while more
    than twice the reserve is available, that is no pressure.
    """

    root: Path = Path("/")
    measure: Callable[[], hardware.Memory] = hardware.memory
    _seen: cgroup.GroupEvents | None = field(default=None, init=False)

    def level(self) -> Pressure:
        """Give the level now."""
        group = cgroup.find(self.root)
        new = self._new_events(group)
        if new.out_of_memory:
            return Pressure.CRITICAL
        found = self.measure()
        reserve = slack_bytes(found.ram_bytes)
        if found.available_bytes > 2 * reserve:
            return Pressure.NORMAL
        some, full = read_stalls(cgroup.stall_file(group, self.root))
        if full >= CRITICAL_PERCENT or found.available_bytes < reserve // 4:
            return Pressure.CRITICAL
        if some >= WARNING_PERCENT or new.throttled:
            return Pressure.WARNING
        return Pressure.NORMAL

    def _new_events(self, group: cgroup.MemoryGroup | None) -> cgroup.GroupEvents:
        if group is None:
            return cgroup.GroupEvents(0, 0)
        now, before = cgroup.events(group), self._seen
        self._seen = now
        if before is None:
            return cgroup.GroupEvents(0, 0)
        return cgroup.GroupEvents(now.throttled - before.throttled, now.out_of_memory - before.out_of_memory)


@dataclass
class DarwinProbe:
    """Ask macOS for its own level."""

    ask: Callable[[list[str]], str] | None = None

    def level(self) -> Pressure:
        """Give the level now; normal when the kernel does not say."""
        value = hardware.sysctl("kern.memorystatus_vm_pressure_level", self.ask)
        return Pressure(_DARWIN_LEVELS.get(value, 0))


Probe = LinuxProbe | DarwinProbe


def probe() -> Probe:
    """Make the probe for this platform."""
    return DarwinProbe() if sys.platform == "darwin" else LinuxProbe()


def read_stalls(path: Path | None) -> tuple[float, float]:
    """Read the ten-second averages of a PSI file in per cent: (some, full); zeros where the kernel keeps none."""
    found = {"some": 0.0, "full": 0.0}
    try:
        lines = path.read_text().splitlines() if path else []
    except OSError:  # kernels with PSI switched off have the file and refuse to read it
        lines = []
    for line in lines:
        kind, _, rest = line.partition(" ")
        averages = dict(pair.split("=", 1) for pair in rest.split() if "=" in pair)
        if kind in found and "avg10" in averages:
            found[kind] = float(averages["avg10"])
    return found["some"], found["full"]

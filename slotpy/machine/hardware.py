"""Facts about this machine, measured rather than assumed. psutil is used here only.

Knows Linux containers through cgroup.py and macOS through `sysctl`. Facts about the GPU come from MLX, which the engine
asks: they are handed in as its `device_info()` dictionary.
"""

import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from slotpy.machine import cgroup
from slotpy.machine.machines import GIB, Backend, Machine

# GPUs that share the machine's memory. MLX does not tell; drop this when its device_info() has an `integrated` entry.
_SHARED_MEMORY_GPUS = ("GB10", "Orin", "Thor", "Tegra")


@dataclass(frozen=True)
class Memory:
    """Bytes of memory this process may use, and where the limit comes from."""

    ram_bytes: int
    available_bytes: int
    swap_bytes: int
    swap_used_bytes: int
    source: str


def memory(root: Path = Path("/")) -> Memory:
    """Measure memory: the machine's, or less where a control group or an address-space limit says so."""
    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    ram, available, source = int(machine.total), int(machine.available), "machine"
    group = cgroup.find(root)
    limits = cgroup.limits(group) if group else None
    if group and limits and limits.limit_bytes < ram:
        ram, source = limits.limit_bytes, f"cgroup v{group.version} limit"
    if limits:
        available = min(available, limits.available_bytes)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < ram:
        ram, source = space, "address-space limit (ulimit -v)"
    if space != resource.RLIM_INFINITY:
        available = max(0, min(available, space - int(psutil.Process().memory_info().vms)))
    return Memory(ram, min(available, ram), int(swap.total), int(swap.used), source)


def this_machine(backend: Backend, device_info: Mapping[str, str | int]) -> Machine:
    """Measure this machine. `device_info` is MLX's, for the device that computes."""
    found = memory()
    gpu_name = str(device_info.get("device_name", "")) if backend != "cpu" else ""
    about = ", ".join(filter(None, (platform.machine(), gpu_name, found.source if found.source != "machine" else "")))
    shared = backend == "cuda" and any(name in gpu_name for name in _SHARED_MEMORY_GPUS)
    own = int(device_info.get("total_memory", 0)) if backend == "cuda" and not shared else 0
    return Machine(
        name="this machine",
        backend=backend,
        ram_bytes=found.ram_bytes,
        available_bytes=found.available_bytes,
        gpu_bytes=own,
        gpu_available_bytes=int(device_info.get("free_memory", own)) if own else 0,
        num_gpus=int(backend == "cuda"),
        working_set_bytes=int(device_info.get("max_recommended_working_set_size", 0)) if backend == "metal" else 0,
        page_cache_bytes=8 * GIB if shared else 0,
        about=about,
    )


def process_bytes() -> int:
    """Give the memory this process holds now, as the operating system counts it."""
    return int(psutil.Process().memory_info().rss)


def peak_memory_bytes() -> int:
    """Give the process's peak resident memory as the operating system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def sysctl(name: str, ask: Callable[[list[str]], str] | None = None) -> str:
    """Read one macOS kernel value; empty where there is none. `ask` runs a command and gives its output."""
    return (ask or _output)(["sysctl", "-n", name]).strip()


def describe_process(pid: int) -> str:
    """Name a process for a message; empty when it is gone or not ours to see."""
    try:
        return " ".join(psutil.Process(pid).cmdline())[:120]
    except psutil.Error:
        return ""


def port_holder(port: int) -> str | None:
    """Say who listens on a local TCP port: None when a server could, else the process if it can be seen."""
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return _listener(port) or "another program"
    return None


def _listener(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # macOS shows sockets to root only
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f"process {connection.pid} ({describe_process(connection.pid) or 'unknown'})"
    return ""


def soft_limit(name: int) -> int | None:
    """Give a resource limit of this process; None where there is none."""
    soft, _ = resource.getrlimit(name)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk_bytes(path: Path) -> int:
    """Measure what an ordinary user may still write where `path` is or will be."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""

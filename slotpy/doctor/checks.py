"""Checks of this machine and installation, as data: what was found, why it matters, how to mend it.

Loads no model, takes no lock, changes nothing but for a scratch file that measures the disk.
"""

import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from slotpy import config, lock, native
from slotpy.doctor.disk_speed import DiskSpeed, measure_directory, measure_model
from slotpy.doctor.sizing import Subject
from slotpy.errors import ReadError, SlotpyError
from slotpy.hub.library import check_verified
from slotpy.machine import hardware, pressure
from slotpy.machine.machines import Machine
from slotpy.units import format_bytes, format_rate

PORT = 11434
"""Where Ollama's clients look, and where a server would listen."""

MIN_FILE_DESCRIPTORS = 256

_MAC_PAGES = "Close other programs: macOS pages out what is idle first."


@dataclass(frozen=True)
class Check:
    """One finding. `status` is `ok`, `warn` or `fail`; `why` and `fix` are empty where all is well."""

    name: str
    status: str
    what: str
    why: str = ""
    fix: str = ""


def run_checks(machine: Machine, subject: Subject, speed: DiskSpeed | None, speed_problem: str) -> list[Check]:
    """Look at the machine, the installation, and the files of a model. `speed` is what `measure_disk` gave."""
    memory = hardware.memory()
    checks: list[Callable[[], Check]] = [
        _python,
        _mlx,
        _native_reader,
        lambda: _gpu(machine),
        lambda: _ram(machine, memory),
        lambda: _available(machine),
        lambda: _swap(memory),
        lambda: _working_set(machine),
        _pressure,
        lambda: _model_files(subject),
        lambda: _disk_space(subject),
        lambda: _disk_speed(speed, speed_problem),
        _port,
        _other_slotpy,
        _file_descriptors,
        _locked_memory,
    ]
    return [check() for check in checks]


def measure_disk(subject: Subject) -> tuple[DiskSpeed | None, str]:
    """Measure the disk that holds the model, or will; None with the reason where that cannot be done."""
    try:
        if subject.checkpoint:
            return measure_model(subject.checkpoint.files, subject.checkpoint.experts), ""
        found = measure_directory(subject.directory, subject.sizes.record_bytes)
        return found, "" if found else "too little room for a scratch file"
    except (OSError, ReadError) as error:
        return None, str(error)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {sys.platform} {platform.machine()}")


def _mlx() -> Check:
    device = mx.default_device()
    what = f"mlx {version('mlx')} on {device}"
    if device.type == mx.DeviceType.cpu:
        return Check(
            "mlx",
            "warn",
            what,
            why="MLX runs on the CPU here, which is right for small models only.",
            fix="On a CUDA host install MLX's CUDA backend too: make install EXTRAS=dev,cuda.",
        )
    return Check("mlx", "ok", what)


def _native_reader() -> Check:
    try:
        return Check("native reader", "ok", str(native.load().path.name))
    except native.NativeAbsentError as error:
        return Check(
            "native reader",
            "warn",
            "absent: records are read by Python threads",
            why=str(error),
            fix="Python threads give the same bytes, at more CPU time per record.",
        )


def _gpu(machine: Machine) -> Check:
    if machine.backend == "cpu":
        return Check("gpu", "warn", "none that MLX uses", why="The model computes on the CPU.", fix="See mlx above.")
    if not machine.is_discrete:
        return Check("gpu", "ok", f"{machine.backend}, sharing the machine's memory")
    free, total = machine.gpu_available_bytes, machine.gpu_bytes
    what = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free * 10 < total:
        return Check("gpu", "warn", what, why="Below 10 % free, GPUs slow down or run out.", fix="End what uses it.")
    return Check("gpu", "ok", what)


def _ram(machine: Machine, memory: hardware.Memory) -> Check:
    limit = "" if memory.source == "machine" else f", from the {memory.source}"
    return Check("ram", "ok", format_bytes(machine.ram_bytes) + limit)


def _available(machine: Machine) -> Check:
    what = f"{format_bytes(machine.available_bytes)} can be had without swapping"
    if machine.available_bytes * 10 < machine.ram_bytes:
        return Check("available", "warn", what, why="Under a tenth of RAM is left.", fix="Close other programs.")
    return Check("available", "ok", what)


def _swap(memory: hardware.Memory) -> Check:
    if not memory.swap_used_bytes:
        return Check("swap", "ok", f"unused, {format_bytes(memory.swap_bytes)} set up")
    what = f"{format_bytes(memory.swap_used_bytes)} of {format_bytes(memory.swap_bytes)} in use"
    if memory.swap_used_bytes * 10 < memory.ram_bytes:
        return Check("swap", "ok", what)
    return Check("swap", "warn", what, why="Other programs were pushed out of memory already.", fix=_MAC_PAGES)


def _working_set(machine: Machine) -> Check:
    if not machine.working_set_bytes:
        return Check("working set", "ok", "no such limit on this backend")
    return Check("working set", "ok", f"{format_bytes(machine.working_set_bytes)} recommended by Metal")


def _pressure() -> Check:
    level = pressure.probe().level()
    if level is pressure.Pressure.NORMAL:
        return Check("memory pressure", "ok", "normal")
    return Check(
        "memory pressure",
        "warn",
        level.name.lower(),
        why="A model started now would be shrunk at once.",
        fix="Close other programs, or wait.",
    )


def _model_files(subject: Subject) -> Check:
    if subject.checkpoint is None:
        return Check(
            "model files",
            "warn",
            f"{format_bytes(subject.missing_bytes)} of {format_bytes(subject.download_bytes)} to download",
            why=f"They would go to {subject.directory}.",
            fix=f"Run `slotpy pull {subject.name}`.",
        )
    checkpoint = subject.checkpoint
    what = f"{len(checkpoint.files)} files, complete by their headers, {checkpoint.layout}, in {subject.directory}"
    try:
        check_verified(subject.directory)
    except SlotpyError as error:
        return Check("model files", "fail", what, why=str(error), fix=error.hint)
    return Check("model files", "ok", what)


def _disk_space(subject: Subject) -> Check:
    free = hardware.free_disk_bytes(subject.directory)
    what = f"{format_bytes(free)} free at {_existing(subject.directory)}"
    needed = subject.missing_bytes + config.PULL_SPARE_BYTES
    if subject.missing_bytes and free < needed:
        return Check(
            "disk space",
            "fail",
            what,
            why=f"The download needs {format_bytes(needed)}.",
            fix="Free some, or set SLOTPY_MODELS to a directory on another disk.",
        )
    return Check("disk space", "ok", what)


def _disk_speed(speed: DiskSpeed | None, problem: str) -> Check:
    if speed is None:
        return Check("disk speed", "warn", "not measured", why=problem, fix="Give a number with --ssd-gbps.")
    what = (
        f"{format_rate(speed.bytes_per_s, 1)}: random reads of {format_bytes(speed.record_bytes)},"
        f" {speed.num_threads} threads, {speed.what}"
    )
    if not speed.direct:
        return Check(
            "disk speed",
            "warn",
            what,
            why="The file system refuses direct reads: the page cache may have answered.",
            fix="Give the disk's own number with --ssd-gbps.",
        )
    return Check("disk speed", "ok", what)


def _port() -> Check:
    holder = hardware.port_holder(PORT)
    if holder is None:
        return Check("port", "ok", f"{PORT} is free")
    return Check("port", "warn", f"{PORT} is taken by {holder}", why="A server could not listen there.", fix="End it.")


def _other_slotpy() -> Check:
    found, held = lock.holder(config.home())
    if held:
        return Check(
            "other slotpy",
            "warn",
            f"{found or 'another slotpy'}",
            why="One model is loaded at a time; its memory is not counted as available here.",
            fix=f"kill {found.pid}" if found else "",
        )
    if found:
        return Check("other slotpy", "ok", f"none; process {found.pid} ended without tidying up")
    return Check("other slotpy", "ok", "none")


def _file_descriptors() -> Check:
    limit = hardware.soft_limit(resource.RLIMIT_NOFILE)
    what = "no limit" if limit is None else str(limit)
    if limit is not None and limit < MIN_FILE_DESCRIPTORS:
        return Check(
            "file descriptors",
            "warn",
            what,
            why="A checkpoint's files, a server's connections and a pull share them.",
            fix="ulimit -n 1024",
        )
    return Check("file descriptors", "ok", what)


def _locked_memory() -> Check:
    limit = hardware.soft_limit(resource.RLIMIT_MEMLOCK)
    what = "no limit" if limit is None else format_bytes(limit)
    return Check("locked memory", "ok", f"{what}; slotpy locks none")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path

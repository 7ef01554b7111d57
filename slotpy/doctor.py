"""Checks of this machine and installation, as data: what was found, why it matters, how to mend it."""

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx

from slotpy import hardware, native
from slotpy.units import format_bytes


@dataclass(frozen=True)
class Check:
    """One finding. `status` is `ok`, `warn` or `fail`; `why` and `fix` are empty where all is well."""

    name: str
    status: str
    what: str
    why: str = ""
    fix: str = ""


def run_checks() -> list[Check]:
    """Look at the machine; loads no model and changes nothing."""
    return [_python(), _mlx(), _native_reader(), _memory()]


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


def _memory() -> Check:
    total, available = hardware.total_memory_bytes(), hardware.available_memory_bytes()
    return Check("memory", "ok", f"{format_bytes(available)} available of {format_bytes(total)}")

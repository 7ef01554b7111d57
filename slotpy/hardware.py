"""Facts about this machine, measured rather than assumed. psutil is used here only."""

import resource
import sys

import psutil


def total_memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def available_memory_bytes() -> int:
    return int(psutil.virtual_memory().available)


def peak_memory_bytes() -> int:
    """Give the process's peak resident memory as the operating system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

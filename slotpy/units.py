"""Print bytes, rates and durations the one way slotpy prints them: binary units, three significant digits."""

_STEPS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(num_bytes: int) -> str:
    """Format a byte count: `format_bytes(2764800)` is `2.64 MiB`."""
    for unit, size in _STEPS:
        if abs(num_bytes) >= size:
            return (
                f"{num_bytes / size:.3g} {unit}" if abs(num_bytes) < 1000 * size else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes} B"


def format_rate(num_bytes: int, seconds: float) -> str:
    """Format bytes over seconds in GB/s, the unit in which drives are sold."""
    return f"{num_bytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else "- GB/s"

"""How long a model stays: `keep_alive`, in seconds or as Go writes durations."""

import json
import math
import re
from typing import Any

from slotpy.server.errors import ApiError

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LIMIT_S = (1 << 63) / 1e9  # Go counts nanoseconds in 64 bits
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]*)")


def parse_duration(text: str) -> float:
    """Read a duration such as `1h30m`, `1.5s` or `-1s`, in seconds. Raises ValueError with Go's text.

    Source: https://pkg.go.dev/time#ParseDuration
    """
    shown = json.dumps(text, ensure_ascii=False)
    sign = -1.0 if text.startswith("-") else 1.0
    rest = text[1:] if text[:1] in ("-", "+") else text
    if rest == "0":
        return 0.0
    if not rest:
        raise ValueError(f"time: invalid duration {shown}")
    total = 0.0
    while rest:
        part = _PART.match(rest)
        assert part is not None, "the pattern matches nothing at all, too"
        whole, fraction, unit = part.groups()
        if not whole and not fraction:
            raise ValueError(f"time: invalid duration {shown}")
        if not unit:
            raise ValueError(f"time: missing unit in duration {shown}")
        if unit not in _UNITS_S:
            raise ValueError(f"time: unknown unit {json.dumps(unit, ensure_ascii=False)} in duration {shown}")
        total += float(f"{whole or 0}.{fraction or 0}") * _UNITS_S[unit]
        rest = rest[part.end() :]
    if total > _LIMIT_S:
        raise ValueError(f"time: invalid duration {shown}")
    return sign * total


def read_keep_alive(value: Any) -> float | None:
    """Read a request's `keep_alive` in seconds: a number, a duration; inf is for ever, None is not given.

    Raises: ApiError 400.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
    elif isinstance(value, bool | list | dict):
        kind = {bool: "bool", list: "[]interface {}", dict: "map[string]interface {}"}[type(value)]
        raise ApiError(400, f"Unsupported type: '{kind}'")
    else:
        seconds = value
    return math.inf if seconds < 0 or seconds >= _LIMIT_S else float(seconds)

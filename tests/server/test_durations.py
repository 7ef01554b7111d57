import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpy.server.durations import parse_duration, read_keep_alive
from slotpy.server.errors import ApiError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        (-1, math.inf),
        (-0.5, math.inf),
        (1e300, math.inf),
        (10**30, math.inf),
        ("0", 0),
        ("0s", 0),
        ("5m", 300),
        ("10m0s", 600),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("1.s", 1),
        ("+2s", 2),
        ("-1s", math.inf),
        ("-1", None),
        ("3ms", 0.003),
        ("7us", 7e-6),
        ("7\u00b5s", 7e-6),
        ("7\u03bcs", 7e-6),
        ("9ns", 9e-9),
        ("2562047h47m16.854775807s", math.inf),  # Go's longest, which its clients write for ever
    ],
)
def test_reads_seconds_and_durations(given, expected):
    if given == "-1":
        with pytest.raises(ApiError, match="missing unit"):
            read_keep_alive(given)
    else:
        assert read_keep_alive(given) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("300", 'time: missing unit in duration "300"'),
        ("1h30", 'time: missing unit in duration "1h30"'),
        ("abc", 'time: invalid duration "abc"'),
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        (".s", 'time: invalid duration ".s"'),
        ("5 m", 'time: unknown unit " m" in duration "5 m"'),
        ("3d", 'time: unknown unit "d" in duration "3d"'),
        ("\u0663s", 'time: invalid duration "\u0663s"'),
        ("300000000h", 'time: invalid duration "300000000h"'),
        ("9" * 400 + "s", f'time: invalid duration "{"9" * 400}s"'),
        (True, "Unsupported type: 'bool'"),
        ([], "Unsupported type: '[]interface {}'"),
        ({}, "Unsupported type: 'map[string]interface {}'"),
    ],
)
def test_refuses_the_rest_in_gos_words(given, error):
    with pytest.raises(ApiError) as caught:
        read_keep_alive(given)
    assert (caught.value.status, str(caught.value)) == (400, error)


@given(st.text("0123456789.+-smhnu\u00b5 e", max_size=12))
def test_any_text_is_a_number_or_a_value_error(text):
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        assert str(error).startswith("time: ")
    else:
        assert math.isfinite(seconds)

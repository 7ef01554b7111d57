import pytest

from slotpy.units import format_bytes, format_rate


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2764800, "2.64 MiB"),
        (104 * 10**9, "96.9 GiB"),
        (1 << 40, "1 TiB"),
        (1000 << 40, "1000 TiB"),
    ],
)
def test_bytes_are_printed_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_rates_are_printed_in_decimal_gigabytes():
    assert format_rate(17_300_000_000, 1.0) == "17.30 GB/s"
    assert format_rate(1, 0.0) == "- GB/s"

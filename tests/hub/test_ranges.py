"""Ranges against a plain set of numbers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slotpy.hub.ranges import Ranges

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 40)), max_size=30)


@given(STEPS, st.integers(0, 40), st.integers(0, 40))
@settings(deadline=None, max_examples=50)
def test_ranges_agree_with_a_set(steps, start, stop):
    ranges, model = Ranges(), set()
    for adds, low, high in steps:
        if adds:
            ranges.add(low, high)
            model |= set(range(low, high))
        else:
            ranges.remove(low, high)
            model -= set(range(low, high))
    assert {n for low, high in ranges for n in range(low, high)} == model
    assert ranges.num_bytes == len(model)
    assert all(a[1] < b[0] for a, b in zip(list(ranges), list(ranges)[1:], strict=False)), "sorted, and none touch"
    first = next((n for n in range(start, stop) if n not in model), None)
    wanted = first is not None and (first, next(n for n in range(first, stop + 1) if n in model or n == stop))
    assert ranges.next_gap(start, stop) == (wanted or None)

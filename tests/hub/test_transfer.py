"""How many connections a transfer uses, and that each is one."""

from dataclasses import replace

import pytest

from slotpy.hub import growth
from tests.hub.conftest import LIMITS


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(growth.time, "monotonic", lambda: now[0])
    return now


def grow(clock, rates, fixed=None):
    """Give the number of connections after each window in which a line brought so many bytes a second."""
    growing, connections, received, found = growth.Growth(fixed), fixed or 4, 0, []
    for rate in rates:
        clock[0] += 3
        received += 3 * rate
        connections = growing.next(connections, received)
        found.append(connections)
    return found


def test_connections_double_only_while_that_makes_the_whole_faster(clock):
    assert grow(clock, [40, 80, 160, 200]) == [8, 16, 16, 16]
    assert grow(clock, [40, 80, 81, 500]) == [8, 16, 8, 8], "the last step did not pay: back, and stay"
    assert grow(clock, [40, 41, 41]) == [8, 4, 4]
    assert grow(clock, [0, 0, 40]) == [4, 4, 8], "nothing came yet: nothing to compare"


def test_a_fixed_number_of_connections_stays(clock):
    assert grow(clock, [40, 80, 160], fixed=3) == [3, 3, 3]


def test_each_worker_keeps_one_connection_to_each_host(puller, hub):
    hub.bytes_per_s = 2_000_000
    puller(replace(LIMITS, connections=3))
    signed = [request.port for request in hub.requests if request.path.startswith("/signed/")]
    assert len(signed) >= 15
    assert len(set(signed)) <= 3

"""Facts of this machine and of recorded ones: containers, address-space limits, GPUs with and without own memory."""

import resource
import socket
import sys
import types

import psutil
import pytest
from test_cgroup import v1, v1_group

from slotpy.machine import hardware
from slotpy.machine.machines import GIB

# mx.device_info() on an M5 Pro of 48 GB: sizes as published with a peer's measurements.
M5_PRO = {
    "device_name": "Apple M5 Pro",
    "memory_size": 51_539_607_552,
    "max_recommended_working_set_size": 40_200_896_512,
    "max_buffer_length": 30_150_672_384,
}


@pytest.fixture
def big(monkeypatch):
    """Stand on a machine of 64 GiB, 60 available."""
    memory = types.SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: types.SimpleNamespace(total=2 * GIB, used=GIB))


def test_without_limits_the_machine_counts(big, tmp_path):
    found = hardware.memory(tmp_path)
    assert (found.ram_bytes, found.available_bytes, found.source) == (64 * GIB, 60 * GIB, "machine")
    assert (found.swap_bytes, found.swap_used_bytes) == (2 * GIB, GIB)


def test_in_a_container_the_limit_counts(big, tmp_path):
    found = hardware.memory(v1(tmp_path, {"pod/app": v1_group(4 * GIB, 3 * GIB, file=GIB)}))
    assert (found.ram_bytes, found.available_bytes) == (4 * GIB, 2 * GIB)
    assert found.source == "cgroup v1 limit"


def test_a_limit_above_the_machine_changes_nothing(big, tmp_path):
    found = hardware.memory(v1(tmp_path, {"pod/app": v1_group(100 * GIB, 0)}))
    assert (found.ram_bytes, found.available_bytes, found.source) == (64 * GIB, 60 * GIB, "machine")


def test_an_address_space_limit_counts(big, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (8 * GIB, 8 * GIB))
    found = hardware.memory(tmp_path)
    assert found.ram_bytes == 8 * GIB
    assert 0 < found.available_bytes < 8 * GIB
    assert "ulimit" in found.source


def test_a_mac_is_one_pool_with_metals_working_set(big):
    machine = hardware.this_machine("metal", M5_PRO)
    assert (machine.is_discrete, machine.working_set_bytes) == (False, 40_200_896_512)
    assert not machine.simulated


def test_a_gpu_with_memory_of_its_own_is_kept_apart(big):
    machine = hardware.this_machine("cuda", {"device_name": "X", "total_memory": 96 * GIB, "free_memory": 90 * GIB})
    assert (machine.gpu_bytes, machine.gpu_available_bytes) == (96 * GIB, 90 * GIB)
    assert machine.ram_bytes == 64 * GIB
    assert machine.working_set_bytes == 0


def test_a_gpu_in_shared_memory_has_none_of_its_own(big):
    machine = hardware.this_machine("cuda", {"device_name": "NVIDIA GB10", "total_memory": 64 * GIB})
    assert (machine.is_discrete, machine.page_cache_bytes) == (False, 8 * GIB)


def test_the_cpu_backend_has_no_gpu(big):
    machine = hardware.this_machine("cpu", {"device_name": "AMD EPYC", "total_memory": 5})
    assert (machine.gpu_bytes, machine.num_gpus, machine.working_set_bytes) == (0, 0, 0)


def test_peak_and_current_memory_are_this_processs():
    now, peak = hardware.process_bytes(), hardware.peak_memory_bytes()
    assert 10 << 20 < now < 1.05 * peak < 1 << 40  # the kernel keeps its counters by the batch


def test_sysctl_asks_by_name_and_gives_nothing_where_there_is_none():
    asked = []
    assert hardware.sysctl("hw.memsize", lambda command: asked.append(command) or "51539607552\n") == "51539607552"
    assert asked == [["sysctl", "-n", "hw.memsize"]]
    if sys.platform != "darwin":
        assert hardware.sysctl("hw.memsize") == ""


def test_the_holder_of_a_port_is_named(monkeypatch):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert "python" in hardware.port_holder(port)
        monkeypatch.setattr(psutil, "net_connections", raise_denied)
        assert hardware.port_holder(port) == "another program"
    assert hardware.port_holder(port) is None


def raise_denied(kind):
    raise psutil.AccessDenied


def test_free_disk_is_that_of_the_nearest_directory(tmp_path):
    near = hardware.free_disk_bytes(tmp_path / "not" / "there")
    assert near == pytest.approx(hardware.free_disk_bytes(tmp_path), rel=0.05)
    assert near > 0

"""`slotpy doctor`: text and JSON, this machine and simulated ones, exit codes; it loads and locks nothing."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from slotpy.cli.doctor import doctor
from slotpy.doctor import checks as doctor_module
from slotpy.doctor.checks import Check, run_checks
from slotpy.doctor.disk_speed import DiskSpeed
from slotpy.doctor.sizing import find_subject
from slotpy.engine import device
from slotpy.errors import UsageError
from slotpy.lock import ModelLock
from slotpy.machine import hardware
from slotpy.machine.machines import GIB, NAMED
from slotpy.machine.pressure import Pressure
from tests.golden_model import GOLDEN

SPEED = DiskSpeed(5_500_000_000, 1 << 28, 2_764_800, 16, True, "a scratch file")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTPY_HOME", str(tmp_path))
    monkeypatch.delenv("SLOTPY_MODELS", raising=False)
    monkeypatch.setattr("slotpy.cli.doctor.measure_disk", lambda subject: (SPEED, ""))
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 1 << 40)
    return tmp_path


def invoke(*args: object):
    return CliRunner().invoke(doctor, [str(arg) for arg in args])


def report(*args: object) -> dict:
    return json.loads(invoke(*args, "--json").stdout)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_named_machine_is_judged_as_text_and_json(name):
    text, data = invoke("--machine", name), report("--machine", name)
    assert data["checks"] == []
    assert data["machine"]["simulated"]
    assert f"qwen3.8-flash-next on {name}" in text.stdout
    if name == "mac-8":
        assert text.exit_code == 1
        assert data["plan"] is None
        assert "Does not fit. Needs 7.99" in text.stdout
        return
    assert text.exit_code == 0
    ledger = data["plan"]["ledger"]
    assert data["plan"]["total_bytes"] == sum(ledger.values())
    assert sum(limit["binding"] for limit in data["plan"]["limits"]) == 1
    assert [tier["memory_bytes"] for tier in data["tiers"]] == sorted(tier["memory_bytes"] for tier in data["tiers"])
    assert all(bool(tier["plan"]) != bool(tier["refusal"]) for tier in data["tiers"])
    assert "decides" in text.stdout


def test_piped_text_has_no_colours_and_no_padding():
    lines = invoke("--machine", "mac-48").stdout.split("\n")
    assert not any("\x1b" in line or line != line.rstrip() for line in lines)


def test_an_estimate_says_what_it_is_from_and_what_is_not_measured():
    text = invoke("--machine", "mac-48").stdout
    assert "estimate: reading alone allows" in text
    assert "from: hit rates of three recorded traces of other models" in text
    assert "from: computing was not measured on this device" in text
    assert "Decoding: not measured" in invoke("--machine", "mac-32").stdout
    assert "estimate 7.8 tokens/s" in invoke("--machine", "h200").stdout


def test_numbers_of_the_users_make_a_machine_up():
    data = report("--ram", 64, "--working-set", 50, "--available", 40, "--ssd-gbps", 5.5)
    machine = data["machine"]
    assert (machine["ram_bytes"], machine["working_set_bytes"]) == (64 * GIB, 50 * GIB)
    assert (machine["available_bytes"], machine["ssd_bytes_per_s"]) == (40 * GIB, 5_500_000_000)
    assert machine["simulated"]
    assert {limit["name"] for limit in data["plan"]["limits"] if limit["binding"]} == {"available now"}
    changed = report("--machine", "mac-48", "--ram", 24)["machine"]
    assert (changed["ram_bytes"], changed["working_set_bytes"]) == (24 * GIB, 18 * GIB)
    mine = report("--available", 5)["machine"]
    assert (mine["name"], mine["available_bytes"], mine["simulated"]) == ("this machine", 5 * GIB, True)
    assert mine["ram_bytes"] == device.this_machine().ram_bytes
    assert report("--ram", 64, "--working-set", 50)["machine"]["backend"] == "metal"
    gpu = report("--ram", 64, "--vram", 24)
    assert gpu["machine"]["gpu_bytes"] == 24 * GIB
    assert gpu["plan"]["total_bytes"] <= 24 * GIB


@pytest.mark.parametrize("flags", [["--ram", "nan"], ["--vram", -1], ["--ssd-gbps", "inf"], ["--memory-gb", 0]])
def test_numbers_that_are_none_are_refused(flags):
    assert isinstance(invoke("--machine", "mac-48", *flags).exception, UsageError)


def test_knobs_plan_as_a_run_would():
    data = report("--machine", "mac-48", "--memory-limit-gb", 20, "--context", 65_536)
    assert data["plan"]["context_tokens"] == 65_536
    assert data["plan"]["total_bytes"] <= 20 * GIB
    refused = invoke("--machine", "mac-48", "--memory-gb", 60)
    assert refused.exit_code == 1
    assert "at most --memory-gb 35.4" in refused.stdout


def test_this_machine_is_checked_and_a_model_here_is_judged_by_its_headers():
    data = report(GOLDEN)
    assert {check["name"] for check in data["checks"]} >= {
        "python", "mlx", "native reader", "gpu", "ram", "available", "swap", "working set", "memory pressure",
        "model files", "disk space", "disk speed", "port", "other slotpy", "file descriptors", "locked memory",
    }  # fmt: skip
    assert not data["machine"]["simulated"]
    assert data["machine"]["ssd_bytes_per_s"] == SPEED.bytes_per_s
    assert data["plan"]["num_records"] == find_subject(str(GOLDEN), on_cpu=True).sizes.num_records
    text = invoke(GOLDEN).stdout
    assert "complete by their headers" in text
    assert "5.50 GB/s: random reads of 2.64 MiB" in text


def test_text_in_brackets_is_shown_as_it_is(monkeypatch):
    monkeypatch.setattr("slotpy.cli.doctor.measure_disk", lambda subject: (None, "cannot read [disk one]"))
    assert "cannot read [disk one]" in invoke(GOLDEN).stdout


def test_a_download_that_does_not_fit_the_disk_fails(monkeypatch):
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 50 * GIB)
    result = invoke()
    assert result.exit_code == 1
    assert "The download needs 99 GiB" in result.stdout
    assert "slotpy pull qwen3.8-flash-next" in result.stdout


def test_doctor_tells_which_reader_is_used(monkeypatch):
    monkeypatch.setattr("slotpy.native.find", lambda: None)
    result = invoke(GOLDEN)
    assert "absent: records are read by Python threads" in result.stdout
    assert "make native" in result.stdout


def test_doctor_needs_no_lock_and_names_its_holder(home):
    with ModelLock.acquire(home, "a-model"):
        assert "with a-model" in invoke(GOLDEN).stdout


def test_an_unknown_model_is_refused_with_what_is_known():
    assert isinstance(invoke("no/such-model").exception, UsageError)


def checks(machine=None, subject=None) -> dict[str, Check]:
    found = run_checks(machine or device.this_machine(), subject or find_subject(str(GOLDEN), on_cpu=True), None, "why")
    return {check.name: check for check in found}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"backend": "cuda", "gpu_bytes": 96 * GIB, "gpu_available_bytes": 5 * GIB}, "gpu"),
        ({"available_bytes": GIB, "ram_bytes": 16 * GIB}, "available"),
    ],
)
def test_what_is_scarce_is_a_warning_with_a_reason(changes, name):
    found = checks(dataclasses.replace(device.this_machine(), **changes))[name]
    assert (found.status, bool(found.why), bool(found.fix)) == ("warn", True, True)


def test_swap_in_use_and_pressure_are_warnings(monkeypatch):
    memory = hardware.Memory(16 * GIB, 8 * GIB, 8 * GIB, 5 * GIB, "cgroup v2 limit")
    monkeypatch.setattr(hardware, "memory", lambda: memory)
    monkeypatch.setattr(doctor_module.pressure, "probe", lambda: type("P", (), {"level": lambda self: Pressure(2)})())
    found = checks()
    assert found["swap"].status == "warn"
    assert (found["memory pressure"].status, found["memory pressure"].what) == ("warn", "critical")
    assert "cgroup v2 limit" in found["ram"].what
    assert found["disk speed"].what == "not measured"


def test_few_file_descriptors_and_a_taken_port_are_warnings(monkeypatch):
    monkeypatch.setattr(hardware, "soft_limit", lambda name: 64)
    monkeypatch.setattr(hardware, "port_holder", lambda port: "process 7 (ollama serve)")
    found = checks()
    assert found["file descriptors"].status == "warn"
    assert found["port"].what == "11434 is taken by process 7 (ollama serve)"

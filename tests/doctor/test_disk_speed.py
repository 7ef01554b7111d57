"""The disk is measured with whole records at the depth a run uses, and the scratch file goes away."""

import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.doctor import disk_speed
from slotpy.doctor.disk_speed import measure_directory, measure_model
from slotpy.errors import ReadError
from slotpy.machine import hardware
from tests.golden_model import GOLDEN


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(disk_speed, "SCRATCH_BYTES", 8 << 20)


def test_a_models_records_are_read_whole_and_none_twice():
    checkpoint = open_checkpoint(GOLDEN)
    found = measure_model(checkpoint.files, checkpoint.experts)
    assert found.record_bytes == checkpoint.experts.record_nbytes
    assert found.read_bytes == checkpoint.experts.num_records * found.record_bytes
    assert found.bytes_per_s > 0


def test_a_place_without_the_model_is_measured_by_a_scratch_file(tmp_path, monkeypatch):
    read = []
    real = disk_speed.open_store

    def watch(files, *, direct):
        store = real(files, direct=direct)
        monkeypatch.setattr(store, "read", lambda reads, buffers: read.extend(reads[:, 1].tolist()))
        return store

    monkeypatch.setattr(disk_speed, "open_store", watch)
    found = measure_directory(tmp_path / "not" / "there", 1_000_000)
    assert sorted(read) == [number * 1_000_000 for number in range(8)]
    assert found.read_bytes == 8 * 1_000_000
    assert str(tmp_path) in found.what
    assert list(tmp_path.iterdir()) == []


def test_the_time_is_bounded(tmp_path):
    assert measure_directory(tmp_path, 100_000, budget_s=0).read_bytes == 10 * 100_000


def test_a_full_disk_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "free_disk_bytes", lambda path: 16 << 20)
    assert measure_directory(tmp_path, 1_000_000) is None


def test_where_direct_reads_are_refused_the_page_cache_is_owned_up_to(tmp_path, monkeypatch):
    real = disk_speed.open_store

    def refuse(files, *, direct):
        if direct:
            raise ReadError("no O_DIRECT here")
        return real(files, direct=False)

    monkeypatch.setattr(disk_speed, "open_store", refuse)
    assert not measure_directory(tmp_path, 1_000_000).direct

"""A pull on a real small disk that fills, and on one that cannot be written: needs the right to mount."""

import subprocess
from dataclasses import replace

import pytest

from slotpy.errors import CapacityError, SlotpyError
from slotpy.hub import pull as pull_module
from tests.hub.conftest import LIMITS, Puller


@pytest.fixture
def small_disk(tmp_path):
    """Mount 600 KiB of memory; the model needs 970."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "slotpy-test", str(folder)]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount a file system")
    except FileNotFoundError:
        pytest.skip("has no mount command")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_pull_stops_on_a_full_disk_and_goes_on_with_room(small_disk, hub, monkeypatch):
    puller = Puller(hub, small_disk)
    with pytest.raises(CapacityError, match=r"needs 9\d\d KiB of disk.* 5\d\d KiB are available"):
        puller()
    assert hub.bytes_sent == 0
    monkeypatch.setattr(pull_module, "_refuse_full_disk", lambda *arguments: None)
    with pytest.raises(CapacityError, match=r"No space left|left\. Free some"):
        puller()
    sent = hub.bytes_sent
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    puller(replace(LIMITS, connections=1))
    puller.assert_right()
    assert hub.bytes_sent - sent < sum(map(len, hub.files.values())) - 200_000, "what fitted is kept"


def test_pull_says_that_a_disk_cannot_be_written(small_disk, hub):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SlotpyError, match=r"Could not write .*Read-only file system"):
        Puller(hub, small_disk)()
    assert hub.bytes_sent == 0

"""The per-user lock: one holder, named; given back by release, by the end of the process, by SIGKILL."""

import os
import signal
import subprocess
import sys

import pytest

from slotpy.errors import SlotpyError
from slotpy.lock import ModelLock, holder

HOLD = """
import sys, time
from pathlib import Path
from slotpy.lock import ModelLock
lock = ModelLock.acquire(Path(sys.argv[1]), "big-model")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Hold the lock in another process."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path, other):
    with pytest.raises(SlotpyError, match=rf"process {other.pid} with big-model.*kill {other.pid}"):
        ModelLock.acquire(tmp_path, "mine")
    found, held = holder(tmp_path)
    assert (found.pid, found.model, held) == (other.pid, "big-model", True)


def test_a_killed_holder_leaves_a_stale_name_and_no_lock(tmp_path, other):
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    found, held = holder(tmp_path)
    assert (found.pid, held) == (other.pid, False)
    with ModelLock.acquire(tmp_path, "mine") as lock:
        assert lock.stale.pid == other.pid
        assert holder(tmp_path)[0].pid == os.getpid()


def test_release_gives_it_back_and_may_be_called_twice(tmp_path):
    lock = ModelLock.acquire(tmp_path / "made", "a")
    with pytest.raises(SlotpyError):
        ModelLock.acquire(tmp_path / "made", "b")
    lock.release()
    lock.release()
    assert holder(tmp_path / "made") == (None, False)
    with ModelLock.acquire(tmp_path / "made", "b") as again:
        assert again.stale is None


def test_looking_never_makes_or_takes_anything(tmp_path):
    assert holder(tmp_path) == (None, False)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_name_does_not_matter(tmp_path):
    (tmp_path / "model.lock").write_text('{"pid": ')
    with ModelLock.acquire(tmp_path, "a") as lock:
        assert lock.stale is None


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SlotpyError, match=r"model\.lock cannot be written.*SLOTPY_HOME"):
        ModelLock.acquire(tmp_path / "file" / "home", "a")

"""`slotpy run` is the user's only model process, from before it loads until it ends."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine, fail

from slotpy.cli import run as run_module
from slotpy.errors import SlotpyError
from slotpy.lock import ModelLock, holder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    return tmp_path


def invoke(monkeypatch, engine: FakeEngine, *args: object):
    monkeypatch.setattr(run_module, "Engine", engine)
    return CliRunner().invoke(run_module.run, [str(arg) for arg in args])


def test_the_lock_is_held_while_a_model_is_loaded_and_given_back(monkeypatch, model, slotpy_home):
    seen = []

    def reply():
        seen.append(holder(slotpy_home))
        return "x"

    assert invoke(monkeypatch, FakeEngine([reply]), model, "Hi").exit_code == 0
    assert [(found.model, held) for found, held in seen] == [(str(model), True)]
    assert holder(slotpy_home) == (None, False)


def test_a_second_run_is_refused_before_it_loads(monkeypatch, model, slotpy_home):
    engine = FakeEngine(["x"])
    with ModelLock.acquire(slotpy_home, "other"):
        result = invoke(monkeypatch, engine, model, "Hi")
    assert isinstance(result.exception, SlotpyError)
    assert "with other" in str(result.exception)
    assert engine.options is None


def test_a_run_that_fails_gives_the_lock_back(monkeypatch, model, slotpy_home):
    assert invoke(monkeypatch, FakeEngine([fail("disk is gone")]), model, "Hi").exception
    assert holder(slotpy_home) == (None, False)

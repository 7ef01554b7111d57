"""Each test of a command has a slotpy home of its own: commands that load a model hold the user's lock in it."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def slotpy_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SLOTPY_HOME", str(home))
    return home

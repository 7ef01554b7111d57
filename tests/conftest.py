"""What every test gets: a slotpy home of its own, so that no test meets a user's models, kernels or lock."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def slotpy_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SLOTPY_HOME", str(tmp_path_factory.mktemp("home")))
        yield

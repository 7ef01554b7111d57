"""One scripted server for all tests here that only talk to it."""

from collections.abc import Iterator

import pytest

from tests.fake_server import running


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running server."""
    with running(tmp_path_factory.mktemp("served")) as port:
        yield port

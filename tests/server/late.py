"""Scripts that are played late, for tests of what keeps a silent stream alive."""

import asyncio
from typing import Any

import pytest

from tests.server.fakes import FakeServer, Submission


def delay(monkeypatch: pytest.MonkeyPatch, server: FakeServer, seconds: float) -> None:
    """Let each event of the server's next script arrive only after so long."""
    script, server.worker.scripts[0] = server.worker.scripts[0], ()
    submit = server.worker.submit
    assert not isinstance(script, Exception)

    def late(*arguments: Any) -> Submission:
        submission = submit(*arguments)
        for event in script:
            asyncio.get_running_loop().call_later(seconds, submission.deliver, event)
        return submission

    monkeypatch.setattr(server.worker, "submit", late)

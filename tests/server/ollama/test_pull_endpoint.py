"""Pulls over HTTP: Ollama's lines, one pull for many clients, and an end when the last one leaves."""

import asyncio
import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest

from slotpy.errors import SlotpyError
from slotpy.hub.events import FileProgress, Status
from slotpy.hub.names import parse_name
from slotpy.server.library import pulls as pulls_module
from slotpy.server.library.library import Library
from slotpy.server.library.pulls import Pulls
from slotpy.server.ollama.models import ROUTES
from tests.hub import conftest as hub_fixtures
from tests.hub.conftest import LIMITS
from tests.hub.fault_hub import LFS_BYTES
from tests.server.fakes import FakeServer
from tests.server.library.test_library import put_demo
from tests.server.ollama.test_blobs import ask

hub, only_loopback = hub_fixtures.hub, hub_fixtures.only_loopback
NAME = parse_name("org/model")


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    server = FakeServer(ROUTES)
    library = Library(tmp_path / "models", tmp_path / "home")
    library.pulls = Pulls(library.models_dir, LIMITS)
    server.service.library = library
    return server


@pytest.mark.parametrize("name", ["org/model", "hf.co/org/model:latest", "org/model:main"])
def test_a_pull_tells_each_file_in_ollamas_lines_and_ends_in_success(server, hub, name):
    lines = server.post("/api/pull", {"model": "", "name": name}).records
    assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
    files = {line["digest"]: line for line in lines if "digest" in line}
    assert len(files) == len(hub.files)
    large = {f"sha256:{hub.facts(path)[1]}" for path, data in hub.files.items() if len(data) > LFS_BYTES}
    assert large <= set(files)
    for line in files.values():
        assert line["status"] == f"pulling {line['digest'].partition(':')[2][:12]}"
        assert line["completed"] == line["total"] and type(line["total"]) is int
    assert lines.count(lines[0]) == 1


def test_a_second_pull_asks_for_nothing(server, hub):
    server.post("/api/pull", {"model": "org/model"})
    hub.requests.clear()
    assert server.post("/api/pull", {"model": "ORG/Model", "stream": False}).json == {"status": "success"}
    assert hub.requests == []


@pytest.mark.parametrize("name", ["demo", "Demo:latest", "mine", "made"])
def test_what_was_not_pulled_is_simply_there(server, tmp_path, name):
    put_demo(tmp_path / "models" / "mine")
    server.service.library.copy("demo", "made")
    assert server.post("/api/pull", {"model": name}).records == [{"status": "pulling manifest"}, {"status": "success"}]


def test_a_name_that_means_nothing_fails_in_ollamas_words(server):
    text = "pull model manifest: file does not exist"
    lines = server.post("/api/pull", {"model": "nosuch"}).records
    assert lines == [{"status": "pulling manifest"}, {"error": text}]
    answer = server.post("/api/pull", {"model": "nosuch", "stream": False})
    assert (answer.status, answer.json) == (500, {"error": text})


def test_a_repository_that_the_hub_does_not_know_fails_in_the_hubs_words(server, hub):
    lines = server.post("/api/pull", {"model": "org/other"}).records
    assert "The hub knows no org/other" in lines[-1]["error"]


@pytest.mark.parametrize("body", [{}, {"model": "a b"}])
def test_what_is_no_name_is_refused(server, body):
    answer = server.post("/api/pull", body)
    assert (answer.status, answer.json) == (400, {"error": "invalid model name"})


def test_a_base_is_pulled_before_something_is_built_on_it(server, hub):
    lines = server.post("/api/create", {"model": "new", "from": "org/model"}).records
    assert any("digest" in line for line in lines)
    assert "error" in lines[-1]  # the hub's files are random bytes, no model


class Slow:
    """Stand in for hub.pull.pull: report until told to end, and take a moment for that."""

    def __init__(self) -> None:
        self.calls, self.running, self.most_running = 0, 0, 0
        self.finish = threading.Event()
        self.error: Exception | None = None

    def __call__(self, name, models, limits, report) -> None:
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            report(Status("pulling manifest"))
            completed = 0
            while not self.finish.wait(0.005):
                completed += 1
                report(FileProgress("a", "sha256:aa", 1000, completed, 0))
            if self.error:
                raise self.error
            report(Status("success"))
        finally:
            time.sleep(0.05)
            self.running -= 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(pulls_module, "pull", slow)
    monkeypatch.setattr(pulls_module, "_REPORT_S", 0.02)
    return slow


async def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_the_last_one_to_leave_ends_the_pull(slow, tmp_path):
    async def run() -> None:
        pulls = Pulls(tmp_path)
        first, second = pulls.follow(NAME), pulls.follow(NAME)
        assert await anext(first) == await anext(second) == Status("pulling manifest")
        await first.aclose()
        assert isinstance(await anext(second), FileProgress)
        assert slow.calls == slow.running == 1
        await second.aclose()
        await until(lambda: slow.running == 0)

    asyncio.run(run())


def test_a_client_that_hangs_up_ends_its_pull(server, slow):
    async def act(client):
        response = await client.post("/api/pull", json={"model": "org/model"})
        assert (await response.content.readline()).startswith(b'{"status":')
        await until(lambda: slow.running == 1)
        response.close()
        await until(lambda: slow.running == 0)
        assert not slow.finish.is_set()

    ask(server, act)


def test_a_pull_that_is_being_ended_is_begun_anew(slow, tmp_path):
    async def run() -> None:
        pulls = Pulls(tmp_path)
        first = pulls.follow(NAME)
        await anext(first)
        await first.aclose()
        again = [pulls.follow(NAME), pulls.follow(NAME)]
        found = await asyncio.gather(*(anext(each) for each in again))
        assert found == 2 * [Status("pulling manifest")]
        assert (slow.calls, slow.most_running) == (2, 1)
        slow.finish.set()
        assert [event async for event in again[0]][-1] == Status("success")
        for each in again:
            await each.aclose()

    asyncio.run(run())


def test_an_error_reaches_everyone_who_waits(slow, tmp_path):
    async def run() -> None:
        pulls = Pulls(tmp_path)
        followers = [pulls.follow(NAME), pulls.follow(NAME)]
        for each in followers:
            await anext(each)
        slow.error = SlotpyError("no space")
        slow.finish.set()
        for each in followers:
            with pytest.raises(SlotpyError, match="no space"):
                async for _ in each:
                    pass

    asyncio.run(run())


def test_a_finished_pull_can_be_asked_for_again(slow, tmp_path):
    async def run() -> None:
        pulls = Pulls(tmp_path)
        slow.finish.set()
        for _ in range(2):
            assert [event async for event in pulls.follow(NAME)] == [Status("pulling manifest"), Status("success")]

    asyncio.run(run())
    assert slow.calls == 2


def test_what_was_received_is_kept_when_a_client_leaves(server, hub, tmp_path):
    """A real pull, cut off in the middle: the next one asks only for what is missing."""
    pulls = Pulls(tmp_path / "models", dataclasses.replace(LIMITS, connections=1))
    size = sum(map(len, hub.files.values()))

    async def run() -> None:
        events = pulls.follow(NAME)
        async for _ in events:
            if hub.bytes_sent:
                break
        await events.aclose()
        await until(lambda: not any(thread.name.startswith("pull") for thread in threading.enumerate()))

    asyncio.run(run())
    server.post("/api/pull", {"model": "org/model"})
    assert hub.bytes_sent < 2 * size
    found = {path.name: path.read_bytes() for path in (tmp_path / "models" / "org" / "model").iterdir()}
    found.pop("slotpy-model.json")
    assert found == hub.files


def test_push_says_that_there_is_nowhere_to_push_to(server):
    for name, text in (("nosuch", "model 'nosuch' not found"), ("demo", "slotpy does not push models")):
        lines = server.post("/api/push", {"model": name}).records
        assert lines[0] == {"status": "retrieving manifest"} and text in lines[1]["error"]
    assert server.post("/api/push", {"model": "demo", "stream": False}).status == 400
    answer = server.post("/api/push", {})
    assert (answer.status, answer.json) == (400, {"error": "model is required"})


def test_every_line_is_json_on_its_own(server):
    for line in server.post("/api/pull", {"model": "demo"}).text.splitlines():
        assert json.loads(line)

"""How a server begins and ends. Signals are sent to the test's own process, which serves on its main thread."""

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from slotpy import config
from slotpy.engine.generation import Failed, LoadRequest, TextDelta
from slotpy.errors import BusyError, CapacityError, SlotpyError, UsageError
from slotpy.server import serve as serving
from slotpy.server.serve import serve
from slotpy.server.service import Service
from slotpy.server.settings import Settings
from tests.server.fakes import FINISHED, LOADED, MODELS, TINYCHAT, FakeLibrary, FakeWorker
from tests.server.live import Live

BUSY = Failed(BusyError("the server is shutting down"))
ANYWHERE = Settings(port=0)
CHAT = b'{"model":"tinychat","messages":[{"role":"user","content":"hi"}]}'


@dataclass
class EndingWorker(FakeWorker):
    """Deliver `at_end` to every submission once it is closed, after so long."""

    at_end: tuple = ()
    closing_s: float = 0.0
    started: bool = False
    closed: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.started = True

    def close(self, drain_s: float) -> None:
        self.closed.append(drain_s)
        time.sleep(self.closing_s)
        for submission in self.submissions:
            for event in self.at_end:
                submission.deliver(event)


def serve_while(worker: EndingWorker, talk: Callable[[Live], object], caplog, preload=None) -> float:
    """Serve while `talk` runs on another thread; it has to send the signal. Gives how long the end took."""
    caplog.set_level(logging.INFO, "slotpy")
    service = Service(FakeLibrary(MODELS), worker)  # type: ignore[arg-type]
    problems: list[BaseException] = []
    signalled: list[float] = []

    def run() -> None:
        try:
            deadline = time.monotonic() + 5
            while not (lines := [r.getMessage() for r in caplog.records if "listening" in r.getMessage()]):
                assert time.monotonic() < deadline, "it never listened"
                time.sleep(0.005)
            talk(Live(int(lines[0].rpartition(":")[2]), service, None))  # type: ignore[arg-type]
        except BaseException as error:
            problems.append(error)
        finally:
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        serve(service, ANYWHERE, preload)
    finally:
        thread.join(5)
    assert not problems, problems
    return time.monotonic() - signalled[0]


def test_it_binds_starts_the_worker_and_ends_when_told(caplog):
    worker = EndingWorker([()])
    took_s = serve_while(worker, lambda server: server.ask("GET", "/"), caplog)
    assert worker.started and worker.closed == [config.DRAIN_S] and took_s < 1
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("listening on http://127.0.0.1:") and lines[-1] == "ended"
    assert "SIGTERM: ending; the running reply has 3 s" in lines


def test_a_reply_that_ends_in_time_is_whole(caplog):
    worker = EndingWorker([(TextDelta("Hel"),)], at_end=(TextDelta("lo"), FINISHED), closing_s=0.1)
    replies = []

    def talk(server: Live) -> None:
        reader = threading.Thread(target=lambda: replies.append(server.ask("POST", "/api/chat", CHAT)))
        reader.start()
        while not worker.submissions:
            time.sleep(0.005)
        threading.Timer(0.3, reader.join).start()

    serve_while(worker, talk, caplog)
    wait_for(lambda: replies)
    assert [line[-1:] for line in replies[0].body.splitlines()] == [b"}"] * 3
    assert b'"done":true' in replies[0].body


def test_a_reply_that_is_cut_short_says_so_and_new_requests_get_503(caplog):
    worker = EndingWorker([(TextDelta("Hel"),), ()], at_end=(BUSY,), closing_s=0.1)
    replies = []

    def talk(server: Live) -> None:
        for number in (1, 2):
            threading.Thread(target=lambda: replies.append(server.ask("POST", "/api/chat", CHAT))).start()
            wait_for(lambda number=number: len(worker.submissions) == number)

    took_s = serve_while(worker, talk, caplog)
    wait_for(lambda: len(replies) == 2)
    begun, queued = sorted(replies, key=lambda reply: reply.status)
    assert begun.status == 200 and begun.body.splitlines()[-1] == b'{"error":"the server is shutting down"}'
    assert (queued.status, queued.json) == (503, {"error": "the server is shutting down"})
    assert took_s < 2


def test_connections_are_refused_while_it_ends(caplog):
    worker = EndingWorker([()], closing_s=0.3)

    def talk(server: Live) -> None:
        def late() -> None:
            wait_for(lambda: worker.closed)
            with pytest.raises(ConnectionError):
                server.ask("GET", "/")
            refused.append(True)

        threading.Thread(target=late).start()

    refused: list[bool] = []
    serve_while(worker, talk, caplog)
    assert refused


def test_handlers_that_do_not_end_are_ended(caplog, monkeypatch):
    monkeypatch.setattr(serving, "HANDLERS_S", 0.05)
    worker = EndingWorker([(TextDelta("Hel"),)])

    def talk(server: Live) -> None:
        connection = server.connect()
        connections.append(connection)
        connection.sendall(
            b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(CHAT) + CHAT
        )
        wait_for(lambda: worker.submissions)

    connections: list[socket.socket] = []
    assert serve_while(worker, talk, caplog) < 2
    assert worker.submissions[0].cancelled
    connections[0].close()


def test_a_model_can_be_loaded_at_once(caplog):
    worker = EndingWorker([(LOADED,)])
    serve_while(worker, lambda server: wait_for(lambda: worker.submissions), caplog, TINYCHAT)
    assert (worker.request, worker.submissions[0].name) == (LoadRequest(), "tinychat:latest")


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason():
    worker = EndingWorker([(Failed(CapacityError("Needs 9.6 GiB.")),)])
    with pytest.raises(CapacityError, match=r"Needs 9\.6 GiB"):
        serve(Service(FakeLibrary(MODELS), worker), ANYWHERE, TINYCHAT)  # type: ignore[arg-type]
    assert worker.closed


def test_a_taken_port_is_told_before_anything_is_loaded():
    worker = EndingWorker([(LOADED,)])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SlotpyError, match=f"http://127.0.0.1:{port} is taken .*--port N"):
            serve(Service(FakeLibrary(MODELS), worker), replace(ANYWHERE, port=port), TINYCHAT)  # type: ignore[arg-type]
    assert not worker.started and not worker.submissions


@pytest.mark.parametrize(
    ("host", "why"), [("192.0.2.1", r"[^:(]*requested address"), ("no-such-host.invalid", r"[^:(]+")]
)
def test_an_address_of_another_machine_is_refused(host, why):
    with pytest.raises(SlotpyError, match=rf"^http://{host}:0 is no address of this machine: {why}\. Give"):
        serve(Service(FakeLibrary(MODELS), EndingWorker([()])), Settings(host=host, port=0, insecure=True))  # type: ignore[arg-type]


def test_it_does_not_listen_to_others_unless_told_to():
    worker = EndingWorker([()])
    with pytest.raises(UsageError, match="--insecure"):
        serve(Service(FakeLibrary(MODELS), worker), Settings(host="0.0.0.0", port=0))  # type: ignore[arg-type]
    assert not worker.started


def test_there_is_room_for_many_connections(monkeypatch):
    limits = {"now": (256, 1_000_000)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: limits.update(now=wanted))
    serving._allow_connections()
    assert limits["now"] == (8192, 1_000_000)
    limits["now"] = (256, 512)
    serving._allow_connections()
    assert limits["now"] == (512, 512)


STUCK = """
import logging, sys
from slotpy import config
from slotpy.server.serve import serve
from slotpy.server.service import Service
from slotpy.server.settings import Settings
from tests.server.test_serve import EndingWorker
config.DRAIN_S = 0.1
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
serve(Service(None, EndingWorker([()], closing_s=60.0)), Settings(port=0))
"""


@pytest.mark.parametrize("again", [True, False])
def test_an_engine_that_does_not_end_is_left_behind(again):
    """In a process of its own, which ends hard: at once when told twice, else when the time is over."""
    with subprocess.Popen([sys.executable, "-u", "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("SIGINT: ending")
        began = time.monotonic()
        if again:
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == (130 if again else 0)
        assert time.monotonic() - began < (1 if again else 5)
        last = process.stdout.read()
    assert ("ending at once" if again else "leaving it behind") in last


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)

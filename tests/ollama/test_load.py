"""Many clients, rude clients, and the end of the server: nobody is lost, nobody waits for what nobody reads."""

import concurrent.futures
import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slotpy.server.settings import Settings
from tests.fake_server import running
from tests.ollama.battery import HI, Call, ask, said
from tests.ollama.compare import Answer, send

ROOT = Path(__file__).parents[2]


def answer(port: int, word: str, model: str = "tiny", **fields: object) -> Answer:
    return send(ask("", model, messages=said(word), **fields), "127.0.0.1", port)


class Reader:
    """A client that reads its stream when it likes."""

    def __init__(self, port: int, call: Call, receive_bytes: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.connect(("127.0.0.1", port))
        self._socket.settimeout(10)
        body = call.raw_body or b""
        head = f"{call.method} {call.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self._file = self._socket.makefile("rb")

    def records(self, count: int) -> list[dict]:
        """Read so many records."""
        lines = (line for line in self._file if line.startswith(b"{"))
        return [json.loads(next(lines)) for _ in range(count)]

    def wait_for_text(self) -> None:
        """Read until some of the body is here."""
        while b"{" not in self._file.readline():
            pass

    def break_off(self) -> None:
        """Leave as a program that is killed does: with a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.leave()

    def leave(self) -> None:
        self._file.close()
        self._socket.close()


def test_a_client_that_leaves_frees_the_engine(port):
    reader = Reader(port, ask("", "tiny", messages=said("SLOW")))
    assert len(reader.records(3)) == 3
    reader.leave()
    began = time.monotonic()
    assert answer(port, "hi", stream=False).status == 200
    assert time.monotonic() - began < 1


def test_a_client_that_leaves_the_queue_is_never_served(port):
    running_one = Reader(port, ask("", "tiny", messages=said("SLOW")))
    running_one.records(1)
    waiting = [Reader(port, ask("", "tiny", messages=said("SLOW"))) for _ in range(5)]
    time.sleep(0.1)
    for reader in [*waiting, running_one]:
        reader.leave()
    began = time.monotonic()
    assert answer(port, "hi", stream=False).status == 200
    assert time.monotonic() - began < 1


def test_clients_that_leave_are_no_errors_in_the_log(port, caplog):
    for path in ("/api/chat", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        for _ in range(5):
            call = ask("", "tiny", path, messages=said("LIMIT"), input="LIMIT", stream=True, max_tokens=200)
            reader = Reader(port, call)
            reader.wait_for_text()
            reader.break_off()
    assert answer(port, "hi", stream=False).status == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_two_hundred_clients_at_once_are_all_answered(port):
    def one(number: int) -> tuple[int, str]:
        got = answer(port, f"SAY {number}", stream=number % 2 == 0)
        return number, "".join(record["message"]["content"] for record in got.records())

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        replies = [pool.submit(one, number) for number in range(200)]
        slowest = max(_timed(lambda: send(Call("", "HEAD", "/"), "127.0.0.1", port)) for _ in range(5))
        for reply in replies:
            number, text = reply.result()
            assert text == str(number)
    assert slowest < 1


def test_one_more_than_the_queue_holds_is_refused(tmp_path):
    with running(tmp_path, Settings(port=0, max_queue=2)) as port:
        first = Reader(port, ask("", "tiny", messages=said("SLOW")))
        first.records(1)
        waiting = [Reader(port, ask("", "tiny", messages=HI)) for _ in range(2)]
        time.sleep(0.1)
        refused = answer(port, "hi")
        for reader in [first, *waiting]:
            reader.leave()
    assert refused.status == 503
    assert json.loads(refused.text) == {"error": "server busy, please try again.  maximum pending requests exceeded"}


def test_a_slow_reader_does_not_hold_up_others(port):
    """Its reply is longer than what the kernel buffers, so the server cannot get rid of it."""
    options = {"num_predict": 1500}
    call = ask("", "tiny", messages=said("LIMIT"), options=options, logprobs=True, top_logprobs=20)
    slow = Reader(port, call, receive_bytes=4096)
    slow.records(1)
    assert answer(port, "hi", stream=False).status == 200
    assert slow.records(1)[0]["done"] is False
    slow.leave()


def test_a_connection_serves_many_requests(port):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for number in range(200):
        connection.request("POST", "/api/chat", json.dumps({"model": "tiny", "messages": said(f"SAY {number}")}))
        records = [json.loads(line) for line in connection.getresponse().read().splitlines()]
        assert "".join(record["message"]["content"] for record in records) == str(number)
    connection.close()


def test_models_swap_under_load_without_cutting_an_answer(port):
    def one(number: int) -> list[dict]:
        model = ("tinychat", "tiny")[number % 2]
        return answer(port, "SAY whole", model, keep_alive=0 if number % 3 == 0 else None).records()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for records in pool.map(one, range(6)):
            assert "".join(record["message"]["content"] for record in records) == "whole"
            assert records[-1]["done_reason"] == "stop"


def test_a_server_that_is_told_to_end_does_so_and_tells_its_clients():
    server = subprocess.Popen([sys.executable, "-m", "tests.fake_server"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        port = next(int(found[1]) for line in server.stderr if (found := re.search(r"listening on .*:(\d+)", line)))
        reader = Reader(port, ask("", "tiny", messages=said("SLOW")))
        reader.records(2)
        began = time.monotonic()
        server.terminate()
        rest = [json.loads(line) for line in reader._file if line.startswith(b"{")]
        assert rest[-1].get("done") is True or "error" in rest[-1]
        server.communicate(timeout=10)
        assert time.monotonic() - began < 5.5
        assert server.returncode == 0
        reader.leave()
    finally:
        server.kill()
        server.wait()


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began

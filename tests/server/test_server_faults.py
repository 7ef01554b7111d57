"""Bad clients, load and bad moments, over real sockets to a server in a process of its own.

The scripted engine has one slot: a SLOW reply keeps it for four seconds, so whoever is answered sooner proves that a
reply was ended before its time.
"""

import gzip
import hashlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server import wire
from tests.server.process import ROOT, ServerProcess, started, wait_for
from tests.server.wire import Client, Gone

MAX_QUEUE = 200
IDLE_S = 3.0
FULL = "server busy, please try again.  maximum pending requests exceeded"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for most tests. A slow body is let go after a second, a large one may take as long as it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))  # macOS begins with 256
    with started(max_queue=MAX_QUEUE, idle_s=IDLE_S, body_s=1.0, bytes_per_s=1 << 24) as process:
        assert chat(process, "hi") == "Hello!"
        yield process
        assert "Traceback" not in process.log


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing runs or waits, and the next client is answered as always."""
    yield
    if "server" in request.fixturenames:
        process = request.getfixturevalue("server")
        wait_for(lambda: load_of(process) == (0, 0), 5, "a request still runs or waits")
        assert chat(process, "hi") == "Hello!"


def body_of(words: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": words}], **fields}


def chat(server: ServerProcess, words: str, **fields: Any) -> str:
    """Ask for a whole reply, on a connection of its own."""
    answer = wire.ask(server.port, "POST", "/api/chat", body_of(words, stream=False, **fields))
    assert answer.status == 200, answer.body
    return str(answer.json["message"]["content"])


def load_of(server: ServerProcess) -> tuple[int, int]:
    """Give how many requests run and wait."""
    text = wire.ask(server.port, "GET", "/metrics").body.decode()
    running, queued = (re.search(rf"\nslotpy_{what}_requests (\d+)", text) for what in ("running", "queued"))
    assert running and queued
    return int(running[1]), int(queued[1])


class Pings:
    """Ask for `/` again and again on one connection while the block runs; `slowest_s` is the longest that it took."""

    def __init__(self, server: ServerProcess) -> None:
        self._client, self._over = Client(server.port, 60), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.took_s: list[float] = []

    def __enter__(self) -> "Pings":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._client.socket.close()

    def _run(self) -> None:
        while not self._over.is_set():
            began_s = time.monotonic()
            assert self._client.ask("HEAD", "/").status == 200
            self.took_s.append(time.monotonic() - began_s)
            time.sleep(0.005)

    @property
    def slowest_s(self) -> float:
        return max(self.took_s)


# Bodies ---------------------------------------------------------------------------------------------------------------


def test_a_body_of_150_mb_is_read_while_others_are_answered(server):
    body = json.dumps(body_of("hi", stream=False)).replace('"hi"', '"hi", "images": ["' + "A" * (150 << 20) + '"]')
    before_bytes = server.rss_bytes()
    with Pings(server) as pings:
        answer = wire.ask(server.port, "POST", "/api/chat", body.encode(), 30)
    assert (answer.status, answer.json) == (400, {"error": "this model is missing data required for image input"})
    assert len(pings.took_s) > 5
    print(f"slowest of {len(pings.took_s)} HEAD / beside 150 MB: {pings.slowest_s * 1e3:.0f} ms")
    assert server.rss_bytes() - before_bytes < 500 << 20


def test_a_body_beyond_the_limit_is_refused_at_once(server):
    with Client(server.port) as client:
        client.send(wire.request("POST", "/api/chat", Content_Length=str(300 << 20), Expect="100-continue"))
        answer = client.read()
    assert (answer.status, answer.json) == (413, {"error": "the request body is larger than 256 MiB"})


def test_a_client_that_sends_too_much_all_the_same_gets_to_read_why(server):
    before_bytes = server.rss_bytes()
    with Client(server.port, 20) as client:
        client.send(wire.request("POST", "/api/chat", Content_Length=str(300 << 20)))
        block = bytes(1 << 20)
        for _ in range(300):
            client.send(block)
        assert client.read().status == 413
    assert server.rss_bytes() - before_bytes < 32 << 20


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_a_chunked_body_has_no_length(server, size):
    data = json.dumps(body_of("hi", stream=False)).encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    answer = wire.ask(server.port, "POST", "/api/chat", body, Transfer_Encoding="chunked")
    assert answer.json["message"]["content"] == "Hello!"


def test_a_client_that_asks_whether_to_go_on_is_told_to(server):
    data = json.dumps(body_of("hi", stream=False)).encode()
    with Client(server.port) as client:
        client.send(wire.request("POST", "/api/chat", Content_Length=str(len(data)), Expect="100-continue"))
        assert client.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(data)
        assert client.read().json["message"]["content"] == "Hello!"


def test_a_packed_body_is_no_json(server):
    body = gzip.compress(json.dumps(body_of("hi")).encode())
    answer = wire.ask(server.port, "POST", "/api/chat", body, Content_Encoding="gzip")
    assert answer.status == 400 and answer.json["error"].startswith("invalid character")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages"])
def test_nesting_11000_deep_is_refused(server, path, opening):
    closing = {"[": "]", '{"a":': "}"}[opening]
    body = f'{{"model": "tiny", "messages": {opening * 11_000}1{closing * 11_000}}}'.encode()
    answer = wire.ask(server.port, "POST", path, body)
    assert answer.status == 400 and b"exceeded max depth" in answer.body


# Headers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flood",
    ["\r\n".join(f"X-{i}: {i}" for i in range(10_000)), "X: " + "a" * (10 << 20), "X" * (1 << 20), "\r\n" * 10],
    ids=["many", "long", "endless-name", "blank"],
)
def test_a_flood_of_headers_is_cut_off(server, flood):
    before_bytes = server.rss_bytes()
    with Client(server.port) as client:
        try:
            client.send(f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n{flood}\r\n\r\n".encode())
            status = client.read().status
        except (ConnectionError, Gone):  # the answer may be lost where the server closes on unread bytes
            status = 400
    assert status in (400, 431) or flood.isspace()
    assert server.rss_bytes() - before_bytes < 32 << 20


@pytest.mark.parametrize(
    "start", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "], ids=["silent", "line", "headers"]
)
def test_a_client_that_never_finishes_its_headers_is_let_go(server, start):
    with Client(server.port, IDLE_S + 5) as client:
        began_s = time.monotonic()
        dripping = threading.Thread(target=drip, args=(client.socket, start))
        dripping.start()
        client.socket.settimeout(0.2)
        is_open = True
        while is_open and time.monotonic() - began_s < IDLE_S + 3:
            assert chat(server, "hi") == "Hello!"
            try:
                is_open = bool(client.socket.recv(1000))
            except TimeoutError:
                continue
            except ConnectionError:
                is_open = False
        assert not is_open
        assert time.monotonic() - began_s > IDLE_S - 1
    dripping.join()


def drip(connection: socket.socket, start: bytes) -> None:
    """Send the start, then a byte now and then as long as somebody takes it; nothing at all after no start."""
    try:
        connection.send(start)
        while start:
            time.sleep(0.1)
            connection.send(b"a")
    except OSError:
        pass


def test_a_body_that_drips_is_answered_with_408(server):
    with Client(server.port, 5) as client:
        began_s = time.monotonic()
        client.send(wire.request("POST", "/api/chat", Content_Length="100"))
        dripping = threading.Thread(target=drip, args=(client.socket, b"{"))
        dripping.start()
        answer = client.read()
        assert (answer.status, answer.json) == (408, {"error": "the request body did not come within 1 s"})
        assert 0.9 < time.monotonic() - began_s < 2.5
    dripping.join()


# Clients that leave ---------------------------------------------------------------------------------------------------

SLOW = wire.request("POST", "/api/chat", body_of("SLOW"))
HEAD_BYTES = SLOW.index(b"\r\n\r\n")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "sent",
    [0, 3, 20, HEAD_BYTES, HEAD_BYTES + 4, HEAD_BYTES + 10, len(SLOW) - 1],
    ids=["nothing", "method", "header", "headers", "no-body", "half-body", "all-but-one"],
)
def test_a_client_that_leaves_within_its_request_is_forgotten(server, sent, reset):
    client = Client(server.port)
    client.send(SLOW[:sent])
    leave(client, reset)
    assert load_of(server) == (0, 0)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("received", [0, 5, 60, 200, 400, 1000], ids=lambda received: f"after-{received}")
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_a_client_that_leaves_within_its_answer_frees_the_slot(server, path, received, reset):
    client = Client(server.port)
    client.send(wire.request("POST", path, body_of("SLOW", stream=True)))
    wait_for(lambda: load_of(server) == (1, 0), 5, "it never ran")
    while received > 0:
        received -= len(client.socket.recv(received))
    began_s = time.monotonic()
    leave(client, reset)
    assert chat(server, "hi") == "Hello!"
    assert time.monotonic() - began_s < 1.5


def test_a_client_that_leaves_without_streaming_frees_the_slot(server):
    client = Client(server.port)
    client.send(wire.request("POST", "/api/chat", body_of("SLOW", stream=False)))
    wait_for(lambda: load_of(server) == (1, 0), 5, "it never ran")
    began_s = time.monotonic()
    leave(client, reset=False)
    assert chat(server, "hi") == "Hello!"
    assert time.monotonic() - began_s < 1.5


def test_a_client_that_leaves_the_queue_is_taken_out(server):
    with Client(server.port) as running:
        running.send(SLOW)
        wait_for(lambda: load_of(server) == (1, 0), 5, "it never ran")
        waiting = [Client(server.port) for _ in range(5)]
        for client in waiting:
            client.send(SLOW)
        wait_for(lambda: load_of(server) == (1, 5), 5, "they never waited")
        for client in waiting:
            leave(client, reset=False)
        wait_for(lambda: load_of(server) == (1, 0), 2, "they still wait")


def test_a_blob_that_does_not_come_whole_leaves_no_file(server):
    digest = hashlib.sha256(b"a" * 100_000).hexdigest()
    client = Client(server.port)
    client.send(wire.request("POST", f"/api/blobs/sha256:{digest}", Content_Length="100000") + b"a" * 99_999)
    wait_for(lambda: server.left_files("part-*"), 5, "it never arrived")
    leave(client, reset=False)
    wait_for(lambda: not server.left_files("part-*"), 5, "its part stays")
    assert wire.ask(server.port, "HEAD", f"/api/blobs/sha256:{digest}").status == 404


def test_a_client_that_sends_no_more_but_listens_has_left(server):
    """As with Go's server: the end of what a client sends ends its reply."""
    with Client(server.port) as client:
        client.send(SLOW)
        wait_for(lambda: load_of(server) == (1, 0), 5, "it never ran")
        client.socket.shutdown(socket.SHUT_WR)
        wait_for(lambda: load_of(server) == (0, 0), 2, "it still runs")


def leave(client: Client, reset: bool) -> None:
    if reset:
        client.abort()
    else:
        client.socket.close()


# Slow readers and many clients ----------------------------------------------------------------------------------------


NUM_UNREAD = 2200
"""Tokens of a reply that no socket's buffers hold: with their log-probabilities it is 3 MB as a stream."""

UNREAD = wire.request(
    "POST",
    "/api/chat",
    body_of("LIMIT", options={"num_predict": NUM_UNREAD}, logprobs=True, top_logprobs=20),
)


def test_a_client_that_does_not_read_holds_up_nobody(server):
    before_bytes, done = server.rss_bytes(), server.log.count("POST /api/chat: 200")
    with Client(server.port, 30, receive_bytes=2048) as slow:
        slow.send(UNREAD)
        wait_for(lambda: load_of(server) == (1, 0), 5, "it never ran")
        assert [chat(server, "hi") for _ in range(3)] == ["Hello!"] * 3
        assert server.log.count("POST /api/chat: 200") == done + 3  # the slow one's answer does not fit into buffers
        assert server.rss_bytes() - before_bytes < 32 << 20
        records = slow.read().records
    assert len(records) > 1000 and records[-1]["done_reason"] == "length"
    assert "".join(record["message"]["content"] for record in records) == " more" * NUM_UNREAD


def test_200_chats_at_once_are_answered_in_order_and_the_next_one_is_refused(server):
    clients = []
    with Client(server.port, 60) as control, Pings(server) as pings:
        first = Client(server.port, 60)
        first.send(
            wire.request("POST", "/api/chat", body_of("SLOW SAY " + "word " * 2000))
        )  # the better part of a minute
        wait_for(lambda: load_of(server) == (1, 0), 5, "it never ran")
        for number in range(MAX_QUEUE):
            client = Client(server.port, 60)
            client.send(wire.request("POST", "/api/chat", body_of(f"SAY {number}.", stream=number % 2 == 0)))
            assert [control.ask("HEAD", "/").status for _ in range(2)] == [200, 200]  # it has been seen by then
            clients.append(client)
        assert load_of(server) == (1, MAX_QUEUE)
        for path in ("/api/chat", "/v1/chat/completions", "/v1/messages"):
            answer = wire.ask(server.port, "POST", path, body_of("hi", max_tokens=5))
            error = answer.json["error"]
            assert answer.status == 503 and (error if path == "/api/chat" else error["message"]) == FULL
        first.socket.close()
        replies = [client.read().records for client in clients]
    texts = ["".join(record["message"]["content"] for record in records) for records in replies]
    assert texts == [f"{number}." for number in range(MAX_QUEUE)]
    ends = [records[-1]["created_at"] for records in replies]
    assert ends == sorted(ends)
    print(f"slowest of {len(pings.took_s)} HEAD / beside 200 chats: {pings.slowest_s * 1e3:.0f} ms")
    for client in clients:
        client.socket.close()


def test_1000_requests_go_over_one_connection(server):
    with Client(server.port, 30) as client:
        for number in range(1000):
            method, path, body = [
                ("GET", "/api/version", None),
                ("HEAD", "/", None),
                ("POST", "/api/show", {"model": "tiny"}),
                ("POST", "/api/chat", body_of("hi", stream=number % 3 == 0)),
            ][3 if number % 20 == 0 else number % 3]  # fmt: skip
            answer = client.ask(method, path, body)
            assert answer.status == 200 and not answer.closes


def test_500_idle_connections_are_let_be_for_a_while(server):
    clients = [Client(server.port) for _ in range(500)]
    assert clients[-1].ask("GET", "/api/version").status == 200
    assert clients[0].ask("GET", "/api/version").status == 200
    assert chat(server, "hi") == "Hello!"
    assert server.held().connections > 400  # the first may have had their time
    assert server.settled(IDLE_S + 4).connections == 0
    for client in clients:
        client.socket.close()


# Models ---------------------------------------------------------------------------------------------------------------


def test_models_that_swap_cut_no_reply(server):
    def ask(number: int) -> Any:
        body = body_of(f"SAY {number} and on.", model=("tiny", "tinychat")[number % 2], stream=number % 3 == 0)
        return wire.ask(server.port, "POST", "/api/chat", body, 30).records

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(ask, range(12)))
    for number, records in enumerate(replies):
        assert "".join(record["message"]["content"] for record in records) == f"{number} and on."
        assert records[-1]["done_reason"] == "stop"


def test_unloading_waits_for_the_reply_that_runs(server):
    with Client(server.port, 20) as client:
        client.send(wire.request("POST", "/api/chat", body_of("SAY " + "word " * 50)))
        answer = wire.ask(server.port, "POST", "/api/generate", {"model": "tiny", "keep_alive": 0})
        assert answer.json["done_reason"] == "unload"
        records = client.read().records
    assert records[-1]["done_reason"] == "stop"
    assert "".join(record["message"]["content"] for record in records).count("word") == 50
    assert wire.ask(server.port, "GET", "/api/ps").json == {"models": []}


def test_a_reply_with_keep_alive_0_is_whole_and_the_model_gone(server):
    assert chat(server, "hi", keep_alive=0) == "Hello!"
    wait_for(lambda: wire.ask(server.port, "GET", "/api/ps").json == {"models": []}, 5, "it stays loaded")


# Errors and ends ------------------------------------------------------------------------------------------------------

ENDS = {
    "/api/chat": rb'\{"error":"The scripted engine fails here\.[^\n]*\}\n',
    "/v1/chat/completions": rb'data: \{"error":\{"message":"The scripted engine .*"type":"api_error".*\}\n\n',
    "/v1/messages": rb'event: error\ndata: \{"type":"error","error":\{"type":"api_error".*\}\n\n',
    "/v1/responses": rb'event: response\.failed\ndata: \{"type":"response\.failed".*\}\n\n',
}


@pytest.mark.parametrize("path", ENDS)
def test_an_error_within_a_reply_ends_it_as_its_dialect_has_it(server, path):
    words = {"input": "ERRMID"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "ERRMID"}]}
    with Client(server.port) as client:
        answer = client.ask("POST", path, {"model": "tiny", "stream": True, "max_tokens": 50, **words})
        assert answer.status == 200 and len(answer.chunks) > 1
        assert re.search(ENDS[path] + b"$", answer.body)
        whole = client.ask("POST", path, {"model": "tiny", "stream": False, "max_tokens": 50, **words})
    assert whole.status == 500 and b"The scripted engine fails here" in whole.body and not whole.chunks


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_sigterm_lets_a_reply_say_that_it_is_cut_short(path):
    with started(drain_s=0.3) as server, Client(server.port) as running, Client(server.port) as waiting:
        running.send(wire.request("POST", path, body_of("SLOW", stream=True)))
        wait_for(lambda: load_of(server) == (1, 0), 10, "it never ran")
        waiting.send(wire.request("POST", path, body_of("hi", stream=True)))
        wait_for(lambda: load_of(server) == (1, 1), 5, "it never waited")
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        refused, cut = waiting.read(), running.read()
        assert server.process.wait(5) == 0
        assert time.monotonic() - began_s < 5
        assert refused.status == 503 and b"the server is shutting down" in refused.body
        assert cut.status == 200 and b"slow" in cut.chunks[0] and b"the server is shutting down" in cut.chunks[-1]
        assert "Traceback" not in server.log


def test_sigterm_does_not_wait_for_a_client_that_does_not_read():
    with started(drain_s=0.3) as server, Client(server.port, 20, receive_bytes=2048) as client:
        client.send(UNREAD)
        wait_for(lambda: load_of(server) == (1, 0), 10, "it never ran")
        wait_for(lambda: load_of(server) == (0, 0), 10, "it does not end")
        assert "POST /api/chat: 200" not in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once():
    with started(drain_s=30) as server, Client(server.port) as client:
        client.send(SLOW)
        wait_for(lambda: load_of(server) == (1, 0), 10, "it never ran")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "SIGTERM: ending" in server.log, 5, "it does not hear")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 128 + signal.SIGTERM
        with pytest.raises(Gone):
            client.read()


def test_a_taken_port_ends_the_command_with_what_to_do(server):
    main = "from slotpy.cli.main import main; main()"
    command = [sys.executable, "-c", main, "serve", "demo", "--port", str(server.port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert result.returncode == 1 and "is taken by another program" in result.stderr and "--port N" in result.stderr
    assert "Traceback" not in result.stderr

import asyncio
import json
import socket
import threading
import time
from datetime import datetime, timedelta

import pytest
from aiohttp import web

from slotpy.errors import UsageError
from slotpy.server.errors import ApiError, error_body
from slotpy.server.stream import Sse, json_response, ndjson, now, sse
from tests.server.live import live

RECORDS = [{"response": "line\u2028separators \u0085 \U0001f600 caf\u00e9\n"}, {"done": True}]


def stream_of(*items, closed: list | None = None):
    async def records():
        try:
            for item in items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if closed is not None:
                closed.append(True)

    return records()


def lines(*items):
    async def handler(request):
        return await ndjson(request, stream_of(*items))

    return [web.post("/api/x", handler)]


def events(*items):
    async def handler(request):
        return await sse(request, stream_of(*items), lambda error: [Sse(error_body("openai", error, "")), Sse("bye")])

    return [web.post("/v1/x", handler)]


def test_ndjson_is_one_ascii_line_and_one_chunk_for_each_record():
    with live(lines(*RECORDS)) as server:
        reply = server.ask("POST", "/api/x", b"")
        assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
        assert reply.headers["transfer-encoding"] == "chunked" and "content-encoding" not in reply.headers
        assert reply.body.isascii() and reply.body.count(b"\n") == 2
        assert [json.loads(line) for line in reply.body.splitlines()] == RECORDS


def test_sse_frames_have_names_only_where_given():
    with live(events(Sse({"a": "\u2028"}), Sse({"b": 1}, "named"), Sse("[DONE]"))) as server:
        reply = server.ask("POST", "/v1/x", b"")
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.body == b'data: {"a":"\\u2028"}\n\nevent: named\ndata: {"b":1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ApiError(404, "model 'x' not found"), 404, "model 'x' not found"),
        (UsageError("No.", hint="Do."), 400, "No. Do."),
        (KeyError("secret"), 500, "internal error (KeyError); the server's log has the details"),
    ],
)
def test_an_error_before_the_first_record_keeps_its_status(error, status, text):
    with live([*lines(error), *events(error)]) as server:
        reply = server.ask("POST", "/api/x", b"")
        assert (reply.status, reply.json) == (status, {"error": text})
        reply = server.ask("POST", "/v1/x", b"")
        assert (reply.status, reply.json["error"]["message"]) == (status, text)
        assert reply.headers["content-type"] == "application/json; charset=utf-8"


def test_an_error_after_the_first_record_is_the_last_one(caplog):
    with live([*lines({"a": 1}, KeyError("secret")), *events(Sse({"a": 1}), ApiError(400, "no"))]) as server:
        reply = server.ask("POST", "/api/x", b"")
        assert reply.status == 200
        assert [json.loads(line) for line in reply.body.splitlines()] == [
            {"a": 1},
            {"error": "internal error (KeyError); the server's log has the details"},
        ]
        assert "secret" in caplog.text, "the log has what the client does not see"
        body = server.ask("POST", "/v1/x", b"").body.split(b"\n\n")
        assert body[0] == b'data: {"a":1}' and b'"message":"no"' in body[1] and body[2:] == [b"data: bye", b""]


def test_records_go_out_as_they_come():
    proceed = threading.Event()

    async def handler(request):
        async def records():
            yield {"a": 1}
            await asyncio.to_thread(proceed.wait, 5)
            yield {"b": 2}

        return await ndjson(request, records())

    with live([web.post("/api/x", handler)]) as server, server.connect() as connection:
        connection.sendall(b"POST /api/x HTTP/1.1\r\nHost: x.local\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        first = connection.recv(1 << 16)
        while not first.endswith(b'{"a":1}\n\r\n'):
            first += connection.recv(1 << 16)
        proceed.set()
        assert connection.recv(1 << 16).endswith((b'{"b":2}\n\r\n', b"0\r\n\r\n"))


@pytest.mark.parametrize("num_records", [0, 1, 3])
def test_a_client_that_leaves_has_its_records_closed(num_records):
    closed, reached = threading.Event(), threading.Event()

    async def handler(request):
        async def records():
            try:
                for index in range(num_records):
                    yield {"index": index}
                reached.set()
                await asyncio.sleep(30)
            finally:
                closed.set()

        return await ndjson(request, records())

    with live([web.post("/api/x", handler)]) as server:
        before = server.tasks()
        with server.connect() as connection:
            connection.sendall(b"POST /api/x HTTP/1.1\r\nHost: x.local\r\nContent-Length: 0\r\n\r\n")
            assert reached.wait(5)
        assert closed.wait(1)
        deadline = time.monotonic() + 2
        while server.tasks() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.tasks() == before


def test_a_client_that_does_not_read_holds_its_stream_back_and_no_other():
    produced = []

    async def slow(request):
        async def records():
            for index in range(200):
                produced.append(index)
                yield {"text": "x" * 100_000}

        return await ndjson(request, records())

    with live([web.post("/slow", slow), *lines(*RECORDS)]) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(10)
        connection.sendall(b"POST /slow HTTP/1.1\r\nHost: x.local\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        while not produced:
            time.sleep(0.01)
        for _ in range(5):
            assert server.ask("POST", "/api/x", b"").status == 200
        time.sleep(0.1)
        assert len(produced) < 150, "most of it waits for the client"


def test_json_answers_have_their_length_and_type():
    answer = json_response({"a": "\u2028\u00e9", "b": [1.5, None]})
    assert answer.body == b'{"a":"\\u2028\\u00e9","b":[1.5,null]}'
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert json_response([], charset=False, status=404).headers["Content-Type"] == "application/json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_response(float("nan"))


def test_times_have_a_zone():
    assert now().endswith("Z")
    assert abs(datetime.fromisoformat(now()) - datetime.now().astimezone()) < timedelta(seconds=5)

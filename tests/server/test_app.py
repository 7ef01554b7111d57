"""What stands around every handler: who may call, what paths lead to, bodies, errors, and what is logged."""

import asyncio
import gzip
import logging
import time

import pytest
from aiohttp import web

from slotpy.errors import BusyError, CapacityError, SlotpyError, UsageError
from slotpy.server import bodies
from slotpy.server import serve as serving
from slotpy.server.app import is_local_name
from slotpy.server.bodies import UNPACKED_BYTES, unpacked, zstd
from slotpy.server.errors import ApiError
from slotpy.server.settings import Settings
from slotpy.server.stream import json_response
from tests.server.live import live


async def hello(request):
    return web.Response(text="Ollama is running")


async def echo(request):
    body = await request.read()
    return json_response({"size": len(body), "start": body[:8].hex()})


async def blob(request):
    size = 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
    return json_response({"size": size})


RAISED: dict[str, Exception] = {}


async def raising(request):
    raise RAISED["error"]


ROUTES = [
    web.get("/", hello),
    web.get("/api/tags", hello),
    web.get("/v1/models", hello),
    web.get("/v1/models/{id:.+}", hello),
    web.post("/api/chat", echo),
    web.delete("/api/delete", echo),
    web.post("/v1/chat/completions", echo),
    web.post("/api/blobs/{digest}", blob),
    web.post("/api/raise", raising),
    web.post("/v1/raise", raising),
    web.post("/v1/messages/raise", raising),
]


@pytest.fixture(scope="module")
def server():
    with live(ROUTES) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/nope", 404, b"404 page not found"),
        ("POST", "/api/nope", 404, b"404 page not found"),
        ("GET", "/api/nope/", 404, b"404 page not found"),
        ("POST", "/", 405, b"405 method not allowed"),
        ("GET", "/api/chat", 405, b"405 method not allowed"),
        ("PUT", "/api/chat", 405, b"405 method not allowed"),
        ("OPTIONS", "/api/chat", 405, b"405 method not allowed"),
        ("HEAD", "/api/chat", 405, b""),
        ("GET", "/api/chat/", 404, b"404 page not found"),
    ],
)
def test_paths_and_methods_that_are_not_there(server, method, path, status, body):
    reply = server.ask(method, path)
    assert (reply.status, reply.body, reply.headers["content-type"]) == (status, body, "text/plain")


@pytest.mark.parametrize(
    ("method", "path", "status", "location"),
    [
        ("GET", "/api/tags/", 301, "/api/tags"),
        ("HEAD", "/v1/models/?a=b", 301, "/v1/models?a=b"),
        ("GET", "//api/tags", 307, "/api/tags"),
        ("POST", "/api/chat/", 307, "/api/chat"),
        ("GET", "//evil.example//api/tags", 404, None),
        ("GET", "//", 404, None),
        ("GET", "//v1/models/%22%3Cb%3E", 307, "/v1/models/%22%3Cb%3E"),
    ],
)
def test_superfluous_slashes_are_redirected(server, method, path, status, location):
    reply = server.ask(method, path)
    assert (reply.status, reply.headers.get("location")) == (status, location)
    if status == 301 and method == "GET":
        assert server.ask("GET", "//v1/models/a&b").body == b'<a href="/v1/models/a&amp;b">Temporary Redirect</a>.\n\n'
        assert reply.body == b'<a href="/api/tags">Moved Permanently</a>.\n\n'
        assert reply.headers["content-type"] == "text/html; charset=utf-8"


def test_head_gives_the_headers_alone(server):
    reply = server.ask("HEAD", "/")
    assert (reply.status, reply.headers["content-length"], reply.body) == (200, "17", b"")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert "server" not in reply.headers


LOCAL = [
    "http://localhost", "https://localhost", "http://localhost:3000", "https://127.0.0.1:5173", "http://0.0.0.0:80",
    "app://obsidian.md", "file://", "tauri://localhost", "vscode-webview://abc", "vscode-file://vscode-app",
]  # fmt: skip
FOREIGN = [
    "http://evil.example", "null", "chrome-extension://abc", "http://localhost.evil.example", "http://127.0.0.1.evil",
    "https://evil.example:11434", "http://xlocalhost",
]  # fmt: skip


@pytest.mark.parametrize("origin", LOCAL)
def test_local_pages_may_call(server, origin):
    for reply in (server.ask("GET", "/api/tags", Origin=origin), server.ask("GET", "/nope", Origin=origin)):
        assert reply.headers["access-control-allow-origin"] == origin and reply.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in reply.headers
    assert reply.status == 404
    reply = server.ask("OPTIONS", "/api/chat", Origin=origin, Access_Control_Request_Method="POST")
    assert (reply.status, reply.body, reply.headers["access-control-max-age"]) == (204, b"", "43200")
    assert reply.headers["access-control-allow-methods"] == "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS"
    for name in ("Authorization", "Content-Type", "User-Agent", "Openai-Beta", "X-Stainless-Retry-Count", "X-Api-Key"):
        assert name in reply.headers["access-control-allow-headers"].split(",")
    assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (origin, "Origin")


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "DELETE", "POST"])
def test_pages_from_elsewhere_may_not(server, origin, method):
    reply = server.ask(method, "/api/chat", Origin=origin)
    assert (reply.status, reply.body) == (403, b"") and "access-control-allow-origin" not in reply.headers


def test_a_page_from_this_very_server_may_call(server):
    reply = server.ask("GET", "/api/tags", Host="box.local:1", Origin="http://box.local:1")
    assert reply.status == 200 and "vary" not in reply.headers


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (("https://*.example.com",), "https://chat.example.com", "https://chat.example.com"),
        (("https://*.example.com",), "https://chat.example.org", None),
        (("chrome-extension://*", "http://a.b"), "chrome-extension://xyz", "chrome-extension://xyz"),
        (("http://a.b",), "http://aXb", None),
        (("*",), "http://anyone.example", "*"),
        (("*",), "null", "*"),
    ],
)
def test_more_origins_can_be_allowed(origins, origin, allowed):
    with live(ROUTES, Settings(origins=origins)) as server:
        for method in ("GET", "OPTIONS"):
            reply = server.ask(method, "/api/tags", Origin=origin)
            assert reply.headers.get("access-control-allow-origin") == allowed
            assert reply.status == (403 if allowed is None else 204 if method == "OPTIONS" else 200)
            assert ("vary" in reply.headers) == (allowed not in (None, "*"))


HOSTS = {
    "localhost": True, "LOCALHOST:11434": True, "127.0.0.1:1": True, "[::1]:11434": True, "192.168.1.5:11434": True,
    "10.0.0.1": True, "0.0.0.0": True, "box.local": True, "a.internal:80": True, "x.localhost": True, "me": True,
    "evil.example": False, "8.8.8.8": False, "localhost.evil.example": False, "local": False, "[2001:4860::8]": False,
    "evil.example:11434": False, "": True,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_only_names_of_this_machine_are_local(host):
    assert is_local_name(host, "me") == HOSTS[host]


def test_foreign_host_names_are_refused_only_where_this_machine_alone_can_connect(server):
    reply = server.ask("GET", "/api/tags", Host="evil.example")
    assert (reply.status, reply.body) == (403, b"")
    with live(ROUTES, Settings(host="0.0.0.0", insecure=True)) as wide:
        assert wide.ask("GET", "/api/tags", Host="evil.example").status == 200


def test_an_api_key_is_demanded_everywhere_but_at_the_root():
    with live(ROUTES, Settings(api_key="sésame")) as server:
        assert server.ask("GET", "/").status == 200
        for given in ({}, {"Authorization": "Bearer sésam"}, {"x-api-key": ""}, {"Authorization": "Basic c2VzYW1l"}):
            reply = server.ask("POST", "/api/chat", b"{}", **given)
            assert reply.status == 403 and "API key" in reply.json["error"]
            assert server.ask("GET", "/metrics", **given).status == 403
            assert server.ask("GET", "/nope", **given).status == 403
            reply = server.ask("POST", "/v1/chat/completions", b"{}", **given)
            assert reply.status == 401 and "API key" in reply.json["error"]["message"]
            assert reply.headers["www-authenticate"] == "Bearer"
            assert (
                server.ask("POST", "/v1/messages/raise", b"{}", **given).json["error"]["type"] == "authentication_error"
            )
        for given in (
            {"Authorization": "Bearer sésame"},
            {"authorization": "bearer  sésame "},
            {"X-Api-Key": "sésame"},
        ):
            assert server.ask("POST", "/api/chat", b"{}", **given).status == 200
        assert server.ask("OPTIONS", "/api/chat", Origin="http://localhost").status == 204, "preflights carry no key"


def test_bodies_arrive_whole_whatever_their_framing(server):
    assert server.ask("POST", "/api/chat", b"x" * 3_000_000).json["size"] == 3_000_000
    assert server.ask("DELETE", "/api/delete", b"{}").json["size"] == 2


def test_chunked_bodies_and_expectations_are_understood(server):
    head = b"POST /api/chat HTTP/1.1\r\nHost: x.local\r\nConnection: close\r\n"
    reply = server.send(head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n")
    assert reply.json["size"] == 4
    with server.connect() as connection:
        connection.sendall(head + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abcd")
        assert b'{"size":4' in connection.recv(1000)


def test_packed_bodies_reach_handlers_as_they_are(server):
    packed = gzip.compress(b'{"model":"x"}')
    assert server.ask("POST", "/api/chat", packed, Content_Encoding="gzip").json["start"] == packed[:8].hex()


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_bodies_beyond_the_limit_are_refused_in_the_dialect(path):
    with live(ROUTES, Settings(max_body_bytes=100_000)) as server:
        assert server.ask("POST", path, b"x" * 100_000).json["size"] == 100_000
        refused = server.ask("POST", path, b"x" * 100_001)
        chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: x.local\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        announced = server.ask(path=path, method="POST", Content_Length="100001")  # and never sent
        for reply in (refused, announced, server.send(head.encode() + 8 * chunk + b"0\r\n\r\n")):
            assert reply.status == 413 and "97.7 KiB" in str(reply.json["error"])
        assert server.ask("POST", "/api/blobs/sha256:0", b"x" * 300_000).json == {"size": 300_000}


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(bodies, "PATIENCE_S", 0.1)
    with live(ROUTES) as server:
        reply = server.ask("POST", "/api/chat", b"abc", Content_Length="100")
        assert reply.status == 408 and "did not come" in reply.json["error"]


def test_headers_that_do_not_come_are_not_waited_for_either(monkeypatch):
    monkeypatch.setattr(serving, "IDLE_S", 0.2)
    with live(ROUTES) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: x.local\r\nX-Slow: "):
            with server.connect() as slow:
                slow.sendall(sent)
                assert server.ask("GET", "/").status == 200, "others are served meanwhile"
                assert slow.recv(100) == b"", "it is closed"


def test_unpacking_takes_what_clients_send_and_no_bombs():
    text = b'{"model":"x"}'
    assert unpacked(text, "") == unpacked(text, "identity") == text
    assert unpacked(gzip.compress(text), "GZIP") == unpacked(zstd.compress(text), "zstd") == text
    assert unpacked(zstd.compress(gzip.compress(text)), "gzip, zstd") == text
    largest = bytes(UNPACKED_BYTES)
    assert unpacked(gzip.compress(largest), "gzip") == largest
    for bomb, name in ((gzip.compress(largest + b"x"), "gzip"), (zstd.compress(largest + b"x"), "zstd")):
        with pytest.raises(ApiError, match="larger than 20 MiB") as caught:
            unpacked(bomb, name)
        assert caught.value.status == 413
    for body, name in (
        (text, "gzip"), (text, "zstd"), (gzip.compress(text)[:-3], "gzip"), (zstd.compress(text)[:-3], "zstd"),
        (text, "br"), (b"", "zstd"), (b"", "gzip"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            unpacked(body, name)
        assert caught.value.status == 400 and name in str(caught.value)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(404, "model 'x' not found"), 404, "not_found_error"),
        (UsageError("No."), 400, "invalid_request_error"),
        (CapacityError("No memory."), 503, "overloaded_error"),
        (BusyError("server busy"), 503, "overloaded_error"),
        (SlotpyError("Unreadable."), 500, "api_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
        (ConnectionResetError("secret, of another connection than the client's"), 500, "api_error"),
        (web.HTTPBadRequest(text="secret"), 500, "api_error"),
    ],
)
def test_errors_are_answered_in_the_dialect_of_the_path(server, monkeypatch, caplog, error, status, kind):
    monkeypatch.setitem(RAISED, "error", error)
    is_bug = "secret" in str(error) or isinstance(error, web.HTTPException)
    text = f"internal error ({type(error).__name__}); the server's log has the details" if is_bug else str(error)
    reply = server.ask("POST", "/api/raise", b"")
    assert (reply.status, reply.json) == (status, {"error": text})
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    reply = server.ask("POST", "/v1/raise", b"")
    openai_kind = "api_error" if status == 503 else kind
    assert (reply.status, reply.json) == (
        status, {"error": {"message": text, "type": openai_kind, "param": None, "code": None}},
    )  # fmt: skip
    reply = server.ask("POST", "/v1/messages/raise", b"")
    assert reply.json.pop("request_id").startswith("req_") and reply.status == status
    assert reply.json["error"] == {"type": kind, "message": text}
    assert b"Traceback" not in reply.body
    assert ("Traceback" in caplog.text) == is_bug, "a bug keeps its traceback, in the log"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x.local\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(300)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x.local\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x.local\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x.local\r\nContent-Length: abc\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x.local\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nHost: x.local\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabcd",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["many headers", "long header", "long path", "no length", "two lengths", "two framings", "tls", "nonsense"],
)
def test_what_is_no_http_is_refused_in_a_line(server, caplog, data):
    reply = server.send(data)
    assert reply.status in (400, 431) and b"Traceback" not in reply.body
    assert "Traceback" not in caplog.text
    assert server.ask("GET", "/").status == 200


def test_every_request_has_its_line_in_the_log(server, caplog):
    caplog.set_level(logging.INFO, "slotpy")
    server.ask("GET", "/api/tags?x=1")
    server.ask("GET", "/nope%0A2026-01-01")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(" in ")[0] for line in lines] == [
        "127.0.0.1 GET /api/tags: 200", "127.0.0.1 GET /nope%0A2026-01-01: 404",
    ]  # fmt: skip


def test_a_client_that_left_is_logged_as_such(caplog):
    caplog.set_level(logging.INFO, "slotpy")

    async def never(request):
        await asyncio.sleep(30)

    with live([web.post("/api/chat", never)]) as server:
        with server.connect() as connection:
            connection.sendall(b"POST /api/chat HTTP/1.1\r\nHost: x.local\r\nContent-Length: 0\r\n\r\n")
            time.sleep(0.1)
        deadline = time.monotonic() + 2
        while "client gone" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "POST /api/chat: client gone in" in caplog.text and "Traceback" not in caplog.text


def test_metrics_are_served(server):
    server.ask("GET", "/api/tags")
    reply = server.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert b'slotpy_requests_total{method="GET",route="/api/tags",status="200"}' in reply.body


def test_many_connections_and_many_requests_on_one(server):
    connections = [server.connect() for _ in range(200)]
    request = b"GET / HTTP/1.1\r\nHost: x.local\r\n\r\n"
    try:
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            assert connection.recv(1000).endswith(b"Ollama is running")
        for _ in range(300):
            connections[0].sendall(request)
            assert connections[0].recv(1000).endswith(b"Ollama is running")
    finally:
        for connection in connections:
            connection.close()

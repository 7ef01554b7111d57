"""A server on a socket of its own, with the runner that `slotpy serve` uses, for tests of what goes over the wire."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from slotpy.server.app import make_app
from slotpy.server.serve import make_runner
from slotpy.server.service import Service
from slotpy.server.settings import Settings
from tests.server.fakes import MODELS, FakeLibrary, FakeWorker


@dataclass(frozen=True)
class Reply:
    """What came back; `headers` have lower-case names, chunks are put together."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Live:
    """A running server: `send` bytes to it, or `ask` it something. `service` is what its handlers use."""

    def __init__(self, port: int, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.port, self.service, self.loop = port, service, loop

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, data: bytes) -> Reply:
        """Send bytes that ask for the connection's end, and read to it."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_reply(connection)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """Keyword `content_type` is the header Content-Type."""
        given = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            given.setdefault("Content-Length", str(len(body)))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))

    def tasks(self) -> int:
        """Count the tasks of the server's loop."""
        counted: list[int] = []
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (counted.append(len(asyncio.all_tasks(self.loop))), done.set()))
        assert done.wait(5)
        return counted[0]


def read_reply(connection: socket.socket) -> Reply:
    """Read to the end of the connection, or of a body whose length is known."""
    data = body = b""
    headers: dict[str, str] = {}
    while len(body) < int(headers.get("content-length", 1 << 40)) and (received := connection.recv(1 << 16)):
        data += received
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(chunks(body))
    return Reply(int(first.split()[1]), headers, body)


def chunks(body: bytes) -> Iterator[bytes]:
    """Take a chunked body apart, which must have its end."""
    while True:
        size, _, body = body.partition(b"\r\n")
        num_bytes = int(size, 16)
        if not num_bytes:
            assert body == b"\r\n"
            return
        yield body[:num_bytes]
        assert body[num_bytes : num_bytes + 2] == b"\r\n"
        body = body[num_bytes + 2 :]


@contextmanager
def live(
    routes: Sequence[web.AbstractRouteDef],
    settings: Settings = Settings(),  # noqa: B008  # frozen
    *scripts: Any,
) -> Iterator[Live]:
    """Serve `routes` on a free port from another thread."""
    service = Service(FakeLibrary(MODELS), FakeWorker(list(scripts or [()])))  # type: ignore[arg-type]
    loop, started, found = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def run() -> None:
        app = make_app(service, settings, routes)
        runner = make_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(runner.addresses[0][1])
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(5)
        yield Live(found[0], service, loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()

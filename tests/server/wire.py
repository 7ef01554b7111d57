"""HTTP/1.1 from a client that takes nothing on trust: answers are read byte by byte, and every oddity is an error."""

import json
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_STATUS_LINE = re.compile(rb"HTTP/\d\.\d (\d{3}) ([ -~]*)")  # the version is the request's
_FIELD = re.compile(rb"([A-Za-z0-9-]+): ?([\t -~]*)")
_ONCE = ("content-length", "transfer-encoding", "content-type", "connection", "location")


class Malformed(Exception):
    """Say what is wrong with an answer."""


class Gone(Exception):
    """Say that the connection ended before the answer did; `received` is what came of it."""

    def __init__(self, received: bytes) -> None:
        super().__init__(f"the connection ended after {received[-200:]!r}")
        self.received = received


@dataclass(frozen=True)
class Answer:
    """Hold a whole answer; header names are in lower case. `chunks` are the pieces of a chunked body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    chunks: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def records(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


class Client:
    """One connection. `deadline_s` is when everything on it has to be over; later a TimeoutError is raised."""

    def __init__(self, port: int, timeout_s: float = 10.0, *, receive_bytes: int | None = None) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self.socket = socket.socket()
        if receive_bytes is not None:  # before connecting: the window is agreed upon then
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(timeout_s)
        self.socket.connect(("127.0.0.1", port))
        self._buffer = bytearray()
        self.received = 0

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.settimeout(max(0.01, self._deadline_s - time.monotonic()))
        self.socket.sendall(data)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request with a JSON body, or bytes as they are, and read its answer."""
        self.send(request(method, path, body, **headers))
        return self.read(method)

    def read(self, method: str = "GET") -> Answer:
        """Read one answer. Raises: Malformed, Gone, TimeoutError."""
        head = self._until(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise Malformed(f"status line {first!r}")
        status, headers = int(found[1]), _headers(lines)
        if status == 100:
            return self.read(method)
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if length is not None and coding is not None:
            raise Malformed("content-length beside transfer-encoding")
        if method == "HEAD" or status in (204, 304):
            return Answer(status, headers, b"")
        if coding is not None:
            if coding != "chunked":
                raise Malformed(f"transfer-encoding {coding}")
            chunks = self._chunks()
            return Answer(status, headers, b"".join(chunks), tuple(chunks))
        if length is not None:
            if not re.fullmatch("[0-9]+", length):
                raise Malformed(f"content-length {length}")
            return Answer(status, headers, self._exactly(int(length)))
        if headers.get("connection", "").lower() != ("" if first.startswith(b"HTTP/1.0") else "close"):
            raise Malformed("a body without an end")
        return Answer(status, headers, self.rest())

    def rest(self) -> bytes:
        """Read to the end of the connection."""
        while self._more():
            pass
        data, self._buffer = bytes(self._buffer), bytearray()
        return data

    def abort(self) -> None:
        """Close with a reset, as a client that is killed does when it has not read everything."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _chunks(self) -> list[bytes]:
        chunks = []
        while True:
            size = self._until(b"\r\n")
            if not re.fullmatch(rb"[0-9a-fA-F]+", size):
                raise Malformed(f"chunk size {size!r}")
            chunk = self._exactly(int(size, 16))
            if self._exactly(2) != b"\r\n":
                raise Malformed("a chunk without its end")
            if not chunk:
                return chunks
            chunks.append(chunk)

    def _until(self, end: bytes) -> bytes:
        while (place := self._buffer.find(end)) < 0:
            if not self._more():
                raise Gone(bytes(self._buffer))
        data = bytes(self._buffer[:place])
        del self._buffer[: place + len(end)]
        return data

    def _exactly(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            if not self._more():
                raise Gone(bytes(self._buffer))
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    def _more(self) -> bool:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no answer in time")
        self.socket.settimeout(remaining_s)
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self._buffer += data
        self.received += len(data)
        return bool(data)


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """Write a request; keyword `content_type` is the header Content-Type."""
    given = {"Host": "127.0.0.1"} | {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    if body is not None and "Transfer-Encoding" not in given:
        given.setdefault("Content-Length", str(len(data)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def ask(port: int, method: str, path: str, body: Any = None, timeout_s: float = 10.0, **headers: str) -> Answer:
    """Ask on a connection of its own."""
    with Client(port, timeout_s) as client:
        return client.ask(method, path, body, Connection="close", **headers)


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise Malformed(f"header {line!r}")
        name = found[1].decode().lower()
        if name in headers and name in _ONCE:
            raise Malformed(f"{name} twice")
        headers[name] = found[2].decode().strip()
    return headers

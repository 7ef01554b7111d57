"""A hub on this machine that misbehaves on request: listing, resolving, signed addresses, and every fault of a line.

Real sockets on loopback. Large files are redirected to a signed address under another host name, as the real hub does.
Counts the body bytes it sent, so that a test can say what was fetched.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LFS_BYTES = 10_000
REVISION = "c0ffee" * 6 + "abcd"


@dataclass
class Fault:
    """Do `kind` to the next `times` requests for file bytes that `path` fits (all with "")."""

    kind: str
    at: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    path: str = ""
    seconds: float = 0.0


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    port: int


class FaultHub:
    """Serve `files` as repository `repo`; `faults` are used up in order. Use as a context."""

    def __init__(self, files: dict[str, bytes | Path], repo: str = "org/model") -> None:
        self.repo, self.files = repo, files
        self.faults: list[Fault] = []
        self.api_faults: list[Fault] = []
        self.requests: list[Request] = []
        self.sent: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.signatures: set[str] = set()
        self.on_request: Callable[[str], None] = lambda path: None
        self.bytes_per_s = 0
        self._issued = 0
        self._shut = threading.Event()
        self._digests: dict[str, tuple[int, str, str]] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> "FaultHub":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._shut.set()
        self._server.shutdown()
        self._server.server_close()

    def use_tls(self, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bytes_sent(self) -> int:
        with self.lock:
            return sum(self.sent.values())

    def facts(self, path: str) -> tuple[int, str, str]:
        """Give a file's size, SHA-256 and git SHA-1."""
        content = self.files[path]
        key = str(content) if isinstance(content, Path) else path
        if key not in self._digests:
            if isinstance(content, Path):
                with open(content, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                self._digests[key] = content.stat().st_size, sha256, "0" * 40
            else:
                git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                self._digests[key] = len(content), hashlib.sha256(content).hexdigest(), git
        return self._digests[key]

    def listing(self) -> dict[str, object]:
        siblings = []
        for path in self.files:
            size, sha256, git = self.facts(path)
            sibling: dict[str, object] = {"rfilename": path, "size": size, "blobId": git}
            if size >= LFS_BYTES:
                sibling["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 134}
            siblings.append(sibling)
        return {"id": self.repo, "sha": REVISION, "siblings": siblings}

    def sign(self, path: str) -> str:
        with self.lock:
            self._issued += 1
            signature = f"{self._issued:08x}"
            self.signatures.add(signature)
        return f"http://localhost:{self.port}/signed/{path}?X-Signature={signature}"

    def expire(self) -> None:
        with self.lock:
            self.signatures.clear()

    def take(self, faults: list[Fault], path: str) -> Fault | None:
        with self.lock:
            for fault in faults:
                if fault.path in ("", path):
                    fault.times -= 1
                    if fault.times <= 0:
                        faults.remove(fault)
                    return fault
        return None

    def wait(self, seconds: float) -> None:
        self._shut.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    hub: FaultHub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        target = re.sub(r"^http://[^/]+", "", self.path)  # a proxy gets the whole address
        path, _, query = target.partition("?")
        with hub.lock:
            hub.requests.append(
                Request(
                    self.command,
                    path,
                    {name.lower(): value for name, value in self.headers.items()},
                    self.client_address[1],
                )
            )
        if path.startswith("/api/models/"):
            self._list(path)
        elif path.startswith("/org/bad/resolve/"):
            self._resolve(path.removeprefix("/org/bad/resolve/").partition("/")[2], "bad/")
        elif path.startswith(f"/{hub.repo}/resolve/"):
            self._resolve(path.removeprefix(f"/{hub.repo}/resolve/").partition("/")[2])
        elif path.startswith("/signed/"):
            with hub.lock:
                known = query.removeprefix("X-Signature=") in hub.signatures
            self._send(path.removeprefix("/signed/")) if known else self._answer(403, b"Request has expired")
        elif path.startswith("/loop"):
            self._answer(302, b"", {"Location": f"{hub.url}/loop{time.monotonic_ns()}"})
        else:
            self._answer(404, b"Not Found")

    def _list(self, path: str) -> None:
        hub = self.hub
        fault = hub.take(hub.api_faults, path)
        if fault is not None:
            self._answer(fault.status, b"{}", fault.headers)
        elif not path.startswith(f"/api/models/{hub.repo}"):
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif not re.fullmatch(rf"/api/models/{hub.repo}(/revision/(main|v1|{REVISION}))?", path):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(200, json.dumps(hub.listing()).encode(), {"Content-Type": "application/json"})

    def _resolve(self, path: str, folder: str = "") -> None:
        hub = self.hub
        if path not in hub.files:
            self._answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
            return
        size, sha256, _ = hub.facts(path)
        if size < LFS_BYTES:
            self._send(folder + path)
            return
        self._answer(
            302, b"", {"Location": hub.sign(folder + path), "X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(size)}
        )

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        headers = headers or {}
        if "Date" in headers:
            self.send_response_only(status)
        else:
            self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, path: str) -> None:
        """Send a file or a range of it, with whatever fault is due."""
        hub = self.hub
        name = path.removeprefix("bad/")
        content = hub.files[name]
        size, sha256, _ = hub.facts(name)
        hub.on_request(path)
        fault = Fault("corrupt") if name != path else hub.take(hub.faults, path) or Fault("")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        headers = {"ETag": f'"{sha256}"', "Content-Length": str(end - start), "Accept-Ranges": "bytes"}
        status = 206 if wanted else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        kind = fault.kind
        if kind == "status":
            self._answer(fault.status, b"no", fault.headers)
            return
        if kind == "close":
            self.close_connection = True
            return
        if kind == "redirect loop":
            self._answer(302, b"", {"Location": f"{hub.url}/loop"})
            return
        if kind == "stall before headers":
            hub.wait(fault.seconds)
            self.close_connection = True
            return
        if kind == "ignore range":
            status, start, end = 200, 0, size
            headers["Content-Length"] = str(size)
            headers.pop("Content-Range", None)
        if kind == "no content length":
            headers.pop("Content-Length")
            headers["Connection"] = "close"
        if kind == "longer content length":
            headers["Content-Length"] = str(end - start + 1000)
        if kind == "shorter content length":
            headers["Content-Length"] = str(max(0, end - start - 1000))
        if kind == "wrong content range":
            headers["Content-Range"] = f"bytes {start + 7}-{end + 6}/{size}"
        if kind == "other size":
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size + 1}"
        if kind == "other etag":
            headers["ETag"] = '"0123"'
        if kind == "huge gzip" or kind == "gzip" or kind == "truncated gzip":
            status, start, end = 200, 0, size
            assert isinstance(content, bytes)
            body = gzip.compress(content)
            body = body[: len(body) // 2] if kind == "truncated gzip" else body
            headers = {"Content-Encoding": "gzip", "Content-Length": str(len(body)), "ETag": headers["ETag"]}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if "gzip" in kind:
            self.wfile.write(body)
            self._count(path, len(body))
            return
        self._send_body(path, content, start, end, fault)

    def _send_body(self, path: str, content: bytes | Path, start: int, end: int, fault: Fault) -> None:
        hub = self.hub
        self.wfile.flush()
        if isinstance(content, Path):
            self._send_file(path, content, start, end)
            return
        body = bytearray(content[start:end])
        if fault.kind == "corrupt" and body:
            body[fault.at % len(body)] ^= 0x10
        step = 16 << 10
        position = 0
        while position < len(body):
            stop = min(position + step, len(body))
            if fault.kind in ("drop", "stall", "reset") and stop > fault.at:
                self.wfile.write(body[position : max(position, fault.at)])
                self._count(path, max(0, fault.at - position))
                if fault.kind == "stall":
                    hub.wait(fault.seconds)
                if fault.kind == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                self.close_connection = True
                return
            if fault.kind == "drip":
                stop = position + 1
                hub.wait(0.02)
            if hub.bytes_per_s:
                hub.wait((stop - position) / hub.bytes_per_s)
            self.wfile.write(body[position:stop])
            self._count(path, stop - position)
            position = stop
        if fault.kind == "shorter content length":
            self.close_connection = True
        if fault.kind == "longer content length":
            self.close_connection = True
        if fault.kind == "no content length":
            self.close_connection = True

    def _send_file(self, path: str, file: Path, start: int, end: int) -> None:
        with open(file, "rb") as opened:
            while start < end and not self.hub._shut.is_set():
                sent = os.sendfile(self.connection.fileno(), opened.fileno(), start, min(end - start, 4 << 20))
                start += sent
                self._count(path, sent)

    def _count(self, path: str, num_bytes: int) -> None:
        with self.hub.lock:
            self.hub.sent[path] += num_bytes


class Proxy(FaultHub):
    """An HTTP proxy for loopback: forwards whole addresses, and counts them."""

    def __init__(self, behind: FaultHub) -> None:
        super().__init__(behind.files, behind.repo)
        self.signatures = behind.signatures


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Give a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]

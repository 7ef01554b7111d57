"""A server without an engine, for the tests of the dialects: made-up models, and a worker that plays scripted events.

The real application and service lie around and between the two, so a handler runs as it does in production.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from slotpy.demo import demo_directory
from slotpy.engine.generation import Embedded, Event, Finished, Loaded, Request, TextDelta, Unloaded
from slotpy.engine.session import GenerationStats
from slotpy.engine.worker import WorkerStatus
from slotpy.server.app import make_app
from slotpy.server.errors import ApiError
from slotpy.server.library.facts import ModelText
from slotpy.server.library.library import Model, UnknownModel
from slotpy.server.library.names import parse_served
from slotpy.server.service import Service
from slotpy.server.settings import Settings

FINISHED = Finished(
    reason="stop",
    stop_sequence=None,
    token_ids=(3, 4, 5),
    prompt_tokens=7,
    completion_tokens=3,
    reasoning_tokens=2,
    total_ns=61_000_743,
    load_ns=6_901_992,
    prefill_ns=12_500_000,
    decode_ns=30_000_000,
    stats=GenerationStats(),
)
HELLO: tuple[Event, ...] = (TextDelta("Hel"), TextDelta("lo"), FINISHED)
LOADED, UNLOADED = Loaded(load_ns=5), Unloaded()


def finished(**changes: Any) -> Finished:
    """FINISHED with other values."""
    return replace(FINISHED, **changes)


def embedded(*vectors: Sequence[float], prompt_tokens: int = 3) -> Embedded:
    """The end of an EmbedRequest with these vectors."""
    arrays = tuple(np.array(vector, dtype=np.float32) for vector in vectors)
    return Embedded(vectors=arrays, prompt_tokens=prompt_tokens, total_ns=3_509_202, load_ns=1_567_675)


def model(name: str = "tiny", *capabilities: str, **changes: Any) -> Model:
    """A model with the demo's files: a real tokenizer and template. `capabilities` come beside completion."""
    values: dict[str, Any] = {
        "name": parse_served(name).key,
        "directory": demo_directory(),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "size": 1000,
        "modified_at": datetime(2026, 1, 2, tzinfo=UTC),
        "details": {"family": "qwen4_exp"},
        "info": {"general.architecture": "qwen4_exp"},
        "capabilities": frozenset({"completion", *capabilities}),
        "context_length": 4096,
        "embedding_length": 64,
        "parameter_count": 1_000_000,
        "architecture": "qwen4_exp",
        "template": "{{ messages }}",
        "license": "",
        "text": ModelText(demo_directory()),
    }
    return Model(**values | changes)


TINYCHAT = model("tinychat")
TINY = model("tiny", "tools")
TINYTHINK = model("tinythink", "tools", "thinking")
MODELS = (TINYCHAT, TINY, TINYTHINK)


class FakeLibrary:
    """Find models by name, as the library does, among those given."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = list(models)

    def list(self) -> list[Model]:
        return self.models

    def find(self, name: str) -> Model:
        wanted = parse_served(name)
        if wanted.is_remote:
            raise ApiError(403, "ollama cloud is disabled: remote model is unavailable")
        for found in self.models:
            if found.name == wanted.key:
                return found
        raise UnknownModel(name)


@dataclass
class Submission:
    """What a handler asked of the worker; `cancelled` counts, as every handler cancels when it leaves."""

    name: str
    directory: Path
    request: Request
    keep_alive_s: float | None
    deliver: Callable[[Event], None]
    cancelled: int = 0

    def cancel(self) -> None:
        self.cancelled += 1


@dataclass
class FakeWorker:
    """Play the next script for each submission, the last one for ever. An exception in a script's place is raised."""

    scripts: list[Sequence[Event] | Exception]
    submissions: list[Submission] = field(default_factory=list)

    def submit(
        self,
        name: str,
        directory: Path,
        request: Request,
        deliver: Callable[[Event], None],
        keep_alive_s: float | None = None,
    ) -> Submission:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, Exception):
            raise script
        submission = Submission(name, directory, request, keep_alive_s, deliver)
        self.submissions.append(submission)
        for event in script:
            deliver(event)
        return submission

    def status(self) -> WorkerStatus:
        return WorkerStatus(loaded=None, num_queued=0, running=False)

    @property
    def request(self) -> Any:
        """The last request."""
        return self.submissions[-1].request


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def records(self) -> list[Any]:
        """The lines of an NDJSON stream."""
        assert self.headers["Content-Type"] == "application/x-ndjson"
        assert self.raw.endswith(b"\n")
        return [json.loads(line) for line in self.text.split("\n")[:-1]]

    @property
    def sse(self) -> list[tuple[str | None, Any]]:
        """The events of an SSE stream: name (None without one) and data, parsed if it is JSON."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        assert self.text.endswith("\n\n")
        events = []
        for block in self.text.split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            data = fields["data"]
            events.append((fields.get("event"), json.loads(data) if data.startswith(("{", "[{")) else data))
        return events


class FakeServer:
    """Serve `routes`; each request plays a script. Every call starts a server, asks, and ends it.

    server = FakeServer(ROUTES, HELLO)
    server.post("/api/chat", {...}).records
    server.worker.request.messages
    """

    def __init__(
        self,
        routes: Sequence[web.RouteDef],
        *scripts: Sequence[Event] | Exception,
        models: Sequence[Model] = MODELS,
    ) -> None:
        self.routes = routes
        self.worker = FakeWorker(list(scripts or (HELLO,)))
        self.service = Service(FakeLibrary(models), self.worker)  # type: ignore[arg-type]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """`body` is sent as JSON, bytes as they are, None not at all."""

        async def run() -> Answer:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            async with TestClient(TestServer(make_app(self.service, Settings(), self.routes))) as client:
                response = await client.request(method, path, data=data, headers=headers, allow_redirects=False)
                return Answer(response.status, dict(response.headers), await response.read())

        return asyncio.run(run())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)

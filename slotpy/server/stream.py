"""How answers are written: one JSON object, NDJSON, or server-sent events.

All text is ASCII-escaped JSON: clients split streams at every kind of line end there is in Unicode.
"""

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from slotpy.server.errors import error_body, is_bug

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sse:
    """Hold one server-sent event. A string goes out as it is, for `[DONE]`."""

    data: dict[str, Any] | str
    event: str | None = None

    def encode(self) -> bytes:
        """Give the event as it goes over the wire."""
        data = self.data if isinstance(self.data, str) else dumps(self.data)
        name = "" if self.event is None else f"event: {self.event}\n"
        return f"{name}data: {data}\n\n".encode("ascii")


def now() -> str:
    """Give the time in RFC 3339, in UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def dumps(value: Any) -> str:
    """Write compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_response(value: Any, *, status: int = 200, charset: bool = True) -> web.Response:
    """Answer with one JSON value. Ollama names the charset on /api, and not where it wraps OpenAI's answers."""
    content_type = "application/json; charset=utf-8" if charset else "application/json"
    return web.Response(body=dumps(value).encode("ascii"), status=status, headers={"Content-Type": content_type})


def is_gone(request: web.Request) -> bool:
    """Tell whether a request's client has left, so that nobody is there to be told anything."""
    return request.transport is None or request.transport.is_closing()


async def ndjson(request: web.Request, records: AsyncGenerator[dict[str, Any]]) -> web.StreamResponse:
    """Answer with a line for each record.

    Headers wait for the first one, so an error before it still gets its own status; a later one becomes the last line.
    Closes `records` in any case, also when the client has gone.
    """
    lines = (f"{dumps(record)}\n".encode("ascii") async for record in records)

    def fail(error: Exception) -> list[bytes]:
        return [f"{dumps(error_body('ollama', error, ''))}\n".encode("ascii")]

    async with contextlib.aclosing(records):
        return await _stream(request, "application/x-ndjson", lines, fail)


async def sse(
    request: web.Request, events: AsyncGenerator[Sse], fail: Callable[[Exception], list[Sse]]
) -> web.StreamResponse:
    """Answer with server-sent events; `fail` gives those that end the stream after an error. Otherwise as `ndjson`."""
    chunks = (event.encode() async for event in events)
    async with contextlib.aclosing(events):
        return await _stream(
            request, "text/event-stream", chunks, lambda error: [event.encode() for event in fail(error)]
        )


async def _stream(
    request: web.Request,
    content_type: str,
    chunks: AsyncGenerator[bytes],
    fail: Callable[[Exception], list[bytes]],
) -> web.StreamResponse:
    async with contextlib.aclosing(chunks):
        first = await anext(chunks)
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        await response.write(first)
        try:
            async for chunk in chunks:
                await response.write(chunk)
        except Exception as error:  # the status is out; whatever it is, the stream must say that it is cut short
            if is_gone(request):
                raise
            if is_bug(error):
                log.exception("%s %s failed after its first record", request.method, request.rel_url.raw_path)
            for chunk in fail(error):
                await response.write(chunk)
        await response.write_eof()
        return response

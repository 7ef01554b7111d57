"""How the long tasks answer: a line for each step, or only the last of them where the client wants one object."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from slotpy.server.stream import json_response, ndjson


async def answer(request: web.Request, lines: AsyncGenerator[dict[str, Any]], *, stream: bool) -> web.StreamResponse:
    """Answer with `lines` as they come, or with the last one after all. Closes them in any case."""
    if stream:
        return await ndjson(request, lines)
    last: dict[str, Any] = {}
    async with contextlib.aclosing(lines):
        async for last in lines:  # noqa: B007  what counts is where it ends
            pass
    return json_response(last, charset=False)

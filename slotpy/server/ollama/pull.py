"""`/api/pull`: get a model from the hub, in Ollama's lines. `/api/push` says that there is nowhere to push to."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from slotpy.errors import UsageError
from slotpy.hub.events import Status, to_ollama
from slotpy.hub.manifest import load_manifest
from slotpy.hub.names import ModelName, parse_name
from slotpy.server.errors import ApiError
from slotpy.server.gojson import BOOL, STRING, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Library, UnknownModel
from slotpy.server.library.names import parse_served
from slotpy.server.ollama.progress import answer

_TRANSFER = {"model": STRING, "name": STRING, "insecure": BOOL, "username": STRING, "password": STRING, "stream": BOOL}
_PULL = Struct("api.PullRequest", _TRANSFER)
_PUSH = Struct("api.PushRequest", _TRANSFER)
_SUCCESS = {"status": "success"}


async def pull(request: web.Request) -> web.StreamResponse:
    """Pull a model, or what is missing of it."""
    fields = _PULL.read(await request.read())
    name = fields.get("model") or fields.get("name", "")
    parse_served(name)
    lines = pull_lines(request.app[SERVICE].library, name)
    return await answer(request, lines, stream=fields.get("stream", True))


async def push(request: web.Request) -> web.StreamResponse:
    """Refuse, as late as Ollama does, where its clients show the reason."""
    fields = _PUSH.read(await request.read())
    name = fields.get("model") or fields.get("name", "")
    if not name:
        raise ApiError(400, "model is required")
    return await answer(request, _push_lines(request.app[SERVICE].library, name), stream=fields.get("stream", True))


async def pull_lines(library: Library, name: str) -> AsyncGenerator[dict[str, Any]]:
    """Pull a model and give Ollama's lines. One that did not come from the hub is simply there.

    Raises: ApiError for a name that means nothing; SlotpyError when the files cannot be had.
    """
    first = Status("pulling manifest")
    yield to_ollama(first)
    wanted = _hub_name(library, name)
    if wanted is None:
        yield _SUCCESS
        return
    async with contextlib.aclosing(library.pulls.follow(wanted)) as events:
        async for event in events:
            line = to_ollama(event)
            if line == _SUCCESS:
                await asyncio.to_thread(library.list)  # its first look at the model takes a moment
            if event != first:
                yield line


def _hub_name(library: Library, name: str) -> ModelName | None:
    """Give what to pull; None for a model that is here and was not pulled. Raises: ApiError."""
    try:
        located = library.locate(name)
    except UnknownModel:
        located = None
    if located is not None:
        manifest = load_manifest(located.directory) if located.record is None else None
        return parse_name(manifest.model) if manifest else None
    try:
        return parse_served(name).hub_name()
    except UsageError as error:
        # Word for word: clients go on from here to ask for a hosted model of that name.
        raise ApiError(500, "pull model manifest: file does not exist") from error


async def _push_lines(library: Library, name: str) -> AsyncGenerator[dict[str, Any]]:
    yield {"status": "retrieving manifest"}
    library.find(name)
    raise ApiError(400, "slotpy does not push models: upload the model's directory with the hub's own tools")

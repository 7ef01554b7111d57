"""Ollama's /api/chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from slotpy.engine.generation import Finished
from slotpy.server.durations import read_keep_alive
from slotpy.server.errors import ApiError, unsupported
from slotpy.server.gojson import ListOf, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model
from slotpy.server.ollama import fields, replies
from slotpy.server.stream import json_response, now

CHAT = Struct("api.ChatRequest", {**fields.SHARED, "messages": ListOf(fields.MESSAGE), "tools": ListOf(fields.TOOL)})


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation; without messages, load the model or with `keep_alive` 0 unload it."""
    service = request.app[SERVICE]
    body = CHAT.read(await request.read())
    keep_alive_s = read_keep_alive(body.get("keep_alive"))
    name = body.get("model", "")
    if not name:
        raise ApiError(400, "model is required")
    model = service.library.find(name)
    messages, tools = body.get("messages", []), tuple(body.get("tools", ()))
    _check_tools(tools, model, name)
    for message in messages:
        fields.refuse_images(message.get("images", ()))
    asked = fields.generation(model, body, messages=conversation(model, messages), tools=tools)
    if not messages:
        reason = await replies.load_or_unload(service, model, asked.context_tokens, keep_alive_s)
        return json_response(_record(name, replies.Piece(), done=True, done_reason=reason))
    if body.get("_debug_render_only"):
        info = await replies.debug_info(model, asked)
        empty = {"role": "", "content": ""}
        return json_response({"model": name, "created_at": now(), "message": empty, "done": False, **info})

    def write(piece: replies.Piece, finished: Finished | None) -> dict[str, Any]:
        logprobs = {"logprobs": piece.logprobs} if piece.logprobs else {}
        if finished is None:
            return _record(name, piece, done=False, **logprobs)
        end = {"done": True, "done_reason": finished.reason, **logprobs, **replies.metrics(finished)}
        return _record(name, piece, **end)

    stream = body.get("stream", True)
    return await replies.answer(request, service, model, asked, keep_alive_s=keep_alive_s, stream=stream, write=write)


def conversation(model: Model, messages: list[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Put the model's own messages before a request's: its system prompt only if the request begins with none."""
    begins_with_system = bool(messages) and messages[0].get("role", "").lower() == "system"
    system = [{"role": "system", "content": model.system}] if model.system and not begins_with_system else []
    return (*system, *model.messages, *messages)


def _check_tools(tools: Sequence[Mapping[str, Any]], model: Model, name: str) -> None:
    if tools and "tools" not in model.capabilities:
        raise unsupported(name, "tools")
    if not all(tool.get("function", {}).get("name") for tool in tools):
        raise ApiError(400, "every tool needs a function with a name")


def _record(name: str, piece: replies.Piece, **rest: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.content}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.tool_calls:
        message["tool_calls"] = piece.tool_calls
    return {"model": name, "created_at": now(), "message": message, **rest}


ROUTES = [web.post("/api/chat", chat)]

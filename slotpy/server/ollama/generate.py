"""Ollama's /api/generate: a continuation of one prompt, through the chat template or as it is."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from slotpy.engine.generation import Finished
from slotpy.server.durations import read_keep_alive
from slotpy.server.errors import ApiError, unsupported
from slotpy.server.gojson import BOOL, INT, STRING, ListOf, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model, UnknownModel
from slotpy.server.ollama import fields, replies
from slotpy.server.stream import json_response, now

GENERATE = Struct(
    "api.GenerateRequest",
    {
        **fields.SHARED,
        "prompt": STRING,
        "suffix": STRING,
        "system": STRING,
        "template": STRING,
        "context": ListOf(INT),
        "raw": BOOL,
        "images": ListOf(STRING),
    },
)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer a prompt; without one, load the model or with `keep_alive` 0 unload it."""
    service = request.app[SERVICE]
    body = GENERATE.read(await request.read())
    keep_alive_s = read_keep_alive(body.get("keep_alive"))
    name = body.setdefault("model", "")
    if not name:
        raise UnknownModel(name)
    model = service.library.find(name)
    _check(body, model)
    fields.refuse_images(body.get("images", ()))
    asked = fields.generation(model, body, **_prompt(body, model))
    if not body.get("prompt"):
        reason = await replies.load_or_unload(service, model, asked.context_tokens, keep_alive_s)
        return json_response(_record(name, replies.Piece(), done=True, done_reason=reason))
    if body.get("_debug_render_only"):
        return json_response(_record(name, replies.Piece(), done=False, **await replies.debug_info(model, asked)))

    def write(piece: replies.Piece, finished: Finished | None) -> dict[str, Any]:
        if finished is None:
            return _record(name, piece, done=False)
        # Ollama leaves the context out after a raw prompt; some clients want the list in any case.
        end = {"done": True, "done_reason": finished.reason, "context": list(finished.token_ids)}
        return _record(name, piece, **end, **replies.metrics(finished))

    stream = body.get("stream", True)
    return await replies.answer(request, service, model, asked, keep_alive_s=keep_alive_s, stream=stream, write=write)


def _check(body: Mapping[str, Any], model: Model) -> None:
    if body.get("raw") and (body.get("template") or body.get("system") or body.get("context")):
        raise ApiError(400, "raw mode does not support template, system, or context")
    if body.get("suffix"):
        raise unsupported(body["model"], "insert")
    if body.get("template", "") not in ("", model.template):
        raise ApiError(
            400,
            "a template of the request's own is not supported: leave it out to use the model's, or send the whole "
            "prompt with raw set to true",
        )


def _prompt(body: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Give the prompt in GenerationRequest's fields: as it is if it is raw or there is no template for it.

    A `context` holds the earlier turns, so nothing of the model's own comes before it again. The request's own system
    prompt replaces the model's.
    """
    prompt, context = body.get("prompt", ""), tuple(body.get("context", ()))
    system = body.get("system") or ("" if context else model.system)
    before: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    if not context:
        before += model.messages
    if body.get("raw") or not (model.template or before):
        return {"prompt": prompt, "prefix_ids": context}
    return {"messages": (*before, {"role": "user", "content": prompt}), "prefix_ids": context}


def _record(name: str, piece: replies.Piece, **rest: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"model": name, "created_at": now(), "response": piece.content}
    if piece.thinking:
        record["thinking"] = piece.thinking
    record.update(rest)
    if piece.tool_calls:
        record["tool_calls"] = piece.tool_calls
    if piece.logprobs:
        record["logprobs"] = piece.logprobs
    return record


ROUTES = [web.post("/api/generate", generate)]

"""POST /v1/messages and /v1/messages/count_tokens. Anthropic's headers and `?beta=true` change nothing."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from slotpy.engine.generation import Event, GenerationRequest
from slotpy.engine.prompts import prompt_ids
from slotpy.server.anthropic.blocks import messages_of, tool_choice_of, tools_of
from slotpy.server.anthropic.reply import PING, Message
from slotpy.server.errors import ApiError, error_body
from slotpy.server.gojson import ANY, BOOL, FLOAT, INT, OBJECT, STRING, ListOf, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model
from slotpy.server.options import read_options
from slotpy.server.service import Idle
from slotpy.server.stream import Sse, json_response, sse
from slotpy.server.turns import DEFAULTS, KEEP_ALIVE_S, choose_tools, conversation, first_call_only, think_of

MESSAGES = Struct(
    "anthropic.MessagesRequest",
    {
        "model": STRING,
        "max_tokens": INT,
        "messages": ListOf(Struct("anthropic.MessageParam", {"role": STRING, "content": ANY})),
        "system": ANY,
        "stream": BOOL,
        "temperature": FLOAT,
        "top_p": FLOAT,
        "top_k": INT,
        "stop_sequences": ListOf(STRING),
        "tools": ListOf(OBJECT),
        "tool_choice": OBJECT,
        "thinking": Struct("anthropic.ThinkingConfig", {"type": STRING, "budget_tokens": INT}),
        "output_config": Struct(
            "anthropic.OutputConfig",
            {"effort": STRING, "format": Struct("anthropic.OutputFormat", {"type": STRING, "schema": ANY})},
        ),
        "container": ANY,
        "mcp_servers": ListOf(ANY),
    },
)


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer one conversation with one message."""
    service = request.app[SERVICE]
    body = MESSAGES.read(await request.read(), empty="EOF")
    _check(body, ("model", "max_tokens", "messages"))
    model = service.library.find(body["model"])
    asked = _generation(model, body)
    message = Message(f"msg_{uuid.uuid4().hex}", body["model"])
    with service.submit(model, asked) as queue:
        events: AsyncIterable[Event | Idle] = queue.with_idle(KEEP_ALIVE_S)
        if body.get("tool_choice", {}).get("disable_parallel_tool_use"):
            events = first_call_only(events)
        if body.get("stream"):
            # Counting here costs no time: meanwhile the engine has more to do with the same prompt.
            input_tokens = await asyncio.to_thread(_count, model, asked)
            return await sse(request, _events(events, message, input_tokens), _fail)
        async for _ in _events(events, message, 0):
            pass
    return json_response(message.body, charset=False)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a prompt, without asking the engine."""
    body = MESSAGES.read(await request.read(), empty="EOF")
    _check(body, ("model", "messages"))
    model = request.app[SERVICE].library.find(body["model"])
    num_tokens = await asyncio.to_thread(_count, model, _generation(model, body))
    return json_response({"input_tokens": num_tokens}, charset=False)


def _check(body: Mapping[str, Any], required: Sequence[str]) -> None:
    for name in required:
        if name == "max_tokens" and body.get(name, 0) <= 0:
            raise ApiError(400, "max_tokens is required and must be positive")
        if not body.get(name):
            raise ApiError(400, f"{name} is required")
    for name in ("container", "mcp_servers"):
        if body.get(name):
            raise ApiError(400, f"{name} is not supported")


def _count(model: Model, asked: GenerationRequest) -> int:
    return len(prompt_ids(model.text.tokenizer, model.text.chat, asked))


def _generation(model: Model, body: Mapping[str, Any]) -> GenerationRequest:
    options = {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}
    if "max_tokens" in body:
        options["num_predict"] = body["max_tokens"]
    if "stop_sequences" in body:
        options["stop"] = body["stop_sequences"]
    read = read_options(options, model.parameters)
    choice = tool_choice_of(body.get("tool_choice", {}))
    tools, tool_choice = choose_tools(model, tools_of(body.get("tools", ())), *choice)
    return GenerationRequest(
        messages=conversation(model, messages_of(body.get("system"), body["messages"])),
        tools=tools,
        tool_choice=tool_choice,
        think=_think(model, body),
        defaults=DEFAULTS,
        format=_format(body.get("output_config", {}).get("format", {})),
        truncate=False,
        **read.asked(model),
    )


def _think(model: Model, body: Mapping[str, Any]) -> bool | str | None:
    """Read how much to think. A budget cannot be kept; a model that cannot think is not asked to."""
    kind = body.get("thinking", {}).get("type", "adaptive")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, f'thinking.type must be "enabled", "disabled" or "adaptive", not "{kind}"')
    effort = think_of(body.get("output_config", {}).get("effort"), model, relaxed=True)
    return False if kind == "disabled" else effort


def _format(wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not wanted:
        return None
    if wanted.get("type") == "json_schema" and isinstance(wanted.get("schema"), dict):
        return dict(wanted["schema"])
    raise ApiError(400, 'output_config.format must be "json_schema" with an object schema')


async def _events(events: AsyncIterable[Event | Idle], message: Message, input_tokens: int) -> AsyncGenerator[Sse]:
    """Give the events of a message. They begin when there is something to say."""
    begun = False
    async for event in events:
        if not begun:
            begun = True
            yield message.start(input_tokens)
        if isinstance(event, Idle):
            yield PING
            continue
        for told in message.add(event):
            yield told


def _fail(error: Exception) -> list[Sse]:
    return [Sse(error_body("anthropic", error, uuid.uuid4().hex), event="error")]


ROUTES = [web.post("/v1/messages", messages), web.post("/v1/messages/count_tokens", count_tokens)]

"""POST /v1/chat/completions."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from slotpy.engine.generation import Event, Finished, GenerationRequest, TextDelta, TokenLogprob, ToolCall
from slotpy.server.errors import ApiError
from slotpy.server.gojson import ANY, BOOL, INT, STRING, ListOf, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model
from slotpy.server.ollama.fields import TOOL
from slotpy.server.openai.common import (
    CHOICES,
    FINGERPRINT,
    SAMPLING,
    STREAM_OPTIONS,
    fail,
    logprob_entry,
    options_of,
    top_logprobs_of,
    usage_of,
)
from slotpy.server.service import Idle
from slotpy.server.stream import Sse, json_response, sse
from slotpy.server.turns import (
    DEFAULTS,
    KEEP_ALIVE_S,
    Reply,
    ToolChoice,
    call_entry,
    choose_tools,
    conversation,
    first_call_only,
    text_of,
    think_of,
)

_MESSAGE = Struct(
    "openai.Message",
    {
        "role": STRING,
        "content": ANY,
        "reasoning": STRING,
        "reasoning_content": STRING,
        "tool_calls": ListOf(
            Struct(
                "openai.ToolCall",
                {"id": STRING, "function": Struct("openai.ToolCallFunction", {"name": STRING, "arguments": ANY})},
            )
        ),
        "name": STRING,
        "tool_call_id": STRING,
    },
)
CHAT = Struct(
    "openai.ChatCompletionRequest",
    {
        **SAMPLING,
        **CHOICES,
        "model": STRING,
        "messages": ListOf(_MESSAGE),
        "stream": BOOL,
        "stream_options": STREAM_OPTIONS,
        "max_tokens": INT,
        "max_completion_tokens": INT,
        "response_format": Struct(
            "openai.ResponseFormat",
            {"type": STRING, "json_schema": Struct("openai.JsonSchema", {"name": STRING, "schema": ANY})},
        ),
        "tools": ListOf(TOOL),
        "tool_choice": ANY,
        "parallel_tool_calls": BOOL,
        "reasoning": Struct("openai.Reasoning", {"effort": STRING}),
        "reasoning_effort": STRING,
        "logprobs": BOOL,
        "top_logprobs": INT,
        "functions": ListOf(ANY),
    },
)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one conversation with one choice."""
    service = request.app[SERVICE]
    body = CHAT.read(await request.read(), empty="EOF")
    _refuse(body)
    name = body.get("model", "")
    if not name:
        raise ApiError(400, "model is required")
    model = service.library.find(name)
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk" if body.get("stream") else "chat.completion",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": FINGERPRINT,
    }
    with_logprobs = body.get("logprobs", False)
    with service.submit(model, _generation(model, body)) as queue:
        events: AsyncIterable[Event | Idle] = queue.with_idle(KEEP_ALIVE_S)
        if body.get("parallel_tool_calls") is False:
            events = first_call_only(events)
        if body.get("stream"):
            include_usage = body.get("stream_options", {}).get("include_usage", False)
            return await sse(request, _chunks(events, head, include_usage, with_logprobs), fail)
        reply = await Reply.gather(events)
    return json_response(_completion(reply, head, with_logprobs), charset=False)


def _refuse(body: Mapping[str, Any]) -> None:
    if not body.get("messages"):
        raise ApiError(400, "[] is too short - 'messages'")
    if body.get("functions"):
        raise ApiError(400, "functions is not supported: declare them in tools")


def _generation(model: Model, body: Mapping[str, Any]) -> GenerationRequest:
    options = options_of(model, body, body.get("max_completion_tokens", body.get("max_tokens")))
    top_logprobs = top_logprobs_of(body.get("top_logprobs", 0), "top_logprobs")
    effort = body.get("reasoning", {}).get("effort") or body.get("reasoning_effort")
    tools, choice = choose_tools(model, _tools(body.get("tools", ())), *_tool_choice(body.get("tool_choice")))
    return GenerationRequest(
        messages=conversation(model, [_message(message) for message in body["messages"]]),
        tools=tools,
        tool_choice=choice,
        think=think_of(effort, model),
        defaults=DEFAULTS,
        format=_format(body.get("response_format", {})),
        top_logprobs=top_logprobs if body.get("logprobs") else None,
        **options.asked(model),
    )


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    rendered = {"role": message.get("role", "").lower(), "content": text_of(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        rendered["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        rendered["tool_calls"] = [_earlier_call(call) for call in message["tool_calls"]]
    return rendered | {key: message[key] for key in ("name", "tool_call_id") if key in message}


def _earlier_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    return call_entry(call.get("id", ""), function.get("name", ""), function.get("arguments"))


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    declared = []
    for tool in tools:
        kind = tool.get("type") or "function"
        function = tool.get("function", {})
        if kind != "function":
            raise ApiError(400, f'tools of type "{kind}" are not supported, only functions')
        if not function.get("name"):
            raise ApiError(400, "every tool needs a function with a name")
        declared.append({"type": kind, "function": function})
    return declared


def _tool_choice(choice: Any) -> tuple[ToolChoice, str | None]:
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return "required", name
    raise ApiError(400, 'tool_choice must be "auto", "none", "required" or a function with a name')


def _format(wanted: Mapping[str, Any]) -> str | Mapping[str, Any] | None:
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if kind == "json_schema":
        schema = wanted.get("json_schema", {}).get("schema")
        if isinstance(schema, dict):
            return schema
        raise ApiError(400, "response_format needs an object json_schema.schema")
    raise ApiError(400, f'response_format must be "text", "json_object" or "json_schema", not "{kind}"')


def _reason(finished: Finished, num_calls: int) -> str:
    """A call that is complete may be followed by one that the token limit cut off: then the limit counts."""
    return "tool_calls" if num_calls and finished.reason == "stop" else finished.reason


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [logprob_entry(entry) for entry in entries]}


def _completion(reply: Reply, head: Mapping[str, Any], with_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message |= {"reasoning": reply.reasoning, "reasoning_content": reply.reasoning}
    if reply.calls:
        message["tool_calls"] = [{"id": call.id, "index": call.index, **_call(call)} for call in reply.calls]
    choice = {"index": 0, "message": message, "finish_reason": _reason(reply.end, len(reply.calls))}
    if with_logprobs:
        choice["logprobs"] = _logprobs(reply.logprobs)
    return {**head, "choices": [choice], "usage": usage_of(reply.end)}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}


async def _chunks(
    events: AsyncIterable[Event | Idle], head: Mapping[str, Any], include_usage: bool, with_logprobs: bool
) -> AsyncGenerator[Sse]:
    """Give a chunk for each event: the role in the first delta, each tool call whole, the reason in an empty one."""

    def chunk(delta: Mapping[str, Any], reason: str | None = None, logprobs: Sequence[TokenLogprob] = ()) -> Sse:
        scored = {"logprobs": _logprobs(logprobs)} if logprobs else {}
        return Sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **scored}]})

    num_calls, begun = 0, False
    async for event in events:
        delta = _delta(event)
        if not begun:
            begun = True
            delta = {"role": "assistant", **(delta or {"content": ""})}
        if isinstance(event, ToolCall):
            num_calls += 1
        if delta is not None:
            logprobs = event.logprobs if with_logprobs and isinstance(event, TextDelta) and not event.reasoning else ()
            yield chunk(delta, logprobs=logprobs)
        if isinstance(event, Finished):
            yield chunk({}, _reason(event, num_calls))
            if include_usage:
                yield Sse({**head, "choices": [], "usage": usage_of(event)})
    yield Sse("[DONE]")


def _delta(event: Event | Idle) -> dict[str, Any] | None:
    """Give what an event adds to the message; an idle time adds nothing, as a delta, which clients do count."""
    if isinstance(event, TextDelta) and event.reasoning:
        return {"content": "", "reasoning": event.text, "reasoning_content": event.text}
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ToolCall):
        return {"content": "", "tool_calls": [{"index": event.index, "id": event.id, **_call(event)}]}
    return {"content": ""} if isinstance(event, Idle) else None


ROUTES = [web.post("/v1/chat/completions", chat_completions)]

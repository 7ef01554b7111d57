"""POST /v1/responses. Nothing is stored, so there is nothing to go on from or to look up later."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any

from aiohttp import web

from slotpy.engine.generation import Event, Finished, GenerationRequest
from slotpy.server.bodies import unpacked
from slotpy.server.errors import ApiError, message_of, status_of
from slotpy.server.gojson import ANY, BOOL, INT, OBJECT, STRING, ListOf, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model
from slotpy.server.openai.common import SAMPLING, options_of, top_logprobs_of
from slotpy.server.openai.responses_input import Tools, messages_of, tool_choice_of
from slotpy.server.openai.responses_output import Output
from slotpy.server.service import Idle
from slotpy.server.stream import Sse, json_response, sse
from slotpy.server.turns import DEFAULTS, KEEP_ALIVE_S, choose_tools, conversation, first_call_only, think_of

_FORMAT = Struct("openai.ResponsesTextFormat", {"type": STRING, "name": STRING, "schema": ANY, "strict": BOOL})
RESPONSES = Struct(
    "openai.ResponsesRequest",
    {
        **SAMPLING,
        "model": STRING,
        "input": ANY,
        "instructions": STRING,
        "max_output_tokens": INT,
        "text": Struct("openai.ResponsesText", {"format": _FORMAT, "verbosity": STRING}),
        "reasoning": Struct("openai.ResponsesReasoning", {"effort": STRING, "summary": STRING}),
        "tools": ListOf(OBJECT),
        "tool_choice": ANY,
        "parallel_tool_calls": BOOL,
        "top_logprobs": INT,
        "include": ListOf(STRING),
        "stream": BOOL,
        "truncation": STRING,
        "metadata": OBJECT,
        "safety_identifier": STRING,
        "prompt_cache_key": STRING,
        "previous_response_id": STRING,
        "conversation": ANY,
        "background": BOOL,
        "prompt": ANY,
        "max_tool_calls": INT,
    },
)
_UNSUPPORTED = {
    "previous_response_id": "send the earlier items in input",
    "conversation": "send the earlier items in input",
    "background": "use stream",
    "prompt": "send its text in instructions or input",
    "max_tool_calls": "it is about tools that the server runs, and there are none",
}


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer one input with output items."""
    service = request.app[SERVICE]
    raw = unpacked(await request.read(), request.headers.get("Content-Encoding", ""))  # Codex packs long ones
    body = RESPONSES.read(raw, empty="EOF")
    name = body.get("model", "")
    if not name:
        raise ApiError(400, "model is required")
    for field, instead in _UNSUPPORTED.items():
        if body.get(field):
            raise ApiError(400, f"{field} is not supported: {instead}")
    model = service.library.find(name)
    tools = Tools(body.get("tools", ()))
    output = Output(tools.name_of)
    response = _response(body, tools)
    with service.submit(model, _generation(model, body, tools)) as queue:
        events: AsyncIterable[Event | Idle] = queue.with_idle(KEEP_ALIVE_S)
        if body.get("parallel_tool_calls") is False:
            events = first_call_only(events)
        stream = _events(events, output, response)
        if body.get("stream"):
            return await sse(request, stream, lambda error: _failure(error, output, response))
        async for _ in stream:
            pass
    return json_response(response, charset=False)


async def not_stored(request: web.Request) -> web.Response:
    """Say that no response is kept."""
    raise ApiError(404, f"response '{request.match_info['id']}' not found: responses are not stored")


def _generation(model: Model, body: Mapping[str, Any], tools: Tools) -> GenerationRequest:
    options = options_of(model, body, body.get("max_output_tokens"))
    offered, choice = choose_tools(model, tools.functions, *tool_choice_of(body.get("tool_choice")))
    effort = body.get("reasoning", {}).get("effort")
    top_logprobs = top_logprobs_of(body.get("top_logprobs", 0), "top_logprobs")
    wanted = top_logprobs > 0 or "message.output_text.logprobs" in body.get("include", ())
    return GenerationRequest(
        messages=conversation(model, messages_of(body.get("input"), body.get("instructions", ""))),
        tools=offered,
        tool_choice=choice,
        think=think_of(effort, model, relaxed=True),
        defaults=DEFAULTS,
        format=_format(body.get("text", {}).get("format", {})),
        top_logprobs=top_logprobs if wanted else None,
        truncate=body.get("truncation") == "auto",
        **options.asked(model),
    )


def _format(wanted: Mapping[str, Any]) -> str | Mapping[str, Any] | None:
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json"
    if kind == "json_schema" and isinstance(wanted.get("schema"), dict):
        return dict(wanted["schema"])
    raise ApiError(400, 'text.format must be "text", "json_object", or "json_schema" with an object schema')


def _response(body: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    """Give the response as it is before anything was generated. Clients want every key."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "incomplete_details": None,
        "model": body["model"],
        "previous_response_id": None,
        "instructions": body.get("instructions"),
        "output": [],
        "error": None,
        "tools": tools.echo,
        "tool_choice": body.get("tool_choice", "auto"),
        "truncation": body.get("truncation", "disabled"),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "text": {"format": {"type": "text"}} | body.get("text", {}),
        "top_p": body.get("top_p", 1),
        "presence_penalty": body.get("presence_penalty", 0),
        "frequency_penalty": body.get("frequency_penalty", 0),
        "top_logprobs": body.get("top_logprobs", 0),
        "temperature": body.get("temperature", 1),
        "reasoning": _reasoning(body),
        "usage": None,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": None,
        "store": False,
        "background": False,
        "service_tier": "default",
        "metadata": body.get("metadata", {}),
        "safety_identifier": body.get("safety_identifier"),
        "prompt_cache_key": body.get("prompt_cache_key"),
    }


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any] | None:
    given = body.get("reasoning")
    return None if given is None else {"effort": given.get("effort"), "summary": given.get("summary")}


async def _events(events: AsyncIterable[Event | Idle], output: Output, response: dict[str, Any]) -> AsyncGenerator[Sse]:
    """Give the events of a response, which is filled in meanwhile. They begin when there is something to say."""
    begun = False
    async for event in events:
        if not begun:
            begun = True
            yield output.event("response.created", response=response)
            yield output.event("response.in_progress", response=response)
        elif isinstance(event, Idle):
            yield output.event("response.in_progress", response=response)
        if not isinstance(event, Idle):
            for told in output.add(event):
                yield told
        if isinstance(event, Finished):
            _finish(response, output, event)
            yield output.event(f"response.{response['status']}", response=response)


def _finish(response: dict[str, Any], output: Output, finished: Finished) -> None:
    response["output"] = output.items
    response["usage"] = {
        "input_tokens": finished.prompt_tokens,
        "output_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "input_tokens_details": {"cached_tokens": max(0, finished.prompt_tokens - finished.stats.prefill_tokens)},
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    }
    if finished.reason == "length":
        response["status"] = "incomplete"
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    else:
        response["status"] = "completed"
        response["completed_at"] = int(time.time())


def _failure(error: Exception, output: Output, response: dict[str, Any]) -> list[Sse]:
    """End a stream with the two events that clients look for: an error, and the response that failed."""
    code = "server_error" if status_of(error) >= 500 else "invalid_request_error"
    told = {"type": code, "code": code, "message": message_of(error), "param": None}
    response["status"] = "failed"
    response["error"] = {"code": code, "message": told["message"]}
    return [
        output.event("error", error=told, code=code, message=told["message"], param=None),
        output.event("response.failed", response=response),
    ]


ROUTES = [
    web.post("/v1/responses", responses),
    web.get("/v1/responses/{id}", not_stored),
    web.delete("/v1/responses/{id}", not_stored),
]

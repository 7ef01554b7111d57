"""Conversations of the /v1 dialects in the form that chat templates read, and replies gathered from their events.

A message has role and content, an assistant's perhaps reasoning_content and tool_calls, a tool's name and tool_call_id.
"""

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slotpy.engine.generation import Event, Finished, TextDelta, TokenLogprob, ToolCall
from slotpy.server.errors import ApiError, unsupported
from slotpy.server.library.library import Model
from slotpy.server.service import Idle

KEEP_ALIVE_S = 10.0
"""How long a stream may be silent. Clients give up on one that brings no event; comments do not count with them."""

DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 40}
"""How the /v1 dialects sample where neither the request nor the model says anything."""

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "ultra", "max", "none")

ToolChoice = Literal["auto", "none", "required"]

_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image_url", "input_image", "image")


def text_of(content: Any, separator: str = "") -> str:
    """Give the text of a message's content: a text, a list of parts, or nothing. Raises: ApiError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"invalid message content type: {type(content).__name__}")
    return separator.join(_text_of_part(part) for part in content)


def read_arguments(arguments: Any) -> Mapping[str, Any]:
    """Read a tool call's arguments from a client's history: an object, JSON text of one, or nothing."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "null")
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"invalid tool call arguments: {error}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ApiError(400, "invalid tool call arguments: they must be a JSON object")
    return arguments


def call_entry(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Give a tool call as it stands in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read_arguments(arguments)}}


def conversation(model: Model, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Give the messages to render: one system message, first, and tool results in the order of their calls.

    A system message of the request's takes the place of the model's own; developers are the system by a newer name.
    """
    system: list[str] = []
    rest: list[Mapping[str, Any]] = []
    for message in (*model.messages, *messages):
        if message.get("role") in ("system", "developer"):
            system.append(message.get("content") or "")
        else:
            rest.append(message)
    text = "\n\n".join(filter(None, system)) or model.system
    opening = [{"role": "system", "content": text}] if text else []
    return (*opening, *_paired(rest))


def think_of(effort: str | None, model: Model, *, relaxed: bool = False) -> bool | str | None:
    """Read a reasoning effort; without one, a model that can think does.

    Raises: ApiError for an unknown one, and unless `relaxed` for a model that cannot think.
    """
    thinks = "thinking" in model.capabilities
    if effort is None:
        return True if thinks else None
    if effort not in EFFORTS:
        known = ", ".join(f'"{name}"' for name in EFFORTS[:-1])
        raise ApiError(400, f'invalid reasoning value: "{effort}" (must be {known}, or "none")')
    if effort == "none":
        return False
    if thinks:
        return effort
    if relaxed:
        return None
    raise unsupported(model.name, "thinking")


def choose_tools(
    model: Model, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, name: str | None = None
) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice]:
    """Give the tools to offer, and whether one must be called. `name` asks for a call of just that one.

    Raises: ApiError for a call that cannot be, and for a model whose template has no place for tools.
    """
    if name is not None:
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(400, f'tool_choice names the tool "{name}", which tools does not declare')
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice asks for a tool call, but there are no tools")
    if choice == "none":
        return (), choice
    if tools and "tools" not in model.capabilities:
        raise unsupported(model.name, "tools")
    return tuple(tools), choice


async def first_call_only(events: AsyncIterable[Event | Idle]) -> AsyncIterator[Event | Idle]:
    """Leave out all tool calls but the first, for clients that want no parallel ones."""
    async for event in events:
        if not isinstance(event, ToolCall) or event.index == 0:
            yield event


@dataclass
class Reply:
    """Hold a whole reply. `logprobs` are of the answer's tokens, not of the reasoning's."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    @classmethod
    async def gather(cls, events: AsyncIterable[Event | Idle]) -> "Reply":
        """Wait for all of a reply."""
        reply = cls()
        async for event in events:
            reply.add(event)
        return reply

    def add(self, event: Event | Idle) -> None:
        """Take the next event."""
        if isinstance(event, TextDelta) and event.reasoning:
            self.reasoning += event.text
        elif isinstance(event, TextDelta):
            self.text += event.text
            self.logprobs += event.logprobs
        elif isinstance(event, ToolCall):
            self.calls.append(event)
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def end(self) -> Finished:
        """How it ended; every reply that was gathered has."""
        assert self.finished is not None
        return self.finished


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    if kind in _IMAGES:
        source = part.get("image_url") or part.get("source") or {}
        url = source.get("url") if isinstance(source, dict) else source
        if isinstance(url, str) and url.startswith(("http://", "https://", "file://")):
            raise ApiError(400, "image URLs are not fetched, and images are not supported: send text only")
        raise ApiError(400, "images are not supported: send text only")
    raise ApiError(400, f"content parts of type {json.dumps(kind)} are not supported: send text only")


def _paired(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Name tool results after their calls and put each run of them in the order of the calls before it."""
    paired: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}
    order: dict[str, int] = {}
    run: list[Mapping[str, Any]] = []

    def place(message: Mapping[str, Any]) -> int:
        return order.get(message.get("tool_call_id", ""), len(order))

    for message in messages:
        if message.get("role") == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""))
            run.append({**message, "name": name} if name else message)
            continue
        paired += sorted(run, key=place)
        run = []
        paired.append(message)
        calls = message.get("tool_calls") or ()
        if calls:
            order = {call.get("id", ""): i for i, call in enumerate(calls)}
            names |= {call.get("id", ""): call["function"]["name"] for call in calls}
    return paired + sorted(run, key=place)

"""A reply as the items and events of the Responses dialect."""

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from slotpy.engine.generation import Event, Finished, TextDelta, TokenLogprob, ToolCall
from slotpy.server.openai.common import logprob_entry
from slotpy.server.openai.responses_input import ToolName
from slotpy.server.stream import Sse


class Output:
    """Turn a reply's events into output items, kept in `items`, and the events that describe their growth.

    One item is open at a time: reasoning, a message, or a function call, which comes whole. Encode each event before
    asking for the next: they hold the items themselves, which go on growing.
    """

    def __init__(self, name_of: Callable[[str], ToolName]) -> None:
        self._name_of = name_of
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._num_events = 0

    def event(self, name: str, **fields: Any) -> Sse:
        """Give one event with the next sequence number."""
        data = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return Sse(data, event=name)

    def add(self, event: Event) -> Iterator[Sse]:
        """Take the next event of the reply."""
        if isinstance(event, ToolCall):
            yield from self._close()
            yield from self._call(event)
        elif isinstance(event, TextDelta):
            kind = "reasoning" if event.reasoning else "message"
            if self._open != kind:
                yield from self._close()
                yield from self._begin(kind)
            yield from self._grow(event)
        elif isinstance(event, Finished):
            yield from self._close("completed" if event.reason == "stop" else "incomplete")

    def _begin(self, kind: str) -> Iterator[Sse]:
        self._open, self._text, self._logprobs = kind, "", []
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
        else:
            item = {
                "id": _new_id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        self.items.append(item)
        yield self._item_event("response.output_item.added", item=item)
        if kind == "message":
            yield self._part_event("response.content_part.added", part=self._part())
        else:
            yield self._summary_event("response.reasoning_summary_part.added", part=self._summary())

    def _grow(self, delta: TextDelta) -> Iterator[Sse]:
        self._text += delta.text
        if self._open == "reasoning":
            yield self._summary_event("response.reasoning_summary_text.delta", delta=delta.text)
        else:
            entries = _logprobs(delta.logprobs)
            self._logprobs += entries
            yield self._part_event("response.output_text.delta", delta=delta.text, logprobs=entries)

    def _close(self, status: str = "completed") -> Iterator[Sse]:
        if self._open is None:
            return
        item = self.items[-1]
        if self._open == "reasoning":
            yield self._summary_event("response.reasoning_summary_text.done", text=self._text)
            yield self._summary_event("response.reasoning_summary_part.done", part=self._summary())
            item["summary"] = [self._summary()]
            item["encrypted_content"] = self._text
        else:
            yield self._part_event("response.output_text.done", text=self._text, logprobs=self._logprobs)
            yield self._part_event("response.content_part.done", part=self._part())
            item["content"] = [self._part()]
            item["status"] = status
        self._open = None
        yield self._item_event("response.output_item.done", item=item)

    def _call(self, call: ToolCall) -> Iterator[Sse]:
        name = self._name_of(call.name)
        arguments = json.dumps(call.arguments)
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": name.name,
            "arguments": arguments,
        }
        if name.namespace:
            item["namespace"] = name.namespace
        self.items.append(item)
        yield self._item_event("response.output_item.added", item={**item, "status": "in_progress", "arguments": ""})
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield self.event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self.event("response.function_call_arguments.done", **place, arguments=arguments)
        yield self._item_event("response.output_item.done", item=item)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _summary(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self._text}

    def _item_event(self, event: str, **fields: Any) -> Sse:
        return self.event(event, output_index=len(self.items) - 1, **fields)

    def _summary_event(self, event: str, **fields: Any) -> Sse:
        return self._item_event(event, item_id=self.items[-1]["id"], summary_index=0, **fields)

    def _part_event(self, event: str, **fields: Any) -> Sse:
        return self._item_event(event, item_id=self.items[-1]["id"], content_index=0, **fields)


def _logprobs(entries: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    return [logprob_entry(entry) for entry in entries]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"

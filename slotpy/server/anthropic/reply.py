"""A reply as the content blocks and events of the Messages dialect."""

import json
from collections.abc import Iterator
from typing import Any

from slotpy.engine.generation import Event, Finished, TextDelta, ToolCall
from slotpy.server.stream import Sse

_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class Message:
    """Turn a reply's events into a message, kept in `body`, and the events that describe its growth.

    Encode each event before asking for the next: they hold the message's own parts, which go on growing.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self.body: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._blocks: list[dict[str, Any]] = self.body["content"]
        self._open: str | None = None

    def start(self, input_tokens: int) -> Sse:
        """Give the first event. The counts of the last one are the ones that hold."""
        self.body["usage"]["input_tokens"] = input_tokens
        return _event("message_start", message=self.body)

    def add(self, event: Event) -> Iterator[Sse]:
        """Take the next event of the reply."""
        if isinstance(event, ToolCall):
            yield from self._close()
            yield from self._call(event)
        elif isinstance(event, TextDelta):
            yield from self._grow("thinking" if event.reasoning else "text", event.text)
        elif isinstance(event, Finished):
            yield from self._close()
            self._finish(event)
            reason = {key: self.body[key] for key in ("stop_reason", "stop_sequence")}
            yield _event("message_delta", delta=reason, usage=self.body["usage"])
            yield _event("message_stop")

    def _grow(self, kind: str, text: str) -> Iterator[Sse]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            signature = {"signature": ""} if kind == "thinking" else {}  # clients want the key
            yield self._begin({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        yield self._block_event("content_block_delta", delta={"type": _DELTAS[kind], kind: text})

    def _call(self, call: ToolCall) -> Iterator[Sse]:
        yield self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._blocks[-1]["input"] = call.arguments
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments)}
        yield self._block_event("content_block_delta", delta=delta)
        yield self._block_event("content_block_stop")

    def _begin(self, block: dict[str, Any]) -> Sse:
        self._blocks.append(block)
        return self._block_event("content_block_start", content_block=block)

    def _close(self) -> Iterator[Sse]:
        if self._open is not None:
            self._open = None
            yield self._block_event("content_block_stop")

    def _finish(self, finished: Finished) -> None:
        if finished.reason == "length":
            reason = "max_tokens"
        elif finished.stop_sequence is not None:
            reason = "stop_sequence"
        else:
            called = any(block["type"] == "tool_use" for block in self._blocks)
            reason = "tool_use" if called else "end_turn"
        self.body |= {
            "stop_reason": reason,
            "stop_sequence": finished.stop_sequence,
            "usage": {"input_tokens": finished.prompt_tokens, "output_tokens": finished.completion_tokens},
        }

    def _block_event(self, name: str, **fields: Any) -> Sse:
        return _event(name, index=len(self._blocks) - 1, **fields)


def _event(name: str, **fields: Any) -> Sse:
    return Sse({"type": name, **fields}, event=name)


PING = _event("ping")

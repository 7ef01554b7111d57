"""A model's events as Ollama's records, one by one or all in one. Their shape is chat.py's and generate.py's."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slotpy.engine.generation import (
    Event,
    Finished,
    GenerationRequest,
    LoadRequest,
    TextDelta,
    TokenLogprob,
    ToolCall,
    UnloadRequest,
)
from slotpy.engine.prompts import make_prompt
from slotpy.server.library.library import Model
from slotpy.server.service import Service
from slotpy.server.stream import json_response, ndjson


@dataclass
class Piece:
    """Hold a part of a reply, or the whole, in the parts that records have."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Append what an event brings."""
        if isinstance(event, TextDelta):
            if event.reasoning:
                self.thinking += event.text
            else:
                self.content += event.text
            self.logprobs += [logprob_record(each) for each in event.logprobs]
        elif isinstance(event, ToolCall):
            function = {"index": event.index, "name": event.name, "arguments": event.arguments}
            self.tool_calls.append({"id": event.id, "function": function})


Write = Callable[[Piece, Finished | None], dict[str, Any]]
"""Writes a record: what it says, and the end of the reply if it is the last."""


async def answer(
    request: web.Request,
    service: Service,
    model: Model,
    asked: GenerationRequest,
    *,
    keep_alive_s: float | None,
    stream: bool,
    write: Write,
) -> web.StreamResponse:
    """Run a request and answer with its records, or with all of them as one."""
    records = _records(service, model, asked, keep_alive_s, write, stream)
    if stream:
        return await ndjson(request, records)
    async with contextlib.aclosing(records):
        return json_response(await anext(records))


async def load_or_unload(service: Service, model: Model, num_ctx: int | None, keep_alive_s: float | None) -> str:
    """Do what a request without a prompt is for, and give its `done_reason`."""
    if keep_alive_s == 0:
        await service.run_to_end(model, UnloadRequest(), keep_alive_s)
        return "unload"
    await service.run_to_end(model, LoadRequest(num_ctx), keep_alive_s)
    return "load"


async def debug_info(model: Model, asked: GenerationRequest) -> dict[str, Any]:
    """Give what a record shows of the prompt, instead of running it. Raises: UsageError."""

    def render() -> str | None:
        return make_prompt(model.text.tokenizer, model.text.chat, asked).text

    rendered = asked.prompt if asked.messages is None else await asyncio.to_thread(render)
    return {"_debug_info": {"rendered_template": rendered}}


def metrics(finished: Finished) -> dict[str, int]:
    """Give the counts and nanoseconds of a last record. All of them, where Ollama leaves zeros out: clients do sums."""
    return {
        "total_duration": finished.total_ns,
        "load_duration": finished.load_ns,
        "prompt_eval_count": finished.prompt_tokens,
        "prompt_eval_duration": finished.prefill_ns,
        "eval_count": finished.completion_tokens,
        "eval_duration": finished.decode_ns,
    }


def logprob_record(logprob: TokenLogprob) -> dict[str, Any]:
    """Write one token's log-probability, with its likeliest rivals if there are any."""
    record = {"token": logprob.token, "logprob": logprob.logprob, "bytes": list(logprob.raw)}
    if logprob.top:
        record["top_logprobs"] = [logprob_record(each) for each in logprob.top]
    return record


async def _records(
    service: Service,
    model: Model,
    asked: GenerationRequest,
    keep_alive_s: float | None,
    write: Write,
    stream: bool,
) -> AsyncGenerator[dict[str, Any]]:
    """Yield a record for each event, or with `stream` off the last one alone, which then says all."""
    piece = Piece()
    with service.submit(model, asked, keep_alive_s) as events:
        async for event in events:
            piece.add(event)
            if isinstance(event, Finished):
                yield write(piece, event)
            elif stream:
                yield write(piece, None)
                piece = Piece()

"""POST /v1/completions, the older endpoint.

As with Ollama the prompt is a user's message where the model has a chat template, and continued as it is where not.
"""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from slotpy.engine.generation import Event, Finished, GenerationRequest, TextDelta, TokenLogprob
from slotpy.server.errors import ApiError
from slotpy.server.gojson import ANY, BOOL, INT, STRING, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model, UnknownModel
from slotpy.server.openai.common import (
    CHOICES,
    FINGERPRINT,
    SAMPLING,
    STREAM_OPTIONS,
    fail,
    finite,
    options_of,
    top_logprobs_of,
    usage_of,
)
from slotpy.server.service import Idle
from slotpy.server.stream import Sse, json_response, sse
from slotpy.server.turns import DEFAULTS, KEEP_ALIVE_S, Reply, conversation, think_of

_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}

COMPLETION = Struct(
    "openai.CompletionRequest",
    {
        **SAMPLING,
        **CHOICES,
        "model": STRING,
        "prompt": ANY,
        "max_tokens": INT,
        "stream": BOOL,
        "stream_options": STREAM_OPTIONS,
        "logprobs": INT,
        "echo": BOOL,
        "best_of": INT,
        "suffix": STRING,
    },
)


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one prompt with one choice."""
    service = request.app[SERVICE]
    body = COMPLETION.read(await request.read(), empty="EOF")
    name = body.get("model", "")
    if not name:
        raise UnknownModel(name)
    model = service.library.find(name)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": FINGERPRINT,
    }
    with service.submit(model, _generation(model, body)) as queue:
        if body.get("stream"):
            include_usage = body.get("stream_options", {}).get("include_usage", False)
            events = queue.with_idle(KEEP_ALIVE_S)
            return await sse(request, _chunks(events, head, include_usage, "logprobs" in body), fail)
        reply = await Reply.gather(queue)
    choice = _choice(reply.text, reply.end.reason, _Logprobs() if "logprobs" in body else None, reply.logprobs)
    return json_response({**head, "choices": [choice], "usage": usage_of(reply.end)}, charset=False)


def _generation(model: Model, body: Mapping[str, Any]) -> GenerationRequest:
    for name in ("echo", "suffix"):
        if body.get(name):
            raise ApiError(400, f"{name} is not supported")
    if body.get("best_of", 1) != 1:
        raise ApiError(400, "best_of must be 1")
    prompt = _prompt(body.get("prompt", ""))
    options = options_of(model, body, body.get("max_tokens"))
    return GenerationRequest(
        messages=conversation(model, [{"role": "user", "content": prompt}]) if model.template else None,
        prompt=None if model.template else prompt,
        think=think_of("none", model),  # there is no place for reasoning: a client would wait for nothing
        defaults=DEFAULTS,
        top_logprobs=top_logprobs_of(body["logprobs"], "logprobs") if "logprobs" in body else None,
        **options.asked(model),
    )


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if prompt == []:
        raise ApiError(400, "prompt must not be an empty list")
    raise ApiError(400, "prompt must be one string: send one request for each, and text in place of tokens")


class _Logprobs:
    """Write log-probabilities in the columns of this endpoint, chunk after chunk: `text_offset` goes on counting."""

    def __init__(self) -> None:
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{other.token: finite(other.logprob) for other in entry.top} for entry in entries],
            "text_offset": offsets,
        }


def _choice(
    text: str, reason: str | None, logprobs: _Logprobs | None, entries: Sequence[TokenLogprob] = ()
) -> dict[str, Any]:
    choice = {"text": text, "index": 0, "finish_reason": reason}
    return choice if logprobs is None else {**choice, "logprobs": logprobs.write(entries) if entries else None}


async def _chunks(
    events: AsyncIterable[Event | Idle], head: Mapping[str, Any], include_usage: bool, with_logprobs: bool
) -> AsyncGenerator[Sse]:
    """Give a chunk for each piece of the answer, then the reason. Silence and reasoning are empty chunks."""
    logprobs = _Logprobs() if with_logprobs else None
    usage = {"usage": _NO_USAGE} if include_usage else {}

    def chunk(text: str, reason: str | None = None, entries: Sequence[TokenLogprob] = ()) -> Sse:
        return Sse({**head, "choices": [_choice(text, reason, logprobs, entries)], **usage})

    async for event in events:
        if isinstance(event, TextDelta) and not event.reasoning:
            yield chunk(event.text, entries=event.logprobs)
        elif isinstance(event, Idle | TextDelta):
            yield chunk("")
        elif isinstance(event, Finished):
            yield chunk("", event.reason)
            if include_usage:
                yield Sse({**head, "choices": [], "usage": usage_of(event)})
    yield Sse("[DONE]")


ROUTES = [web.post("/v1/completions", completions)]

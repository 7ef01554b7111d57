"""One generation request on a loaded model: from the request to its events.

Knows nothing of queues and other requests. Runs on the thread that owns the engine.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slotpy.engine.engine import Engine
from slotpy.engine.generation import Embedded, EmbedRequest, Event, Finished, GenerationRequest
from slotpy.engine.grammar import Constraint
from slotpy.engine.prompts import Context, encode, make_prompt
from slotpy.engine.reply import ReplyReader
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.errors import PromptTooLongError, UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What one request works with.

    `emit` takes the pieces of a reply as they come. `is_over` is asked after each token whether to give up; to end a
    prefill early, cancel the session too. `started_ns` is `perf_counter_ns` at submission.
    """

    engine: Engine
    session: Session
    emit: Callable[[Event], None]
    is_over: Callable[[], bool]
    started_ns: int
    load_ns: int

    def context(self, asked_tokens: int | None) -> Context:
        """Give the room of a request: what is loaded, or less if it asked for less."""
        tokens = min(asked_tokens or self.engine.context_tokens, self.engine.context_tokens)
        return Context(tokens, self.engine.max_context_tokens)

    def total_ns(self) -> int:
        return time.perf_counter_ns() - self.started_ns


def answer(work: Work, request: GenerationRequest) -> Finished | None:
    """Generate one reply; gives its end, or None if the work was over before.

    Raises: UsageError and PromptTooLongError for what the request cannot have; whatever the model raises, after which
        the session must not be used again.
    """
    engine, session = work.engine, work.session
    context = work.context(request.context_tokens)
    forced = request.tool_choice == "required"
    tools = engine.tools if request.tools and request.tool_choice != "none" else None
    if forced and tools is None:
        raise UsageError("A tool call is required, but there are no tools or the model knows none.")
    opening = tools.opening(request.tools) if forced and tools is not None else ""
    prompt = make_prompt(engine.tokenizer, engine.chat, request, context, opening)
    if prompt.num_left_out:
        _log.info("the oldest %d messages are left out: %d tokens of context", prompt.num_left_out, context.tokens)
    reader = ReplyReader(engine.tokenizer, prompt.text, request.stops, tools, request.tools, opening)
    constraint = None
    if request.format is not None and not forced:  # a forced call has its own form
        call_id = engine.tokenizer.token_id(tools.start) if tools is not None else None
        constraint = engine.grammar.compile(request.format, frozenset() if call_id is None else frozenset([call_id]))
    replies = session.generate(
        prompt.ids,
        SamplingParams.merge(engine.defaults, request.sampling, request.defaults),
        _max_tokens(request, engine.defaults, context.tokens - len(prompt.ids)),
        engine.stop_ids,
        constraint=constraint,
        top_logprobs=request.top_logprobs,
    )
    token_ids, reasoning_tokens = list(prompt.ids), 0
    _start(constraint, reader)
    for sampled in () if work.is_over() else replies:
        token_ids.append(sampled.token)
        reasoning_tokens += not reader.in_answer
        for event in reader.push(sampled):
            work.emit(event)
        _start(constraint, reader)
        if reader.stopped or work.is_over():
            session.cancel()  # ends the iteration
    if work.is_over():
        return None
    for event in reader.flush():
        work.emit(event)
    stats = session.stats
    if reader.stopped:  # the session only knows that it was cancelled
        stats.finish_reason = "stop"
    _log.debug(
        "prompt: %d tokens, %d of them computed in %.2f s; reply: %d in %.2f s; experts: %d hits, %d misses",
        *(len(prompt.ids), stats.prefill_tokens, stats.prefill_s, stats.decode_tokens, stats.decode_s),
        *(stats.hits, stats.misses),
    )
    return Finished(
        reason="stop" if stats.finish_reason == "stop" else "length",
        stop_sequence=reader.stop_sequence,
        token_ids=tuple(token_ids),
        prompt_tokens=len(prompt.ids),
        completion_tokens=stats.decode_tokens,
        reasoning_tokens=reasoning_tokens,
        total_ns=work.total_ns(),
        load_ns=work.load_ns,
        prefill_ns=int(stats.prefill_s * 1e9),
        decode_ns=int(stats.decode_s * 1e9),
        stats=stats,
    )


def embed(work: Work, request: EmbedRequest) -> Embedded | None:
    """Embed the texts of a request; None if the work was over before. Raises what `answer` raises."""
    limit = work.context(request.context_tokens).tokens
    encoded = [encode(work.engine.tokenizer, text, limit, add_special_tokens=True) for text in request.texts]
    empty = next((index for index, ids in enumerate(encoded) if not ids), None)
    if empty is not None:
        raise UsageError(f"Text {empty} of those to embed has no tokens.", hint="Leave empty texts out.")
    longest = max(map(len, encoded), default=0)
    if longest > limit and not request.truncate:
        raise PromptTooLongError(
            f"the input length exceeds the context length: {longest} tokens, and the context holds {limit}.",
            hint="Cut the text, or let it be truncated.",
        )
    encoded = [ids[:limit] for ids in encoded]
    vectors = []
    for ids in encoded:
        vector = None if work.is_over() else work.session.embed(ids)
        if vector is None:
            return None
        vectors.append(vector)
    return Embedded(
        vectors=tuple(vectors),
        prompt_tokens=sum(map(len, encoded)),
        total_ns=work.total_ns(),
        load_ns=work.load_ns,
    )


def _max_tokens(request: GenerationRequest, generation_config: Mapping[str, Any], room: int) -> int:
    wanted = request.max_tokens
    if wanted is None:
        recommended = generation_config.get("max_new_tokens")
        wanted = recommended if isinstance(recommended, int) and recommended > 0 else room
    return min(wanted, room)


def _start(constraint: Constraint | None, reader: ReplyReader) -> None:
    """Let the grammar hold from the reply's first token after its reasoning."""
    if constraint is not None and reader.in_answer:
        constraint.start()

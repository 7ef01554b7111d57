"""What can be asked of a loaded model, and what it says while it works. Data only: worker.py runs it.

Knows no wire format: the server turns its dialects into these requests, and these events into its dialects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slotpy.engine.session import GenerationStats


@dataclass(frozen=True)
class GenerationRequest:
    """Ask for one reply: to `messages` through the chat template, or a continuation of `prompt` as it is.

    `prefix_ids` come before the prompt. `tools` are OpenAI's function declarations; `tool_choice` "required" opens a
    call by force, "none" hides them. `think` None leaves thinking to the template; a string is a level, passed on to
    the template, which may not know it. `sampling` has SamplingParams' names and wins over the checkpoint's
    generation_config.json, which wins over `defaults`. `format` is "json" or a JSON schema. `top_logprobs` None: no
    log-probabilities; 0 to 20: those of the chosen tokens and of so many others. `truncate` lets the oldest messages
    go when they leave the reply too little of the context; without it a prompt that leaves nothing is a
    PromptTooLongError. `context_tokens` asks for at least so much context: more than is loaded loads the model anew.
    """

    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    prefix_ids: tuple[int, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    think: bool | str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    format: str | Mapping[str, Any] | None = None
    top_logprobs: int | None = None
    truncate: bool = True
    context_tokens: int | None = None


@dataclass(frozen=True)
class EmbedRequest:
    """Ask for the embedding of each text: the final hidden state of its last token, as the model gives it.

    Longer texts than the context are cut, or with `truncate` off a PromptTooLongError.
    """

    texts: tuple[str, ...]
    truncate: bool = True
    context_tokens: int | None = None


@dataclass(frozen=True)
class LoadRequest:
    """Ask only that the model be loaded."""

    context_tokens: int | None = None


@dataclass(frozen=True)
class UnloadRequest:
    """Ask that the model be unloaded, after everything asked before."""


Request = GenerationRequest | EmbedRequest | LoadRequest | UnloadRequest


@dataclass(frozen=True)
class TokenLogprob:
    """Give one token's text and bytes and the natural logarithm of its probability, before any filter.

    `top` are the likeliest tokens at its place, best first; theirs is empty.
    """

    token: str
    raw: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True)
class TextDelta:
    """Carry a piece of a reply: answer text, or reasoning without its tags. `logprobs` are of tokens ending in it."""

    text: str
    reasoning: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """Carry one whole tool call. `index` counts the calls of a reply from 0; `id` is `call_` and eight hex digits."""

    index: int
    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    """End a reply. `reason` is "stop" or "length"; `stop_sequence` the stop string that ended it, if one did.

    `token_ids` are the prompt's and the reply's, without a stop id. `reasoning_tokens` of the `completion_tokens` were
    reasoning, with the tag that ends it. Durations are whole nanoseconds; `load_ns` is what
    loading took for this request, `total_ns` counts from submission, so with the time in the queue.
    """

    reason: Literal["stop", "length"]
    stop_sequence: str | None
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    total_ns: int
    load_ns: int
    prefill_ns: int
    decode_ns: int
    stats: GenerationStats


@dataclass(frozen=True)
class Embedded:
    """End an EmbedRequest: one float32 vector (D,) for each text, not normalised."""

    vectors: tuple[np.ndarray, ...]
    prompt_tokens: int
    total_ns: int
    load_ns: int


@dataclass(frozen=True)
class Loaded:
    """End a LoadRequest. `load_ns` is 0 if the model was there."""

    load_ns: int


@dataclass(frozen=True)
class Unloaded:
    """End an UnloadRequest."""


@dataclass(frozen=True)
class Failed:
    """End any request with an error: a SlotpyError that the user can act on, or a bug."""

    error: Exception


Event = TextDelta | ToolCall | Finished | Embedded | Loaded | Unloaded | Failed
FINAL = (Finished, Embedded, Loaded, Unloaded, Failed)

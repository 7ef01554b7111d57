"""Requests to prompts: messages made uniform, rendered, encoded, and cut to the context.

Text and ids alone: knows no model and needs no thread. Serves the engine's thread and whoever only counts tokens.
"""

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slotpy.engine.chat import ChatTemplate
from slotpy.engine.generation import GenerationRequest
from slotpy.engine.text import Tokenizer
from slotpy.errors import PromptTooLongError, SlotpyError, UsageError

Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}
"""Roles under names that no chat template knows, and their own."""

_KNOWN = ("user", "assistant", "tool")

_LONGEST_TOKEN = 256
"""More characters than any token stands for. The longest in use are runs of 128 blanks."""


@dataclass(frozen=True)
class Context:
    """Say how many tokens prompt and reply have together, and how many they could have if more were asked for."""

    tokens: int
    most_tokens: int


@dataclass(frozen=True)
class Prompt:
    """Hold what the model reads. `text` is the rendered conversation, None for a prompt taken as it is.

    `num_left_out` counts the messages that there was no room for.
    """

    ids: list[int]
    text: str | None
    num_left_out: int = 0


def prompt_ids(tokenizer: Tokenizer, chat: ChatTemplate | None, request: GenerationRequest) -> list[int]:
    """Give the whole prompt of a request, however long. Raises what `make_prompt` raises but for the length."""
    return make_prompt(tokenizer, chat, request).ids


def make_prompt(
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    request: GenerationRequest,
    context: Context | None = None,
    opening: str = "",
) -> Prompt:
    """Render and encode a request, leaving room in `context` for at least one token of reply.

    `opening` is the beginning of the reply, put in the model's mouth; else a last message of the assistant is. A
    request that may be truncated loses first the beginning of its `prefix_ids`, then its oldest messages; system
    messages and the last one stay, a tool call goes with its results, an answer with its question. Messages go when
    they leave less than a sixteenth of the context for the reply; then they leave a quarter, if it can be.

    Raises: UsageError for messages that mean nothing, or that the template refuses; PromptTooLongError, which begins
        as clients of Anthropic know it.
    """
    if request.messages is None:
        limit = None if context is None else context.tokens
        ids = encode(tokenizer, request.prompt or "", limit, add_special_tokens=not request.prefix_ids)
        return Prompt(_after_prefix(ids, request, context), None)
    messages = uniform(request.messages)
    if not opening and _is_begun_reply(messages):
        opening = messages.pop()["content"]
    writer = _Writer(tokenizer, chat, request, context, opening)
    prompt = writer.write(messages)
    # A reply of a few tokens would be cut off in mid-sentence. The quarter is more than it takes to go on, so that a
    # conversation at its limit is not cut, and read anew, at every turn.
    if (
        context is not None
        and request.truncate
        and len(prompt.ids) > context.tokens - _reply_room(request, context, 16)
    ):
        prompt = _shortened(writer, messages, context.tokens - _reply_room(request, context, 4))
    return replace(prompt, ids=_after_prefix(prompt.ids, request, context))


def _is_begun_reply(messages: list[Message]) -> bool:
    """Tell whether a conversation ends with text that the assistant is to go on from, as clients prefill a reply."""
    return (
        len(messages) > 1
        and messages[-1]["role"] == "assistant"
        and bool(messages[-1]["content"])
        and "tool_calls" not in messages[-1]
    )


def encode(tokenizer: Tokenizer, text: str, limit: int | None, *, add_special_tokens: bool = False) -> list[int]:
    """Encode a text; of one that surely has more than `limit` tokens, only as much as still has.

    A request may hold hundreds of megabytes, and encoding takes several hundred bytes of memory for each token.
    """
    if limit is not None:
        text = text[: _LONGEST_TOKEN * (limit + 1)]
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def uniform(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Give the messages as chat templates read them.

    Roles in lower case, contents as one text, arguments of tool calls as objects, reasoning as `reasoning_content`.
    Raises: UsageError for what cannot be made so.
    """
    return [_uniform(message) for message in messages]


def _uniform(message: Mapping[str, Any]) -> Message:
    made = {key: value for key, value in message.items() if value is not None and key != "images"}
    role = str(message.get("role") or "user").lower()
    made["role"] = _ROLES.get(role, role)
    made["content"] = _text(message.get("content"))
    if "thinking" in made:
        made.setdefault("reasoning_content", made.pop("thinking"))
    if "tool_name" in made:
        made.setdefault("name", made["tool_name"])
    made.pop("tool_calls", None)
    if message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return made


def _text(content: Any) -> str:
    """Join the parts of a content that has some."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UsageError(f"A message has content of type {kind!r}: this model reads text only.")
        texts.append(text)
    return "".join(texts)


def _call(call: Mapping[str, Any]) -> Message:
    function = call.get("function") or {key: call.get(key) for key in ("name", "arguments")}
    arguments = _arguments(function.get("arguments"), str(function.get("name")))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(value: Any, name: str) -> dict[str, Any]:
    """Read the arguments of an earlier call: OpenAI's clients send them as JSON text, none as an empty one or null."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}", strict=False)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"The arguments of the earlier call of {name} are no JSON: {error}.") from error
    if not isinstance(value or {}, dict):
        raise UsageError(f"The arguments of the earlier call of {name} are no JSON object.")
    return value or {}


class _Writer:
    """Render and encode conversations for one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        request: GenerationRequest,
        context: Context | None,
        opening: str,
    ) -> None:
        if chat is None:
            raise UsageError("This model has no chat template.", hint="Give it a raw prompt to continue.")
        self._tokenizer, self._chat, self._opening = tokenizer, chat, opening
        self._limit = None if context is None else context.tokens
        self._tools = list(request.tools) if request.tool_choice != "none" and request.tools else None
        think = False if opening else request.think  # a reply that was begun for it has no room for reasoning
        self._thinking = None if think is None else bool(think)
        self._effort = think if isinstance(think, str) else None

    def write(self, messages: list[Message]) -> Prompt:
        text = self._render(messages)
        return Prompt(encode(self._tokenizer, text + self._opening, self._limit), text)

    def _render(self, messages: list[Message]) -> str:
        """Render, and what the template refuses once more in the form that all of them know."""
        try:
            return self._render_as_is(messages)
        except SlotpyError:
            messages = _conventional(messages)
        try:
            return self._render_as_is(messages)
        except SlotpyError as error:
            raise UsageError(str(error)) from error

    def _render_as_is(self, messages: list[Message]) -> str:
        return self._chat.render(
            messages, tools=self._tools, enable_thinking=self._thinking, reasoning_effort=self._effort
        )


def _conventional(messages: list[Message]) -> list[Message]:
    """Give one system message, at the beginning, and to strangers the role of the user."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    plain = [{**message, "role": message["role"] if message["role"] in _KNOWN else "user"} for message in others]
    return [{"role": "system", "content": "\n\n".join(system)}, *plain] if system else plain


def _reply_room(request: GenerationRequest, context: Context, share: int) -> int:
    """Give the tokens to leave for a reply: one in `share` of the context, or fewer if it may not be so long."""
    part = context.tokens // share
    return max(1, part if request.max_tokens is None else min(request.max_tokens, part))


def _shortened(writer: _Writer, messages: list[Message], limit: int) -> Prompt:
    """Leave out as many of the oldest messages as it takes for `limit` tokens, or all that may go."""
    order = _in_order_of_leaving(messages)
    made: dict[int, Prompt] = {}

    def fits(count: int) -> bool:
        gone = {index for unit in order[:count] for index in unit}
        prompt = writer.write([message for index, message in enumerate(messages) if index not in gone])
        made[count] = replace(prompt, num_left_out=len(gone))
        return len(made[count].ids) <= limit

    count = bisect.bisect_left(range(len(order)), True, key=fits)
    if count not in made:
        fits(count)
    return made[count]


def _in_order_of_leaving(messages: list[Message]) -> list[list[int]]:
    """Group the messages that may go by what belongs together, oldest first; the last question goes last."""
    units: list[list[int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "system":
            continue
        begins = message["role"] == "user" or "tool_calls" in message
        if begins or not units:
            units.append([])
        units[-1].append(index)
    leaving = units[:-1]
    asked = [unit for unit in units if messages[unit[0]]["role"] == "user"]
    if asked and asked[-1] in leaving:
        leaving.remove(asked[-1])
        leaving.append(asked[-1])
    return leaving


def _after_prefix(ids: list[int], request: GenerationRequest, context: Context | None) -> list[int]:
    """Put the prefix before the prompt, or as much of its end as there is room for."""
    prefix = list(request.prefix_ids)
    if context is None:
        return prefix + ids
    excess = max(0, len(prefix) + len(ids) + 1 - context.tokens)
    if request.truncate:
        prefix = prefix[excess:]
    if len(prefix) + len(ids) >= context.tokens:
        raise _too_long(len(prefix) + len(ids), context)
    return prefix + ids


def _too_long(num_tokens: int, context: Context) -> PromptTooLongError:
    hint = f"Shorten it to at most {context.tokens - 1}."
    if num_tokens < context.most_tokens:
        hint = f"Shorten it, or ask for a context of at least {num_tokens + 1} (num_ctx, slotpy serve --context)."
    return PromptTooLongError(
        f"prompt is too long: {num_tokens} tokens, and the context holds {context.tokens}, reply included.",
        hint=hint,
    )

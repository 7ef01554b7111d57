"""Conversations to prompts, and tokens back to replies.

Owns the checkpoint's chat template, which tokens and strings end a reply, and telling reasoning from answer. Works on
text and ids alone: knows no model and no terminal. Serves the command line and the server.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from slotpy.engine.text import StreamDecoder, Tokenizer, read_json, special_tokens
from slotpy.errors import SlotpyError

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# Qwen templates ask for the first name, DeepSeek's for the second.
_THINKING_VARIABLES = ("enable_thinking", "thinking")


class ChatTemplate:
    """Render messages to the prompt that a checkpoint was trained on.

    The template is a program from the checkpoint. It runs in Jinja's immutable sandbox: it can neither reach Python's
    internals nor change the messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. Raises SlotpyError for a template that does not parse."""
        environment = _environment()
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise SlotpyError(
                f"The chat template does not parse: {error}.",
                hint="Fetch chat_template.jinja or tokenizer_config.json again, or prompt with `--raw`.",
            ) from error
        self._special_tokens = dict(special_tokens)
        self.supports_thinking = not used.isdisjoint(_THINKING_VARIABLES)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """Read a checkpoint's template; None when it has none, as base models do.

        Looks at chat_template.jinja, then `chat_template` in tokenizer_config.json, then in chat_template.json.
        Of several named templates the one called `default` counts.
        """
        config = read_json(directory / "tokenizer_config.json")
        source: Any = config.get("chat_template")
        path = directory / "chat_template.jinja"
        if path.is_file():
            source = path.read_text(encoding="utf-8", errors="replace")
        elif source is None:
            source = read_json(directory / "chat_template.json").get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" not in named:
                raise SlotpyError(
                    f"{directory} names the chat templates {', '.join(named)}, but none is `default`.",
                    hint="Save the one to use as chat_template.jinja beside them, or prompt with `--raw`.",
                )
            source = named["default"]
        if source is None:
            return None
        return cls(source, special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
    ) -> str:
        """Render a conversation and the opening of the reply. None leaves thinking to the template's default.

        Raises: SlotpyError with the template's own message when it refuses the messages or fails on them.
        """
        variables: dict[str, Any] = dict(self._special_tokens)
        if enable_thinking is not None:
            variables |= dict.fromkeys(_THINKING_VARIABLES, enable_thinking)
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **variables)
        except Exception as error:  # the template is the checkpoint's program: whatever it raises is its failure
            raise SlotpyError(f"The chat template refuses this conversation: {error}") from error


def load_stop_ids(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Read the token ids that end a reply.

    `eos_token_id` of generation_config.json, one id or several. Conversions may drop that file: then the id of
    config.json, which may only end documents, and the tokenizer's `eos_token`, which ends turns.
    """
    ids = _ids(read_json(directory / "generation_config.json").get("eos_token_id"))
    if ids:
        return ids
    config = read_json(directory / "config.json")
    text_config = config.get("text_config") or {}
    end = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
    return _ids(config.get("eos_token_id")) | _ids(text_config.get("eos_token_id")) | _ids(end)


class StopMatcher:
    """Find the first stop string in text that arrives in pieces, however it is cut.

    The first is the one that is complete first; what follows the start of a possible stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Give the text that is certain to come before any stop string; nothing more after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Give what was held back: the reply ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Delta:
    """Carry a piece of a reply: answer text, or reasoning without its tags."""

    text: str
    reasoning: bool = False


class ReasoningSplitter:
    """Tell a reply's reasoning from its answer, in text that arrives in pieces.

    Reasoning is one block, at the start: opened by the prompt (`opened`) or by the reply's first visible characters.
    Tags after that are text. White space next to the tags, outside the reasoning, is dropped.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "reasoning" if opened else "start"
        self._held = ""
        self._trimming = True

    def push(self, text: str) -> list[Delta]:
        """Give the pieces that are certain by now."""
        deltas: list[Delta] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._start(text)
        if self._state == "reasoning":
            text = self._reasoning(text, deltas)
        if self._state == "answer":
            self._emit(text, deltas, reasoning=False)
        return deltas

    def flush(self) -> list[Delta]:
        """Give what was held back as a possible tag: the reply ended, so it was none."""
        deltas: list[Delta] = []
        self._trimming = self._trimming and self._state != "start"
        self._emit(self._held, deltas, reasoning=self._state == "reasoning")
        self._held = ""
        return deltas

    def _start(self, text: str) -> str:
        visible = text.lstrip()
        if visible.startswith(THINK_OPEN):
            self._state = "reasoning"
            return visible[len(THINK_OPEN) :]
        if THINK_OPEN.startswith(visible):
            self._held = text
        else:
            self._state, self._trimming = "answer", False
        return text

    def _reasoning(self, text: str, deltas: list[Delta]) -> str:
        """Emit the reasoning in `text` and give what follows it."""
        before, tag, after = text.partition(THINK_CLOSE)
        if tag:
            self._emit(before, deltas, reasoning=True)
            self._state, self._trimming = "answer", True
            return after
        held = _overlap(text, THINK_CLOSE)
        self._held = text[len(text) - held :]
        self._emit(text[: len(text) - held], deltas, reasoning=True)
        return ""

    def _emit(self, text: str, deltas: list[Delta], *, reasoning: bool) -> None:
        if self._trimming:
            text = text.lstrip()
        if text:
            self._trimming = False
            deltas.append(Delta(text, reasoning))


class ReplyReader:
    """Turn one reply's tokens into the pieces to show: decoded, cut at a stop string, split into reasoning and answer.

    `prompt` is the rendered conversation that the reply continues, or None for a raw completion, which is not split.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str | None, stops: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopMatcher(stops)
        self._splitter = None if prompt is None else ReasoningSplitter(opened=prompt.rstrip().endswith(THINK_OPEN))

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string ended the reply: nothing more will come of further tokens."""
        return self._stops.matched is not None

    def push(self, token_id: int) -> list[Delta]:
        """Give the pieces that this token makes certain."""
        return self._split(self._stops.push(self._decoder.push(token_id)))

    def flush(self) -> list[Delta]:
        """End the reply: give everything held back."""
        text = self._stops.push(self._decoder.flush())
        deltas = self._split(text + self._stops.flush())
        return deltas + (self._splitter.flush() if self._splitter is not None else [])

    def _split(self, text: str) -> list[Delta]:
        if self._splitter is not None:
            return self._splitter.push(text)
        return [Delta(text)] if text else []


def _overlap(text: str, stop: str) -> int:
    """Give the length of the longest beginning of `stop`, short of the whole, that `text` ends with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in values if isinstance(token_id, int))


class _GenerationTag(jinja2.ext.Extension):
    """Accept `{% generation %}`, with which templates mark the assistant's text for training: the body as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Build the environment that published templates are written for.

    Source: huggingface/transformers, src/transformers/utils/chat_template_utils.py
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.LoopControlExtension, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is. Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

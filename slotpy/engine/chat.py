"""Conversations to prompts.

Owns the checkpoint's chat template and which tokens end a reply. Works on text and ids alone: knows no model and no
terminal; reply.py reads what comes back. Serves the command line and the server.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from slotpy.engine.text import Tokenizer, read_json, special_tokens
from slotpy.errors import SlotpyError

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"  # what templates write around reasoning

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
        self.source = source
        self.supports_tools = "tools" in used
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
        reasoning_effort: str | None = None,
    ) -> str:
        """Render a conversation and the opening of the reply. None leaves thinking to the template's default.

        `reasoning_effort` is a level for templates that ask for one; the others never see it.

        Raises: SlotpyError with the template's own message when it refuses the messages or fails on them.
        """
        variables: dict[str, Any] = dict(self._special_tokens)
        if enable_thinking is not None:
            variables |= dict.fromkeys(_THINKING_VARIABLES, enable_thinking)
        if reasoning_effort is not None:
            variables["reasoning_effort"] = reasoning_effort
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

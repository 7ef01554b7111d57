"""Tool calls as models write them: which grammar a checkpoint was trained on, and the text of a call to a call.

Owns the choice among mlx-lm's tool parsers and what must hold before a client may act on their results: the tool is
declared, and its arguments have the declared types where the model's text allows it. reply.py finds calls in a reply.
"""

import ast
import importlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from slotpy.engine.text import read_json

# What a chat template holds if it teaches a grammar, the telling ones first; then the grammar, by mlx-lm's name for it.
# Grammars marked by special tokens are left out: decoding hides those.
_TEMPLATE_MARKS = (
    ("<minimax:tool_call>", "minimax_m2"),
    ("<longcat_tool_call>", "longcat"),
    ("<atem:function_calls>", "muse_spark"),
    ("<arg_key>", "glm47"),
    ("<function=", "qwen3_coder"),
    ('<function name="', "minicpm5"),
    ("<tool_call>", "json_tools"),
)
_GRAMMARS = {grammar for _, grammar in _TEMPLATE_MARKS} | {"laguna"}
# Grammars whose arguments are bare text, to be read by their schema. In the others a JSON value says its own type.
_BARE = {"minimax_m2", "longcat", "glm47", "laguna", "qwen3_coder", "minicpm5"}
# Grammars that show where a call begins and ends without the markers, and what it begins with.
_OPENINGS = {"json_tools": ("{", "["), "qwen3_coder": ("<function=",)}
# How those begin a call of one tool, up to where the tokens of what follows do not depend on it.
_NAMED = {"json_tools": '\n{{"name": {json}, "arguments":', "qwen3_coder": "\n<function={name}"}

_TYPE_NAMES = {"str": "string", "text": "string", "int": "integer", "float": "number"}
_TYPE_NAMES |= {"bool": "boolean", "list": "array", "dict": "object"}


@dataclass(frozen=True)
class ToolGrammar:
    """One model's way to write tool calls: `name` is a module of mlx_lm.tool_parsers."""

    name: str

    @classmethod
    def of(cls, directory: Path, template: str) -> "ToolGrammar | None":
        """Tell a checkpoint's grammar: `tool_parser_type` of tokenizer_config.json, else by its chat template.

        None when neither names one that can be read.
        """
        named = read_json(directory / "tokenizer_config.json").get("tool_parser_type")
        if isinstance(named, str) and named in _GRAMMARS:
            return cls(named)
        return next((cls(grammar) for mark, grammar in _TEMPLATE_MARKS if mark in template), None)

    @cached_property
    def _module(self) -> ModuleType:
        # Not at the top: mlx_lm imports transformers, which takes 2 s. Most requests come without tools.
        return importlib.import_module(f"mlx_lm.tool_parsers.{self.name}")

    @property
    def start(self) -> str:
        """Give the text that opens a call."""
        return str(self._module.tool_call_start)

    def opening(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Give the text that commits a reply to a call of one of the tools: with its name, if there is only one."""
        names = {name for name, _ in _parameters(tools)}
        if len(names) != 1 or self.name not in _NAMED:
            return self.start
        (name,) = names
        return self.start + _NAMED[self.name].format(name=name, json=json.dumps(name, ensure_ascii=False))

    @property
    def end(self) -> str:
        """Give the text that ends a call."""
        return str(self._module.tool_call_end)

    @property
    def is_closed(self) -> bool:
        """Tell whether a call that parses is surely whole, so that it counts even without its end marker."""
        return self.name in _OPENINGS

    def begins(self, text: str) -> bool | None:
        """Tell whether `text`, after a start marker, begins a call; None while it is too short to tell."""
        openings = _OPENINGS.get(self.name, ("",))
        text = text.lstrip()
        if any(text.startswith(opening) for opening in openings):
            return True
        return None if any(opening.startswith(text) for opening in openings) else False

    def breaks_off(self, text: str) -> bool:
        """Tell whether `text` ends inside an argument: then an end marker after it is part of that argument."""
        if text.lstrip().startswith(("{", "[")):
            return re.sub(r"\\.", "", text).count('"') % 2 == 1
        return self.name == "qwen3_coder" and text.count("<function=") > text.count("</function>")

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """Give name and arguments of each call in `text`, which stood between the markers.

        `tools` are OpenAI's function declarations. The list is empty unless all of `text` is calls of declared tools.
        Arguments are JSON values; where the declared type is another, they are converted if nothing is lost.
        """
        parameters = dict(_parameters(tools))
        parser = self._module
        try:
            if self.name == "qwen3_coder" and not _is_clean(text):
                return []
            found = parser.parse_tool_call(text.strip(), _all_text(parameters))
            calls = found if isinstance(found, list) else [found]
            return [self._call(call, parameters) for call in calls]
        except Exception:  # a model may write anything, and the parsers raise anything: then it is no call
            return []

    def _call(self, call: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Check what a parser gives. Raises whatever happens to it when that is no call of a declared tool."""
        name = call["name"]
        schema = parameters[name]
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        arguments = {} if arguments is None else _plain(dict(arguments))
        return name, _Fit(schema).arguments(arguments, bare=self.name in _BARE)


def _parameters(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each declared tool's name and schema of parameters, over what is no declaration."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"], function.get("parameters")


def _all_text(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Declare the same tools with strings only: the parsers then give text as it is, which their own typing loses.

    They know neither `$ref` nor `anyOf`, and make "1.10" of an optional string 1.1.
    """
    tools = []
    for name, schema in parameters.items():
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        strings = {each: {"type": "string"} for each in (properties if isinstance(properties, Mapping) else ())}
        tools.append({"type": "function", "function": {"name": name, "parameters": {"properties": strings}}})
    return tools


def _is_clean(text: str) -> bool:
    """Tell whether a qwen3_coder call is one function of whole parameters; its parser drops all else in silence."""
    *parameters, rest = text.strip().split("</parameter>")
    frame = "".join(each.partition("<parameter=")[0] for each in parameters) + rest
    return re.fullmatch(r"<function=[^<>\s]+>\s*</function>", frame) is not None


class _Fit:
    """Fit values to a JSON schema: what has another type than declared is converted if its text says the same."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def arguments(self, values: Mapping[str, Any], *, bare: bool) -> dict[str, Any]:
        """Fit all arguments of a call. `bare`: they are text whose type only the schema knows."""
        alternatives = self._alternatives(self._root)
        return {name: self._value(value, _property(alternatives, name), bare) for name, value in values.items()}

    def _value(self, value: Any, schema: Any, bare: bool = False) -> Any:
        alternatives = self._alternatives(schema)
        types = {name for alternative in alternatives for name in _types(alternative)}
        if bare and value is None and "string" in types and "null" not in types:
            value = "null"  # qwen3_coder's parser makes it None whatever is declared
        if types and not _is_one_of(value, types):
            value = _convert(value, types)
        elif bare and not types and isinstance(value, str) and isinstance(_read(value), dict | list):
            value = _read(value)
        if isinstance(value, dict):
            return {name: self._value(each, _property(alternatives, name)) for name, each in value.items()}
        if isinstance(value, list):
            items = {"anyOf": [each["items"] for each in alternatives if "items" in each]}
            return [self._value(each, items) for each in value]
        return value

    def _alternatives(self, schema: Any) -> list[Mapping[str, Any]]:
        """Give the plain schemas that a schema stands for: references followed, each once, and unions opened."""
        plain: list[Mapping[str, Any]] = []
        followed: set[str] = set()
        left = [schema]
        while left:
            schema = left.pop()
            if not isinstance(schema, Mapping):  # `true` and `false` are schemas too
                continue
            plain.append(schema)
            reference = schema.get("$ref")
            if isinstance(reference, str) and reference not in followed:
                followed.add(reference)
                left.append(self._resolve(reference))
            for union in ("anyOf", "oneOf", "allOf"):
                left += schema[union] if isinstance(schema.get(union), list) else []
        return plain

    def _resolve(self, reference: str) -> Any:
        place = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return place


def _property(alternatives: Iterable[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Give the schema of one property: any of those that the alternatives have for it."""
    found = []
    for schema in alternatives:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif "additionalProperties" in schema:
            found.append(schema["additionalProperties"])
    return {"anyOf": found}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Give the names of the types that a plain schema allows; none when it does not say."""
    declared = schema.get("type")
    names = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    names = {_TYPE_NAMES.get(name.lower(), name.lower()) for name in names}
    if not names:
        enum = schema.get("enum")
        values = [*(enum if isinstance(enum, list) else ()), *([schema["const"]] if "const" in schema else ())]
        names = {_type_of(value) for value in values}
    if not names and isinstance(schema.get("properties"), Mapping):
        names = {"object"}
    return names | ({"null"} if schema.get("nullable") is True else set())


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _is_one_of(value: Any, types: set[str]) -> bool:
    name = _type_of(value)
    return name in types or (name == "integer" and "number" in types)


def _convert(value: Any, types: set[str]) -> Any:
    """Make a value one of `types` if its text can be read so; otherwise it stays as the model wrote it."""
    read = _read(value) if isinstance(value, str) else value
    if isinstance(read, float) and read.is_integer() and "number" not in types:
        read = int(read)
    if _is_one_of(read, types):
        return read
    if "string" in types and value is not None:
        return json.dumps(value, ensure_ascii=False)
    return value


def _read(text: str) -> Any:
    """Read JSON, or a Python literal, which models write for it; the text itself where it is neither."""
    for reader in (_json, ast.literal_eval):
        try:
            return _plain(reader(text.strip()))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _json(text: str) -> Any:
    return json.loads(text, strict=False)


def _plain(value: Any) -> Any:
    """Give a parser's value in JSON's types; numbers that JSON cannot write become text. Raises TypeError."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is no type of JSON")

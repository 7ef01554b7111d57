"""What a Responses request says: its input items as messages, its tools flattened."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slotpy.server.errors import ApiError
from slotpy.server.turns import ToolChoice, call_entry, text_of

# Tools that OpenAI runs itself. Codex and others always declare some; a model that is not told of them does without.
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "tool_search")


@dataclass(frozen=True)
class ToolName:
    """Name a function, and the namespace it was declared in, "" for none."""

    name: str
    namespace: str = ""

    @property
    def flat(self) -> str:
        """The one name under which the model knows it."""
        return f"{self.namespace}.{self.name}" if self.namespace else self.name


class Tools:
    """The functions that a request declares, in the form of chat completions and by their flat names."""

    def __init__(self, declared: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.echo: list[dict[str, Any]] = []
        self._names: dict[str, ToolName] = {}
        for tool in declared:
            self._add(tool)

    def name_of(self, flat: str) -> ToolName:
        """Give the declared name of what the model called."""
        return self._names.get(flat, ToolName(flat))

    def _add(self, tool: Mapping[str, Any]) -> None:
        kind = tool.get("type")
        if kind == "function":
            self._add_function(tool, "")
            self.echo.append(_echo(tool))
        elif kind == "namespace":
            inner = _objects(tool.get("tools"))
            for each in inner:
                self._add_function(each, str(tool.get("name") or ""))
            self.echo.append({**tool, "tools": [_echo(each) for each in inner]})
        elif not isinstance(kind, str) or not kind.startswith(_HOSTED):
            raise ApiError(400, f"tools of type {json.dumps(kind)} are not supported, only functions")

    def _add_function(self, tool: Mapping[str, Any], namespace: str) -> None:
        name, parameters = tool.get("name"), tool.get("parameters")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "every tool needs a name")
        if not isinstance(parameters, dict | None):
            raise ApiError(400, f"the parameters of the tool {name} must be a JSON schema")
        known = ToolName(name, namespace)
        self._names[known.flat] = known
        function = {"name": known.flat} | {
            key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None
        }
        self.functions.append({"type": "function", "function": function})


def tool_choice_of(choice: Any) -> tuple[ToolChoice, str | None]:
    """Read tool_choice: whether a tool must be called, and which."""
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return "required", ToolName(choice["name"], choice.get("namespace") or "").flat
    raise ApiError(400, 'tool_choice must be "auto", "none", "required" or a function with a name')


def messages_of(given: Any, instructions: str) -> list[dict[str, Any]]:
    """Read `input`, a text or items, after the instructions. Raises: ApiError for an item that is not understood."""
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input must be a text or a list of items")
    for item in given:
        kind = (item.get("type") or "message") if isinstance(item, dict) else None
        add = _ADD.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise ApiError(400, f"input items of type {json.dumps(kind)} are not supported")
        add(messages, item)
    return messages


def _echo(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
    }


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the assistant's message that goes on here: reasoning, text and calls are items of their own."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if not isinstance(role, str):
        raise ApiError(400, "every input message needs a role")
    text = text_of(item.get("content"))
    if role != "assistant":
        messages.append({"role": role, "content": text})
        return
    message = _assistant(messages)
    message["content"] = "\n".join(filter(None, (message["content"], text)))


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    name = ToolName(_string(item, "name"), item.get("namespace") or "").flat
    entry = call_entry(_string(item, "call_id"), name, item.get("arguments"))
    _assistant(messages).setdefault("tool_calls", []).append(entry)


def _add_output(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    text = text_of(item.get("output"))
    messages.append({"role": "tool", "content": text, "tool_call_id": _string(item, "call_id")})


def _add_reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Our own reasoning items carry all of it in the summary; encrypted ones of others say nothing to this model."""
    parts = _objects(item.get("summary")) + _objects(item.get("content"))
    text = "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    if text:
        message = _assistant(messages)
        message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), text)))


def _drop(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """A hosted tool's call: its findings are not in the item."""


_ADD: Mapping[str, Callable[[list[dict[str, Any]], Mapping[str, Any]], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
    "web_search_call": _drop,
    "file_search_call": _drop,
}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _string(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"every {item['type']} needs a {key}")
    return value

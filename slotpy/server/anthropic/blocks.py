"""What a Messages request says: its content blocks as messages, its tools as functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slotpy.server.errors import ApiError
from slotpy.server.turns import ToolChoice, call_entry, text_of

# Tools that Anthropic runs itself. Clients declare them always; a model that is not told of them does without.
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")

_CHOICES: Mapping[Any, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def messages_of(system: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read a conversation. Raises: ApiError for a block that is not understood."""
    text = text_of(system, "\n")
    made = [{"role": "system", "content": text}] if text else []
    for role, blocks in _joined(messages):
        if role == "assistant":
            made.append(_assistant(blocks))
        elif role == "user":
            made += _user(blocks)
        elif role == "system":
            made.append({"role": role, "content": text_of(blocks, "\n")})
        else:
            raise ApiError(400, f'role must be "user" or "assistant", not {json.dumps(role)}')
    return made


def tools_of(declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read the declared tools, leaving out those that Anthropic would run."""
    tools = []
    for tool in declared:
        kind, name = tool.get("type") or "custom", tool.get("name")
        schema = tool.get("input_schema") or {"type": "object"}
        if kind == "custom":
            if not isinstance(name, str) or not name or not isinstance(schema, dict):
                raise ApiError(400, "every tool needs a name, and an object for its input_schema")
            described = {"description": tool["description"]} if tool.get("description") else {}
            tools.append({"type": "function", "function": {"name": name, **described, "parameters": schema}})
        elif not isinstance(kind, str) or not kind.startswith(_HOSTED):
            raise ApiError(400, f"tools of type {json.dumps(kind)} are not supported, only those with an input_schema")
    return tools


def tool_choice_of(choice: Mapping[str, Any]) -> tuple[ToolChoice, str | None]:
    """Read tool_choice: whether a tool must be called, and which."""
    kind = choice.get("type", "auto")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return "required", choice["name"]
    if kind in ("auto", "any", "none"):
        return _CHOICES[kind], None
    raise ApiError(400, 'tool_choice.type must be "auto", "any", "none", or "tool" with a name')


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Join neighbours of one role: results of parallel calls may come in messages of their own."""
    joined: list[tuple[str, list[Any]]] = []
    for message in messages:
        role, blocks = message.get("role", ""), _blocks(message.get("content"))
        if joined and joined[-1][0] == role:
            joined[-1][1].extend(blocks)
        else:
            joined.append((role, blocks))
    return joined


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, list):
        return list(content)
    return [{"type": "text", "text": text_of(content)}]


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _user(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Give the results of tools first: they belong to the calls before them."""
    results = [_result(block) for block in blocks if _kind(block) == "tool_result"]
    rest = [block for block in blocks if _kind(block) != "tool_result"]
    text = text_of([_document(block) if _kind(block) == "document" else block for block in rest], "\n")
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    text = text_of(block.get("content"), "\n")
    if block.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": _string(block, "tool_use_id")}


def _document(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a document of plain text as text; any other stays, to be refused."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    return block


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    calls = [block for block in blocks if _kind(block) == "tool_use"]
    thoughts = [str(block.get("thinking") or "") for block in blocks if _kind(block) == "thinking"]
    apart = ("tool_use", "thinking", "redacted_thinking")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text_of([block for block in blocks if _kind(block) not in apart], "\n"),
    }
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = [
            call_entry(_string(call, "id"), _string(call, "name"), call.get("input")) for call in calls
        ]
    return message


def _string(block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"every {block['type']} block needs a {key}")
    return value

"""The texts by which Ollama's clients show what a model was made of: its parameters, and a Modelfile."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slotpy.server.library.library import Model


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """Give one aligned line for each parameter, a list's elements one by one."""
    return "\n".join(f"{name:<30} {_go_value(value)}" for name, value in _flat(parameters))


def modelfile_text(model: Model) -> str:
    """Give a Modelfile that makes this model again. It has no TEMPLATE: the checkpoint's own is always used."""
    base = model.details.get("parent_model") or model.name
    lines = [f"# Made by slotpy for {model.name}", f"FROM {base}"]
    if model.system:
        lines.append(f"SYSTEM {_quoted(model.system)}")
    lines += [f"PARAMETER {name} {_bare(value)}" for name, value in _flat(model.parameters)]
    lines += [f"MESSAGE {message.get('role', '')} {_quoted(message.get('content', ''))}" for message in model.messages]
    if model.license:
        lines.append(f"LICENSE {_quoted(model.license)}")
    return "\n".join(lines) + "\n"


def _flat(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(parameters.items()):
        for each in value if isinstance(value, list) else [value]:
            yield name, each


def _go_value(value: Any) -> str:
    """Write a value as Go's `%#v` does: strings in quotes, whole floats without a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Any) -> str:
    return _quoted(value) if isinstance(value, str) else _go_value(value)


def _quoted(text: str) -> str:
    """Quote what the Modelfile parser would otherwise cut or trim."""
    if text and text == text.strip() and "\n" not in text and '"' not in text:
        return text
    return f'"""{text}"""'

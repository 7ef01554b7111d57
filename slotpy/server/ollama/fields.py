"""The request fields that several of Ollama's endpoints share, read and checked."""

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slotpy.engine.generation import GenerationRequest
from slotpy.server.errors import ApiError, unsupported
from slotpy.server.gojson import ANY, BOOL, INT, OBJECT, STRING, Kind, ListOf, Struct
from slotpy.server.library.library import Model
from slotpy.server.options import DEFAULTS, read_options

_CALL = Struct(
    "api.ToolCall",
    {"id": STRING, "function": Struct("api.ToolCallFunction", {"index": INT, "name": STRING, "arguments": ANY})},
)
MESSAGE = Struct(
    "api.Message",
    {
        "role": STRING,
        "content": STRING,
        "thinking": STRING,
        "images": ListOf(STRING),
        "tool_calls": ListOf(_CALL),
        "tool_name": STRING,
        "tool_call_id": STRING,
    },
)
TOOL = Struct(
    "api.Tool",
    {
        "type": STRING,
        "function": Struct("api.ToolFunction", {"name": STRING, "description": STRING, "parameters": OBJECT}),
    },
)
# `shift` would let the oldest tokens go in the middle of a reply. slotpy ends such a reply with "length".
SHARED: Mapping[str, Kind] = {
    "model": STRING,
    "stream": BOOL,
    "format": ANY,
    "keep_alive": ANY,
    "options": OBJECT,
    "think": ANY,
    "truncate": BOOL,
    "shift": BOOL,
    "logprobs": BOOL,
    "top_logprobs": INT,
    "_debug_render_only": BOOL,
}
MAX_TOP_LOGPROBS = 20

_LEVELS = ("high", "medium", "low", "max")
_THINK_VALUES = ", ".join(f'"{level}"' for level in _LEVELS) + ", true, or false"
_CHECKED_BASE64 = 1 << 16  # whole groups of four
_BASE64 = re.compile(r"[A-Za-z0-9+/]*")


def generation(model: Model, body: Mapping[str, Any], **asked: Any) -> GenerationRequest:
    """Make a request of the shared fields of `body`; `asked` are GenerationRequest's others. Raises: ApiError 400."""
    options = read_options(body.get("options", {}), model.parameters)
    return GenerationRequest(
        think=read_think(body.get("think"), model, body["model"]),
        defaults=DEFAULTS,
        format=read_format(body.get("format")),
        top_logprobs=read_top_logprobs(body),
        truncate=body.get("truncate", True),
        **options.asked(model),
        **asked,
    )


def read_think(value: Any, model: Model, name: str) -> bool | str | None:
    """Read `think`: on unless told otherwise, for models that can. A level is passed on.

    Raises: ApiError 400 for another value, and for a model that cannot.
    """
    if value is not None and not isinstance(value, bool | str):
        raise ApiError(400, f"think must be a boolean or string ({_THINK_VALUES})")
    if isinstance(value, str) and value not in _LEVELS:
        raise ApiError(400, f"invalid think value: {_quoted(value)} (must be {_THINK_VALUES})")
    if "thinking" in model.capabilities:
        return True if value is None else value
    if value:
        raise unsupported(name, "thinking")
    return None


def read_format(value: Any) -> str | Mapping[str, Any] | None:
    """Read `format`: "json", a schema, or none. Raises: ApiError 400."""
    if value is None or value == "":
        return None
    if value == "json" or isinstance(value, dict):
        return value
    shown = _quoted(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    raise ApiError(400, f'invalid format: {shown}; expected "json" or a valid JSON Schema object')


def read_top_logprobs(body: Mapping[str, Any]) -> int | None:
    """Read `logprobs` and `top_logprobs` as GenerationRequest has them. Raises: ApiError 400."""
    number: int = body.get("top_logprobs", 0)
    if not 0 <= number <= MAX_TOP_LOGPROBS:
        raise ApiError(400, f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}")
    return number if body.get("logprobs") else None


def refuse_images(images: Sequence[str]) -> None:
    """Refuse images: no model here takes any. First those that are no base64. Raises: ApiError 400."""
    for image in images:
        _check_base64(image)
    if images:
        raise ApiError(400, "this model is missing data required for image input")


def _check_base64(text: str) -> None:
    # The beginning is enough: the image is refused in any case, and may have a hundred megabytes.
    text = text.replace("\r", "").replace("\n", "")[:_CHECKED_BASE64]
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        wrong = _BASE64.match(text).end()  # type: ignore[union-attr]  # an empty match is one
        # Go points at the first foreign character, or at the group of four that is incomplete.
        position = wrong if wrong < len(text) and text[wrong] != "=" else wrong - wrong % 4
        raise ApiError(400, f"illegal base64 data at input byte {position}") from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""Read request bodies as Go's encoding/json does, which Ollama's clients rely on without knowing.

Keys match whatever their case, null is the same as absent, unknown keys and all bytes after the first value are
ignored, broken UTF-8 and lone surrogates become U+FFFD, a type that does not fit is refused and never converted. No
other exception than ApiError leaves this module.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slotpy.server.errors import ApiError

MAX_DEPTH = 200
"""Nesting that is accepted. Go takes 10,000; what is read here is walked by recursive code, the template's among it."""

MAX_VALUES = 4_000_000
"""Commas and opening brackets in one body. Hundreds of megabytes of `{},` would become gigabytes, and take a minute."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_BLANK = re.compile(r"[ \t\r\n]*")
_WRONG = {  # the json module's words for what Go says in its own
    "Expecting property name": "looking for beginning of object key string",
    "Illegal trailing comma before end of object": "looking for beginning of object key string",
    "Expecting ':'": "after object key",
    "Expecting ','": "after object key:value pair or array element",
    "Invalid control": "in string literal",
    "Invalid \\u": "in \\u hexadecimal character escape",
    "Invalid \\e": "in string escape code",
}


class NothingSent(ApiError):
    """Say that there is no value at all."""

    def __init__(self) -> None:
        super().__init__(400, "EOF")


def parse(raw: bytes) -> Any:
    """Give the first JSON value of `raw`; null as None. Raises ApiError, which is NothingSent for blanks alone."""
    text = _decode(raw)
    start = _BLANK.match(text).end()  # type: ignore[union-attr]  # an empty match is one
    if start == len(text):
        raise NothingSent
    if text[start] in "-0123456789":  # the json module would take 1.x for 1
        number = _NUMBER.match(text, start)
        if number is None or text[number.end() : number.end() + 1] in (*".eE",):
            raise ApiError(400, "invalid character in numeric literal")
    num_brackets = text.count("[") + text.count("{")
    if num_brackets + text.count(",") > MAX_VALUES:
        raise ApiError(413, f"the request body has more than {MAX_VALUES} values")
    try:
        value, _ = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ApiError(400, _go_text(error)) from error
    except RecursionError as error:
        raise ApiError(400, "exceeded max depth") from error
    if num_brackets > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ApiError(400, "exceeded max depth")
    return _mended(value) if _SURROGATE_ESCAPE.search(text) else value


class Kind(Protocol):
    """Check a value, neither null nor absent, against one of Go's types. `zero` makes what null is in a list."""

    go_name: str

    @property
    def zero(self) -> Callable[[], Any]: ...

    def take(self, value: Any, at: str) -> Any:
        """Give the value as the type has it. `at` is the path of fields, for the message of ApiError."""


class Scalar:
    """Accept the values of `types`, as they are; `zero` is the first one's."""

    def __init__(self, go_name: str, *types: type) -> None:
        self.go_name, self._types = go_name, types
        self.zero: Callable[[], Any] = types[0]

    def take(self, value: Any, at: str) -> Any:
        if type(value) not in self._types:  # not isinstance: True is no number
            raise _mismatch(_name(value), at, self.go_name)
        return value


class Integer(Scalar):
    """Accept whole numbers of 64 bits."""

    def take(self, value: Any, at: str) -> Any:
        if not -(1 << 63) <= super().take(value, at) < 1 << 63:
            raise _mismatch("number out of range", at, self.go_name)
        return value


class Float(Scalar):
    """Accept any number, as a float."""

    def take(self, value: Any, at: str) -> Any:
        return float(super().take(value, at))


class Anything:
    """Accept everything."""

    go_name = "interface {}"

    def zero(self) -> None:
        """Null stays null."""

    def take(self, value: Any, at: str) -> Any:
        return value


class ListOf:
    """Accept lists, with each element of one kind; a null in them is that kind's zero."""

    def __init__(self, element: Kind) -> None:
        self._element, self.go_name = element, f"[]{element.go_name}"
        self.zero: Callable[[], Any] = list

    def take(self, value: Any, at: str) -> Any:
        if not isinstance(value, list):
            raise _mismatch(_name(value), at, self.go_name)
        element = self._element
        return [element.zero() if item is None else element.take(item, at) for item in value]


class Struct:
    """Accept objects with fields of known kinds. `go_name` is for messages, as in `api.ChatRequest`."""

    def __init__(self, go_name: str, fields: Mapping[str, Kind]) -> None:
        self.go_name = go_name
        self.zero: Callable[[], Any] = dict
        self._fields = {_folded(name): (name, kind) for name, kind in fields.items()}

    def read(self, raw: bytes, *, empty: str = "missing request body") -> dict[str, Any]:
        """Read a body: the fields that are there and not null, under the names given here.

        Raises: ApiError 400 with Go's text, or with `empty` where there is no body.
        """
        try:
            value = parse(raw)
        except NothingSent as error:
            raise ApiError(400, empty) from error
        if value is None:
            return {}
        return self.take(value, "")

    def take(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _mismatch(_name(value), at, self.go_name)
        found = {}
        at = at or self.go_name.rpartition(".")[2]
        for key, item in value.items():
            name, kind = self._fields.get(_folded(key), (None, ANY))
            if name is not None and item is not None:
                found[name] = kind.take(item, f"{at}.{name}")
        return found


STRING = Scalar("string", str)
BOOL = Scalar("bool", bool)
INT = Integer("int", int)
FLOAT = Float("float64", float, int)
OBJECT = Scalar("map[string]interface {}", dict)
ANY = Anything()


def _decode(raw: bytes) -> str:
    """Decode UTF-8 with U+FFFD for every byte that does not belong, as Go has it; Python would join some."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _SURROGATES.sub("\ufffd", raw.decode(errors="surrogateescape"))


def _folded(key: str) -> str:
    return key.lower().replace("\u017f", "s")  # Go folds the long s; the other odd one, the Kelvin sign, lower() does


def _name(value: Any) -> str:
    return {str: "string", bool: "bool", list: "array", dict: "object"}.get(type(value), "number")


def _mismatch(found: str, at: str, go_name: str) -> ApiError:
    where = f"Go struct field {at}" if at else "Go value"
    return ApiError(400, f"json: cannot unmarshal {found} into {where} of type {go_name}")


def _go_text(error: json.JSONDecodeError) -> str:
    position = error.pos
    if error.msg.startswith(("Illegal trailing", "Invalid \\")):  # these point one before
        position = _BLANK.match(error.doc, position + 1).end()  # type: ignore[union-attr]
    if position >= len(error.doc) or error.msg.startswith("Unterminated"):
        return "unexpected EOF"
    wrong = next((go for words, go in _WRONG.items() if error.msg.startswith(words)), "looking for beginning of value")
    return f"invalid character {_quoted(error.doc[position])} {wrong}"


def _quoted(character: str) -> str:
    byte = chr(character.encode()[0])  # Go names the first byte
    if byte in "'\\":
        return f"'\\{byte}'"
    return f"'{byte}'" if byte.isprintable() else f"'\\x{ord(byte):02x}'"


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


def _integer(digits: str) -> int:
    return int(digits) if len(digits) < 300 else int(_float(digits))


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        shown = digits if len(digits) < 40 else f"{digits[:40]}..."
        raise ApiError(400, f"json: cannot unmarshal number {shown} into Go value of type float64")
    return number


def _constant(word: str) -> None:
    where = "in numeric literal" if word[0] == "-" else "looking for beginning of value"
    raise ApiError(400, f"invalid character {word.removeprefix('-')[0]!r} {where}")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_constant)

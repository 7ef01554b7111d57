"""Keep a reply inside a grammar: any JSON object, or what a JSON schema describes.

Owns everything that is asked of llguidance: its view of the tokenizer, the options a schema is compiled with, and the
mask of each step. Knows no model and no sampling; serves engine/session.py. One thread at a time.

Source: guidance-ai/llguidance, docs/json_schema.md
"""

import copy
import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from slotpy.engine.text import Tokenizer
from slotpy.errors import SlotpyError, UsageError

# One space, or a new line with its indentation: from a run of any blanks a weak model would not find out again.
# Nothing that a schema asks for is passed over: a reply that ends by itself holds to all of it.
_OPTIONS: Any = {"whitespace_pattern": r" |\n[ \t]{0,32}", "lenient": False, "coerce_one_of": False}

# llguidance 1.9.1 overflows the stack, and the process with it, on 10,000 schemas that refer to one another. Below
# these limits only hundreds of patterns in one `patternProperties` take more than a few seconds.
_MAX_PARTS = 2000
_MAX_SCHEMA_BYTES = 1 << 18
# Every optional property that could come next takes four items; the default is 2000.
_MAX_ITEMS_IN_ROW = 4 * _MAX_PARTS + 1000

# Where a schema has further schemas: one, a list, or a mapping by name.
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")


class Constraint:
    """Forbid, token by token, what would leave the grammar. For one reply; it binds nothing before `start`."""

    def __init__(
        self, matcher: llguidance.LLMatcher, num_ids: int, exempt_ids: frozenset[int], blank_line_ids: frozenset[int]
    ) -> None:
        self._matcher, self._num_ids = matcher, num_ids
        self._exempt_ids, self._blank_line_ids = exempt_ids, blank_line_ids
        self._started = self._has_history = False
        self.active = False

    def start(self) -> None:
        """Hold the reply to the grammar from its next token on; calls after the first do nothing.

        Where something came before, reasoning that is, one blank line may come first: models are used to writing it.
        """
        if not self._started:
            self._started = self.active = True
            if not self._has_history:
                self._blank_line_ids = frozenset()

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Give a copy of the logits (V,) with -inf for every token that may not come next; a NaN stays one.

        Where the grammar is complete, only stop ids may.

        Raises: SlotpyError when no token may come next, or to find them takes more work than is reasonable.
        """
        if not self.active:
            return logits
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the mask then allows the stop ids, so that half a reply would pass for a whole
            raise self._failed()
        forbidden = np.ones(len(logits), dtype=bool)
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=self._num_ids, bitorder="little")
        forbidden[: self._num_ids] = bits == 0
        forbidden[list(self._exempt_ids | self._blank_line_ids)] = False
        with np.errstate(invalid="ignore"):  # an infinite logit becomes a NaN: the sampler refuses both
            return np.subtract(logits, np.inf, out=logits.copy(), where=forbidden)

    def accept(self, token: int) -> None:
        """Move on by a token that `apply` allowed. An exempt one ends the constraint.

        Raises: SlotpyError when the grammar cannot go on.
        """
        self._has_history = True
        if not self.active:
            return
        if token in self._exempt_ids:
            self.active = False
        elif token in self._blank_line_ids:
            self._blank_line_ids = frozenset()
        else:
            self._exempt_ids = self._blank_line_ids = frozenset()
            if not self._matcher.consume_token(token):
                raise self._failed()

    def _failed(self) -> SlotpyError:
        return SlotpyError(
            f"The reply cannot be kept to its format: {_reason(self._matcher)}.",
            hint="Ask without `format`, or with a simpler schema.",
        )


class GrammarCompiler:
    """Make constraints for one tokenizer. What llguidance needs of it is prepared at first use and then kept."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids

    def compile(self, format: str | Mapping[str, Any], exempt_ids: frozenset[int] = frozenset()) -> Constraint:
        """Make the constraint of one reply: "json" is any JSON object, a mapping is a JSON schema.

        An object schema with `properties` that is silent on further ones allows none, as long as that contradicts
        nothing else in the schema: it describes fewer replies, and a weak model comes to an end. `exempt_ids` may
        come in place of the whole, such as the token that opens a tool call.

        Raises: UsageError naming the keyword that is not supported, or what is wrong with the schema.
        """
        if isinstance(format, str) and format != "json":
            raise UsageError(f'format must be "json" or a JSON schema, got {format!r}.')
        schema = _schema_text({"type": "object"} if isinstance(format, str) else format)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise UsageError(f"The JSON schema cannot be read: {error}.") from error
        limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW)
        matcher = llguidance.LLMatcher(self._view, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # some schemas turn out to be too large only here
        if matcher.is_error():
            raise _unsupported(_reason(matcher))
        return Constraint(matcher, self._tokenizer.num_ids, exempt_ids, self._blank_line_ids)

    @cached_property
    def _view(self) -> llguidance.LLTokenizer:
        # Through the tokens' bytes and not the tokenizer's JSON, which takes as long and 60 MiB more for 248,000 ids;
        # and so the grammar reads a token exactly as the reply's decoder does.
        return llguidance.LLTokenizer(_TokenizerView(self._tokenizer, self._stop_ids), eos_token=sorted(self._stop_ids))

    @cached_property
    def _blank_line_ids(self) -> frozenset[int]:
        encoded = [self._tokenizer.encode(text) for text in ("\n", "\n\n")]
        return frozenset(ids[0] for ids in encoded if len(ids) == 1)


class _TokenizerView(llguidance.TokenizerWrapper):
    """Show a tokenizer the way LLTokenizer asks for it. Control tokens have no bytes, so no grammar allows them."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._control_ids = tokenizer, tokenizer.special_ids | stop_ids
        self.is_tokenizer_wrapper = True
        # A stop id need not be special: its name within a string would then end the reply there.
        self.tokens = [b"" if i in stop_ids else tokenizer.token_bytes(i) for i in range(tokenizer.num_ids)]
        self.special_token_ids: list[int] = []
        self.eos_token_id = min(stop_ids)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Encode what a grammar leaves no choice about. Names of control tokens in it are text, as in a string."""
        ids = self._tokenizer.encode(text)
        if self._control_ids.isdisjoint(ids):
            return ids
        return [token for character in text for token in self._tokenizer.encode(character)]


def _schema_text(schema: Mapping[str, Any]) -> str:
    """Write a schema as JSON, narrowed. Raises UsageError for one that is too large."""
    try:
        schema = copy.deepcopy(dict(schema))
        parts = list(_parts(schema))
        _narrow(parts)
        text = json.dumps(schema)
    except RecursionError as error:
        raise UsageError("The JSON schema is nested too deep.", hint="Define parts under `$defs`.") from error
    if len(parts) > _MAX_PARTS or len(text) > _MAX_SCHEMA_BYTES:
        raise UsageError(
            f"The JSON schema is too large: {len(parts)} schemas within it, {len(text)} bytes. "
            f"Up to {_MAX_PARTS} and {_MAX_SCHEMA_BYTES} are supported."
        )
    return text


def _narrow(parts: list[dict[str, Any]]) -> None:
    """Close the objects of a schema where that is sure to leave something; drop `propertyNames` that says nothing."""
    for part in parts:
        if part.get("propertyNames") == {"type": "string"}:  # zod writes it for every record
            del part["propertyNames"]
    if not any(_joins(part) for part in parts):
        for part in filter(_can_be_closed, parts):
            part["additionalProperties"] = False


def _joins(part: dict[str, Any]) -> bool:
    """Tell whether schemas must hold together here: each may then name properties that the others do not."""
    own = part.keys() & {"properties", "required", "minProperties"}
    return "allOf" in part or bool(own and part.keys() & {"anyOf", "oneOf", "$ref"})


def _can_be_closed(part: dict[str, Any]) -> bool:
    properties, required = part.get("properties"), part.get("required", [])
    if not properties or part.keys() & {"additionalProperties", "minProperties"}:
        return False
    # Anything else in their place is left for the compiler to refuse.
    names = list(properties) if isinstance(properties, dict) and isinstance(required, list) else []
    return bool(names) and all(name in names for name in required)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Walk all schemas within a schema, itself first; not the values of `enum`, `const`, `default` and the like."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        inner: list[Any] = []
        if key in _MAPPINGS and isinstance(value, dict):
            inner = list(value.values())
        elif key in _LISTS and isinstance(value, list):
            inner = value
        elif key in _ONE:
            inner = [value]
        for part in inner:
            yield from _parts(part)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Give a matcher's error on one line, without the dumps that may follow it."""
    text = textwrap.shorten(matcher.get_error().split("\n<")[0], 300, placeholder=" ...").rstrip(".")
    return "nothing fits it" if text.startswith("NoExtension") else text


def _unsupported(reason: str) -> UsageError:
    if reason.startswith("oneOf constraints"):
        return UsageError(
            "The JSON schema uses oneOf with alternatives that may hold at once, which is not supported.",
            hint="Use anyOf.",
        )
    if reason.startswith("Unimplemented keys: "):
        keys = ", ".join(json.loads(reason.removeprefix("Unimplemented keys: ")))
        return UsageError(f"The JSON schema uses what is not supported: {keys}.", hint="Leave it out.")
    return UsageError(f"The JSON schema cannot be followed: {reason}.")

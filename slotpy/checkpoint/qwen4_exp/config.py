"""The `qwen4_exp` text model's configuration, parsed strictly from config.json.

Owns every number that the arithmetic and the tensor shapes follow from. A key that slotpy does not know is an error,
because it could change the arithmetic; keys.py lists those that cannot.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotpy.checkpoint.qwen4_exp.keys import (
    FIXED_MTP,
    FIXED_TEXT,
    FULL,
    IGNORED_TEXT,
    IGNORED_TOP,
    LAYER_TYPES,
    LINEAR,
    MINIMUM,
    MODEL_TYPES,
    REQUIRED_TEXT,
    SIZES,
)
from slotpy.checkpoint.qwen4_exp.quantization import Quantization, parse_quantization
from slotpy.errors import CheckpointError

# The head sizes of the hash are primes found by trial division: keeps an absurd base from running for hours.
_MAX_INTEGER = 2**32
_MAX_LAYERS = 2**16


@dataclass(frozen=True)
class Qwen4ExpConfig:
    """Hold the text model's numbers under their config.json names.

    `layer_types` holds `linear_attention` and `full_attention` only. `eos_token_id` is the n-gram boundary, not where
    generation stops. `ple_layer_ids` is one-based as in the file; `ple_layer` is the layer's index.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, int, int]
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    ple_layer_ids: tuple[int, ...]
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    seed: int
    eos_token_id: int
    mtp_num_hidden_layers: int
    quantization: Quantization

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def streams_size(self) -> int:
        """Width of the flattened hyper-connection streams."""
        return self.hc_count * self.hidden_size

    @property
    def linear_key_size(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def ple_layer(self) -> int:
        """Index of the layer before which the n-gram embedding is added."""
        return self.ple_layer_ids[0] - 1

    @property
    def num_ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_head_dim(self) -> int:
        return self.ple_embed_dim // self.num_ngram_heads


class _Section:
    """Take the known keys out of one config object; what is left at the end is unknown."""

    def __init__(self, raw: object, where: str, file: Path) -> None:
        self._prefix = f"{where}." if where else ""
        self._file = file
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where} is not an object", file=file, expected="an object", found=repr(raw))
        self._left: dict[str, Any] = dict(raw)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def require(self, keys: Iterable[str]) -> None:
        if missing := [self._prefix + key for key in keys if key not in self._left]:
            raise CheckpointError("missing config keys", file=self._file, expected=", ".join(missing), found="none")

    def take(self, key: str, default: object = None) -> Any:
        return self._left.pop(key, default)

    def section(self, key: str) -> "_Section":
        return _Section(self.take(key), self._prefix + key, self._file)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        value = self.take(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.bad(key, f"an integer from {minimum} to {maximum}", value)
        return value

    def number(self, key: str) -> float:
        """Take a finite number above zero."""
        value = self.take(key)
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            raise self.bad(key, "a finite number above 0", value)
        return float(value)

    def fix(self, values: Mapping[str, object]) -> None:
        """Refuse any other value of these keys than the one given; an absent key is that value."""
        for key, expected in values.items():
            value = self.take(key, expected)
            if value != expected or isinstance(value, bool) != isinstance(expected, bool):
                raise self.bad(key, repr(expected), value)

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuse the first key that was neither taken nor is known to change nothing."""
        for key in self._left.keys() - set(ignored):
            raise CheckpointError(
                "unknown config key, which could change the arithmetic",
                file=self._file,
                expected="the keys of qwen4_exp",
                found=f"{self._prefix}{key} = {self._left[key]!r}",
            )

    def bad(self, key: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(
            f"unsupported value of {self._prefix}{key}", file=self._file, expected=expected, found=repr(found)
        )


def parse_config(raw: Mapping[str, Any], file: Path) -> Qwen4ExpConfig:
    """Read the object of a config.json whose model_type is `qwen4_exp`, with `text_config` nested or flat.

    Raises CheckpointError for a missing or unknown key, and for a value that slotpy does not compute.
    """
    if "text_config" not in raw:
        text, ignored = _Section(raw, "", file), IGNORED_TOP | IGNORED_TEXT
        blocks = _quantization_blocks(raw)
    else:
        top, text, ignored = _Section(raw, "", file), _Section(raw["text_config"], "text_config", file), IGNORED_TEXT
        top.fix({"tie_word_embeddings": False})
        top.finish({"text_config", *IGNORED_TOP})
        if (model_type := text.take("model_type", MODEL_TYPES[1])) not in MODEL_TYPES:
            raise text.bad("model_type", " or ".join(MODEL_TYPES), model_type)
        blocks = _quantization_blocks(raw["text_config"]) | _quantization_blocks(raw)
    text.require(REQUIRED_TEXT)
    config = _parse_text(text, parse_quantization(blocks, file))
    text.finish({"quantization", "quantization_config", *ignored})
    _check(config, file)
    return config


def _quantization_blocks(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: raw[key] for key in ("quantization", "quantization_config") if key in raw}


def _parse_text(text: _Section, quantization: Quantization) -> Qwen4ExpConfig:
    text.fix(FIXED_TEXT)
    rms_norm_eps = text.number("rms_norm_eps")
    layer_types = _take_layer_types(text)
    rope_theta, partial_rotary_factor, mrope_section = _take_rope(text)
    sizes = {key: text.integer(key, minimum=MINIMUM.get(key, 1)) for key in SIZES}
    return Qwen4ExpConfig(
        **sizes,
        layer_types=layer_types,
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
        partial_rotary_factor=partial_rotary_factor,
        mrope_section=mrope_section,
        ple_layer_ids=_take_ple_layer(text, layer_types),
        ple_embed_dim=text.integer("ple_embed_dim", default=sizes["hidden_size"]),
        seed=text.integer("seed", default=1234, minimum=0),
        eos_token_id=_take_eos(text),
        mtp_num_hidden_layers=_take_mtp(text, rope_theta),
        quantization=quantization,
    )


def _take_layer_types(text: _Section) -> tuple[str, ...]:
    num_layers = text.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    interval = text.integer("full_attention_interval", default=4)
    # The interval only stands in for an absent list, as in transformers.
    if "layer_types" not in text:
        return tuple(FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers))
    names = text.take("layer_types")
    if not isinstance(names, list) or not all(isinstance(name, str) and name in LAYER_TYPES for name in names):
        raise text.bad("layer_types", f"a list of {', '.join(LAYER_TYPES)}", names)
    if len(names) != num_layers:
        raise text.bad("layer_types", f"{num_layers} entries, as num_hidden_layers says", f"{len(names)} entries")
    return tuple(LAYER_TYPES[name] for name in names)


def _take_rope(text: _Section) -> tuple[float, float, tuple[int, int, int]]:
    rope = text.section("rope_parameters")
    rope.require(("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section"))
    rope.fix({"rope_type": "default", "mrope_interleaved": True})
    theta, factor = rope.number("rope_theta"), rope.number("partial_rotary_factor")
    sections = rope.take("mrope_section")
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n >= 0 for n in sections)):
        raise rope.bad("mrope_section", "three counts: time, height, width", sections)
    rope.finish()
    # Older files repeat both outside rope_parameters.
    text.fix({"rope_theta": theta, "partial_rotary_factor": factor})
    return theta, factor, (sections[0], sections[1], sections[2])


def _take_mtp(text: _Section, rope_theta: float) -> int:
    num_layers = text.integer("mtp_num_hidden_layers", default=0, minimum=0)
    if num_layers > 1:
        raise text.bad("mtp_num_hidden_layers", "0 or 1", num_layers)
    if "mtp" in text:
        mtp = text.section("mtp")
        mtp.fix(FIXED_MTP | {"num_hidden_layers": num_layers, "rope_theta": rope_theta})
        names = mtp.take("layer_types", [FULL] * num_layers)
        if not isinstance(names, list) or [LAYER_TYPES.get(str(name)) for name in names] != [FULL] * num_layers:
            raise mtp.bad("layer_types", [FULL] * num_layers, names)
        mtp.finish()
    return num_layers


def _take_ple_layer(text: _Section, layer_types: tuple[str, ...]) -> tuple[int, ...]:
    ids = text.take("ple_layer_ids")
    linear = [layer + 1 for layer, kind in enumerate(layer_types) if kind == LINEAR]
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int or ids[0] not in linear:
        raise text.bad("ple_layer_ids", "one id, counted from 1, of a linear_attention layer", ids)
    return (ids[0],)


def _take_eos(text: _Section) -> int:
    eos = text.take("eos_token_id")
    first = eos[0] if isinstance(eos, list) and eos else eos
    if type(first) is not int or first < 0:
        raise text.bad("eos_token_id", "a token id or a list of them", eos)
    return first


def _check(config: Qwen4ExpConfig, file: Path) -> None:
    """Refuse numbers that cannot be right together."""
    c = config
    multiples = (
        ("num_attention_heads", c.num_attention_heads, "num_key_value_heads", c.num_key_value_heads),
        ("linear_num_value_heads", c.linear_num_value_heads, "linear_num_key_heads", c.linear_num_key_heads),
        ("indexer_budget", c.indexer_budget, "indexer_compress_ratio", c.indexer_compress_ratio),
        ("ple_embed_dim", c.ple_embed_dim, "(ngram_size - 1) * heads_per_ngram", c.num_ngram_heads),
        ("rotary dimensions", c.rotary_dim, "half of them", 2),
    )
    for name, value, by_name, by in multiples:
        if value % by:
            raise _conflict(file, f"{name} a multiple of {by_name} = {by}", value)
    limits = (
        ("num_experts_per_tok", c.num_experts_per_tok, "num_experts", c.num_experts),
        ("rotary dimensions", c.rotary_dim, "indexer_head_dim", c.indexer_head_dim),
        ("eos_token_id", c.eos_token_id, "vocab_size - 1", c.vocab_size - 1),
    )
    for name, value, limit_name, limit in limits:
        if value > limit:
            raise _conflict(file, f"{name} at most {limit_name} = {limit}", value)
    if 2 * sum(c.mrope_section) != c.rotary_dim:
        raise _conflict(file, f"mrope_section to add up to {c.rotary_dim // 2}", list(c.mrope_section))
    if c.rotary_dim == 0:
        raise _conflict(file, "head_dim * partial_rotary_factor at least 2", c.rotary_dim)


def _conflict(file: Path, expected: str, found: object) -> CheckpointError:
    return CheckpointError("config values contradict each other", file=file, expected=expected, found=found)

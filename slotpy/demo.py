"""The demo model: random weights in the published 4-bit `qwen4_exp` layout, written in a moment, a few MiB.

Owns its config, its weights and where it is kept. It answers in word salad: it shows streaming, not language. Every
byte follows from `SEED` by integer arithmetic and exactly rounded float operations, so it is the same everywhere.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig, parse_config
from slotpy.checkpoint.qwen4_exp.hashing import hash_constants
from slotpy.errors import SlotpyError

VERSION = 1
"""Names the directory. Raise it with any change to the bytes; a test compares their digest."""

SEED = 20_260_930

_END_OF_TEXT, _END_OF_TURN = 3045, 3047  # ids of data/demo/tokenizer.json
_MAX_NEW_TOKENS = 200  # random weights hardly ever say that they are done
_GROUP, _ROW_GROUP = 64, 32  # an n-gram row of 32 values is too short for the group of everything else

# Sized for two CPU cores: 512 experts of 13.5 KiB, of which a token uses at most 32, so that a quarter of them is a
# cache worth having, and under 10 million multiplications a token. 22 rows pad the vocabulary beyond the tokenizer.
_TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": _END_OF_TEXT,
    "dtype": "bfloat16",
    "eos_token_id": _END_OF_TEXT,
    "full_attention_interval": 4,
    "hc_count": 4,
    "hc_lowrank": 64,
    "head_dim": 64,
    "heads_per_ngram": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 32,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 32,
    "make_ngram_vocab_size_divisible_by": 16,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "model_type": "qwen4_exp_text",
    "moe_intermediate_size": 64,
    "ngram_size": 3,
    "ngram_vocab_size_base": 5000,
    "num_attention_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "output_gate_type": "sigmoid",
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "ple_conv_kernel_size": 4,
    "ple_embed_dim": 128,
    "ple_layer_ids": [2],
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 64,
    "split_ngram_parts": 16,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 3072,
}


def ensure_demo(home: Path) -> Path:
    """Give the demo model's directory under `home`, writing it first if it is not there.

    It appears complete or not at all, also when two processes write it at once.

    Raises: SlotpyError when it cannot be written.
    """
    directory = home / f"demo-v{VERSION}"
    if directory.is_dir():
        return directory
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=home, ignore_cleanup_errors=True) as scratch:
            complete = Path(scratch) / "model"
            write_demo(complete)
            try:
                os.rename(complete, directory)
            except OSError:
                if not directory.is_dir():  # otherwise another process was first
                    raise
    except OSError as error:
        raise SlotpyError(
            f"Cannot write the demo model to {directory}: {error.strerror or error}.",
            hint="Set SLOTPY_HOME to a writable directory with 20 MiB free.",
        ) from error
    return directory


def write_demo(directory: Path) -> None:
    """Write the demo model into a new directory."""
    directory.mkdir()
    config = _config()
    weights = _draw(parse_config(config, directory / "config.json"))
    files = {f"model-{number:05}.safetensors": tensors for number, tensors in enumerate(weights, start=1)}
    for name, tensors in files.items():
        _write_safetensors(directory / name, tensors)
    total = sum(data.nbytes for tensors in files.values() for _, _, data in tensors.values())
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    _write_json(
        directory / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [_END_OF_TURN, _END_OF_TEXT],
            "max_new_tokens": _MAX_NEW_TOKENS,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    for source in resources.files("slotpy").joinpath("data", "demo").iterdir():
        (directory / source.name).write_bytes(source.read_bytes())


def _config() -> dict[str, Any]:
    table = "model.layers.1.ple.ple_embedding.ngram_embedding"
    row_format = {"group_size": _ROW_GROUP, "bits": 4}
    shards = {f"{table}.shard_{k}": row_format for k in range(_TEXT_CONFIG["split_ngram_parts"])}
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": _TEXT_CONFIG,
        "tie_word_embeddings": False,
        "quantization": {"group_size": _GROUP, "bits": 4} | shards,
    }


_Tensors = dict[str, tuple[str, tuple[int, ...], np.ndarray]]
"""Name to safetensors dtype, shape and little-endian values."""


class _Weights:
    """Draw tensors, one after the other, from one stream of random words.

    Values are uniform: sums and logarithms, as a normal distribution needs them, differ between maths libraries.
    """

    def __init__(self, words: np.random.PCG64) -> None:
        self._words = words  # the bare bit generator: numpy keeps its stream the same for good
        self.tensors: _Tensors = {}

    def dense(self, name: str, shape: tuple[int, ...], std: float | np.ndarray, mean: float = 0.0) -> None:
        """Draw a bfloat16 tensor."""
        self.tensors[name] = ("BF16", shape, _bfloat16(mean + std * math.sqrt(3) * self.uniform(shape)))

    def affine(self, module: str, shape: tuple[int, ...], std: float, group: int = _GROUP) -> None:
        """Draw a 4-bit weight (..., out, in): random codes are uniform weights, so nothing has to be quantised."""
        *outer, width = shape
        codes = self._words.random_raw(math.prod(shape) // 16).astype("<u8").view("<u4")
        # The codes 0..15 have a standard deviation of sqrt((16**2 - 1) / 12) and a mean of 7.5.
        scales = _bfloat16(std / math.sqrt(21.25) * (1 + 0.25 * self.uniform((*outer, width // group))))
        biases = _bfloat16(-7.5 * _widen(scales))
        self.tensors[f"{module}.weight"] = ("U32", (*outer, width // 8), codes)
        self.tensors[f"{module}.scales"] = ("BF16", scales.shape, scales)
        self.tensors[f"{module}.biases"] = ("BF16", biases.shape, biases)

    def integers(self, name: str, values: Sequence[int]) -> None:
        self.tensors[name] = ("I64", (len(values),), np.array(values, dtype="<i8"))

    def uniform(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw from -1 to 1, float64 with 24 random bits."""
        words = self._words.random_raw(math.prod(shape)) >> np.uint64(40)
        return (words.astype(np.float64) / (1 << 23) - 1).reshape(shape)


def _draw(c: Qwen4ExpConfig) -> Iterator[_Tensors]:
    """Yield the tensors file by file: what stays resident with the n-gram table, then each half of the experts."""
    words = np.random.PCG64(SEED)
    resident = _Weights(words)
    _draw_resident(resident, c)
    yield resident.tensors
    half = c.num_hidden_layers // 2
    for layers in (range(half), range(half, c.num_hidden_layers)):
        experts = _Weights(words)
        for layer in layers:
            _draw_experts(experts, f"language_model.model.layers.{layer}.mlp.switch_mlp", c)
        yield experts.tensors


def _draw_experts(w: _Weights, prefix: str, c: Qwen4ExpConfig) -> None:
    hidden, inner = c.hidden_size, c.moe_intermediate_size
    w.affine(f"{prefix}.gate_proj", (c.num_experts, inner, hidden), 2 / math.sqrt(hidden))
    w.affine(f"{prefix}.up_proj", (c.num_experts, inner, hidden), 2 / math.sqrt(hidden))
    w.affine(f"{prefix}.down_proj", (c.num_experts, hidden, inner), 2 / math.sqrt(inner))


def _draw_resident(w: _Weights, c: Qwen4ExpConfig) -> None:
    model = "language_model.model"
    w.affine(f"{model}.embed_tokens", (c.vocab_size, c.hidden_size), 1.0)
    w.affine("language_model.lm_head", (c.vocab_size, c.hidden_size), 4 / math.sqrt(c.hidden_size))
    _draw_hyper_connection(w, f"{model}.hyper_connection_mixer", c)
    for layer, kind in enumerate(c.layer_types):
        prefix = f"{model}.layers.{layer}"
        for block in ("attn", "mlp"):
            _draw_hyper_connection(w, f"{prefix}.{block}_hyper_connection", c)
            inject = f"{prefix}.{block}_hyper_connection.block_inject_weight.weight"
            w.dense(inject, (c.hc_count, c.streams_size), 4 / math.sqrt(c.streams_size))
        if kind == "linear_attention":
            _draw_linear_attention(w, f"{prefix}.linear_attn", c)
        else:
            _draw_attention(w, f"{prefix}.self_attn", c)
        _draw_router(w, f"{prefix}.mlp", c)
    _draw_ngram(w, f"{model}.layers.{c.ple_layer}.ple", c)


def _draw_hyper_connection(w: _Weights, prefix: str, c: Qwen4ExpConfig) -> None:
    w.dense(f"{prefix}.hc_norm.weight", (c.streams_size,), 0.2, mean=1.0)  # this layout has the 1 folded in
    w.affine(f"{prefix}.input_mix_weight_down", (c.hc_lowrank, c.streams_size), 4 / math.sqrt(c.streams_size))
    w.affine(f"{prefix}.input_mix_weight_up", (c.streams_size, c.hc_lowrank), 2 / math.sqrt(c.hc_lowrank))


def _draw_linear_attention(w: _Weights, prefix: str, c: Qwen4ExpConfig) -> None:
    hidden, heads = c.hidden_size, c.linear_num_value_heads
    channels = 2 * c.linear_key_size + c.linear_value_size
    w.affine(f"{prefix}.in_proj_qkv", (channels, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.in_proj_z", (c.linear_value_size, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.out_proj", (hidden, c.linear_value_size), 1 / math.sqrt(c.linear_value_size))
    w.dense(f"{prefix}.in_proj_a.weight", (heads, hidden), 1 / math.sqrt(hidden))
    w.dense(f"{prefix}.in_proj_b.weight", (heads, hidden), 1 / math.sqrt(hidden))
    w.dense(f"{prefix}.conv1d.weight", (channels, c.linear_conv_kernel_dim, 1), 0.4)
    w.dense(f"{prefix}.A_log", (heads,), 0.6, mean=-0.5)
    w.dense(f"{prefix}.dt_bias", (heads,), 0.5, mean=-1.0)
    w.dense(f"{prefix}.norm.weight", (c.linear_value_head_dim,), 0.2, mean=1.0)


def _draw_attention(w: _Weights, prefix: str, c: Qwen4ExpConfig) -> None:
    hidden, head = c.hidden_size, c.head_dim
    queries, keys = c.num_attention_heads * head, c.num_key_value_heads * head
    w.affine(f"{prefix}.q_proj", (2 * queries, hidden), 1 / math.sqrt(hidden))  # a query and a gate per head
    w.affine(f"{prefix}.k_proj", (keys, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.v_proj", (keys, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.o_proj", (hidden, queries), 1 / math.sqrt(queries))
    index_rows = (c.indexer_n_heads + 1) * c.indexer_head_dim
    w.dense(f"{prefix}.indexer.index_qk_proj.weight", (index_rows, hidden), 1 / math.sqrt(hidden))
    for norm, size in (
        ("q_norm", head),
        ("k_norm", head),
        ("indexer.q_layernorm", c.indexer_head_dim),
        ("indexer.k_layernorm", c.indexer_head_dim),
    ):
        w.dense(f"{prefix}.{norm}.weight", (size,), 0.2, mean=1.0)


def _draw_router(w: _Weights, prefix: str, c: Qwen4ExpConfig) -> None:
    hidden, inner = c.hidden_size, c.shared_expert_intermediate_size
    # Rows of different length make some experts popular, as in trained models: a cache of a quarter then hits by half.
    lengths = 2.5 + 2 * w.uniform((c.num_experts, 1))
    w.dense(f"{prefix}.gate.weight", (c.num_experts, hidden), lengths / math.sqrt(hidden))
    w.dense(f"{prefix}.shared_expert_gate.weight", (1, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.shared_expert.gate_proj", (inner, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.shared_expert.up_proj", (inner, hidden), 1 / math.sqrt(hidden))
    w.affine(f"{prefix}.shared_expert.down_proj", (hidden, inner), 1 / math.sqrt(inner))


def _draw_ngram(w: _Weights, prefix: str, c: Qwen4ExpConfig) -> None:
    constants = hash_constants(c)
    embedding = f"{prefix}.ple_embedding"
    w.integers(f"{embedding}.layer_multipliers", constants.multipliers)
    w.integers(f"{embedding}.ngram_heads_vocab_sizes", constants.head_sizes)
    w.integers(f"{embedding}.ngram_heads_offsets", constants.head_offsets)
    rows = constants.num_rows // c.split_ngram_parts
    for shard in range(c.split_ngram_parts):
        w.affine(f"{embedding}.ngram_embedding.shard_{shard}", (rows, c.ngram_head_dim), 0.7, group=_ROW_GROUP)
    w.affine(f"{prefix}.key_proj", (c.streams_size, c.ple_embed_dim), 1 / math.sqrt(c.ple_embed_dim))
    w.affine(f"{prefix}.value_proj", (c.hidden_size, c.ple_embed_dim), 1 / math.sqrt(c.ple_embed_dim))
    w.dense(f"{prefix}.conv1d.weight", (c.streams_size, c.ple_conv_kernel_size, 1), 0.4)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        w.dense(f"{prefix}.{norm}.weight", (c.streams_size,), 0.2, mean=1.0)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to bfloat16, ties to even, as its 16 bits."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def _write_safetensors(path: Path, tensors: _Tensors) -> None:
    """Write one file: header length, JSON header padded to 8 bytes, then the values in header order.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, _, data in tensors.values():
            file.write(data.tobytes())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

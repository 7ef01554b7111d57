"""Write tiny random `qwen4_exp` checkpoints in each published layout, and decode them again.

All layouts of one seed come from the same values, really quantised. `dequantised` gives the exact values that a written
directory stands for, so that a model run on it can be compared with one run on `write_values` of the same values.
Nothing here uses slotpy's own reading of layouts.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slotpy.checkpoint.qwen4_exp.config import parse_config
from slotpy.checkpoint.qwen4_exp.hashing import hash_constants
from tests.checkpoint.raw_files import write_tensors

LAYOUTS = ("bf16", "bf16-per-expert", "fp8", "mlx", "mlx-shards", "nvfp4-radixark", "nvfp4-nvidia")
TEXT, MTP, VISION = "model.language_model.", "mtp.", "model.visual."

Array = np.ndarray
Shapes = dict[str, tuple[int, ...]]
Stored = dict[str, tuple[str, Array]]  # tensor name -> (safetensors dtype, array of the stored codes)


def tiny_config(
    *,
    hidden: int = 128,
    num_layers: int = 5,
    num_experts: int = 8,
    shards: int = 16,
    mtp: bool = True,
    vision: bool = True,
    **text: Any,
) -> dict[str, Any]:
    """Give the config.json of a tiny model in the official form; `text` replaces keys of its text_config."""
    config: dict[str, Any] = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": {
            "model_type": "qwen4_exp_text", "dtype": "bfloat16", "vocab_size": 512, "hidden_size": hidden,
            "num_hidden_layers": num_layers, "full_attention_interval": 4,
            "layer_types": ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)],
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "attention_bias": False,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 7, "eos_token_id": 7,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                "mrope_interleaved": True, "mrope_section": [3, 3, 2],
            },
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "output_gate_type": "sigmoid",
            "mamba_ssm_dtype": "float32", "num_experts": num_experts, "num_experts_per_tok": min(4, num_experts),
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "hc_count": 4, "hc_lowrank": 64,
            "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
            "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_embed_dim": 128, "ple_conv_kernel_size": 4,
            "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 200,
            "make_ngram_vocab_size_divisible_by": shards, "split_ngram_parts": shards,
            "mtp_num_hidden_layers": int(mtp), "mtp_use_dedicated_embeddings": False,
        },
        "tie_word_embeddings": False, "language_model_only": not vision,
    }  # fmt: skip
    if vision:
        config["vision_config"] = {
            "model_type": "qwen4_exp", "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": hidden, "num_position_embeddings": 16,
        }  # fmt: skip
    config["text_config"] |= text
    return config


def official_shapes(config: dict[str, Any]) -> Shapes:
    """List the float tensors of the official layout with their shapes."""
    t = config["text_config"]
    size, streams = t["hidden_size"], t["hc_count"] * t["hidden_size"]
    shapes: Shapes = {
        "lm_head.weight": (t["vocab_size"], size),
        TEXT + "embed_tokens.weight": (t["vocab_size"], size),
        **_under(TEXT + "hyper_connection_mixer.", _read_streams(t)),
    }
    for layer, kind in enumerate(t["layer_types"]):
        shapes |= _under(f"{TEXT}layers.{layer}.", _layer(t, kind))
    ple = f"{TEXT}layers.{t['ple_layer_ids'][0] - 1}.ple."
    shapes |= {
        ple + "key_proj.weight": (streams, t["ple_embed_dim"]),
        ple + "value_proj.weight": (size, t["ple_embed_dim"]),
        ple + "conv1d.weight": (streams, 1, t["ple_conv_kernel_size"]),
        **{f"{ple}norm_{name}.weight": (streams,) for name in ("key", "query", "conv")},
    }
    num_rows = hash_constants(parse_config(config, Path("config.json"))).num_rows
    parts, heads = t["split_ngram_parts"], (t["ngram_size"] - 1) * t["heads_per_ngram"]
    for shard in range(parts):
        name = f"{ple}ple_embedding.ngram_embedding.shard_{shard}.weight"
        shapes[name] = (num_rows // parts, t["ple_embed_dim"] // heads)
    if t["mtp_num_hidden_layers"]:
        shapes |= {
            "mtp.fc_embedding.weight": (size, size),
            "mtp.fc_hidden.weight": (size, size),
            "mtp.pre_fc_norm_embedding.weight": (size,),
            "mtp.pre_fc_norm_hidden.weight": (streams,),
            **_under("mtp.hyper_connection_mixer.", _read_streams(t)),
            **_under("mtp.layers.0.", _layer(t, "full_attention")),
        }
    if "vision_config" in config:
        shapes |= _under(VISION, _vision(config["vision_config"]))
    return shapes


def _layer(t: dict[str, Any], kind: str) -> Shapes:
    size, streams, inner, experts = t["hidden_size"], t["hc_count"] * t["hidden_size"], "shared_expert.", "experts."
    wide, expert = t["shared_expert_intermediate_size"], t["moe_intermediate_size"]
    mlp: Shapes = {
        "gate.weight": (t["num_experts"], size),
        "shared_expert_gate.weight": (1, size),
        inner + "gate_proj.weight": (wide, size),
        inner + "up_proj.weight": (wide, size),
        inner + "down_proj.weight": (size, wide),
        experts + "gate_up_proj": (t["num_experts"], 2 * expert, size),
        experts + "down_proj": (t["num_experts"], size, expert),
    }
    read_write = _read_streams(t) | {"block_inject_weight.weight": (t["hc_count"], streams)}
    mixer = _delta_net(t) if kind == "linear_attention" else _attention(t)
    return (
        mixer
        | _under("mlp.", mlp)
        | _under("attn_hyper_connection.", read_write)
        | _under("mlp_hyper_connection.", read_write)
    )


def _read_streams(t: dict[str, Any]) -> Shapes:
    streams = t["hc_count"] * t["hidden_size"]
    return {
        "hc_norm.weight": (streams,),
        "input_mix_weight_down.weight": (t["hc_lowrank"], streams),
        "input_mix_weight_up.weight": (streams, t["hc_lowrank"]),
    }


def _delta_net(t: dict[str, Any]) -> Shapes:
    size, heads = t["hidden_size"], t["linear_num_value_heads"]
    keys, values = t["linear_num_key_heads"] * t["linear_key_head_dim"], heads * t["linear_value_head_dim"]
    shapes: Shapes = {
        "in_proj_qkv.weight": (2 * keys + values, size),
        "in_proj_z.weight": (values, size),
        "in_proj_b.weight": (heads, size),
        "in_proj_a.weight": (heads, size),
        "out_proj.weight": (size, values),
        "conv1d.weight": (2 * keys + values, 1, t["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (t["linear_value_head_dim"],),
    }
    return _under("linear_attn.", shapes)


def _attention(t: dict[str, Any]) -> Shapes:
    size, queries = t["hidden_size"], t["num_attention_heads"] * t["head_dim"]
    keys, index = t["num_key_value_heads"] * t["head_dim"], t["indexer_head_dim"]
    shapes: Shapes = {
        "q_proj.weight": (2 * queries, size),
        "k_proj.weight": (keys, size),
        "v_proj.weight": (keys, size),
        "o_proj.weight": (size, queries),
        "q_norm.weight": (t["head_dim"],),
        "k_norm.weight": (t["head_dim"],),
        "indexer.index_qk_proj.weight": ((t["indexer_n_heads"] + 1) * index, size),
        "indexer.q_layernorm.weight": (index,),
        "indexer.k_layernorm.weight": (index,),
    }
    return _under("self_attn.", shapes)


def _vision(v: dict[str, Any]) -> Shapes:
    size, wide, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    layers: Shapes = {
        "patch_embed.proj": (size, v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"]),
        "merger.norm": (size,),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (v["out_hidden_size"], merged),
    }
    for block in range(v["depth"]):
        prefix = f"blocks.{block}."
        layers |= {
            prefix + "norm1": (size,),
            prefix + "norm2": (size,),
            prefix + "attn.qkv": (3 * size, size),
            prefix + "attn.proj": (size, size),
            prefix + "mlp.linear_fc1": (wide, size),
            prefix + "mlp.linear_fc2": (size, wide),
        }
    weights = {f"{name}.weight": shape for name, shape in layers.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    return weights | biases | {"pos_embed.weight": (v["num_position_embeddings"], size)}


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def tiny_values(config: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """Draw float32 values, each exact in BF16, by official names; scaled so that every part of the model matters."""
    rng = np.random.default_rng(seed)
    return {name: round_bf16(_draw(rng, name, shape)) for name, shape in sorted(official_shapes(config).items())}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    r = rng.standard_normal(shape, np.float32)
    scale = 1 / math.sqrt(shape[-1])
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.1, 16, shape).astype(np.float32)) / 2
    if name.endswith("dt_bias"):
        return r / 2 - 1
    if name.endswith("linear_attn.norm.weight"):
        return 1 + r / 5
    if "norm" in name:
        return r / 5  # applied as 1 + w
    if "conv1d" in name:
        return r * 0.4
    if "embed" in name:
        return r
    if "block_inject" in name or "input_mix_weight_down" in name:
        return r * 4 * scale
    if "input_mix_weight_up" in name or name.endswith("mlp.gate.weight"):
        return r * 2 * scale
    return r * scale


def write_tiny(directory: Path, layout: str, *, seed: int = 0, scale_inv: str = "BF16", **config: Any) -> Path:
    """Write a random checkpoint in one of LAYOUTS; other arguments are those of `tiny_config`. Returns `directory`.

    `scale_inv` is the dtype of the 128x128 block scales, BF16 or F32.
    """
    raw = tiny_config(**config)
    values = tiny_values(raw, seed)
    match layout:
        case "bf16":
            stored, files = _encode(values, lambda name, w: _floats(name, w, "BF16")), _in_two
        case "bf16-per-expert":
            stored, files = _encode(values, _split_experts(lambda name, w: _floats(name, w, "BF16"))), _in_two
        case "fp8":
            stored, files = _encode(values, _split_experts(lambda name, w: _fp8(name, w, scale_inv))), _in_two
            _table_to_fp8(stored, values)
            raw["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
            raw["quantization_config"] = {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "model.visual"],
            }  # fmt: skip
        case "mlx" | "mlx-shards":
            stored, files = _to_mlx(values, "shard_" if layout == "mlx" else "shards."), _as_mlx
            overrides = {
                re.sub(r"^language_model\.", "", name).removesuffix(".weight"): {"group_size": 32, "bits": 4}
                for name in stored
                if "ngram_embedding" in name and name.endswith(".weight")
            }
            raw["quantization"] = raw["quantization_config"] = {"group_size": 64, "bits": 4, **overrides}
        case "nvfp4-radixark" | "nvfp4-nvidia":
            nvidia = layout == "nvfp4-nvidia"
            stored, files = _to_nvfp4(values, nvidia), _as_nvidia if nvidia else _as_radixark
            raw["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
            raw["quantization_config"] = _modelopt_config(raw, nvidia)
        case _:
            raise ValueError(layout)
    prefix = "language_model.model." if layout.startswith("mlx") else TEXT
    stored |= _constants(raw, prefix)
    return _write(directory, raw, stored, files)


def write_values(directory: Path, values: dict[str, Array], config: dict[str, Any], dtype: str = "F32") -> Path:
    """Write these values in the official layout with one float dtype: F32, F16 or BF16. Returns `directory`."""
    raw = {key: value for key, value in config.items() if not key.startswith("quantization")}
    stored = _encode(values, lambda name, w: _floats(name, w, dtype)) | _constants(raw, TEXT)
    return _write(directory, raw, stored, _in_two)


def _encode(values: dict[str, Array], encode: Callable[[str, Array], Stored]) -> Stored:
    stored: Stored = {}
    for name, value in values.items():
        stored |= encode(name, value)
    return stored


def _constants(raw: dict[str, Any], prefix: str) -> Stored:
    """Give the I64 tensors of the n-gram hash."""
    constants = hash_constants(parse_config(raw, Path("config.json")))
    ple = f"{prefix}layers.{raw['text_config']['ple_layer_ids'][0] - 1}.ple.ple_embedding."
    return {
        ple + "layer_multipliers": ("I64", np.array(constants.multipliers)),
        ple + "ngram_heads_vocab_sizes": ("I64", np.array(constants.head_sizes)),
        ple + "ngram_heads_offsets": ("I64", np.array(constants.head_offsets)),
    }


# Encoding -----------------------------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_values() -> Array:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[127::128] = np.nan
    return (np.where(code >= 128, -1, 1) * value).astype(np.float32)


E4M3 = _e4m3_values()


def round_bf16(value: Array) -> Array:
    """Round float32 to the nearest BF16, ties to even, and widen again."""
    return _widen(_to_bf16(value))


def _to_bf16(value: Array) -> Array:
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _widen(codes: Array) -> Array:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def _nearest(value: Array, positive: Array) -> Array:
    """Give the code of the nearest of these rising magnitudes, ties to the even code, the sign above it."""
    size = np.minimum(np.abs(value), positive[-1])
    above = np.clip(np.searchsorted(positive, size), 1, len(positive) - 1)
    low, high = size - positive[above - 1], positive[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (code + len(positive) * np.signbit(value)).astype(np.uint8)


def _to_e4m3(value: Array) -> Array:
    magnitude = _nearest(np.abs(value), E4M3[:127])
    return magnitude | (np.signbit(value) << 7).astype(np.uint8)


def _floats(name: str, value: Array, dtype: str) -> Stored:
    codes = {"BF16": _to_bf16, "F16": lambda w: w.astype(np.float16), "F32": lambda w: w.astype(np.float32)}
    return {name: (dtype, codes[dtype](value))}


def _split_experts(encode: Callable[[str, Array], Stored]) -> Callable[[str, Array], Stored]:
    """Encode each expert's matrices one by one under `experts.E.gate_proj.weight`; other tensors stay BF16."""

    def split(name: str, value: Array) -> Stored:
        if ".mlp.experts." not in name:
            return _floats(name, value, "BF16")
        stored: Stored = {}
        for owner, matrix in _expert_matrices(name, value):
            stored |= encode(f"{owner}.weight", matrix)
        return stored

    return split


def _expert_matrices(name: str, value: Array) -> Iterator[tuple[str, Array]]:
    block, which = name.rsplit(".", 1)
    halves = {"gate_proj": 0, "up_proj": 1} if which == "gate_up_proj" else {which: 0}
    inner = value.shape[1] // len(halves)
    for projection, half in halves.items():
        for expert, matrix in enumerate(value[:, half * inner : (half + 1) * inner]):
            yield f"{block}.{expert}.{projection}", matrix


def _fp8(name: str, value: Array, scale_dtype: str) -> Stored:
    """Encode with one scale per 128x128 block; blocks at the edges may be smaller."""
    blocks = [-(-size // 128) for size in value.shape]
    padded = np.zeros([128 * count for count in blocks], np.float32)
    padded[: value.shape[0], : value.shape[1]] = value
    largest = np.abs(padded).reshape(blocks[0], 128, blocks[1], 128).max((1, 3))
    scale = (largest / 448).astype(np.float32)
    scale = round_bf16(scale) if scale_dtype == "BF16" else scale
    codes = _to_e4m3(value / _spread(scale, value.shape))
    return {name: ("F8_E4M3", codes), **_floats(f"{name}_scale_inv", scale, scale_dtype)}


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
    return scale.repeat(128, 0).repeat(128, 1)[: shape[0], : shape[1]]


def _table_to_fp8(stored: Stored, values: dict[str, Array]) -> None:
    """Replace the n-gram table by E4M3 codes with one BF16 scale."""
    table = {name: value for name, value in values.items() if "ngram_embedding.shard_" in name}
    scale = round_bf16(np.array(max(np.abs(value).max() for value in table.values()) / 448, np.float32))
    for name, value in table.items():
        stored[name] = ("F8_E4M3", _to_e4m3(value / scale))
    stored[name.split("shard_")[0] + "weight_scale"] = ("BF16", _to_bf16(scale))


def _to_nvfp4(values: dict[str, Array], nvidia: bool) -> Stored:
    """Quantise the text model's experts; gate and up of one expert share their global scale, as RadixArk has it."""
    largest: dict[str, float] = {}
    for name, value in values.items():
        if ".mlp.experts." in name and not name.startswith(MTP):
            for owner, matrix in _expert_matrices(name, value):
                key = owner.replace("up_proj", "gate_proj")
                largest[key] = max(largest.get(key, 0.0), float(np.abs(matrix).max()))

    def encode_matrix(name: str, matrix: Array) -> Stored:
        owner = name.removesuffix(".weight")
        return _nvfp4(owner, matrix, largest[owner.replace("up_proj", "gate_proj")])

    def encode(name: str, value: Array) -> Stored:
        if not name.startswith(MTP):
            return _split_experts(encode_matrix)(name, value)
        return _split_experts(lambda n, w: _fp8(n, w, "F32"))(name, value) if nvidia else _floats(name, value, "BF16")

    stored = _encode(values, encode)
    _table_to_fp8(stored, values)
    return stored


def _nvfp4(owner: str, value: Array, largest: float) -> Stored:
    scale_2 = np.float32(largest / (6 * 448))
    groups = value.reshape(value.shape[0], -1, 16)
    scales = _to_e4m3(np.abs(groups).max(-1) / 6 / scale_2)
    step = np.maximum(E4M3[scales] * scale_2, np.float32(1e-30))[..., None]
    codes = _nearest(groups / step, E2M1[:8]).reshape(value.shape)
    return {
        f"{owner}.weight": ("U8", codes[:, 0::2] | codes[:, 1::2] << 4),  # the even element in the low half
        f"{owner}.weight_scale": ("F8_E4M3", scales),
        f"{owner}.weight_scale_2": ("F32", np.array(scale_2)),
        f"{owner}.input_scale": ("F32", np.array(1.0, np.float32)),
    }


MLX_QUANTISED = re.compile(
    r"(in_proj_qkv|in_proj_z|out_proj|\.[qkvo]_proj|shared_expert\.\w+|input_mix_weight_\w+|ple\.\w+_proj"
    r"|switch_mlp\.\w+|embed_tokens|lm_head|fc_embedding|fc_hidden|ngram_embedding\.\w+)\.weight$"
)


def _to_mlx(values: dict[str, Array], shard: str) -> Stored:
    """Stack experts, fold 1 into the zero-centred norms, store convolutions channels-last, and quantise to 4 bits."""
    stored: Stored = {}
    for official, value in values.items():
        name, w = mlx_name(official, shard), value
        if "experts.gate_up_proj" in name:
            for half, which in zip(np.split(w, 2, axis=1), ("gate_proj", "up_proj"), strict=True):
                stored |= _affine(name.replace("experts.gate_up_proj", f"switch_mlp.{which}"), half, 64)
        elif "experts.down_proj" in name:
            stored |= _affine(name.replace("experts.", "switch_mlp."), w, 64)
        elif MLX_QUANTISED.search(official):
            stored |= _affine(name.removesuffix(".weight"), w, 32 if "ngram" in name else 64)
        else:
            w = w.transpose(0, 2, 1) if "conv1d" in name else w + 1 if _zero_centred(official) else w
            stored |= _floats(name, w, "BF16")
    return stored


def mlx_name(official: str, shard: str) -> str:
    name = official.replace("shard_", shard)
    for old, new in ((TEXT, "language_model.model."), ("lm_head", "language_model.lm_head"), (VISION, "vision_tower.")):
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def _zero_centred(official: str) -> bool:
    norm = "norm" in official and not official.startswith(VISION)
    return norm and not official.endswith("linear_attn.norm.weight")


def _affine(module: str, value: Array, group: int) -> Stored:
    """Quantise to 4 bits as mlx.core.quantize does, with BF16 scales and biases."""
    groups = value.reshape(*value.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)
    scale = np.maximum((high - low) / 15, 1e-7)
    scale = np.where(np.abs(low) > np.abs(high), scale, -scale)
    edge = np.where(np.abs(low) > np.abs(high), low, high)
    steps = np.round(edge / scale)
    scale, bias = round_bf16(np.where(steps != 0, edge / steps, scale)), round_bf16(np.where(steps != 0, edge, 0))
    codes = np.clip(np.round((groups - bias[..., None]) / scale[..., None]), 0, 15).astype(np.uint32)
    words = codes.reshape(*value.shape[:-1], -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    return {
        f"{module}.weight": ("U32", np.bitwise_or.reduce(words, -1)),
        f"{module}.scales": ("BF16", _to_bf16(scale)),
        f"{module}.biases": ("BF16", _to_bf16(bias)),
    }


def _modelopt_config(raw: dict[str, Any], nvidia: bool) -> dict[str, Any]:
    common = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.46.0"}}
    ignore = ["lm_head", "*.self_attn.*", "*.linear_attn.*", "*.mlp.gate*", "*.ple.*", "model.visual.*"]
    if nvidia:
        layers: dict[str, Any] = {
            f"model.language_model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}
            for layer in range(raw["text_config"]["num_hidden_layers"])
        }
        layers["mtp.layers.0.mlp.experts"] = {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}
        return common | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ignore}
    weights = {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}
    groups = {"group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}}
    return common | {"quant_algo": "NVFP4", "config_groups": groups, "ignore": ["mtp.*", *ignore]}


# Files --------------------------------------------------------------------------------------------------------------


def _in_two(names: list[str]) -> dict[str, list[str]]:
    return {f"model-{n + 1:05}-of-00002.safetensors": names[n::2] for n in range(2)}


def _as_mlx(names: list[str]) -> dict[str, list[str]]:
    """Number the files without their count; a converted draft head lies in a file of its own."""
    main = [name for name in names if not name.startswith(MTP)]
    files = {f"model-{n + 1:05}.safetensors": main[n * len(main) // 3 : (n + 1) * len(main) // 3] for n in range(3)}
    drafts = {"mtp.safetensors": [name for name in names if name.startswith(MTP)]}
    return files | (drafts if drafts["mtp.safetensors"] else {})


def _as_radixark(names: list[str]) -> dict[str, list[str]]:
    """Scatter an expert layer over several files, and table shards in lexicographic order over others."""
    files: dict[str, list[str]] = {}
    for position, name in enumerate(sorted(names)):
        if match := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.", name):
            file = f"layer-{int(match[1]):03}-experts-{int(match[2]) % 4}.safetensors"
        elif "ngram_embedding" in name:
            file = f"model-plefp8-{position % 3:05}.safetensors"
        else:
            file = f"model-bf16-{position % 2:05}.safetensors"
        files.setdefault(file, []).append(name)
    return files


def _as_nvidia(names: list[str]) -> dict[str, list[str]]:
    apart = [name for name in names if name.startswith(MTP) or "ngram_embedding" in name]
    files = _in_two([name for name in names if name not in apart])
    return files | {"model-fp8-mtp-ple.safetensors": apart}


def _write(
    directory: Path, raw: dict[str, Any], stored: Stored, files: Callable[[list[str]], dict[str, list[str]]]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for file, names in files(list(stored)).items():
        tensors = {name: (stored[name][0], stored[name][1].shape, stored[name][1].tobytes()) for name in names}
        write_tensors(directory / file, tensors)
        weight_map |= dict.fromkeys(names, file)
    total = sum(codes.nbytes for _, codes in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(raw, indent=1))
    return directory


# Decoding -----------------------------------------------------------------------------------------------------------

_STORED = {
    "U8": np.uint8, "U32": np.uint32, "F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32,
    "I64": np.int64,
}  # fmt: skip


def read_stored(directory: Path) -> Stored:
    """Read every tensor of a directory as (dtype, codes)."""
    stored: Stored = {}
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            codes = np.frombuffer(data[start + begin : start + end], _STORED[entry["dtype"]])
            stored[name] = (entry["dtype"], codes.reshape(entry["shape"]))
    return stored


def dequantised(directory: Path) -> dict[str, Array]:
    """Give by official names the float32 values that a written directory stands for."""
    stored = read_stored(directory)
    config = json.loads((directory / "config.json").read_text())
    values: dict[str, Array] = {}
    for name, (dtype, codes) in stored.items():
        if dtype == "I64" or name.endswith(("scales", "biases", "scale", "scale_2", "scale_inv")):
            continue
        values[_official_name(name)] = _decode(name, dtype, codes, stored)
    if "quantization" in config:
        _undo_mlx(values)
    _fuse_experts(values, config["text_config"]["num_experts"])
    return values


def _decode(name: str, dtype: str, codes: Array, stored: Stored) -> Array:
    match dtype:
        case "U32":
            nibbles = (codes[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
            scales, biases = (_widen(stored[name.removesuffix("weight") + part][1]) for part in ("scales", "biases"))
            groups = nibbles.reshape(*scales.shape, -1).astype(np.float32)
            return (groups * scales[..., None] + biases[..., None]).reshape(*codes.shape[:-1], -1)
        case "U8":
            values = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(codes.shape[0], -1, 16)
            scales = E4M3[stored[f"{name}_scale"][1]] * stored[f"{name}_scale_2"][1]
            return (values * scales[..., None]).reshape(codes.shape[0], -1)
        case "F8_E4M3" if "ngram_embedding" in name:
            return E4M3[codes] * _widen(stored[name.split("shard")[0] + "weight_scale"][1])
        case "F8_E4M3":
            scale_dtype, scale = stored[f"{name}_scale_inv"]
            return E4M3[codes] * _spread(_widen(scale) if scale_dtype == "BF16" else scale, codes.shape)
        case "BF16":
            return _widen(codes)
        case _:
            return codes.astype(np.float32)


def _official_name(name: str) -> str:
    for old, new in (("language_model.model.", TEXT), ("language_model.lm_head", "lm_head"), ("vision_tower.", VISION)):
        if name.startswith(old):
            name = new + name[len(old) :]
    return name.replace("shards.", "shard_")


def _undo_mlx(values: dict[str, Array]) -> None:
    for name in list(values):
        if _zero_centred(name):
            values[name] = values[name] - 1
        elif "conv1d" in name:
            values[name] = values[name].transpose(0, 2, 1)
        elif name.endswith("switch_mlp.gate_proj.weight"):
            up = values.pop(name.replace("gate_proj", "up_proj"))
            fused = np.concatenate([values.pop(name), up], axis=1)
            values[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = fused
        elif name.endswith("switch_mlp.down_proj.weight"):
            values[name.replace("switch_mlp", "experts").removesuffix(".weight")] = values.pop(name)


def _fuse_experts(values: dict[str, Array], num_experts: int) -> None:
    for name in [name for name in values if name.endswith("experts.0.gate_proj.weight")]:
        block = name.removesuffix(".0.gate_proj.weight")
        gate, up, down = (
            np.stack([values.pop(f"{block}.{expert}.{which}_proj.weight") for expert in range(num_experts)])
            for which in ("gate", "up", "down")
        )
        values[f"{block}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        values[f"{block}.down_proj"] = down

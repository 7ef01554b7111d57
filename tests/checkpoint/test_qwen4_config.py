import copy
from pathlib import Path
from typing import Any

import pytest

from slotpy.checkpoint.formats import DENSE, FP8, FP8_BLOCKS, NVFP4, WeightFormat
from slotpy.checkpoint.qwen4_exp.config import parse_config
from slotpy.errors import CheckpointError
from tests.tiny import tiny_config

FILE = Path("somewhere/config.json")
AFFINE = WeightFormat("affine", bits=4, group_size=64)


def parse(raw: dict[str, Any]):
    return parse_config(raw, FILE)


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        parse(raw)
    assert "somewhere/config.json" in str(error.value)
    return str(error.value)


def with_text(**changes: Any) -> dict[str, Any]:
    raw = tiny_config()
    raw["text_config"] |= changes
    return raw


def without(key: str) -> dict[str, Any]:
    raw = tiny_config()
    del raw["text_config"][key]
    return raw


def test_values_are_those_of_the_file():
    config = parse(tiny_config(hidden=192, num_layers=6, num_experts=9))
    assert (config.hidden_size, config.num_hidden_layers, config.num_experts) == (192, 6, 9)
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",) + ("linear_attention",) * 2
    assert (config.rope_theta, config.partial_rotary_factor, config.rotary_dim) == (1e7, 0.25, 16)
    assert (config.rms_norm_eps, config.eos_token_id, config.mtp_num_hidden_layers) == (1e-6, 7, 1)
    assert (config.ple_layer_ids, config.ple_layer) == ((2,), 1)
    assert (config.streams_size, config.num_ngram_heads, config.ngram_head_dim) == (768, 4, 32)


def test_text_config_may_be_flat():
    nested = tiny_config()
    flat = nested["text_config"] | {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text"}
    assert parse(flat) == parse(nested)


@pytest.mark.parametrize("spelling", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_every_spelling_of_the_attention_layers_is_accepted(spelling: str):
    raw = tiny_config()
    types = raw["text_config"]["layer_types"]
    raw["text_config"]["layer_types"] = [spelling if kind == "full_attention" else kind for kind in types]
    assert parse(raw) == parse(tiny_config())


def test_absent_keys_mean_what_transformers_means():
    raw = tiny_config(hidden=128, ple_embed_dim=128, num_layers=8)
    for key in ("layer_types", "ple_embed_dim", "mamba_ssm_dtype", "hidden_act"):
        del raw["text_config"][key]
    config = parse(raw)
    assert config == parse(tiny_config(num_layers=8))
    assert config.seed == 1234
    assert parse(with_text(seed=5)).seed == 5


def test_ngram_boundary_is_the_first_of_several_eos_ids():
    assert parse(with_text(eos_token_id=[9, 7])).eos_token_id == 9


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("text_config", "sliding_window", 4096),
        ("text_config", "delta_engram_enabled", True),
        ("", "router_bias", 0.5),
        ("text_config.rope_parameters", "factor", 4.0),
        ("text_config.mtp", "share_experts", True),
    ],
)
def test_an_unknown_key_is_refused_by_name_and_value(place: str, key: str, value: object):
    raw = tiny_config()
    raw["text_config"]["mtp"] = {"num_hidden_layers": 1}
    section = raw
    for name in filter(None, place.split(".")):
        section = section[name]
    section[key] = value
    message = refusal(raw)
    assert "unknown config key" in message
    assert f"{place}.{key} = {value!r}".lstrip(".") in message


@pytest.mark.parametrize("key", ["use_cache", "attention_dropout", "ple_embedding_dtype", "number_of_conv_states"])
def test_keys_that_change_nothing_are_accepted(key: str):
    assert parse(with_text(**{key: 1})) == parse(tiny_config())


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"attention_bias": True}, "False", "True"),
        ({"attention_bias": 0}, "False", "0"),
        ({"hidden_act": "gelu"}, "'silu'", "'gelu'"),
        ({"output_gate_type": "silu"}, "'sigmoid'", "'silu'"),
        ({"norm_topk_prob": False}, "True", "False"),
        ({"tie_word_embeddings": True}, "False", "True"),
        ({"indexer_kv_heads": 2}, "1", "2"),
        ({"mamba_ssm_dtype": "bfloat16"}, "'float32'", "'bfloat16'"),
        ({"rope_scaling": {"type": "yarn"}}, "None", "yarn"),
        ({"mtp_use_dedicated_embeddings": True}, "False", "True"),
        ({"mtp_num_hidden_layers": 2}, "0 or 1", "2"),
        ({"hc_count": 1}, "2", "1"),
        ({"num_experts": 0}, "an integer from 1", "0"),
        ({"num_experts": 8.0}, "an integer from 1", "8.0"),
        ({"num_experts": True}, "an integer from 1", "True"),
        ({"num_experts": None}, "an integer from 1", "None"),
        ({"num_hidden_layers": 10**6}, "65536", "1000000"),
        ({"full_attention_interval": 0}, "an integer from 1", "0"),
        ({"ngram_size": 1}, "an integer from 2", "1"),
        ({"ngram_vocab_size_base": 10**18}, "4294967296", str(10**18)),
        ({"seed": -1}, "an integer from 0", "-1"),
        ({"rms_norm_eps": 0}, "above 0", "0"),
        ({"rms_norm_eps": float("nan")}, "above 0", "nan"),
        ({"rms_norm_eps": "1e-6"}, "above 0", "'1e-6'"),
        ({"layer_types": ["linear_attention"] * 4}, "5 entries", "4 entries"),
        ({"layer_types": ["linear_attention"] * 4 + ["sliding"]}, "indexed_attention", "sliding"),
        ({"layer_types": "linear_attention"}, "a list", "'linear_attention'"),
        ({"ple_layer_ids": []}, "one id", "[]"),
        ({"ple_layer_ids": [2, 3]}, "one id", "[2, 3]"),
        ({"ple_layer_ids": [0]}, "one id", "[0]"),
        ({"ple_layer_ids": [4]}, "of a linear_attention layer", "[4]"),
        ({"eos_token_id": None}, "a token id", "None"),
        ({"eos_token_id": []}, "a token id", "[]"),
        ({"eos_token_id": 512}, "vocab_size - 1 = 511", "512"),
        ({"num_experts_per_tok": 9}, "num_experts = 8", "9"),
        ({"num_attention_heads": 5}, "num_key_value_heads = 2", "5"),
        ({"linear_num_value_heads": 5}, "linear_num_key_heads = 2", "5"),
        ({"indexer_budget": 18}, "indexer_compress_ratio = 4", "18"),
        ({"ple_embed_dim": 130}, "heads_per_ngram = 4", "130"),
        ({"indexer_head_dim": 8}, "indexer_head_dim = 8", "16"),
        ({"rope_theta": 5e5}, "10000000.0", "500000.0"),
        ({"mtp": {"num_hidden_layers": 1, "rope_theta": 5}}, "10000000.0", "5"),
        ({"mtp": {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}}, "full_attention", "linear_attention"),
        ({"mtp": {"num_hidden_layers": 1, "mtp_use_hidden_state_from_layer": 3}}, "None", "3"),
        ({"mtp": [1]}, "an object", "[1]"),
        ({"rope_parameters": None}, "an object", "None"),
        ({"model_type": "qwen3_next"}, "qwen4_exp_text", "'qwen3_next'"),
    ],
)
def test_an_unsupported_value_is_refused(changes: dict[str, Any], expected: str, found: str):
    message = refusal(with_text(**changes))
    assert expected in message.split("; expected")[1] and found in message.split("; found")[1]


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"rope_type": "yarn"}, "'yarn'"), ({"partial_rotary_factor": 1.5}, "96"), ({"rope_theta": 0}, "0")],
)
def test_unsupported_rope_is_refused(changes: dict[str, Any], found: str):
    raw = tiny_config()
    del raw["text_config"]["partial_rotary_factor"]
    raw["text_config"]["rope_parameters"] |= changes
    assert found in refusal(raw)


def test_tied_embeddings_at_the_top_are_refused():
    assert "tie_word_embeddings" in refusal(tiny_config() | {"tie_word_embeddings": True})


def test_all_missing_keys_are_named():
    raw = without("hc_lowrank")
    del raw["text_config"]["num_experts"]
    message = refusal(raw)
    assert "text_config.hc_lowrank" in message and "text_config.num_experts" in message


@pytest.mark.parametrize("key", ["output_gate_type", "eos_token_id", "rope_parameters", "split_ngram_parts"])
def test_keys_whose_absence_means_something_else_are_required(key: str):
    assert f"text_config.{key}" in refusal(without(key))


def test_text_config_must_be_an_object():
    assert "text_config is not an object" in refusal(tiny_config() | {"text_config": "qwen4_exp_text"})


# Quantization ---------------------------------------------------------------------------------------------------------


def quantised(block: object, key: str = "quantization_config") -> dict[str, Any]:
    return tiny_config() | {key: block}


FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


def test_no_block_means_plain_floats():
    quantization = parse(tiny_config()).quantization
    assert quantization.method == "none" and quantization.format_of("lm_head") == DENSE


def test_mlx_overrides_are_found_under_any_prefix():
    shard = "layers.1.ple.ple_embedding.ngram_embedding.shard_0"
    block = {"group_size": 64, "bits": 4, f"model.{shard}": {"group_size": 32, "bits": 4}, "lm_head": False}
    block |= {"language_model.model.layers.0.mlp.gate": {"bits": 8}}
    quantization = parse(quantised(block, "quantization")).quantization
    assert quantization.format_of("embed_tokens") == AFFINE
    assert quantization.format_of(shard) == WeightFormat("affine", bits=4, group_size=32)
    assert quantization.format_of("layers.0.mlp.gate") == WeightFormat("affine", bits=8, group_size=64)
    assert quantization.format_of("lm_head") == DENSE


def test_mlx_block_may_stand_under_both_names():
    block = {"group_size": 64, "bits": 4}
    both = quantised(block) | {"quantization": copy.deepcopy(block)}
    assert parse(both) == parse(quantised(block))
    assert "disagree" in refusal(both | {"quantization": {"group_size": 64, "bits": 8}})


def test_block_inside_text_config_counts():
    assert parse(with_text(quantization_config=FP8_BLOCK)).quantization.default == FP8_BLOCKS


def test_fp8_blocks():
    quantization = parse(quantised(FP8_BLOCK | {"modules_to_not_convert": ["lm_head"]})).quantization
    assert quantization.method == "fp8" and quantization.declares(FP8_BLOCKS)


def test_modelopt_nvfp4():
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}}
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups, "ignore": ["mtp.*"]}
    assert parse(quantised(block)).quantization.default == NVFP4


@pytest.mark.parametrize("algo", ["FP8_BLOCK_SCALES", "FP8_PB_WO"])
def test_modelopt_mixed_precision(algo: str):
    layers = {
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "mtp.layers.0.mlp.experts": {"quant_algo": algo, "group_size": 128},
        "model.language_model.layers.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "FP8"},
    }
    quantization = parse(quantised(MIXED | {"quantized_layers": layers})).quantization
    assert quantization.format_of("mtp.layers.0.mlp.experts") == FP8_BLOCKS
    assert quantization.format_of("lm_head") == DENSE
    assert all(quantization.declares(stored) for stored in (NVFP4, FP8, FP8_BLOCKS))


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["quant_method", "'gptq'", "fp8, modelopt"]),
        ("fp8", ["quantization_config", "'fp8'"]),
        ({"bits": 4}, ["group_size", "None"]),
        ({"bits": 7, "group_size": 64}, ["bits", "7"]),
        ({"bits": 4.0, "group_size": 64}, ["bits", "4.0"]),
        ({"bits": 4, "group_size": 48}, ["group_size", "48"]),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, ["mode", "affine", "'mxfp4'"]),
        ({"bits": 4, "group_size": 64, "lm_head": {"bits": 4, "symmetric": True}}, ["lm_head.symmetric", "True"]),
        ({"bits": 4, "group_size": 64, "symmetric": 1}, ["quantization.symmetric", "1"]),
        (FP8_BLOCK | {"weight_block_size": [64, 64]}, ["weight_block_size", "[128, 128]", "[64, 64]"]),
        (FP8_BLOCK | {"scale_fmt": "ue8m0"}, ["scale_fmt", "'ue8m0'"]),
        (FP8_BLOCK | {"transpose": True}, ["transpose", "True"]),
        ({"quant_method": "fp8"}, ["weight_block_size", "[128, 128]"]),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, ["quant_algo", "'W4A8'"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ["group_size", "16", "32"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "rotate": True}, ["rotate", "True"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"g": {}}}, ["group_size", "None"]),
        (MIXED | {"quantized_layers": {"lm_head": {"quant_algo": "W4A8"}}}, ["lm_head", "W4A8"]),
        (MIXED | {"quantized_layers": {"x": {"quant_algo": "FP8_PB_WO", "group_size": 64}}}, ["x", "64"]),
        (MIXED | {"quantized_layers": ["lm_head"]}, ["quantized_layers", "['lm_head']"]),
    ],
)
def test_a_quantization_that_cannot_be_computed_is_refused(block: object, names: list[str]):
    message = refusal(quantised(block))
    assert all(name in message for name in names), message

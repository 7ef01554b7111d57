"""What is to be converted into what: decided from headers, so the published size is planned here too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.formats import DENSE, WeightFormat
from slotpy.checkpoint.qwen4_exp.mlx_form import MlxWeight, mlx_config, plan_weights
from slotpy.errors import CheckpointError
from tests import tiny
from tests.checkpoint.test_layouts import change, published_config, write_headers

FOUR_BITS = WeightFormat("affine", 4, 64)
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


def plan(directory: Path, asked: WeightFormat = FOUR_BITS) -> dict[str, MlxWeight]:
    return {weight.module: weight for weight in plan_weights(open_checkpoint(directory), asked)}


def formats(directory: Path, asked: WeightFormat) -> dict[str, tuple[int, int]]:
    return {module: (weight.format.bits, weight.format.group_size) for module, weight in plan(directory, asked).items()}


def test_the_published_size_comes_out(tmp_path: Path):
    """103,769,745,912 bytes in 3,215 tensors are published; 333 of them, 897,862,112 bytes, are the vision tower's."""
    raw = published_config()
    write_headers(tmp_path, raw, {name: ("BF16", shape) for name, shape in tiny.official_shapes(raw).items()})
    weights = plan(tmp_path).values()
    text = [weight for weight in weights if not weight.module.startswith("mtp.")]
    assert sum(weight.nbytes for weight in text) == 103_769_745_912 - 897_862_112
    assert sum(len(list(weight.tensors())) for weight in text) == 3215 - 333
    draft_experts = [weight for weight in weights if weight.module.startswith("mtp.layers.0.mlp.switch_mlp.")]
    assert sum(weight.nbytes for weight in draft_experts) == 512 * 2_764_800


@pytest.mark.parametrize(
    ("asked", "linear", "expert", "narrow"),
    [(32, 32, 32, 32), (64, 64, 64, 64), (128, 128, 64, 64)],
)
def test_a_width_that_the_group_does_not_divide_gets_a_smaller_one(
    tmp_path: Path, asked: int, linear: int, expert: int, narrow: int
):
    """Hidden states are 128 wide, experts and low-rank mixers 64, n-gram rows 32; an expert has one format."""
    found = formats(tiny.write_tiny(tmp_path, "bf16"), WeightFormat("affine", 8, asked))
    assert found["language_model.lm_head"] == (8, linear)
    for projection in ("gate", "up", "down"):
        assert found[f"language_model.model.layers.0.mlp.switch_mlp.{projection}_proj"] == (8, expert)
    assert found["language_model.model.hyper_connection_mixer.input_mix_weight_up"] == (8, narrow)
    assert found[f"language_model.{TABLE}.shard_3"] == (8, 32)


def test_rows_of_no_group_stay_plain(tmp_path: Path):
    directory = tiny.write_tiny(tmp_path, "bf16", heads_per_ngram=4)
    assert plan(directory)[f"language_model.{TABLE}.shard_0"].format == DENSE


def test_experts_of_no_group_are_refused(tmp_path: Path):
    directory = tiny.write_tiny(tmp_path, "bf16", moe_intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"cannot be quantised in groups.*multiples of 32; found 128 and 48"):
        plan(directory)


@pytest.mark.parametrize("mean", [-0.7, 1.6])
def test_norms_of_neither_convention_are_refused(tmp_path: Path, mean: float):
    """Whoever reads the result could not tell whether the 1 is in them."""
    config = tiny.tiny_config()
    values = tiny.tiny_values(config)
    for name in values:
        if name.startswith(f"{tiny.TEXT}layers.") and name.endswith("hc_norm.weight"):
            values[name][:] = mean
    with pytest.raises(CheckpointError, match=rf"neither zero-centred nor around 1.*found {mean:.3f}"):
        plan(tiny.write_values(tmp_path, values, config, "F32"))


def test_a_linear_in_fp8_is_refused(tmp_path: Path):
    source = tiny.write_tiny(tmp_path / "in", "fp8")
    name = tiny.TEXT + "layers.0.linear_attn.out_proj.weight"

    def edit(stored: tiny.Stored) -> None:
        shape = stored[name][1].shape
        stored[name] = ("F8_E4M3", np.zeros(shape, np.uint8))
        stored[name + "_scale_inv"] = ("F32", np.ones([-(-size // 128) for size in shape], np.float32))

    with pytest.raises(CheckpointError, match=r"only experts and n-gram rows.*out_proj.*found fp8_block"):
        plan(change(source, tmp_path, edit))


def configured(source: Path, asked: WeightFormat = FOUR_BITS) -> dict[str, Any]:
    raw = json.loads((source / "config.json").read_text())
    return mlx_config(raw, list(plan(source, asked).values()), asked)


def test_the_config_names_the_group_of_every_shard(tmp_path: Path):
    config = configured(tiny.write_tiny(tmp_path, "fp8"))
    shards = {f"{TABLE}.shard_{shard}": {"group_size": 32, "bits": 4} for shard in range(16)}
    assert config["quantization"] == {"group_size": 64, "bits": 4} | shards
    assert "quantization_config" not in config and "ple_embedding_dtype" not in config["text_config"]


def test_the_config_leaves_vision_out_and_keeps_the_rest(tmp_path: Path):
    source = tiny.write_tiny(tmp_path, "bf16", dtype="float32")
    before = json.loads((source / "config.json").read_text())
    config = configured(source)
    assert config["language_model_only"] is True and "vision_config" not in config
    assert config["text_config"] == before["text_config"] | {"dtype": "bfloat16"}
    for key in before.keys() - {"vision_config", "text_config", "language_model_only"}:
        assert config[key] == before[key]


def test_a_flat_config_stays_flat(tmp_path: Path):
    source = tiny.write_tiny(tmp_path, "bf16", vision=False)
    flat = json.loads((source / "config.json").read_text())["text_config"]
    (source / "config.json").write_text(json.dumps(flat))
    config = configured(source)
    assert {key: config[key] for key in flat} == flat
    assert "language_model_only" not in config


def test_one_group_for_all_needs_no_override(tmp_path: Path):
    config = configured(tiny.write_tiny(tmp_path, "bf16"), WeightFormat("affine", 4, 32))
    assert config["quantization"] == {"group_size": 32, "bits": 4}

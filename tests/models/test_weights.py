"""Resident weights: what a linear weight becomes."""

import mlx.core as mx
import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.demo import demo_directory
from slotpy.models.weights import Weights


@pytest.fixture(scope="module")
def weights():
    return Weights(open_checkpoint(demo_directory()), mx.bfloat16).at("layers.0.attn_hyper_connection")


def test_a_quantised_weight_stays_so(weights):
    assert weights.linear("input_mix_weight_down").scales is not None


def test_one_that_is_a_single_group_wide_becomes_plain(weights):
    linear, stored = weights.linear("input_mix_weight_up"), weights._tensor("input_mix_weight_up")
    assert linear.scales is None and linear.weight.dtype == mx.bfloat16
    parts = [weights._read(stored.parts[part]) for part in ("weight", "scales", "biases")]
    assert parts[1].shape[-1] == 1
    wide = mx.dequantize(parts[0], *(part.astype(mx.float32) for part in parts[1:]), group_size=64, bits=4)
    assert mx.array_equal(linear.weight, wide.astype(mx.bfloat16))

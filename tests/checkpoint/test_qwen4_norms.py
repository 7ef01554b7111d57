"""Which norm convention a checkpoint follows is read from its values, and no single norm decides it."""

import numpy as np
import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.qwen4_exp.norms import norm_offset
from tests import tiny


@pytest.mark.parametrize(
    ("layout", "offset"), [("bf16", 1.0), ("fp8", 1.0), ("nvfp4-radixark", 1.0), ("mlx", 0.0), ("mlx-shards", 0.0)]
)
def test_published_layouts(layout, offset, tmp_path):
    assert norm_offset(open_checkpoint(tiny.write_tiny(tmp_path, layout))) == offset


@pytest.mark.parametrize("moved", ["hyper_connection_mixer", "layers.2.mlp_hyper_connection"])
def test_one_norm_that_training_moved_far_does_not_decide(moved, tmp_path):
    config = tiny.tiny_config()
    values = tiny.tiny_values(config)
    values[f"{tiny.TEXT}{moved}.hc_norm.weight"] += np.float32(1.4)
    assert norm_offset(open_checkpoint(tiny.write_values(tmp_path, values, config))) == 1.0

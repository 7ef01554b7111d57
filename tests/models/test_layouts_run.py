"""Every published layout runs to the logits of the plain values it stands for, and packing changes no bit.

The expected logits come from a float32 checkpoint that holds the values decoded by tests/tiny.py, which shares no code
with slotpy's readers and kernels. Norm conventions, conv shapes, shard order and scales all differ between layouts.
"""

import json

import mlx.core as mx
import numpy as np
import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.pack import pack
from slotpy.engine.loader import EngineOptions, load
from tests.golden_model import largest, run
from tests.tiny import LAYOUTS, dequantised, write_tiny, write_values

TOKENS = np.random.default_rng(4).integers(0, 512, 40)
PASSES = [TOKENS[:30], *TOKENS[30:, None]]


def logits_of(directory, *, slots=5, **options):
    loaded = load(directory, EngineOptions(slots=slots, context_tokens=128, **options))
    try:
        return run(loaded, PASSES)[0]
    finally:
        loaded.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_runs_to_the_logits_of_its_values(layout, tmp_path):
    directory = write_tiny(tmp_path / "stored", layout, seed=2)
    config = json.loads((directory / "config.json").read_text())
    plain = write_values(tmp_path / "plain", dequantised(directory), config, dtype="F32")
    expected = logits_of(plain, float32=True)
    assert np.std(expected) > 0.1
    assert largest(logits_of(directory, float32=True) - expected) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_changes_no_bit(layout, tmp_path):
    directory = write_tiny(tmp_path / "stored", layout, seed=2)
    pack(open_checkpoint(directory), tmp_path / "packed")
    expected = logits_of(directory).tobytes()
    assert logits_of(tmp_path / "packed").tobytes() == expected
    assert logits_of(tmp_path / "packed", slots=40, native=False).tobytes() == expected


def test_quantised_resident_weights_agree_with_widened_ones(tmp_path, monkeypatch):
    """Above the size limit the CPU backend keeps resident weights quantised: slower, and the same up to rounding."""
    directory = write_tiny(tmp_path / "stored", "mlx", seed=2)
    widened = logits_of(directory, float32=True)
    monkeypatch.setattr("slotpy.engine.loader.config.CPU_FLOAT32_LIMIT_BYTES", 0)
    assert largest(logits_of(directory, float32=True) - widened) < 1e-4


def test_dense_experts_beyond_the_window_are_computed_in_waves(tmp_path, monkeypatch):
    directory = write_tiny(tmp_path / "stored", "fp8", seed=2)
    expected = logits_of(directory, slots=40).tobytes()
    monkeypatch.setattr("slotpy.layers.switch.DENSE_WINDOW_BYTES", 3 * 64 * 128 * 4 * 2)
    assert logits_of(directory, slots=40).tobytes() == expected


def test_notes_tell_what_was_left_out(tmp_path):
    notes = " ".join(open_checkpoint(write_tiny(tmp_path / "stored", "bf16")).notes)
    assert "vision" in notes.lower()


def test_no_norm_convention_is_assumed(tmp_path):
    """MLX files store 1 + w: the loader must see it in the values, for the same layout may hold raw norms."""
    directory = write_tiny(tmp_path / "stored", "mlx", seed=2)
    loaded = load(directory, EngineOptions(slots=5, context_tokens=128))
    scale = loaded.model.mixer.norm_scale
    loaded.close()
    assert abs(mx.mean(scale).item() - 1) < 0.2

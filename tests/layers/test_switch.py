"""Experts over slots: a pair's bits depend on its token and its expert alone."""

import mlx.core as mx
import numpy as np
import pytest

from slotpy.engine.loader import EngineOptions, load
from slotpy.layers.switch import StreamedExperts, scale_blocks
from slotpy.slots.resizing import resize_within
from tests.golden_model import load_golden
from tests.tiny import write_tiny

WIDTH, EXPERTS = 64, 8


@pytest.fixture
def make_experts():
    opened = []

    def make(slots):
        opened.append(load_golden(slots=slots))
        loaded = opened[-1]
        return StreamedExperts(loaded.experts, loaded.checkpoint.expert_format, mx.float32)

    yield make
    for loaded in opened:
        loaded.close()


def outputs(experts, x, keys):
    y = np.array(experts(mx.array(x), keys))
    experts.cache.retire()
    return y


def test_a_pair_has_the_same_bits_alone_in_a_crowd_and_in_waves(make_experts):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, WIDTH)).astype(np.float32)
    keys = EXPERTS * 2 + np.array([rng.choice(EXPERTS, 3, replace=False) for _ in range(30)])
    together = outputs(make_experts(40), x, keys)
    alone = np.stack([outputs(make_experts(40), x[i : i + 1], keys[i : i + 1])[0] for i in range(4)])
    assert together[:4].tobytes() == alone.tobytes()
    for slots in (1, 3, 7):
        assert outputs(make_experts(slots), x, keys).tobytes() == together.tobytes()


@pytest.mark.parametrize(("num_tokens", "fewest"), [(30, 8), (2, 1)])
def test_a_wave_has_few_pairs_only_if_the_whole_has(make_experts, monkeypatch, num_tokens, fewest):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_tokens, WIDTH)).astype(np.float32)
    keys = np.array([rng.choice(EXPERTS, 3, replace=False) for _ in range(num_tokens)])
    keys[0] = [0, 1, EXPERTS - 1]
    keys[keys == EXPERTS - 1] = 2  # the last expert, alone in its wave, has one pair
    keys[0, 2] = EXPERTS - 1
    experts = make_experts(1)
    computed = []
    compute = experts._compute
    monkeypatch.setattr(experts, "_compute", lambda x, *more: computed.append(len(x)) or compute(x, *more))
    y = outputs(experts, x, keys)
    assert len(computed) > 1 and min(computed) == fewest
    assert y.tobytes() == outputs(make_experts(40), x, keys).tobytes()


def test_waves_grow_with_the_cache(tmp_path):
    """After a resize a wave is as large as the cache then is, not as it was at load."""
    loaded = load(write_tiny(tmp_path, "mlx"), EngineOptions(slots=2, context_tokens=64))
    experts = StreamedExperts(loaded.experts, loaded.checkpoint.expert_format, mx.float32)
    resize_within(loaded.experts, 8, 1 << 20)
    asked = []
    acquire = loaded.experts.acquire
    loaded.experts.acquire = lambda keys: asked.append(len(keys)) or acquire(keys)
    outputs(experts, np.ones((1, 128), dtype=np.float32), np.array([[0, 3, 5, 6]]))
    loaded.close()
    assert asked == [4]


def test_experts_compute_swiglu(make_experts):
    experts = make_experts(40)
    x = np.random.default_rng(1).standard_normal((1, WIDTH)).astype(np.float32)
    y = outputs(experts, x, np.array([[5]]))[0, 0]
    slot = experts.cache.acquire(np.array([5]))[0]
    gate, up, down = (
        np.array(experts.cache.arrays[f"{name}.weight"][int(slot)].astype(mx.float32))
        for name in ("gate", "up", "down")
    )
    hidden = (gate @ x[0]) / (1 + np.exp(-(gate @ x[0]))) * (up @ x[0])
    assert np.abs(y - down @ hidden).max() < 1e-5


def test_block_scales_cover_partial_blocks():
    codes = mx.to_fp8(mx.ones((2, 130, 200)))
    scale = mx.arange(8, dtype=mx.float32).reshape(2, 2, 2)
    found = np.array(scale_blocks(codes, scale))
    for record in range(2):
        for row in (0, 127, 128, 129):
            for column in (0, 127, 128, 199):
                assert found[record, row, column] == record * 4 + row // 128 * 2 + column // 128

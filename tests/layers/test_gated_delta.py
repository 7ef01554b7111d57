"""The chunked delta rule against the recurrence, and its triangular inverse against numpy."""

import mlx.core as mx
import numpy as np
import pytest

from slotpy.layers.gated_delta import _invert_unit_lower, delta_chunks, delta_step

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 6


def inputs(num_tokens: int, seed: int = 0) -> list[mx.array]:
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((num_tokens, HEADS, KEY_DIM)).astype(np.float32) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((num_tokens, HEADS, VALUE_DIM)).astype(np.float32)
    log_decay = -rng.exponential(0.3, (num_tokens, HEADS)).astype(np.float32)
    beta = rng.uniform(0, 1, (num_tokens, HEADS)).astype(np.float32)
    return [mx.array(a) for a in (q, k, v, log_decay, beta)]


def recurrence(args: list[mx.array], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition, token by token, in float64."""
    q, k, v, log_decay, beta = (np.array(a, dtype=np.float64) for a in args)
    state, outs = state.astype(np.float64), []
    for t in range(len(q)):
        state = state * np.exp(log_decay[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None, :]
        outs.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.stack(outs), state


@pytest.mark.parametrize("num_tokens", [2, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence(num_tokens):
    args = inputs(num_tokens)
    start = np.random.default_rng(9).standard_normal((HEADS, KEY_DIM, VALUE_DIM)).astype(np.float32)
    out, state = delta_chunks(*args, mx.array(start))
    expected_out, expected_state = recurrence(args, start)
    assert np.abs(np.array(out) - expected_out).max() < 2e-5
    assert np.abs(np.array(state) - expected_state).max() < 2e-5


def test_one_step_equals_the_recurrence():
    args = inputs(1)
    start = np.random.default_rng(9).standard_normal((HEADS, KEY_DIM, VALUE_DIM)).astype(np.float32)
    out, state = delta_step(*args, mx.array(start))
    expected_out, expected_state = recurrence(args, start)
    assert np.abs(np.array(out) - expected_out).max() < 1e-6
    assert np.abs(np.array(state) - expected_state).max() < 1e-6


def test_chunks_stay_exact_when_all_keys_are_equal():
    """The hardest case for the inverse: nothing decays and every key overwrites the same direction."""
    q, k, v, _, _ = inputs(128)
    k = mx.broadcast_to(k[:1], k.shape)
    args = [q, k, v, mx.zeros((128, HEADS)), mx.ones((128, HEADS))]
    out, _ = delta_chunks(*args, mx.zeros((HEADS, KEY_DIM, VALUE_DIM)))
    expected, _ = recurrence(args, np.zeros((HEADS, KEY_DIM, VALUE_DIM)))
    assert np.abs(np.array(out) - expected).max() < 1e-4


def test_strong_decay_neither_overflows_nor_loses_the_answer():
    q, k, v, _, beta = inputs(100)
    args = [q, k, v, mx.full((100, HEADS), -40.0), beta]
    out, _ = delta_chunks(*args, mx.zeros((HEADS, KEY_DIM, VALUE_DIM)))
    expected, _ = recurrence(args, np.zeros((HEADS, KEY_DIM, VALUE_DIM)))
    assert np.isfinite(np.array(out)).all()
    assert np.abs(np.array(out) - expected).max() < 2e-5


def test_inverse_of_unit_lower_triangle():
    strict = np.tril(np.random.default_rng(1).standard_normal((2, 64, 64)), -1).astype(np.float32) * 0.3
    expected = np.linalg.inv(np.eye(64) + strict.astype(np.float64))
    found = np.array(_invert_unit_lower(mx.array(strict)))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()

"""The selection rule on its own: which blocks win, and what happens at ties."""

import mlx.core as mx
import numpy as np

from slotpy.layers.sparse_attention import GROWTH_TOKENS, GrowingArray, top_mask


def slow_top(scores: np.ndarray, count: int) -> np.ndarray:
    """Sort by falling score, then by rising index, and take the first `count` finite ones."""
    mask = np.zeros(scores.shape, dtype=bool)
    for row, values in enumerate(scores):
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
        mask[row, [i for i in order if values[i] > -np.inf]] = True
    return mask


def test_top_mask_takes_the_lower_index_among_equals():
    rng = np.random.default_rng(0)
    # Sums of relu: many exact zeros, so most rows have a tie at the cut.
    scores = np.maximum(rng.integers(-4, 4, (200, 24)), 0).astype(np.float32)
    assert np.array_equal(np.array(top_mask(mx.array(scores), 9)), slow_top(scores, 9))


def test_top_mask_never_takes_a_block_that_is_not_visible():
    scores = np.zeros((6, 12), dtype=np.float32)
    for row in range(6):
        scores[row, row * 2 :] = -np.inf
    assert np.array_equal(np.array(top_mask(mx.array(scores), 5)), slow_top(scores, 5))


def test_growing_array_keeps_rows_across_its_steps():
    rows = np.arange(3 * GROWTH_TOKENS * 2, dtype=np.float32).reshape(-1, 2)
    array = GrowingArray((2,), mx.float32)
    for size in (1, GROWTH_TOKENS - 1, 1, GROWTH_TOKENS + 5):
        array.append(mx.array(rows[array.length : array.length + size]))
    assert np.array_equal(np.array(array.view()), rows[: array.length])

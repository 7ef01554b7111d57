"""QSA: grouped-query attention over the tokens that a small indexer selects, block by block.

The indexer scores blocks of `ratio` tokens; a query attends to the tokens of its best `budget / ratio` complete blocks
and to the trailing incomplete block. While everything visible fits the budget, that is plain causal attention.

Source: transformers 5.24.0 `models/qwen4_exp/modeling_qwen4_exp.py`.
"""

from dataclasses import dataclass

import mlx.core as mx

from slotpy.layers.linear import Linear
from slotpy.layers.norm import scaled_rms_norm
from slotpy.layers.rotary import Rotation

GROWTH_TOKENS = 1024
"""KV arrays grow by this many tokens at a time, so that most steps write in place."""


class GrowingArray:
    """Append rows along axis 0 to an array that is enlarged in steps; `view()` gives the rows so far."""

    def __init__(self, row_shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.length = 0
        self._array = mx.zeros((0, *row_shape), dtype=dtype)

    def append(self, rows: mx.array) -> None:
        end = self.length + rows.shape[0]
        if end > self._array.shape[0]:
            spare = -(-end // GROWTH_TOKENS) * GROWTH_TOKENS - self.length
            tail = mx.zeros((spare, *self._array.shape[1:]), dtype=self._array.dtype)
            self._array = mx.concatenate([self._array[: self.length], tail])
        self._array[self.length : end] = rows
        self.length = end

    def view(self) -> mx.array:
        return self._array[: self.length]

    def cut(self, length: int) -> None:
        """Forget the rows from `length` on. Those before stay where they are."""
        assert length <= self.length
        self.length = length


@dataclass(frozen=True)
class SparseAttentionMark:
    """Remember where a state was: what grows by its length, the open block by itself."""

    num_tokens: int
    num_blocks: int
    open_keys: mx.array


@dataclass
class SparseAttentionState:
    """Carry one sequence's keys and values (n, kv_heads, D), pooled block keys (n // ratio, Di), and the open block.

    `open_keys` holds the raw indexer keys (< ratio, Di) of the block not yet complete.
    """

    keys: GrowingArray
    values: GrowingArray
    block_keys: GrowingArray
    open_keys: mx.array

    def arrays(self) -> list[mx.array]:
        return [self.keys._array, self.values._array, self.block_keys._array, self.open_keys]

    def mark(self) -> SparseAttentionMark:
        return SparseAttentionMark(self.keys.length, self.block_keys.length, self.open_keys)

    def rewind(self, mark: SparseAttentionMark) -> None:
        """Go back to where the state was at `mark`."""
        self.keys.cut(mark.num_tokens)
        self.values.cut(mark.num_tokens)
        self.block_keys.cut(mark.num_blocks)
        self.open_keys = mark.open_keys


@dataclass(frozen=True)
class StepPositions:
    """Say where a step's tokens stand: `start` tokens came before; rotations for the T tokens, and for the first token
    of each block that these tokens complete."""

    start: int
    tokens: Rotation
    blocks: Rotation


@dataclass
class Indexer:
    """Score complete blocks for each query. `num_heads` query heads share one key head."""

    qk_proj: Linear
    q_scale: mx.array
    k_scale: mx.array
    num_heads: int
    head_dim: int
    budget_tokens: int
    ratio: int
    eps: float

    def project(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Give the unrotated queries (T, heads, Di) and the raw keys (T, Di)."""
        qk = self.qk_proj(x)
        split = self.num_heads * self.head_dim
        return qk[:, :split].reshape(-1, self.num_heads, self.head_dim), qk[:, split:]

    def complete_blocks(self, keys: mx.array, state: SparseAttentionState, positions: StepPositions) -> None:
        """Pool raw keys (T, Di) into block keys: mean in float32, then norm, then rotation at a block's first token."""
        pending = mx.concatenate([state.open_keys, keys])
        num_blocks = pending.shape[0] // self.ratio
        whole = num_blocks * self.ratio
        state.open_keys = pending[whole:]
        if num_blocks == 0:
            return
        grouped = pending[:whole].reshape(num_blocks, self.ratio, self.head_dim)
        pooled = grouped.astype(mx.float32).mean(axis=1).astype(keys.dtype)
        pooled = scaled_rms_norm(pooled, self.k_scale, self.eps)
        state.block_keys.append(positions.blocks(pooled[:, None])[:, 0])

    def select(self, q: mx.array, state: SparseAttentionState, positions: StepPositions) -> mx.array | None:
        """Give the (T, n) bool mask of attended tokens, or None where causal attention is already exact."""
        num_visible = positions.start + q.shape[0]
        block_keys = state.block_keys.view()
        num_blocks, wanted = block_keys.shape[0], self.budget_tokens // self.ratio
        if num_blocks <= wanted:
            return None
        q = positions.tokens(scaled_rms_norm(q, self.q_scale, self.eps))
        dots = q.astype(mx.float32).swapaxes(0, 1) @ block_keys.astype(mx.float32).T
        scores = mx.maximum(dots, 0).sum(axis=0) * self.head_dim**-0.5
        query = mx.arange(positions.start, num_visible)[:, None]
        complete = (query + 1) // self.ratio
        chosen = top_mask(mx.where(mx.arange(num_blocks) < complete, scores, -mx.inf), wanted)
        chosen = mx.repeat(chosen, self.ratio, axis=1)
        chosen = mx.pad(chosen, [(0, 0), (0, num_visible - num_blocks * self.ratio)])
        token = mx.arange(num_visible)
        return chosen | ((token >= complete * self.ratio) & (token <= query))


def top_mask(scores: mx.array, count: int) -> mx.array:
    """Mark the `count` largest finite scores of each row (T, N), the lower index first among equals.

    Scores are sums of relu, so exact ties at zero are common: the rule must not depend on a backend's sort.
    """
    threshold = mx.sort(scores, axis=-1)[:, -count, None]
    above = scores > threshold
    tied = (scores == threshold) & (scores > -mx.inf)
    room = count - above.sum(axis=-1, keepdims=True)
    return above | (tied & (mx.cumsum(tied.astype(mx.int32), axis=-1) <= room))


@dataclass
class SparseAttention:
    """Attend with per-head sigmoid output gates; `q_proj` gives, for each head, its query and then its gate."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_scale: mx.array
    k_scale: mx.array
    indexer: Indexer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    def new_state(self, dtype: mx.Dtype) -> SparseAttentionState:
        kv_shape = (self.num_kv_heads, self.head_dim)
        return SparseAttentionState(
            keys=GrowingArray(kv_shape, dtype),
            values=GrowingArray(kv_shape, dtype),
            block_keys=GrowingArray((self.indexer.head_dim,), dtype),
            open_keys=mx.zeros((0, self.indexer.head_dim), dtype=dtype),
        )

    def __call__(self, x: mx.array, state: SparseAttentionState, positions: StepPositions) -> mx.array:
        """Map x (T, D) to (T, D), append T tokens to the state."""
        num_tokens = x.shape[0]
        index_q, index_k = self.indexer.project(x)
        self.indexer.complete_blocks(index_k, state, positions)
        mask = self.indexer.select(index_q, state, positions)

        q, gate = mx.split(self.q_proj(x).reshape(num_tokens, self.num_heads, 2 * self.head_dim), 2, axis=-1)
        q = positions.tokens(scaled_rms_norm(q, self.q_scale, self.eps))
        k = self.k_proj(x).reshape(num_tokens, self.num_kv_heads, self.head_dim)
        state.keys.append(positions.tokens(scaled_rms_norm(k, self.k_scale, self.eps)))
        state.values.append(self.v_proj(x).reshape(num_tokens, self.num_kv_heads, self.head_dim))
        q, k, v = (a.swapaxes(0, 1)[None] for a in (q, state.keys.view(), state.values.view()))
        causal = "causal" if mask is None and num_tokens > 1 else mask
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5, mask=causal)
        out = out[0].swapaxes(0, 1) * mx.sigmoid(gate)
        return self.o_proj(out.reshape(num_tokens, -1))

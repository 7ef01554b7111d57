"""Per-layer embedding from n-gram rows: rows are streamed, then gated into the residual streams.

Owns the block (PLE) and the streamed row look-up. Hashing tokens to row ids is `checkpoint/qwen4_exp/hashing.py`.

Source: transformers 5.24.0 `models/qwen4_exp/modeling_qwen4_exp.py`.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slotpy.checkpoint.formats import WeightFormat
from slotpy.layers.causal_conv import causal_conv
from slotpy.layers.linear import Linear
from slotpy.layers.norm import scaled_rms_norm
from slotpy.slots.cache import Lease, SlotCache


class StreamedRows:
    """Look n-gram rows up by id, through the row cache."""

    def __init__(self, cache: SlotCache, weight_format: WeightFormat, scale: float, dtype: mx.Dtype) -> None:
        """`scale` multiplies every row: the one global scale of an FP8 table, else 1."""
        self.cache, self.format, self.scale, self.dtype = cache, weight_format, scale, dtype

    def begin(self, ids: np.ndarray) -> "PendingRows":
        """Start reading rows (T, heads) as soon as their tokens are known; more rows than slots are read in waves."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        waves = [distinct[i : i + self.cache.num_slots] for i in range(0, len(distinct), self.cache.num_slots)]
        return PendingRows(self, waves, inverse.reshape(ids.shape), self.cache.begin(waves[0]))

    def prefetch(self, ids: np.ndarray) -> None:
        """Start reading rows (T, heads) that will be begun next, as far as free slots go."""
        self.cache.prefetch(np.unique(ids))

    def _decode(self, slots: np.ndarray) -> mx.array:
        """Read rows (n, D) out of their slots, rounded once to the model dtype."""
        index = mx.array(slots)
        parts = {role: array[index] for role, array in self.cache.arrays.items()}
        weight = parts["row.weight"]
        if self.format.kind == "affine":
            scales, biases = (parts[f"row.{name}"].astype(mx.float32) for name in ("scales", "biases"))
            rows = mx.dequantize(weight, scales, biases, group_size=self.format.group_size, bits=self.format.bits)
        elif self.format.kind == "fp8":
            rows = mx.from_fp8(weight, dtype=mx.float32) * self.scale
        else:
            rows = weight
        return rows.astype(self.dtype)


@dataclass
class PendingRows:
    """Rows on their way from SSD. `take` waits for them."""

    rows: StreamedRows
    waves: list[np.ndarray]
    inverse: np.ndarray
    first: Lease

    def take(self) -> mx.array:
        """Give the concatenated rows (T, heads * D); several waves are evaluated one by one."""
        parts = [self.rows._decode(self.first.wait())]
        for wave in self.waves[1:]:
            mx.eval(parts[-1])
            self.rows.cache.retire()
            parts.append(self.rows._decode(self.rows.cache.acquire(wave)))
        table = mx.concatenate(parts)
        return table[mx.array(self.inverse)].reshape(len(self.inverse), -1)


@dataclass
class NgramState:
    """Carry one sequence's convolution history ((K-1) * ngram_size, S * D), in the model dtype."""

    conv: mx.array


@dataclass
class NgramBlock:
    """Gate n-gram rows into the streams: the conv sees the normed value, the skip the un-normed one."""

    key_proj: Linear
    value_proj: Linear
    key_scale: mx.array
    query_scale: mx.array
    conv_scale: mx.array
    conv_taps: mx.array
    dilation: int
    eps: float

    def new_state(self, dtype: mx.Dtype) -> NgramState:
        num_taps, channels = self.conv_taps.shape
        return NgramState(mx.zeros(((num_taps - 1) * self.dilation, channels), dtype=dtype))

    def __call__(self, streams: mx.array, rows: mx.array, state: NgramState) -> mx.array:
        """Add the block's output to streams (T, S, D), given rows (T, heads * row width)."""
        dtype = streams.dtype
        key = scaled_rms_norm(self.key_proj(rows).reshape(streams.shape), self.key_scale, self.eps)
        query = scaled_rms_norm(streams, self.query_scale, self.eps)
        dots = (key * query).astype(mx.float32).sum(axis=-1, keepdims=True).astype(dtype)
        # Divided in float32: MLX would round the divisor to bf16 first.
        dots = (dots.astype(mx.float32) / math.sqrt(streams.shape[-1])).astype(dtype)
        # The floor is under the root, so |score| >= 1e-3; sign(0) = 0 gives a gate of one half.
        score = mx.sign(dots) * mx.sqrt(mx.maximum(mx.abs(dots), 1e-6))
        gated = mx.sigmoid(score) * self.value_proj(rows)[:, None, :]
        normed = scaled_rms_norm(gated, self.conv_scale, self.eps).reshape(len(rows), -1)
        conv, state.conv = causal_conv(state.conv, normed, self.conv_taps, self.dilation)
        return streams + (gated + conv.reshape(streams.shape))

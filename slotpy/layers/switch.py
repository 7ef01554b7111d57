"""Mixture of experts over slots: the router is resident, routed experts are read on demand.

Each (token, expert) pair is computed as its own row, so a pair's bits depend on its token and its expert and on nothing
else: not on the slot, the cache size, or which other pairs share the call.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slotpy.checkpoint.formats import FP8_BLOCK, NVFP4_GROUP, WeightFormat
from slotpy.layers.linear import Linear
from slotpy.slots.cache import SlotCache

DENSE_WINDOW_BYTES = 256 << 20
"""Formats without a gathering kernel are decoded into a window of at most this size, wave by wave."""

FEW_PAIRS = 8
"""MLX on CUDA computes fewer pairs in a call with another kernel, whose sums round differently."""


class StreamedExperts:
    """Run SwiGLU experts out of the slot cache."""

    def __init__(self, cache: SlotCache, weight_format: WeightFormat, dtype: mx.Dtype) -> None:
        """`dtype` is the dtype of the experts' arithmetic: the model's, or float32 on the CPU backend."""
        self.cache, self.format, self.dtype = cache, weight_format, dtype
        # Formats with a gathering kernel need no window: their waves are as large as the cache is at the time.
        self.window_experts = cache.records.num_records
        if weight_format.kind in ("dense", "fp8_block"):
            elements = sum(int(np.prod(r.shape)) for r in cache.records.roles if r.name.endswith(".weight"))
            self.window_experts = max(1, DENSE_WINDOW_BYTES // (elements * dtype.size))

    def __call__(self, x: mx.array, keys: np.ndarray) -> mx.array:
        """Apply to each row of x (T, D) its experts, by record keys (T, K): returns (T, K, D) in x's dtype.

        More distinct experts than slots are computed in waves, each evaluated before its slots are reused.
        """
        num_tokens, per_token = keys.shape
        distinct, local = np.unique(keys, return_inverse=True)
        wave_size = min(self.cache.num_slots, self.window_experts)
        if len(distinct) <= wave_size:
            slots = self.cache.acquire(distinct)
            y = self._compute(x[:, None, None, :], slots, local.reshape(keys.shape))
            return y.reshape(num_tokens, per_token, -1)
        local = local.reshape(-1)
        order = np.argsort(local, kind="stable")
        parts = []
        for start in range(0, len(distinct), wave_size):
            pairs = order[(local[order] >= start) & (local[order] < start + wave_size)]
            slots = self.cache.acquire(distinct[start : start + wave_size])
            # A wave may hold few pairs where the whole has many: repeated ones keep it at the kernel of the whole.
            computed = np.resize(pairs, FEW_PAIRS) if len(pairs) < FEW_PAIRS <= len(order) else pairs
            rows = x[mx.array(computed // per_token)][:, None, None, :]
            y = self._compute(rows, slots, local[computed][:, None] - start)
            parts.append(y.reshape(len(computed), -1)[: len(pairs)])
            mx.eval(parts[-1])
            self.cache.retire()
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return mx.concatenate(parts)[mx.array(back)].reshape(num_tokens, per_token, -1)

    def _compute(self, x: mx.array, slots: np.ndarray, local: np.ndarray) -> mx.array:
        """Run x (N, 1, 1, D) through experts `slots[local]`, local (N, k): returns (N, k, 1, D)."""
        dtype = x.dtype
        x = x.astype(self.dtype)
        gate = self._project("gate", x, slots, local)
        up = self._project("up", x, slots, local)
        return self._project("down", gate * mx.sigmoid(gate) * up, slots, local).astype(dtype)

    def _project(self, name: str, x: mx.array, slots: np.ndarray, local: np.ndarray) -> mx.array:
        arrays, fmt = self.cache.arrays, self.format
        weight = arrays[f"{name}.weight"]
        if fmt.kind in ("dense", "fp8_block"):
            window = weight[mx.array(slots)]
            if fmt.kind == "fp8_block":
                window = scale_blocks(window, arrays[f"{name}.scale_inv"][mx.array(slots)])
            window = window.astype(self.dtype).swapaxes(-1, -2)
            return mx.gather_mm(x, window, rhs_indices=mx.array(local.astype(np.uint32)))
        index = mx.array(slots[local].astype(np.uint32))
        if fmt.kind == "nvfp4":
            y = mx.gather_qmm(
                x,
                weight.view(mx.uint32),
                arrays[f"{name}.scales"],
                rhs_indices=index,
                transpose=True,
                group_size=NVFP4_GROUP,
                bits=4,
                mode="nvfp4",
            )
            # The global scale is outside the kernel: it comes before silu, and again after down.
            return y * arrays[f"{name}.scale_2"][index][..., None, None].astype(self.dtype)
        return mx.gather_qmm(
            x,
            weight,
            arrays[f"{name}.scales"],
            arrays[f"{name}.biases"],
            rhs_indices=index,
            transpose=True,
            group_size=fmt.group_size,
            bits=fmt.bits,
        )


def scale_blocks(codes: mx.array, scale_inv: mx.array) -> mx.array:
    """Decode E4M3 codes (n, out, in) with one scale for each 128 x 128 block; edge blocks may be partial."""
    rows, columns = codes.shape[1:]
    scale = mx.repeat(mx.repeat(scale_inv.astype(mx.float32), FP8_BLOCK, axis=1), FP8_BLOCK, axis=2)
    return mx.from_fp8(codes, dtype=mx.float32) * scale[:, :rows, :columns]


@dataclass
class SharedExpert:
    """Run the expert that every token uses, under a scalar sigmoid gate."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    gate: Linear

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x)
        return mx.sigmoid(self.gate(x)) * self.down_proj(gate * mx.sigmoid(gate) * self.up_proj(x))


@dataclass
class StreamedMoE:
    """Route tokens to experts and add the shared expert. `first_key` is the record key of the layer's expert 0."""

    router: Linear
    experts: StreamedExperts
    shared: SharedExpert
    per_token: int
    first_key: int

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (T, D) to (T, D). Costs one host sync: the routed ids decide what must be read."""
        probabilities = mx.softmax(self.router(x).astype(mx.float32), axis=-1)
        # A stable sort: the lower expert id first among equals, whatever the backend.
        ids = mx.argsort(-probabilities, axis=-1)[:, : self.per_token]
        weights = mx.take_along_axis(probabilities, ids, axis=-1)
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
        shared = self.shared(x)
        keys = self.first_key + np.array(ids).astype(np.int64)
        # That was a sync, and everything that read earlier slots lies before it.
        self.experts.cache.retire()
        routed = weights[:, :, None] * self.experts(x, keys)
        return routed.astype(mx.float32).sum(axis=1).astype(x.dtype) + shared

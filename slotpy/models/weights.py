"""Resident weights by name: reads tensors of a checkpoint into MLX arrays of the dtypes the model computes in."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.checkpoint.formats import ResidentTensor
from slotpy.errors import CheckpointError
from slotpy.layers.linear import Linear

_MLX_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32, "I64": mx.int64}


@dataclass(frozen=True)
class Weights:
    """Read resident tensors. `prefix` scopes names; `at("layers.0")` narrows it.

    `dtype` is the model's compute dtype. `wide` keeps linear weights in float32 instead (CPU backend, small bodies).
    """

    checkpoint: Checkpoint
    dtype: mx.Dtype
    wide: bool = False
    prefix: str = ""

    def at(self, scope: str) -> "Weights":
        return Weights(self.checkpoint, self.dtype, self.wide, f"{self.prefix}{scope}.")

    def linear(self, name: str) -> Linear:
        """Read a linear weight (out, in), quantised as it is stored unless `wide` or a single group wide.

        MLX 0.32.4 on CUDA leaves the product unwritten for inputs of 64 in one group of 64, of two rows or more. Such
        weights are small, so they are plain on every backend.
        """
        tensor = self._tensor(name)
        weight = self._read(tensor.parts["weight"])
        fmt = tensor.format
        if fmt.kind == "dense":
            return Linear(weight.astype(mx.float32 if self.wide else self.dtype))
        scales, biases = (self._read(tensor.parts[part]) for part in ("scales", "biases"))
        if self.wide or scales.shape[-1] == 1:
            parts = (weight, scales.astype(mx.float32), biases.astype(mx.float32))
            plain = mx.dequantize(*parts, group_size=fmt.group_size, bits=fmt.bits)
            return Linear(plain if self.wide else plain.astype(self.dtype))
        return Linear(
            weight, scales.astype(self.dtype), biases.astype(self.dtype), group_size=fmt.group_size, bits=fmt.bits
        )

    def float32(self, name: str) -> mx.array:
        """Read a plain tensor widened to float32."""
        return self._read(self._tensor(name).parts["weight"]).astype(mx.float32)

    def conv_taps(self, name: str) -> mx.array:
        """Read depthwise taps as (K, C) float32: torch files store (C, 1, K), MLX files (C, K, 1)."""
        taps = self.float32(name)
        return taps.reshape(taps.shape[0], -1).T

    def _tensor(self, name: str) -> ResidentTensor:
        full = self.prefix + name
        if full not in self.checkpoint.resident:
            raise CheckpointError("a tensor is missing", file=self.checkpoint.directory, tensor=full)
        return self.checkpoint.resident[full]

    def _read(self, name: str) -> mx.array:
        index = self.checkpoint.index
        span = index.spans[name]
        flat = mx.array(np.asarray(index.read(name)))
        return flat.view(_MLX_DTYPES[span.dtype]).reshape(span.shape)

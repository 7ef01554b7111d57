"""A bias-free linear map over resident weights, plain or group-quantised."""

import mlx.core as mx


class Linear:
    """Multiply by a resident weight (out, in).

    A plain weight may be wider than the activations (float32 on the CPU backend): the product is then computed in the
    weight's dtype and rounded once to x's.
    """

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        *,
        group_size: int = 0,
        bits: int = 0,
    ) -> None:
        self.weight, self.scales, self.biases = weight, scales, biases
        self.group_size, self.bits = group_size, bits

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., in) to (..., out) in x's dtype."""
        if self.scales is None:
            return (x.astype(self.weight.dtype) @ self.weight.T).astype(x.dtype)
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group_size, bits=self.bits
        )

    def rows(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """Look up rows of the weight, as an embedding: ids (T,) -> (T, in)."""
        if self.scales is None:
            return self.weight[ids].astype(dtype)
        assert self.biases is not None
        parts = (self.weight[ids], self.scales[ids].astype(mx.float32), self.biases[ids].astype(mx.float32))
        return mx.dequantize(*parts, group_size=self.group_size, bits=self.bits).astype(dtype)

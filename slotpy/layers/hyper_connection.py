"""Hyper-connections ("gated residual"): S parallel residual streams, mixed on read, gated on write.

Source: transformers 5.24.0 `models/qwen4_exp/modeling_qwen4_exp.py`, class Qwen4ExpTextGatedResidual.
"""

import mlx.core as mx

from slotpy.layers.linear import Linear
from slotpy.layers.norm import scaled_rms_norm


class HyperConnection:
    """Read one input from S streams, and write a block's output back to them.

    Shapes: streams (T, S, D); the block's input x (T, D); write gates (T, S, 1).
    `inject` is absent in the final mixer, which only reads.
    """

    def __init__(self, norm_scale: mx.array, down: Linear, up: Linear, inject: Linear | None, eps: float) -> None:
        self.norm_scale, self.down, self.up, self.inject, self.eps = norm_scale, down, up, inject, eps

    def read(self, streams: mx.array) -> tuple[mx.array, mx.array | None]:
        """Give the block input (T, D) and the write gates (T, S, 1)."""
        num_tokens, num_streams, width = streams.shape
        normed = scaled_rms_norm(streams, self.norm_scale, self.eps)
        flat = normed.reshape(num_tokens, num_streams * width)
        hidden = self.down(flat) / num_streams
        hidden = hidden * mx.sigmoid(hidden)
        mix = mx.sigmoid(self.up(hidden)).reshape(streams.shape)
        # The mean is over the normed streams; the residual itself stays un-normed.
        x = (mix * normed).astype(mx.float32).mean(axis=1).astype(streams.dtype)
        if self.inject is None:
            return x, None
        gates = 2 * mx.sigmoid(self.inject(flat) / num_streams)
        return x, gates[:, :, None]

    @staticmethod
    def write(streams: mx.array, y: mx.array, gates: mx.array) -> mx.array:
        """Add y (T, D) to each stream under its gate."""
        return streams + gates * y[:, None, :]

"""Rotary position embedding over the leading dimensions, with interleaved 3-D positions (M-RoPE).

Angles are computed on the host: numpy reduces large arguments exactly, and one table serves all layers of a step.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Rotation:
    """Hold cos and sin (T, 1, R/2) for T positions, in the model dtype."""

    cos: mx.array
    sin: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate pairs (i, i + R/2) of the first R dimensions of x (T, heads, D); the rest passes through."""
        half = self.cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return mx.concatenate([a * self.cos - b * self.sin, b * self.cos + a * self.sin, rest], axis=-1)


class Rotary:
    """Make rotations for positions (3, T): temporal, height, width; all equal for text."""

    def __init__(self, rotary_dim: int, theta: float, sections: tuple[int, int, int], dtype: mx.Dtype) -> None:
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        self.inv_freq = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
        # Frequency j follows height at j = 1, 4, 7..., width at j = 2, 5, 8..., as many as its section says; else time.
        self.axis = np.zeros(rotary_dim // 2, dtype=np.int64)
        for axis in (1, 2):
            self.axis[axis : 3 * sections[axis] : 3] = axis
        self.dtype = dtype

    def __call__(self, positions: np.ndarray) -> Rotation:
        """Compute the rotation for integer positions (3, T)."""
        angles = positions[self.axis].T.astype(np.float32) * self.inv_freq
        cos, sin = (mx.array(f(angles)[:, None, :]).astype(self.dtype) for f in (np.cos, np.sin))
        return Rotation(cos, sin)

"""RMS norms of the Qwen4 family: statistics and scale in float32, one rounding at the end."""

import mlx.core as mx


def scaled_rms_norm(x: mx.array, scale: mx.array, eps: float) -> mx.array:
    """Normalise the last axis of x (..., D) and multiply by scale, which broadcasts: (D,) or (S, D).

    `scale` is float32 and complete: a zero-centred weight w arrives as 1 + w, added in float32, because folding the
    one into bf16 loses up to 0.4 %. Returns x's dtype.
    """
    normed = mx.fast.rms_norm(x.astype(mx.float32), None, eps)
    return (normed * scale).astype(x.dtype)

"""Depthwise causal convolution with carried history, as the GDN and PLE blocks use it."""

import mlx.core as mx


def causal_conv(history: mx.array, x: mx.array, taps: mx.array, dilation: int = 1) -> tuple[mx.array, mx.array]:
    """Convolve x (T, C) after history (H, C), H = (K - 1) * dilation; taps is (K, C) float32, the last tap is now.

    Returns silu of the result (T, C) in x's dtype, and the next history: the last H rows, however short x is.
    """
    num_tokens, num_taps = x.shape[0], taps.shape[0]
    window = mx.concatenate([history, x], axis=0)
    wide = window.astype(mx.float32)
    terms = [wide[i * dilation : i * dilation + num_tokens] * taps[i] for i in range(num_taps)]
    y = mx.stack(terms).sum(axis=0).astype(x.dtype)
    return y * mx.sigmoid(y), window[num_tokens:]

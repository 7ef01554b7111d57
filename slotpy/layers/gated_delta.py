"""Gated DeltaNet: a linear-attention block whose state is one matrix per value head.

Owns the delta rule in its two exact forms: one step (decode) and chunks of 64 tokens (prefill).
mlx-lm's `gated_delta` is not used: it adds `dt_bias` in bf16 where the reference adds in float32, and its ops path
walks the prompt token by token.

Source: transformers 5.24.0 `models/qwen4_exp/modeling_qwen4_exp.py`; chunked form: arXiv 2412.06464.
"""

from dataclasses import dataclass

import mlx.core as mx

from slotpy.layers.causal_conv import causal_conv
from slotpy.layers.linear import Linear

CHUNK_TOKENS = 64
L2_EPS = 1e-6


@dataclass
class GatedDeltaState:
    """Carry one sequence's history: conv (K-1, C) in the model dtype, recurrent (Hv, Dk, Dv) float32."""

    conv: mx.array
    recurrent: mx.array

    def mark(self) -> "GatedDeltaState":
        """Remember where the state is: its arrays never change, a step makes new ones."""
        return GatedDeltaState(self.conv, self.recurrent)

    def rewind(self, mark: "GatedDeltaState") -> None:
        self.conv, self.recurrent = mark.conv, mark.recurrent


@dataclass(frozen=True)
class GatedDeltaShape:
    """Name the head counts and widths of the block."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def new_state(self, dtype: mx.Dtype) -> GatedDeltaState:
        return GatedDeltaState(
            conv=mx.zeros((self.conv_taps - 1, self.conv_channels), dtype=dtype),
            recurrent=mx.zeros((self.num_value_heads, self.key_dim, self.value_dim), dtype=mx.float32),
        )


@dataclass
class GatedDeltaNet:
    """Mix tokens through the gated delta rule. `conv_taps` (K, C), `neg_decay` = -exp(A_log), both float32."""

    shape: GatedDeltaShape
    in_proj_qkv: Linear
    in_proj_z: Linear
    in_proj_b: Linear
    in_proj_a: Linear
    out_proj: Linear
    conv_taps: mx.array
    neg_decay: mx.array
    dt_bias: mx.array
    norm_weight: mx.array
    eps: float

    def __call__(self, x: mx.array, state: GatedDeltaState) -> mx.array:
        """Map x (T, D) to (T, D) and advance the state."""
        s, num_tokens = self.shape, x.shape[0]
        mixed, state.conv = causal_conv(state.conv, self.in_proj_qkv(x), self.conv_taps)
        key_width = s.num_key_heads * s.key_dim
        q, k, v = mx.split(mixed, [key_width, 2 * key_width], axis=-1)
        repeat = s.num_value_heads // s.num_key_heads
        # Value head j reads key head j // repeat.
        q = mx.repeat(_l2(q.reshape(num_tokens, s.num_key_heads, s.key_dim)) * s.key_dim**-0.5, repeat, axis=1)
        k = mx.repeat(_l2(k.reshape(num_tokens, s.num_key_heads, s.key_dim)), repeat, axis=1)
        v = v.reshape(num_tokens, s.num_value_heads, s.value_dim).astype(mx.float32)
        beta = mx.sigmoid(self.in_proj_b(x)).astype(mx.float32)
        log_decay = self.neg_decay * _softplus(self.in_proj_a(x).astype(mx.float32) + self.dt_bias)
        rule = delta_step if num_tokens == 1 else delta_chunks
        out, state.recurrent = rule(q, k, v, log_decay, beta, state.recurrent)
        z = self.in_proj_z(x).reshape(out.shape)
        return self.out_proj(self._gated_norm(out.astype(x.dtype), z).reshape(num_tokens, -1))

    def _gated_norm(self, out: mx.array, z: mx.array) -> mx.array:
        """Normalise each value head and gate it by sigmoid(z); rounded where the reference rounds."""
        normed = mx.fast.rms_norm(out.astype(mx.float32), None, self.eps).astype(out.dtype) * self.norm_weight
        return (normed.astype(mx.float32) * mx.sigmoid(z.astype(mx.float32))).astype(out.dtype)


def _l2(x: mx.array) -> mx.array:
    """Scale the last axis to unit length in float32; eps is added to the sum of squares."""
    x = x.astype(mx.float32)
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + L2_EPS)


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, mx.array(0.0))


def delta_step(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Advance one token: q, k (1, H, Dk), v (1, H, Dv), log_decay, beta (1, H), state (H, Dk, Dv), all float32.

    Returns the output (1, H, Dv) and the new state.
    """
    q, k, v = q[0, :, :, None], k[0, :, :, None], v[0, :, None, :]
    state = state * mx.exp(log_decay[0])[:, None, None]
    delta = beta[0][:, None, None] * (v - (state * k).sum(axis=1, keepdims=True))
    state = state + k * delta
    return (state * q).sum(axis=1)[None], state


def delta_chunks(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Advance T tokens in chunks: shapes as in `delta_step` with T for 1. Padding rows leave the state unchanged."""
    num_tokens = v.shape[0]
    num_chunks = -(-num_tokens // CHUNK_TOKENS)
    q, k, v, log_decay, beta = (_split_chunks(a, num_chunks) for a in (q, k, v, log_decay, beta))
    # Now q, k, v (H, N, C, D) and log_decay, beta (H, N, C).
    total = mx.cumsum(log_decay, axis=-1)
    causal = mx.tri(CHUNK_TOKENS, dtype=mx.bool_)
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    decay = mx.exp(mx.where(causal, total[..., :, None] - total[..., None, :], -mx.inf))
    k_beta = k * beta[..., None]
    inverse = _invert_unit_lower(mx.tril(k_beta @ k.swapaxes(-1, -2) * decay, -1))
    values = inverse @ (v * beta[..., None])
    decayed_keys = inverse @ (k_beta * mx.exp(total)[..., None])
    attention = q @ k.swapaxes(-1, -2) * decay
    q_in = q * mx.exp(total)[..., None]
    k_out = k * mx.exp(total[..., -1:] - total)[..., None]
    outs = []
    for i in range(num_chunks):
        new_values = values[:, i] - decayed_keys[:, i] @ state
        outs.append(q_in[:, i] @ state + attention[:, i] @ new_values)
        state = state * mx.exp(total[:, i, -1])[:, None, None] + k_out[:, i].swapaxes(-1, -2) @ new_values
    out = mx.concatenate(outs, axis=1)[:, :num_tokens]
    return out.swapaxes(0, 1), state


def _split_chunks(a: mx.array, num_chunks: int) -> mx.array:
    """Turn (T, H, ...) into (H, N, C, ...), padded with zeros."""
    padding = [(0, num_chunks * CHUNK_TOKENS - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
    a = mx.pad(a, padding).swapaxes(0, 1)
    return a.reshape(a.shape[0], num_chunks, CHUNK_TOKENS, *a.shape[2:])


def _invert_unit_lower(strict: mx.array) -> mx.array:
    """Invert I + strict, strictly lower triangular (..., C, C), by doubling the size of inverted diagonal blocks.

    With P and Q inverted, the inverse of [[P', 0], [L, Q']] has -Q L P below the diagonal. Six pairs of matmuls for
    C = 64, and as stable as forward substitution; a Neumann product needs as many but cancels catastrophically.
    """
    size = strict.shape[-1]
    rows = mx.arange(size)
    inverse = mx.eye(size)
    block = 1
    while block < size:
        own_pair = (rows // (2 * block))[:, None] == (rows // (2 * block))[None, :]
        below = ((rows // block)[:, None] % 2 == 1) & ((rows // block)[None, :] % 2 == 0) & own_pair
        inverse = inverse - inverse @ mx.where(below, strict, 0.0) @ inverse
        block *= 2
    return inverse

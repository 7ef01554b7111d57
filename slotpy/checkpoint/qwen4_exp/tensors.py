"""The tensors that stay in memory in a `qwen4_exp` model: canonical names and shapes, derived from the config.

Owns the list of what must be there. Which files and formats hold it is layout.py's business; routed experts and
n-gram rows are streamed and not listed.
"""

from dataclasses import dataclass
from typing import Literal

from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig
from slotpy.checkpoint.qwen4_exp.keys import LINEAR


@dataclass(frozen=True)
class Expected:
    """Describe one weight: `linear` (out, in) may be quantised, `conv` may be stored channels-last, `int` is I64."""

    kind: Literal["linear", "plain", "conv", "int"]
    shape: tuple[int, ...]
    ending: str = ".weight"


Tensors = dict[str, Expected]


def text_tensors(config: Qwen4ExpConfig) -> Tensors:
    """List the text model's resident tensors."""
    tensors = {
        "embed_tokens": _linear(config.vocab_size, config.hidden_size),
        "lm_head": _linear(config.vocab_size, config.hidden_size),
        **_under("hyper_connection_mixer", _read_streams(config)),
    }
    for layer, kind in enumerate(config.layer_types):
        tensors |= _under(f"layers.{layer}", _delta_layer(config) if kind == LINEAR else _attention_layer(config))
    return tensors | _under(f"layers.{config.ple_layer}.ple", _ngram_injection(config))


def mtp_tensors(config: Qwen4ExpConfig) -> Tensors:
    """List the draft head's resident tensors; it shares embed_tokens and lm_head with the text model."""
    size = config.hidden_size
    tensors = {
        "fc_embedding": _linear(size, size),
        "fc_hidden": _linear(size, size),
        "pre_fc_norm_embedding": _plain(size),
        "pre_fc_norm_hidden": _plain(config.streams_size),
        **_under("hyper_connection_mixer", _read_streams(config)),
    }
    for layer in range(config.mtp_num_hidden_layers):
        tensors |= _under(f"layers.{layer}", _attention_layer(config))
    return _under("mtp", tensors)


def _delta_layer(c: Qwen4ExpConfig) -> Tensors:
    key, value, heads = c.linear_key_size, c.linear_value_size, c.linear_num_value_heads
    delta_net = {
        "in_proj_qkv": _linear(2 * key + value, c.hidden_size),
        "in_proj_z": _linear(value, c.hidden_size),
        "in_proj_b": _linear(heads, c.hidden_size),
        "in_proj_a": _linear(heads, c.hidden_size),
        "out_proj": _linear(c.hidden_size, value),
        "conv1d": Expected("conv", (2 * key + value, 1, c.linear_conv_kernel_dim)),
        "norm": _plain(c.linear_value_head_dim),
        "A_log": Expected("plain", (heads,), ending=""),
        "dt_bias": Expected("plain", (heads,), ending=""),
    }
    return _under("linear_attn", delta_net) | _rest_of_layer(c)


def _attention_layer(c: Qwen4ExpConfig) -> Tensors:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention = {
        "q_proj": _linear(2 * queries, c.hidden_size),  # each head's query and its output gate
        "k_proj": _linear(keys, c.hidden_size),
        "v_proj": _linear(keys, c.hidden_size),
        "o_proj": _linear(c.hidden_size, queries),
        "q_norm": _plain(c.head_dim),
        "k_norm": _plain(c.head_dim),
        "indexer.index_qk_proj": _linear((c.indexer_n_heads + 1) * c.indexer_head_dim, c.hidden_size),
        "indexer.q_layernorm": _plain(c.indexer_head_dim),
        "indexer.k_layernorm": _plain(c.indexer_head_dim),
    }
    return _under("self_attn", attention) | _rest_of_layer(c)


def _rest_of_layer(c: Qwen4ExpConfig) -> Tensors:
    """List what every layer has: its two hyper-connections, the router and the shared expert."""
    inner = c.shared_expert_intermediate_size
    mlp = {
        "gate": _linear(c.num_experts, c.hidden_size),
        "shared_expert_gate": _linear(1, c.hidden_size),
        "shared_expert.gate_proj": _linear(inner, c.hidden_size),
        "shared_expert.up_proj": _linear(inner, c.hidden_size),
        "shared_expert.down_proj": _linear(c.hidden_size, inner),
    }
    streams = _read_streams(c) | {"block_inject_weight": _linear(c.hc_count, c.streams_size)}
    return _under("mlp", mlp) | _under("attn_hyper_connection", streams) | _under("mlp_hyper_connection", streams)


def _read_streams(c: Qwen4ExpConfig) -> Tensors:
    return {
        "hc_norm": _plain(c.streams_size),
        "input_mix_weight_down": _linear(c.hc_lowrank, c.streams_size),
        "input_mix_weight_up": _linear(c.streams_size, c.hc_lowrank),
    }


def _ngram_injection(c: Qwen4ExpConfig) -> Tensors:
    return {
        "key_proj": _linear(c.streams_size, c.ple_embed_dim),
        "value_proj": _linear(c.hidden_size, c.ple_embed_dim),
        "conv1d": Expected("conv", (c.streams_size, 1, c.ple_conv_kernel_size)),
        "norm_key": _plain(c.streams_size),
        "norm_query": _plain(c.streams_size),
        "norm_conv": _plain(c.streams_size),
        "ple_embedding.layer_multipliers": Expected("int", (c.ngram_size,), ending=""),
        "ple_embedding.ngram_heads_vocab_sizes": Expected("int", (c.num_ngram_heads,), ending=""),
        "ple_embedding.ngram_heads_offsets": Expected("int", (c.num_ngram_heads,), ending=""),
    }


def _under(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{name}": expected for name, expected in tensors.items()}


def _linear(outputs: int, inputs: int) -> Expected:
    return Expected("linear", (outputs, inputs))


def _plain(size: int) -> Expected:
    return Expected("plain", (size,))

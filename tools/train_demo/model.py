"""The demo model as a trainable module: its config, the reference's layers and the draft head.

Owns the sizes and the forward pass over padded rows. The layers, their parameters and their initial values are those
of transformers; what is slow there for many short rows is computed here in another order, with the same result. Knows
nothing of data, optimisers or files.

Source: transformers, models/qwen4_exp; draft head: vLLM's Qwen4Exp multi-token predictor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

MAX_ROW_TOKENS = 512
"""Longest row. Up to here the sparse attention selects every token, so the indexer is left out of training."""

_ROPE = {
    "mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25, "rope_theta": 10_000,
    "rope_type": "default",
}  # fmt: skip


def text_config(vocab_size: int, end_of_text: int) -> dict[str, Any]:
    """Give the `text_config` of config.json.

    Inputs of all quantised matrices are multiples of 64, the group of the 4-bit layout; n-gram rows are one group of
    32. In that layout all of it is 15.3 MB, of which the experts are 8.3 and the n-gram table 2.1.
    """
    return {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": end_of_text, "dtype": "bfloat16",
        "eos_token_id": end_of_text, "full_attention_interval": 4, "hc_count": 4, "hc_lowrank": 64, "head_dim": 64,
        "heads_per_ngram": 4, "hidden_act": "silu", "hidden_size": 256, "indexer_budget": MAX_ROW_TOKENS,
        "indexer_compress_ratio": 4, "indexer_head_dim": 32, "indexer_kv_heads": 1, "indexer_n_heads": 4,
        # 1 / sqrt(hidden_size), not the 0.02 of the wide published model.
        "initializer_range": 0.0625,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32,
        "make_ngram_vocab_size_divisible_by": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 4096,
        "model_type": "qwen4_exp_text", "moe_intermediate_size": 64,
        "mtp": {
            "hybrid": True, "layer_types": ["full_attention"], "mtp_use_hidden_state_from_layer": None,
            "num_hidden_layers": 1, "rope_theta": _ROPE["rope_theta"],
        },
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "ngram_size": 3,
        "ngram_vocab_size_base": 13_000, "num_attention_heads": 4, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 8, "num_key_value_heads": 2, "output_gate_type": "sigmoid", "output_router_logits": False,
        "pad_token_id": None, "partial_rotary_factor": 0.25, "ple_conv_kernel_size": 4, "ple_embed_dim": 256,
        "ple_layer_ids": [2], "rms_norm_eps": 1e-06, "rope_parameters": dict(_ROPE), "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 128, "split_ngram_parts": 16, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": vocab_size,
    }  # fmt: skip


@dataclass(frozen=True)
class Outputs:
    """Hold one forward pass over rows (B, L): `main` and `draft` (B, L, D) go into lm_head.

    `main[:, t]` predicts token t + 1 and `draft[:, t]` token t + 2. `routed` has a pair for each layer, the draft
    head's last: router logits (B * L, experts) and chosen experts (B * L, experts per token).
    """

    main: Tensor
    draft: Tensor
    routed: tuple[tuple[Tensor, Tensor], ...]


class DraftHead(nn.Module):
    """Predict the token after the next from the streams at a token and the embedding of the next."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        one_layer = {"layer_types": ["full_attention"], "num_hidden_layers": 1, "ple_layer_ids": []}
        config = _reference_config(text | one_layer)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._streams = (config.hc_count, hidden)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = qwen4.Qwen4ExpTextRMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = qwen4.Qwen4ExpTextRMSNorm(math.prod(self._streams), eps=eps)  # one group for all
        # Built as a one-layer model, whose own initialisation its layer keeps.
        body = qwen4.Qwen4ExpTextModel(config)
        self.layers, self.hyper_connection_mixer = body.layers, body.hyper_connection_mixer
        for linear in (self.fc_embedding, self.fc_hidden):
            nn.init.normal_(linear.weight, std=config.initializer_range)

    def forward(self, embeddings: Tensor, streams: Tensor, **context: Any) -> Tensor:
        below = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, self._streams))
        fused = self.fc_embedding(self.pre_fc_norm_embedding(embeddings)).unsqueeze(-2) + below
        return self.hyper_connection_mixer(self.layers[0](fused.flatten(-2), **context))


class DemoModel(nn.Module):
    """Hold the text model (`main`) and the draft head (`mtp`), initialised from `seed`.

    `compiled` compiles the hyper-connections, half of an uncompiled step: many small operations on wide streams.
    """

    def __init__(self, text: dict[str, Any], seed: int, *, compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.main = Qwen4ExpForCausalLM(_reference_config(text))
        self.mtp = DraftHead(text)
        self._routed: list[tuple[Tensor, Tensor]] = []
        for module in self.modules():
            match module:
                case qwen4.Qwen4ExpTextGatedDeltaNet():
                    _start_delta_net(module)
                case qwen4.Qwen4ExpTextTopKRouter():
                    module.register_forward_hook(lambda _, inputs, output: self._routed.append((output[0], output[2])))
                case qwen4.Qwen4ExpTextQSAIndexer():
                    module.forward = lambda hidden, rotary, mask, cache: mask
                case qwen4.Qwen4ExpTextGatedResidual() if compiled:
                    module.forward = partial(_read_streams, module, torch.compile(type(module).forward))
                case qwen4.Qwen4ExpTextPLELayer():
                    module._short_conv = lambda hidden, cache, conv=module.conv1d: F.silu(
                        _causal_conv(hidden, conv.weight[:, 0], conv.dilation[0])
                    )

    def forward(self, ids: Tensor) -> Outputs:
        """Run rows of token ids (B, L), padded on the right; what follows a token does not change its outputs."""
        if ids.shape[1] > MAX_ROW_TOKENS:
            raise ValueError(f"Rows of {ids.shape[1]} tokens; the attention sees {MAX_ROW_TOKENS}.")
        self._routed = []
        text = self.main.model
        embeddings = text.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, 1, -1)
        context = {
            "position_embeddings": text.rotary_emb(embeddings, positions),
            "attention_mask": torch.ones(ids.shape[1:] * 2, dtype=torch.bool, device=ids.device).tril()[None, None],
        }
        streams = embeddings.repeat(1, 1, text.config.hc_count)
        with mock.patch.multiple(qwen4, torch_chunk_gated_delta_rule=delta_rule, causal_conv1d_fn=_conv_and_activate):
            for layer in text.layers:
                streams = layer(streams, ple_input_ids=ids, **context)
            following = torch.cat([embeddings[:, 1:], embeddings[:, :1]], 1)  # the last draft is about nothing
            draft = self.mtp(following, streams, **context)
        return Outputs(text.hyper_connection_mixer(streams), draft, tuple(self._routed))


def balance_loss(routed: tuple[tuple[Tensor, Tensor], ...], real: Tensor) -> tuple[Tensor, Tensor]:
    """Give the load-balancing loss, one when all experts of a layer are used alike, and the load of the rarest expert.

    `real` (B * L,) is one where a token counts. The load is a share of the fair load.
    """
    losses, rarest = [], []
    num_real = real.sum()
    for logits, chosen in routed:
        num_experts = logits.shape[1]
        probabilities = (logits.float().softmax(-1) * real[:, None]).sum(0) / num_real
        hits = (chosen[:, :, None] == torch.arange(num_experts, device=chosen.device)).sum(1) * real[:, None]
        shares = hits.sum(0) / (num_real * chosen.shape[1])
        losses.append(num_experts * (shares * probabilities).sum())
        rarest.append(num_experts * shares.min())
    return torch.stack(losses).mean(), torch.stack(rarest).min()


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Apply the gated delta rule to whole rows at once, from an empty state: the chunked form with a single chunk.

    Query and key (B, L, Hk, Dk), value (B, L, Hv, Dv), g and beta (B, L, Hv); returns (B, L, Hv, Dv) and no state.
    """
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    q, k = qwen4.l2norm(q) * q.shape[-1] ** -0.5, qwen4.l2norm(k)
    if (repeats := v.shape[1] // k.shape[1]) > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    beta = beta.transpose(1, 2).float()[..., None]
    total = g.transpose(1, 2).float().cumsum(-1)
    above = torch.ones(total.shape[-1:] * 2, dtype=torch.bool, device=total.device).triu(1)
    # Masked before exp: above the diagonal the difference is positive and could overflow.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()
    system = (k * beta) @ k.transpose(-1, -2) * decay
    values = torch.linalg.solve_triangular(system, v * beta, upper=False, unitriangular=True)
    out = (q @ k.transpose(-1, -2) * decay) @ values
    return out.transpose(1, 2).to(query.dtype), None


def sorted_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run each token (N, D) through its chosen experts (N, K), the pairs sorted by expert.

    As the reference's grouped form, but backward also gathers, where indexing would add rows up one by one.
    """
    num_chosen = chosen.shape[1]
    ranked, order = chosen.flatten().to(torch.int16).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(experts.num_experts, dtype=torch.int16, device=order.device)
    ends = torch.searchsorted(ranked, numbers, right=True, out_int32=True)
    rows = _Take.apply(hidden, order, inverse, num_chosen)
    gate, up = F.grouped_mm(rows, experts.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, experts.down_proj.transpose(1, 2), offs=ends)
    rows = _Take.apply(rows, inverse, order, 1).unflatten(0, (-1, num_chosen))
    return (rows * weights[..., None]).sum(1)


class _Take(torch.autograd.Function):
    """Give row `order // copies` of the input, where `order` is a permutation and `inverse` undoes it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient[ctx.saved_tensors[0]].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def _read_streams(module: nn.Module, compiled: Callable[..., Any], streams: Tensor) -> Any:
    """Read the streams (B, L, S * D) as (B * L, S * D), which has one shape in training: compiled for that only."""
    if not torch.is_grad_enabled():
        return type(module).forward(module, streams)
    out = compiled(module, streams.flatten(0, 1))
    shape = streams.shape[:2]
    if isinstance(out, Tensor):
        return out.unflatten(0, shape)
    mixed, _, injection = out
    return mixed.unflatten(0, shape), streams, injection.unflatten(0, shape)


def _causal_conv(hidden: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Convolve (B, L, C) along L with weight (C, K): sums of shifted copies, as depthwise kernels are slow to train."""
    length, num_taps = hidden.shape[1], weight.shape[1]
    padded = F.pad(hidden, (0, 0, dilation * (num_taps - 1), 0)).float()
    shifted = (padded[:, dilation * tap : dilation * tap + length] * weight[:, tap] for tap in range(num_taps))
    return sum(shifted).to(hidden.dtype)


def _conv_and_activate(hidden: Tensor, weight: Tensor, bias: None = None, activation: str = "silu", **_: Any) -> Tensor:
    """Stand in for the reference's convolution, which has (B, C, L)."""
    return F.silu(_causal_conv(hidden.transpose(1, 2), weight, 1)).transpose(1, 2)


def _reference_config(text: dict[str, Any]) -> Qwen4ExpTextConfig:
    config = Qwen4ExpTextConfig(**text)
    config._attn_implementation, config._experts_implementation = "sdpa", "sorted"
    return config


@torch.no_grad()
def _start_delta_net(layer: nn.Module) -> None:
    """Let heads start with memories from a few to a thousand tokens; the reference's own start forgets in one or two.

    Source: the initialisation of flash-linear-attention's GatedDeltaNet; that of the decays is Mamba-2's.
    """
    steps = torch.empty(layer.num_v_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
    layer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    layer.A_log.copy_(torch.empty(layer.num_v_heads).uniform_(1, 16).log())
    layer.conv1d.reset_parameters()


ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)

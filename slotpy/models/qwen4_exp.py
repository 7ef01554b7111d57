"""Qwen3.8-Flash-Next (`qwen4_exp`): GDN and QSA mixers, hyper-connections, streamed experts and n-gram rows.

Owns the order of the blocks and the per-sequence state. The blocks are in `layers/`; names and byte layouts in
`checkpoint/qwen4_exp/`. There are no per-layer norms and no final norm: hyper-connections do all normalising.

Source: transformers 5.24.0 `models/qwen4_exp/modeling_qwen4_exp.py`; MTP wiring: vLLM `qwen4_exp_mtp`.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig
from slotpy.checkpoint.qwen4_exp.hashing import empty_history, ngram_ids
from slotpy.checkpoint.qwen4_exp.norms import norm_offset
from slotpy.layers.gated_delta import GatedDeltaNet, GatedDeltaShape, GatedDeltaState
from slotpy.layers.hyper_connection import HyperConnection
from slotpy.layers.ngram import NgramBlock, NgramState, PendingRows, StreamedRows
from slotpy.layers.norm import scaled_rms_norm
from slotpy.layers.rotary import Rotary
from slotpy.layers.sparse_attention import (
    Indexer,
    SparseAttention,
    SparseAttentionMark,
    SparseAttentionState,
    StepPositions,
)
from slotpy.layers.switch import SharedExpert, StreamedExperts, StreamedMoE
from slotpy.models.weights import Weights

NO_TOKENS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class StateMark:
    """Remember where a state was. Holds what cannot be cut back: everything but keys and values."""

    mixers: tuple[GatedDeltaState | SparseAttentionMark, ...]
    ngram_conv: mx.array
    token_history: np.ndarray
    num_tokens: int
    open_positions: np.ndarray


@dataclass
class Qwen4ExpState:
    """Carry one sequence: a state per mixer, the n-gram history, and where the next token stands.

    `open_positions` (3, < ratio) are the positions of the tokens in the indexer's incomplete block.
    """

    mixers: list[GatedDeltaState | SparseAttentionState]
    ngram: NgramState
    token_history: np.ndarray
    num_tokens: int
    open_positions: np.ndarray

    def arrays(self) -> list[mx.array]:
        """List every array, so that a step can evaluate the state and free its graph."""
        found = [self.ngram.conv]
        for mixer in self.mixers:
            found += mixer.arrays() if isinstance(mixer, SparseAttentionState) else [mixer.conv, mixer.recurrent]
        return found

    def mark(self) -> StateMark:
        """Remember where the state is, between two steps. Costs the memory of its fixed part, and no copy."""
        return StateMark(
            mixers=tuple(mixer.mark() for mixer in self.mixers),
            ngram_conv=self.ngram.conv,
            token_history=self.token_history,
            num_tokens=self.num_tokens,
            open_positions=self.open_positions,
        )

    def rewind(self, mark: StateMark) -> None:
        """Go back to a mark of this state; marks made later mean nothing from then on."""
        for mixer, then in zip(self.mixers, mark.mixers, strict=True):
            mixer.rewind(then)  # type: ignore[arg-type]  # each gets its own kind back
        self.ngram.conv, self.token_history = mark.ngram_conv, mark.token_history
        self.num_tokens, self.open_positions = mark.num_tokens, mark.open_positions


@dataclass
class Layer:
    """One decoder layer: a mixer and a mixture of experts, each between a read and a write of the streams."""

    mixer_connection: HyperConnection
    mixer: GatedDeltaNet | SparseAttention
    moe_connection: HyperConnection
    moe: StreamedMoE

    def __call__(
        self, streams: mx.array, state: GatedDeltaState | SparseAttentionState, positions: StepPositions
    ) -> mx.array:
        x, gates = self.mixer_connection.read(streams)
        if isinstance(self.mixer, SparseAttention):
            assert isinstance(state, SparseAttentionState)
            y = self.mixer(x, state, positions)
        else:
            assert isinstance(state, GatedDeltaState)
            y = self.mixer(x, state)
        assert gates is not None
        streams = HyperConnection.write(streams, y, gates)
        x, gates = self.moe_connection.read(streams)
        assert gates is not None
        return HyperConnection.write(streams, self.moe(x), gates)


class Qwen4Exp:
    """The text model. One thread uses it; states are per sequence."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights, experts: StreamedExperts, rows: StreamedRows) -> None:
        builder = _Builder(config, weights)
        self.config, self.dtype, self.rows = config, weights.dtype, rows
        self.embed_tokens = weights.linear("embed_tokens")
        self.lm_head = weights.linear("lm_head")
        self.ngram_layer = config.ple_layer
        self.ngram_block = builder.ngram_block(f"layers.{self.ngram_layer}.ple")
        self.layers = [
            builder.layer(f"layers.{i}", kind, experts, first_key=i * config.num_experts)
            for i, kind in enumerate(config.layer_types)
        ]
        self.mixer = builder.connection("hyper_connection_mixer", inject=False)
        self.positioner = Positioner(config, weights.dtype)

    def new_state(self) -> Qwen4ExpState:
        return Qwen4ExpState(
            mixers=[_new_mixer_state(layer, self.dtype) for layer in self.layers],
            ngram=self.ngram_block.new_state(self.dtype),
            token_history=empty_history(self.config),
            num_tokens=0,
            open_positions=np.zeros((3, 0), dtype=np.int64),
        )

    def begin_rows(self, tokens: np.ndarray, state: Qwen4ExpState, upcoming: np.ndarray) -> PendingRows:
        """Start reading the n-gram rows of tokens (T,) and then those of `upcoming`; move the token history on."""
        ids, state.token_history = ngram_ids(tokens, state.token_history, self.config)
        pending = self.rows.begin(ids)
        if len(upcoming):
            self.rows.prefetch(ngram_ids(upcoming, state.token_history, self.config)[0])
        return pending

    def forward(
        self,
        tokens: np.ndarray,
        state: Qwen4ExpState,
        *,
        upcoming: np.ndarray = NO_TOKENS,
        embeddings: mx.array | None = None,
        positions: np.ndarray | None = None,
    ) -> mx.array:
        """Run tokens (T,) and advance the state: returns the streams (T, S, D) before the final mixer.

        `upcoming` tokens follow in the next pass: their n-gram rows are read while this one computes.
        `embeddings` (T, D) replace the tokens' own, and `positions` (3, T) replace text positions, where a prompt holds
        image features; n-gram rows always follow the token ids.
        """
        pending = self.begin_rows(tokens, state, upcoming)
        if embeddings is None:
            embeddings = self.embed(tokens)
        step = self.positioner.step(len(tokens), state, positions)
        streams = mx.repeat(embeddings[:, None, :], self.config.hc_count, axis=1)
        for i, layer in enumerate(self.layers):
            if i == self.ngram_layer:
                streams = self.ngram_block(streams, pending.take(), state.ngram)
            streams = layer(streams, state.mixers[i], step)
        return streams

    def embed(self, tokens: np.ndarray) -> mx.array:
        """Look token embeddings up: (T,) -> (T, D)."""
        return self.embed_tokens.rows(mx.array(tokens), self.dtype)

    def hidden(self, streams: mx.array) -> mx.array:
        """Mix streams (T, S, D) into the final hidden states (T, D), which the output matrix reads."""
        return self.mixer.read(streams)[0]

    def logits(self, streams: mx.array) -> mx.array:
        """Give the logits (T, V) of streams (T, S, D)."""
        return self.lm_head(self.hidden(streams))


class Positioner:
    """Work out, once for all attention layers of a step, the rotations of its tokens and of blocks they complete."""

    def __init__(self, config: Qwen4ExpConfig, dtype: mx.Dtype) -> None:
        self.rotary = Rotary(config.rotary_dim, config.rope_theta, config.mrope_section, dtype)
        self.ratio = config.indexer_compress_ratio

    def step(self, num_tokens: int, state: Qwen4ExpState, positions: np.ndarray | None = None) -> StepPositions:
        start = state.num_tokens
        if positions is None:
            positions = np.broadcast_to(np.arange(start, start + num_tokens), (3, num_tokens))
        known = np.concatenate([state.open_positions, positions], axis=1)
        whole = known.shape[1] // self.ratio * self.ratio
        state.num_tokens += num_tokens
        state.open_positions = known[:, whole:]
        return StepPositions(start, self.rotary(positions), self.rotary(known[:, : whole : self.ratio]))


def _new_mixer_state(layer: Layer, dtype: mx.Dtype) -> GatedDeltaState | SparseAttentionState:
    return (
        layer.mixer.shape.new_state(dtype) if isinstance(layer.mixer, GatedDeltaNet) else layer.mixer.new_state(dtype)
    )


class Qwen4ExpDraft:
    """The multi-token-prediction head: one attention layer that guesses the token after next.

    It shares the main model's embedding and output matrices, and keeps its own attention state.
    """

    def __init__(self, model: Qwen4Exp, weights: Weights, experts: StreamedExperts) -> None:
        config = model.config
        builder, scope = _Builder(config, weights.at("mtp")), weights.at("mtp")
        self.model = model
        self.embedding_scale = builder.norm_scale("pre_fc_norm_embedding")
        # One statistic over all streams together, unlike every other norm here.
        self.hidden_scale = builder.norm_scale("pre_fc_norm_hidden")
        self.fc_embedding, self.fc_hidden = scope.linear("fc_embedding"), scope.linear("fc_hidden")
        self.layer = builder.layer("layers.0", "full_attention", experts, first_key=0)
        self.mixer = builder.connection("hyper_connection_mixer", inject=False)

    def new_state(self) -> SparseAttentionState:
        state = _new_mixer_state(self.layer, self.model.dtype)
        assert isinstance(state, SparseAttentionState)
        return state

    def forward(
        self, tokens: np.ndarray, streams: mx.array, state: SparseAttentionState, positions: StepPositions
    ) -> mx.array:
        """Run T steps: tokens (T,) are the next tokens, streams (T, S, D) the model's at the positions before them.

        Returns the draft's streams (T, S, D); `logits` of them predicts one token further.
        """
        eps = self.model.config.rms_norm_eps
        embedded = self.fc_embedding(scaled_rms_norm(self.model.embed(tokens), self.embedding_scale, eps))
        flat = scaled_rms_norm(streams.reshape(len(tokens), -1), self.hidden_scale, eps)
        mixed = self.fc_hidden(flat.reshape(streams.shape)) + embedded[:, None, :]
        return self.layer(mixed, state, positions)

    def logits(self, streams: mx.array) -> mx.array:
        return self.model.lm_head(self.mixer.read(streams)[0])


class _Builder:
    """Assemble blocks from named weights."""

    def __init__(self, config: Qwen4ExpConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.norm_offset = norm_offset(weights.checkpoint)

    def norm_scale(self, name: str, groups: int = 1) -> mx.array:
        """Read a zero-centred norm weight as its complete float32 scale, (D,) or (groups, D)."""
        scale = self.weights.float32(name) + self.norm_offset
        return scale.reshape(groups, -1) if groups > 1 else scale

    def connection(self, name: str, *, inject: bool = True) -> HyperConnection:
        scope = self.weights.at(name)
        return HyperConnection(
            norm_scale=self.norm_scale(f"{name}.hc_norm", self.config.hc_count),
            down=scope.linear("input_mix_weight_down"),
            up=scope.linear("input_mix_weight_up"),
            inject=scope.linear("block_inject_weight") if inject else None,
            eps=self.config.rms_norm_eps,
        )

    def layer(self, name: str, kind: str, experts: StreamedExperts, *, first_key: int) -> Layer:
        is_linear = kind == "linear_attention"
        mixer = self._gated_delta(f"{name}.linear_attn") if is_linear else self._attention(f"{name}.self_attn")
        return Layer(
            mixer_connection=self.connection(f"{name}.attn_hyper_connection"),
            mixer=mixer,
            moe_connection=self.connection(f"{name}.mlp_hyper_connection"),
            moe=self._moe(f"{name}.mlp", experts, first_key),
        )

    def ngram_block(self, name: str) -> NgramBlock:
        c, scope = self.config, self.weights.at(name)
        return NgramBlock(
            key_proj=scope.linear("key_proj"),
            value_proj=scope.linear("value_proj"),
            key_scale=self.norm_scale(f"{name}.norm_key", c.hc_count),
            query_scale=self.norm_scale(f"{name}.norm_query", c.hc_count),
            conv_scale=self.norm_scale(f"{name}.norm_conv", c.hc_count),
            conv_taps=scope.conv_taps("conv1d"),
            dilation=c.ngram_size,
            eps=c.rms_norm_eps,
        )

    def _gated_delta(self, name: str) -> GatedDeltaNet:
        c, scope = self.config, self.weights.at(name)
        return GatedDeltaNet(
            shape=GatedDeltaShape(
                num_key_heads=c.linear_num_key_heads,
                num_value_heads=c.linear_num_value_heads,
                key_dim=c.linear_key_head_dim,
                value_dim=c.linear_value_head_dim,
                conv_taps=c.linear_conv_kernel_dim,
            ),
            in_proj_qkv=scope.linear("in_proj_qkv"),
            in_proj_z=scope.linear("in_proj_z"),
            in_proj_b=scope.linear("in_proj_b"),
            in_proj_a=scope.linear("in_proj_a"),
            out_proj=scope.linear("out_proj"),
            conv_taps=scope.conv_taps("conv1d"),
            neg_decay=-mx.exp(scope.float32("A_log")),
            dt_bias=scope.float32("dt_bias"),
            # An ordinary weight around 1: no offset, whatever the convention of the others.
            norm_weight=scope.float32("norm").astype(self.weights.dtype),
            eps=c.rms_norm_eps,
        )

    def _attention(self, name: str) -> SparseAttention:
        c, scope = self.config, self.weights.at(name)
        return SparseAttention(
            q_proj=scope.linear("q_proj"),
            k_proj=scope.linear("k_proj"),
            v_proj=scope.linear("v_proj"),
            o_proj=scope.linear("o_proj"),
            q_scale=self.norm_scale(f"{name}.q_norm"),
            k_scale=self.norm_scale(f"{name}.k_norm"),
            indexer=Indexer(
                qk_proj=scope.linear("indexer.index_qk_proj"),
                q_scale=self.norm_scale(f"{name}.indexer.q_layernorm"),
                k_scale=self.norm_scale(f"{name}.indexer.k_layernorm"),
                num_heads=c.indexer_n_heads,
                head_dim=c.indexer_head_dim,
                budget_tokens=c.indexer_budget,
                ratio=c.indexer_compress_ratio,
                eps=c.rms_norm_eps,
            ),
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            eps=c.rms_norm_eps,
        )

    def _moe(self, name: str, experts: StreamedExperts, first_key: int) -> StreamedMoE:
        scope = self.weights.at(name)
        shared = SharedExpert(
            gate_proj=scope.linear("shared_expert.gate_proj"),
            up_proj=scope.linear("shared_expert.up_proj"),
            down_proj=scope.linear("shared_expert.down_proj"),
            gate=scope.linear("shared_expert_gate"),
        )
        return StreamedMoE(scope.linear("gate"), experts, shared, self.config.num_experts_per_tok, first_key)

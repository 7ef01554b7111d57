"""The golden checkpoint, loaded and run on its reference inputs (see tests/golden/README.md)."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.layers.switch import StreamedExperts
from slotpy.models.qwen4_exp import Qwen4ExpDraft, Qwen4ExpState
from slotpy.models.weights import Weights
from slotpy.slots.cache import SlotCache

GOLDEN = Path(__file__).parent / "golden" / "qwen4_tiny"
REF = load_file(GOLDEN / "reference.safetensors")
TOKENS = REF["input_ids"][0]


def load_golden(*, slots: int = 40, float32: bool = True) -> LoadedModel:
    return load(GOLDEN, EngineOptions(slots=slots, float32=float32, context_tokens=256))


def run(
    loaded: LoadedModel, passes: Sequence[np.ndarray], state: Qwen4ExpState | None = None, **forward: object
) -> tuple[np.ndarray, np.ndarray]:
    """Run passes of tokens: returns all logits (T, V) and streams (T, S * D), as float32."""
    state = loaded.model.new_state() if state is None else state
    logits, streams = [], []
    for tokens in passes:
        h = loaded.model.forward(tokens, state, **forward)
        out = loaded.model.logits(h)
        mx.eval(out, h, state.arrays())
        loaded.retire()
        logits.append(np.array(out.astype(mx.float32)))
        streams.append(np.array(h.astype(mx.float32)).reshape(len(tokens), -1))
    return np.concatenate(logits), np.concatenate(streams)


def text_error(loaded: LoadedModel) -> float:
    return largest(run(loaded, [TOKENS])[0] - REF["logits_fp32"])


def image_error(loaded: LoadedModel) -> float:
    """Run the image prompt: features replace the placeholders' embeddings, positions are 3-D."""
    tokens = REF["image.input_ids"][0]
    embeddings = np.array(loaded.model.embed(tokens))
    placeholder = json.loads((GOLDEN / "config.json").read_text())["image_token_id"]
    embeddings[tokens == placeholder] = REF["vision.pooler_output_fp32"]
    logits, _ = run(loaded, [tokens], embeddings=mx.array(embeddings), positions=REF["image.position_ids_3d"])
    return largest(logits - REF["image.logits_fp32"])


def draft_error(loaded: LoadedModel) -> float:
    """Run the draft head over the text, and one more step from its own streams."""
    checkpoint, model = loaded.checkpoint, loaded.model
    cache = SlotCache(checkpoint.mtp_experts, loaded.store, num_slots=8, num_layers=1)
    experts = StreamedExperts(cache, checkpoint.mtp_expert_format, mx.float32)
    draft = Qwen4ExpDraft(model, Weights(checkpoint, mx.float32, True), experts)
    streams = mx.array(run(loaded, [TOKENS])[1]).reshape(len(TOKENS), model.config.hc_count, -1)
    # The draft keeps its own timeline: its positions start where the text's do.
    timeline, state, steps = model.new_state(), draft.new_state(), len(TOKENS) - 1
    multi = draft.forward(TOKENS[1:], streams[:steps], state, model.positioner.step(steps, timeline))
    mx.eval(multi)
    cache.retire()
    chained = draft.forward(np.array([17]), multi[-1:], state, model.positioner.step(1, timeline))
    return max(
        largest(np.array(draft.logits(multi)) - REF["mtp.logits_fp32"]),
        largest(np.array(multi).reshape(steps, -1) - REF["mtp.streams_fp32"]),
        largest(np.array(draft.logits(chained))[0] - REF["mtp.chain_logits_fp32"]),
    )


def largest(difference: np.ndarray) -> float:
    """Give the largest magnitude; infinite where anything is not a number."""
    return float(np.abs(difference).max()) if np.isfinite(difference).all() else float("inf")

"""Measure a trained demo checkpoint with slotpy itself: `python -m tools.train_demo.measure MODEL --data DIR`.

Exact match of greedy replies on the 200 definitions, perplexity on the definitions that training never saw, and how
often the draft head names the token that the model then chooses, on the model's own replies. `--golden FILE` records
the golden replies that tests/test_demo.py expects.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from slotpy.engine.engine import Engine
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import SamplingParams
from slotpy.layers.switch import StreamedExperts
from slotpy.models.qwen4_exp import Qwen4ExpDraft
from slotpy.models.weights import Weights
from slotpy.slots.cache import SlotCache

REPLY = 2
"""Code of a `loss_mask` for tokens of a reply; data.py has them all."""


def greedy(engine: Engine, prompt: str) -> tuple[list[int], list[int]]:
    """Give the ids of a prompt and of the greedy reply to it."""
    tokens = engine.tokenizer.encode(prompt)
    reply = engine.new_session().generate(tokens, SamplingParams(temperature=0), 160, engine.stop_ids)
    return tokens, [token for token, _ in reply]


def held_out_perplexity(engine: Engine, file: Path) -> float:
    """Give exp of the mean loss of the reply tokens in held-out samples, each read in one pass from an empty state."""
    model, losses = engine.loaded.model, []
    with np.load(file) as arrays:
        cuts = arrays["sample_starts"][1:-1].astype(np.int64)
        samples = list(zip(np.split(arrays["tokens"], cuts), np.split(arrays["loss_mask"], cuts), strict=True))
    for tokens, codes in samples:
        ids = tokens.astype(np.int64)
        logits = model.logits(model.forward(ids[:-1], model.new_state())).astype(mx.float32)
        chosen = mx.take_along_axis(logits, mx.array(ids[1:, None]), axis=-1)[:, 0]
        loss = np.array(mx.logsumexp(logits, axis=-1) - chosen)
        engine.loaded.retire()
        losses.append(loss[codes[1:] == REPLY])
    return float(np.exp(np.concatenate(losses).mean()))


class DraftMeter:
    """Count how often the draft head is right about the token after next, given the true tokens before."""

    def __init__(self, engine: Engine) -> None:
        self._loaded = engine.loaded
        checkpoint, model = self._loaded.checkpoint, self._loaded.model
        assert checkpoint.mtp_experts is not None and checkpoint.mtp_expert_format is not None
        experts = checkpoint.mtp_experts
        self._cache = SlotCache(experts, self._loaded.store, num_slots=experts.num_records, num_layers=1)
        streamed = StreamedExperts(self._cache, checkpoint.mtp_expert_format, mx.float32)
        self._draft = Qwen4ExpDraft(model, Weights(checkpoint, model.dtype, True), streamed)
        self.right = self.drafted = 0

    def add(self, prompt: list[int], reply: list[int]) -> None:
        """Count the drafts of all reply tokens but the first, which the model itself must name."""
        model, ids = self._loaded.model, np.array(prompt + reply)
        streams = model.forward(ids, model.new_state())
        timeline, steps = model.new_state(), len(ids) - 1
        drafted = self._draft.forward(
            ids[1:], streams[:steps], self._draft.new_state(), model.positioner.step(steps, timeline)
        )
        # Row t has seen token t + 1 and names token t + 2.
        named = np.array(self._draft.logits(drafted).argmax(axis=-1))[:-1]
        self._loaded.retire()
        self._cache.retire()
        first = len(prompt) - 1
        self.right += int((named[first:] == ids[2:][first:]).sum())
        self.drafted += len(ids[2:][first:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a trained demo checkpoint.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="directory that tools.train_demo.data wrote")
    parser.add_argument("--golden", type=Path, help="file to record the golden replies in")
    parser.add_argument("--limit", type=int, default=200, help="how many questions of each set")
    arguments = parser.parse_args()
    questions = json.loads((arguments.data / "eval.json").read_text())
    results: dict[str, float] = {}
    with Engine.open(arguments.model, EngineOptions()) as engine:
        meter = DraftMeter(engine)
        for name in ("golden", "exact", "rephrased"):
            right, replies, asked = 0, [], questions[name][: arguments.limit]
            for question in asked:
                prompt, reply = greedy(engine, question["prompt"])
                text = engine.tokenizer.decode(reply)
                right += text == question["expected"]
                replies.append({"prompt": question["prompt"], "reply": text})
                if name == "exact" and len(reply) > 1:
                    meter.add(prompt, reply)
            results[name] = right / len(asked)
            if name == "golden" and arguments.golden:
                arguments.golden.write_text(json.dumps(replies, indent=1, ensure_ascii=False) + "\n")
        results["draft_acceptance"] = meter.right / meter.drafted
        results["heldout_perplexity"] = held_out_perplexity(engine, arguments.data / "heldout.npz")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Measure a model in training: held-out perplexity, definitions that come out exactly, drafts that would be accepted.

Owns the measures and how eval.json's questions become rows. Everything takes one forward pass over given tokens: a
greedy answer is exact if and only if each of its tokens is the most likely one after the tokens before it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_demo.model import DemoModel

REPLY = 2
"""Code of a `loss_mask` for tokens of a reply; data.py has them all."""

_END_OF_TURN = "<|im_end|>"
_QUESTION_SETS = ("exact", "rephrased", "golden")
_HELD_OUT = "heldout"


@dataclass(frozen=True)
class Answers:
    """Hold rows of token ids (B, L), padded on the right, and which of them are the answers'."""

    ids: Tensor
    in_answer: Tensor


class Evaluation:
    """Hold the questions of a data directory on a device."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        questions = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
        self._sets = {
            name: self._pad([_encode(tokenizer, question) for question in questions[name]]) for name in _QUESTION_SETS
        }
        with np.load(folder / "heldout.npz") as arrays:
            cuts = arrays["sample_starts"][1:-1].astype(np.int64)
            samples = zip(np.split(arrays["tokens"], cuts), np.split(arrays["loss_mask"] == REPLY, cuts), strict=True)
        self._sets[_HELD_OUT] = self._pad(list(samples))

    @torch.no_grad()
    def __call__(self, model: DemoModel) -> dict[str, float]:
        """Score the model as it is.

        Perplexity is that of a token of a held-out answer. The sets give the share of answers that are right to the
        last token. `draft_agreement` is the share of answer tokens, on the `exact` set, where the draft head and the
        model, each given the true tokens before, name the same token.
        """
        scores: dict[str, float] = {}
        for name, answers in self._sets.items():
            out = model(answers.ids)
            logits = model.main.lm_head(out.main[:, :-1])
            expected, counted = answers.ids[:, 1:], answers.in_answer[:, 1:]
            chosen = logits.argmax(-1)
            if name == _HELD_OUT:
                loss = F.cross_entropy(logits[counted].float(), expected[counted]).item()
                scores |= {"heldout_loss": loss, "heldout_perplexity": math.exp(min(loss, 50.0))}
                continue
            scores[name] = ((chosen == expected) | ~counted).all(1).float().mean().item()
            if name == "exact":
                drafted = model.main.lm_head(out.draft[:, :-2]).argmax(-1)
                scores["draft_agreement"] = (drafted == chosen[:, 1:])[counted[:, 1:]].float().mean().item()
        return scores

    def _pad(self, samples: list[tuple[np.ndarray, np.ndarray]]) -> Answers:
        length = -(-max(len(ids) for ids, _ in samples) // 8) * 8
        ids = np.zeros((len(samples), length), np.int64)
        in_answer = np.zeros((len(samples), length), bool)
        for row, (tokens, answer) in enumerate(samples):
            ids[row, : len(tokens)], in_answer[row, : len(tokens)] = tokens, answer
        return Answers(torch.from_numpy(ids).to(self._device), torch.from_numpy(in_answer).to(self._device))


def _encode(tokenizer: Tokenizer, question: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode prompt and answer apart, as they are at run time."""
    prompt = tokenizer.encode(question["prompt"], add_special_tokens=False).ids
    answer = tokenizer.encode(question["expected"] + _END_OF_TURN, add_special_tokens=False).ids
    return np.array(prompt + answer), np.arange(len(prompt) + len(answer)) >= len(prompt)

"""Train the demo model: `python -m tools.train_demo.train --data DIR --out DIR`, from the repository's root.

Owns the recipe, the order of the samples, the clock and what is saved. Made for one H200 that is lent for minutes: a
run ends itself in time, and the next one goes on with `--state` (everything, about 310 MB) or with `--init` (the BF16
checkpoint that every run writes). Needs torch and transformers, which slotpy does not. README.md has the commands.
"""

import argparse
import csv
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tools.train_demo.evaluate import Evaluation
from tools.train_demo.model import DemoModel, balance_loss, text_config
from tools.train_demo.weights import (
    Weights,
    official_tensors,
    quantised_bytes,
    read_masters,
    write_checkpoint,
)

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"

CODE_WEIGHTS = (0.0, 0.1, 1.0)
"""What a token counts in the loss, by its code in `loss_mask`: boundary, prompt, reply."""

ROW_TOKENS = (24, 32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256, 320, 384, 512)
"""Lengths that rows are padded to. Each divides the tokens of a step, so every step has as many."""

LOG_SECONDS = 10.0

MAX_DEVIATION = 0.4
"""From the reference in float32, see `check_against_reference`. In bfloat16, at the start, 0.2: routers near ties."""


@dataclass(frozen=True)
class Recipe:
    """Hold what a run's outcome depends on. Shares are of `total_seconds`, the time of all runs together."""

    total_seconds: float
    seed: int = 0
    tokens_per_step: int = 46_080
    peak_rate: float = 2e-3
    last_rate: float = 2e-5
    warmup_steps: int = 200
    decay_from: float = 0.4
    quantised_from: float = 0.6
    weight_decay: float = 0.05  # of matrices only
    max_norm: float = 1.0
    draft_weight: float = 0.3
    passing_per_epoch: int = 4000
    balance_weight: float = 0.01

    def rate(self, share: float, steps: int) -> float:
        """Give the learning rate after a share of the time: constant, then a cosine down; `steps` warm it up."""
        falling = max(0.0, share - self.decay_from) / (1 - self.decay_from)
        height = (1 + math.cos(math.pi * min(1.0, falling))) / 2
        rate = self.last_rate + (self.peak_rate - self.last_rate) * height
        return rate * min(1.0, (steps + 1) / self.warmup_steps)


@dataclass
class Progress:
    """Count what all runs did so far. `position` is the next step of the epoch's plan."""

    seconds: float = 0.0
    step: int = 0
    tokens: int = 0
    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class Batch:
    """Hold rows (B, L): token ids, what each token counts in the loss, and one where it is not padding."""

    ids: Tensor
    weights: Tensor
    real: Tensor


class Samples:
    """Hold the packed samples of train.npz on a device and deal them out in rows of one length each."""

    def __init__(self, file: Path, recipe: Recipe, end_of_text: int, device: torch.device) -> None:
        if any(recipe.tokens_per_step % length for length in ROW_TOKENS):
            raise ValueError(f"{recipe.tokens_per_step} tokens a step do not divide into rows of {ROW_TOKENS}.")
        with np.load(file) as arrays:
            starts = torch.from_numpy(arrays["sample_starts"].astype(np.int64))
            self._tokens = torch.from_numpy(arrays["tokens"].astype(np.int64)).to(device)
            codes = torch.from_numpy(arrays["loss_mask"].astype(np.int64)).to(device)
            self._num_repeated = int(arrays["num_repeated"])
        self._weights = torch.tensor(CODE_WEIGHTS, device=device)[codes]
        self._starts, self._lengths = starts[:-1].to(device), starts.diff().to(device)
        lengths = starts.diff()
        if lengths.max() > ROW_TOKENS[-1]:
            raise ValueError(f"A sample of {lengths.max()} tokens; the longest row has {ROW_TOKENS[-1]}.")
        self._bucket = torch.searchsorted(torch.tensor(ROW_TOKENS), lengths)
        self._recipe, self._end_of_text, self._device = recipe, end_of_text, device
        self.mean_weight = self._weights[: int(starts[self._num_repeated])].sum().item() / len(self.plan(0))

    def plan(self, epoch: int) -> list[tuple[int, Tensor]]:
        """Give the steps of an epoch: the length of the rows, and which samples they hold.

        All repeated samples, and a few of the passing ones, which come after them in the file.
        What does not fill a step goes into rows of the next length; the last step is filled up with random samples.
        """
        chance = torch.Generator().manual_seed(self._recipe.seed * 1_000_003 + epoch)
        num_passing = len(self._bucket) - self._num_repeated
        passing = torch.randperm(num_passing, generator=chance)[: self._recipe.passing_per_epoch] + self._num_repeated
        order = torch.cat([torch.arange(self._num_repeated), passing])
        order = order[torch.randperm(len(order), generator=chance)]
        steps: list[tuple[int, Tensor]] = []
        left = order[:0]
        for bucket in range(int(self._bucket.max()) + 1):
            length = ROW_TOKENS[bucket]
            left = torch.cat([left, order[self._bucket[order] == bucket]])
            num_rows = self._recipe.tokens_per_step // length
            whole = len(left) // num_rows * num_rows
            steps += [(length, rows) for rows in left[:whole].split(num_rows) if len(rows)]
            left = left[whole:]
        if len(left):
            more = order[torch.randint(len(order), (num_rows - len(left),), generator=chance)]
            steps.append((length, torch.cat([left, more])))
        return [steps[i] for i in torch.randperm(len(steps), generator=chance)]

    def batch(self, length: int, samples: Tensor) -> Batch:
        samples = samples.to(self._device)
        places = torch.arange(length, device=self._device)
        real = places < self._lengths[samples][:, None]
        at = (self._starts[samples][:, None] + places).clamp(max=len(self._tokens) - 1)
        ids = torch.where(real, self._tokens[at], self._end_of_text)
        return Batch(ids, torch.where(real, self._weights[at], 0.0), real.float())


def losses(model: DemoModel, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Give the weighted sums of both heads' losses and the mean balance loss, and the load of the rarest expert."""
    out = model(batch.ids)
    balance, rarest = balance_loss(out.routed, batch.real.flatten())
    return {
        "main": _weighted_loss(model, out.main, batch, ahead=1),
        "draft": _weighted_loss(model, out.draft, batch, ahead=2),
        "balance": balance,
    }, rarest


def _weighted_loss(model: DemoModel, hidden: Tensor, batch: Batch, ahead: int) -> Tensor:
    logits = model.main.lm_head(hidden[:, :-ahead]).flatten(0, 1).float()
    each = F.cross_entropy(logits, batch.ids[:, ahead:].flatten(), reduction="none")
    return (each * batch.weights[:, ahead:].flatten()).sum()


class Trainer:
    """Hold model, optimizer and progress; `clock` gives seconds."""

    def __init__(
        self,
        recipe: Recipe,
        data: Path,
        device: torch.device,
        *,
        text: dict[str, Any] | None = None,
        compiled: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        end_of_text = Tokenizer.from_file(str(data / "tokenizer.json")).token_to_id(END_OF_TEXT)
        self.text = text_config(VOCAB_SIZE, end_of_text) if text is None else text
        self.recipe, self.device = recipe, device
        self.samples = Samples(data / "train.npz", recipe, end_of_text, device)
        self.evaluation = Evaluation(data, device)
        self.model = DemoModel(self.text, recipe.seed, compiled=compiled)
        # In the type it will run in; on a CPU, where that is slow and nobody trains, exactly.
        self.weights = Weights(self.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        masters = dict(self.weights.masters)
        groups = [
            {"params": [masters.pop("matrix")], "weight_decay": recipe.weight_decay},
            {"params": list(masters.values()), "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.progress = Progress()
        self.curves: list[dict[str, Any]] = []
        self._clock = clock
        self._warm_steps = 0

    @property
    def share(self) -> float:
        return min(1.0, self.progress.seconds / self.recipe.total_seconds)

    @property
    def quantised(self) -> bool:
        return self.share >= self.recipe.quantised_from

    def step(self, plan: list[tuple[int, Tensor]]) -> Tensor:
        """Train on the next batch; gives (main, draft, balance, gradient norm, rarest load) without waiting for it."""
        batch = self.samples.batch(*plan[self.progress.position])
        self.weights.publish(self.quantised)
        parts, rarest = losses(self.model, batch)
        tokens_loss = (parts["main"] + self.recipe.draft_weight * parts["draft"]) / self.samples.mean_weight
        (tokens_loss + self.recipe.balance_weight * parts["balance"]).backward()
        norm = self.weights.collect(self.recipe.max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.share, self._warm_steps)
        self.optimizer.step()
        self._warm_steps += 1
        self.progress.step += 1
        self.progress.tokens += batch.ids.numel()
        self.progress.position += 1
        weight = batch.weights.sum()
        return torch.stack([parts["main"] / weight, parts["draft"] / weight, parts["balance"], norm, rarest]).detach()

    def run(self, run_seconds: float, evaluate_every_s: float, save: Callable[[], None], save_every_s: float) -> None:
        """Train for `run_seconds` or to the end of `total_seconds`, with a row of `curves` for each evaluation.

        Raises: FloatingPointError when a loss is not finite.
        """
        start, before = self._clock(), self.progress.seconds
        due = {"log": LOG_SECONDS, "evaluate": evaluate_every_s, "save": save_every_s}
        recent: list[Tensor] = []
        counted = (0.0, self.progress.tokens)
        plan = self.samples.plan(self.progress.epoch)
        while True:
            elapsed = self._clock() - start
            self.progress.seconds = before + elapsed
            if elapsed >= run_seconds or self.share >= 1:
                break
            if self.progress.position == len(plan):
                self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
                plan = self.samples.plan(self.progress.epoch)
            recent.append(self.step(plan))
            reached = [name for name, at in due.items() if elapsed >= at]
            if "log" in reached or "evaluate" in reached:
                rate = (self.progress.tokens - counted[1]) / max(elapsed - counted[0], 1e-9)
                row = self._row(recent, rate)
                if "evaluate" in reached:
                    row |= self.scores(self.quantised)
                    self.curves.append(row)
                _print(row)
                recent, counted = [], (elapsed, self.progress.tokens)
            if "save" in reached:
                save()
            due |= {
                name: elapsed + {"log": LOG_SECONDS, "evaluate": evaluate_every_s, "save": save_every_s}[name]
                for name in reached
            }

    def scores(self, quantised: bool) -> dict[str, float]:
        """Evaluate, with weights rounded as in the 4-bit layout or as in the BF16 checkpoint."""
        self.weights.publish(quantised)
        return self.evaluation(self.model)

    def save_state(self, file: Path) -> None:
        """Save all that `load_state` needs to go on as if nothing had happened."""
        state = {
            "recipe": asdict(self.recipe),
            "masters": {kind: master.detach() for kind, master in self.weights.masters.items()},
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "curves": self.curves,
            "warm_steps": self._warm_steps,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(file)

    @torch.no_grad()
    def load_state(self, file: Path) -> None:
        state = torch.load(file, map_location=self.device, weights_only=True)
        for kind, master in self.weights.masters.items():
            master.copy_(state["masters"][kind])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.curves, self._warm_steps = state["curves"], state["warm_steps"]

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a BF16 checkpoint: the optimizer starts anew, and warms up."""
        self.progress = Progress(**read_masters(folder, self.weights)["progress"])

    def save_checkpoint(self, folder: Path) -> None:
        """Write the BF16 checkpoint and curves.csv."""
        config = {
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "model_type": "qwen4_exp",
            "text_config": self.text,
            "tie_word_embeddings": False,
            "transformers_version": transformers.__version__,
        }
        tensors = official_tensors(self.weights, self.model, self.text["split_ngram_parts"])
        metadata = {"progress": asdict(self.progress), "recipe": asdict(self.recipe)}
        write_checkpoint(folder, config, tensors, metadata)
        if self.curves:
            with (folder / "curves.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(self.curves[0]))
                writer.writeheader()
                writer.writerows(self.curves)

    def _row(self, recent: list[Tensor], tokens_per_s: float) -> dict[str, Any]:
        main, draft, balance, norm, rarest = torch.stack(recent).mean(0).tolist()
        if not math.isfinite(main + draft + norm):
            raise FloatingPointError(f"Step {self.progress.step}: loss {main}, draft loss {draft}, gradient {norm}.")
        return {
            "seconds": round(self.progress.seconds, 1),
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "epoch": self.progress.epoch,
            "rate": self.optimizer.param_groups[0]["lr"],
            "quantised": int(self.quantised),
            "loss": main,
            "draft_loss": draft,
            "balance": balance,
            "rarest_load": rarest,
            "gradient_norm": norm,
            "tokens_per_s": round(tokens_per_s),
        }


def check_against_reference(model: DemoModel, text: dict[str, Any], device: torch.device) -> float:
    """Compare logits and gradients with the plain reference in float32, on a few tokens.

    Gives the 90th percentile of ‖difference‖ / ‖reference‖ over the parameters.
    """
    reference = Qwen4ExpForCausalLM._from_config(
        Qwen4ExpTextConfig(**text), dtype=torch.float32, attn_implementation="eager"
    ).to(device)
    reference.set_experts_implementation("eager")
    reference.load_state_dict(model.main.state_dict())
    ids = torch.randint(text["vocab_size"], (4, 24), device=device)
    expected = reference(ids, use_cache=False).logits
    logits = model.main.lm_head(model(ids).main)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    model.zero_grad(set_to_none=False)
    (logits.float() * direction).sum().backward()
    deviations = [_deviation(logits, expected)]
    own = dict(model.main.named_parameters())
    for name, parameter in reference.named_parameters():
        if ".indexer." not in name and parameter.grad.norm() > 0:  # the indexer is not trained
            deviations.append(_deviation(own[name].grad, parameter.grad))
    return sorted(deviations)[len(deviations) * 9 // 10]


def _deviation(value: Tensor, reference: Tensor) -> float:
    return ((value.float() - reference).norm() / reference.norm()).item()


def _print(row: dict[str, Any]) -> None:
    values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
    print(" ".join(map("=".join, zip(row, values, strict=True))), flush=True)


def smoke(data: Path, out: Path, device: torch.device) -> None:
    """Exercise everything for half a minute: the reference, both phases, evaluation, saving, going on, speed."""
    recipe = Recipe(total_seconds=10.0, warmup_steps=20)
    for compiled in (False, True):
        trainer = Trainer(recipe, data, device, compiled=compiled)
        trainer.weights.publish(False)
        if not compiled:
            deviation = check_against_reference(trainer.model, trainer.text, device)
            print(f"deviation from the reference: {deviation:.4f}", flush=True)
            if not deviation < MAX_DEVIATION:
                raise SystemExit("The model does not compute what the reference computes on this device.")
        started = time.perf_counter()
        plan = trainer.samples.plan(0)
        for _ in range(3):
            trainer.step(plan)
        _synchronize(device)
        print(f"compiled={compiled}: first steps {time.perf_counter() - started:.1f} s", flush=True)
        started, tokens = time.perf_counter(), trainer.progress.tokens
        while time.perf_counter() - started < 2:
            trainer.step(plan)
            _synchronize(device)
        rate = (trainer.progress.tokens - tokens) / (time.perf_counter() - started)
        print(f"compiled={compiled}: {rate:,.0f} tokens/s", flush=True)
    trainer.run(5.0, 2.5, lambda: None, 60.0)
    trainer.save_state(out / "smoke.pt")
    trainer.save_checkpoint(out)
    resumed = Trainer(recipe, data, device)
    resumed.load_checkpoint(out)
    resumed.load_state(out / "smoke.pt")
    (out / "smoke.pt").unlink()
    resumed.run(5.0, 2.0, lambda: None, 60.0)
    print(json.dumps({"bf16": resumed.scores(False), "quantised": resumed.scores(True)}))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--data", type=Path, required=True, help="directory that tools.train_demo.data wrote")
    parser.add_argument("--out", type=Path, required=True, help="directory for the BF16 checkpoint and curves.csv")
    parser.add_argument("--state", type=Path, help="file of the whole state: read if it is there, written at the end")
    parser.add_argument("--init", type=Path, help="BF16 checkpoint to go on from if there is no state")
    parser.add_argument("--run-seconds", type=float, default=500.0, help="length of this run")
    parser.add_argument("--total-seconds", type=float, default=960.0, help="length of all runs")
    parser.add_argument("--compile", action="store_true", help="compile the hyper-connections")
    parser.add_argument("--smoke", action="store_true", help="try everything for half a minute instead")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.smoke:
        smoke(arguments.data, arguments.out, device)
        return
    recipe = Recipe(total_seconds=arguments.total_seconds)
    trainer = Trainer(recipe, arguments.data, device, compiled=arguments.compile)
    print(f"4-bit size {quantised_bytes(trainer.model) / 1e6:.2f} MB, recipe {asdict(recipe)}", flush=True)
    if arguments.state and arguments.state.exists():
        trainer.load_state(arguments.state)
    elif arguments.init:
        trainer.load_checkpoint(arguments.init)
    print(f"starting at {asdict(trainer.progress)}", flush=True)

    def save() -> None:
        trainer.save_checkpoint(arguments.out)
        if arguments.state:
            trainer.save_state(arguments.state)

    trainer.run(arguments.run_seconds, 30.0, save, 180.0)
    save()
    print(json.dumps({"bf16": trainer.scores(False), "quantised": trainer.scores(True), **asdict(trainer.progress)}))


if __name__ == "__main__":
    main()

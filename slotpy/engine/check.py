"""Checks of a model's output against a reference, and against itself at every cache size, layout and reader."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.engine.session import Session
from slotpy.errors import CheckpointError, SlotpyError

PROMPT_TOKENS = 48


def compare_with_reference(directory: Path, reference: Path, options: EngineOptions) -> Iterator[tuple[str, float]]:
    """Yield (how it was computed, max abs error of the logits) for one pass, for passes of 16, and token by token.

    The reference holds `input_ids` (1, T) or (T,) and `logits_fp32` (T, V); the model computes in float32.
    """
    tokens, expected = _read_reference(reference)
    loaded = load(directory, replace(options, float32=True))
    try:
        for name, size in (("one pass", len(tokens)), ("passes of 16", 16), ("token by token", 1)):
            passes = [tokens[i : i + size] for i in range(0, len(tokens), size)]
            found = _all_logits(loaded, passes)
            if found.shape != expected.shape:
                raise CheckpointError(
                    "the reference is of another model",
                    file=reference,
                    tensor="logits_fp32",
                    expected=found.shape,
                    found=expected.shape,
                )
            difference = np.abs(found - expected)
            # NaN loses every comparison, so it would pass for the smallest error; it must be the largest.
            yield name, float(difference.max()) if np.isfinite(difference).all() else float("inf")
    finally:
        loaded.close()


def _read_reference(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            missing = {"input_ids", "logits_fp32"} - names
            if missing:
                raise CheckpointError("the reference lacks a tensor", file=path, tensor=min(missing))
            return file.get_tensor("input_ids").reshape(-1), file.get_tensor("logits_fp32")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the reference cannot be read: {error}", file=path) from error


def _all_logits(loaded: LoadedModel, passes: Sequence[np.ndarray]) -> np.ndarray:
    state = loaded.model.new_state()
    rows = []
    for tokens in passes:
        logits = loaded.model.logits(loaded.model.forward(tokens, state))
        mx.eval(logits, state.arrays())
        loaded.retire()
        rows.append(np.array(logits))
    return np.concatenate(rows)


@dataclass(frozen=True)
class Variant:
    """One way to run the same model: which directory, how many slots, and which reader."""

    directory: Path
    layout: str
    slots: int
    native: bool

    def describe(self) -> str:
        return f"{self.slots:>6} slots  {self.layout:<8}  {'native' if self.native else 'python'} reader"


def digest(variant: Variant, num_tokens: int, options: EngineOptions) -> tuple[str, float]:
    """Prefill a fixed prompt and decode greedily: returns SHA-256 over all logits, and the expert hit rate."""
    loaded = load(variant.directory, replace(options, slots=variant.slots, native=variant.native))
    try:
        vocab = loaded.model.config.vocab_size
        prompt = np.random.default_rng(1).integers(0, vocab, PROMPT_TOKENS).tolist()
        session = Session(loaded, num_valid_ids=vocab)
        logits, found = session.prefill(prompt), hashlib.sha256()
        for _ in range(num_tokens):
            assert logits is not None
            if not np.isfinite(logits).all():  # all sizes may agree on nonsense
                raise SlotpyError(
                    f"The logits are not finite with {variant.describe().strip()}.",
                    hint="Compare the files with their published SHA-256. If they are right, the backend is wrong.",
                )
            found.update(logits.tobytes())
            logits = session.step([int(logits.argmax())])
        counters = loaded.experts.table.counters
        return found.hexdigest(), counters.hits / max(1, counters.hits + counters.misses)
    finally:
        loaded.close()

"""Pick the next token id from logits, on the host, in numpy, and say how probable it was.

Owns the sampling options with their limits, the merge of a checkpoint's `generation_config.json` with what the user
asked for, the random stream of one reply, and log-probabilities. Knows no tokenizer and no model; serves
engine/session.py.

The filters run in the order of llama.cpp's default chain: penalties, top_k, top_p, min_p, temperature. So top_p and
min_p look at the untempered distribution of what is left, and temperature only decides among the survivors.

Source: llama.cpp, common/common.h (`common_params_sampling::samplers`) and src/llama-sampler.cpp
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from slotpy.errors import SlotpyError, UsageError

_SEED_LIMIT = 1 << 64

_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    # Wide enough to force or forbid a token, narrow enough that no penalised logit leaves float32.
    "presence_penalty": (-1000.0, 1000.0),
    "frequency_penalty": (-1000.0, 1000.0),
    "repeat_penalty": (0.001, 1000.0),
    "repeat_last_n": (-1, math.inf),
    "seed": (0, _SEED_LIMIT - 1),
}
_INTEGERS = ("top_k", "repeat_last_n", "seed")

# generation_config.json speaks transformers' names.
_GENERATION_CONFIG_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


@dataclass(frozen=True)
class SamplingParams:
    """Say how the tokens of one reply are chosen. The defaults leave the model's distribution as it is.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off; `top_p` 0 keeps one token. The penalties look at the
    last `repeat_last_n` tokens of prompt and reply (0: none, -1: all). `seed` None draws a fresh one per reply.

    Raises: UsageError naming the option, its limits and the value, for anything out of range or not a number.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "seed" or self.seed is not None:
                _check(field.name, getattr(self, field.name))

    @classmethod
    def merge(
        cls, generation_config: Mapping[str, Any], options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> "SamplingParams":
        """Merge a checkpoint's `generation_config.json` (`{}` when it has none) with options; a None is not given.

        Options win over the file, the file over the defaults; `do_sample: false` in the file means temperature 0.
        """
        values = dict(defaults or {})
        for key, name in _GENERATION_CONFIG_KEYS.items():
            if generation_config.get(key) is not None:
                values[name] = generation_config[key]
        if generation_config.get("do_sample") is False:
            values["temperature"] = 0.0
        values.update({name: value for name, value in options.items() if value is not None})
        return cls(**values)

    @property
    def penalises(self) -> bool:
        """Tell whether any penalty can change a logit."""
        neutral = self.presence_penalty == 0 and self.frequency_penalty == 0 and self.repeat_penalty == 1
        return self.repeat_last_n != 0 and not neutral


@dataclass(frozen=True)
class Logprobs:
    """Give the natural logarithm of a chosen token's probability, and `top`: the likeliest (id, logarithm), best first.

    They are the model's own, before penalties, filters, temperature and constraint.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: np.ndarray, token: int, num_top: int) -> "Logprobs":
        """Work them out from the float32 logits (V,) of the valid ids. Of equal ones, the lower id comes first."""
        values = logits.astype(np.float64)
        values -= values.max()
        values -= math.log(np.exp(values).sum())
        best = _top_k(logits, num_top) if num_top else np.empty(0, dtype=np.int64)
        best = best[np.argsort(-values[best], kind="stable")]
        return cls(float(values[token]), tuple((int(i), float(values[i])) for i in best))


class Sampled(NamedTuple):
    """One token of a reply. `logprobs` is None unless they were asked for."""

    token: int
    logprobs: Logprobs | None


def fresh_seed() -> int:
    """Draw a seed from the system's entropy, short enough to be typed again."""
    return secrets.randbits(32)


class Sampler:
    """Choose the tokens of one reply: one random stream (PCG64), started from `seed`.

    Ids from `num_valid_ids` on are rows that pad the vocabulary: they are never chosen.
    """

    def __init__(self, params: SamplingParams, num_valid_ids: int) -> None:
        assert num_valid_ids > 0
        self.params = params
        self.num_valid_ids = num_valid_ids
        self.seed = fresh_seed() if params.seed is None else params.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: np.ndarray, history: Sequence[int]) -> int:
        """Choose a token id from float32 `logits` (V,), which stay as they are. One at -inf is forbidden.

        `history` is every token so far, prompt included. Equal logits are ranked by lower id.

        Raises: SlotpyError when the logits hold a NaN or no finite maximum: sampling from those would hide a fault.
        """
        ids, weights = self.candidates(logits, history)
        return int(ids[self._draw(weights)]) if len(ids) > 1 else int(ids[0])

    def candidates(self, logits: np.ndarray, history: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Give the ids that `sample` may choose, ascending, and their weights: probabilities up to a common factor."""
        logits = logits[: self.num_valid_ids]
        if self.params.penalises:
            logits = self._penalise(logits, history)
        best = int(np.argmax(logits))  # the first NaN if there is one, else the lowest id of the maximum
        if not np.isfinite(logits[best]):
            raise SlotpyError(
                f"The model gave logits without a finite maximum (id {best}: {logits[best]}).",
                hint="The weights may be damaged: compare the files with their published SHA-256.",
            )
        if self.params.temperature == 0:
            return np.array([best]), np.ones(1)
        return self._filter(logits, logits[best])

    def _penalise(self, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        p = self.params
        window = history if p.repeat_last_n == -1 else history[-p.repeat_last_n :]
        seen, counts = np.unique(np.asarray(window, dtype=np.int64), return_counts=True)
        seen, counts = seen[seen < len(logits)], counts[seen < len(logits)]
        values = logits[seen].astype(np.float64)
        values = np.where(values > 0, values / p.repeat_penalty, values * p.repeat_penalty)
        logits = logits.copy()
        logits[seen] = values - counts * p.frequency_penalty - p.presence_penalty
        return logits

    def _filter(self, logits: np.ndarray, maximum: np.float32) -> tuple[np.ndarray, np.ndarray]:
        p = self.params
        ids = _top_k(logits, p.top_k or len(logits))
        distance = logits[ids].astype(np.float64) - np.float64(maximum)
        if p.top_p < 1:
            kept = _top_p(np.exp(distance), p.top_p)
            ids, distance = ids[kept], distance[kept]
        if p.min_p > 0:
            kept = np.flatnonzero(distance >= math.log(p.min_p))
            ids, distance = ids[kept], distance[kept]
        if p.temperature != 1:
            with np.errstate(over="ignore"):  # a tiny temperature sends every distance but 0 to -inf: weight 0
                distance = distance / p.temperature
        return ids, np.exp(distance)

    def _draw(self, weights: np.ndarray) -> int:
        """Draw an index with probability weight / sum, from the running sum itself so that nothing has to add to 1."""
        cumulative = np.cumsum(weights)
        # The best candidate weighs 1, so the total is at least 1, and random() is at most 1 - 2**-53: their product
        # rounds to less than the total, and the index it falls on exists and has weight.
        return int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))


def _top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Give the ids of the k highest logits, ascending; of equal ones at the edge, the lower ids; of -inf ones, none."""
    if logits.min() == -np.inf:
        # Partitioning a vocabulary of which a grammar forbids most takes 15 times as long as one of distinct logits.
        ids = np.flatnonzero(logits > -np.inf)
        return ids[_top_k(logits[ids], k)]
    if k >= len(logits):
        return np.arange(len(logits))
    edge = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = np.flatnonzero(logits > edge)
    ties = np.flatnonzero(logits == edge)[: k - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _top_p(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Give the indexes, ascending, of the fewest highest weights that hold `top_p` of the sum; at least one."""
    total = weights.sum()
    # All weights below this hold at most half of the 1 - top_p that may go, so the others contain the answer: far
    # fewer have to be sorted. Half, so that rounding in the sums cannot matter.
    contenders = np.flatnonzero(weights >= (1 - top_p) / 2 * total / len(weights))
    order = contenders[np.argsort(-weights[contenders], kind="stable")]
    length = np.searchsorted(np.cumsum(weights[order]), top_p * total, side="left") + 1
    return np.sort(order[:length])


def _check(name: str, value: object) -> None:
    low, high = _LIMITS[name]
    wanted = "a whole number" if name in _INTEGERS else "a number"
    limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    if name == "seed":
        limits = "from 0 to 2**64 - 1"
    number = not isinstance(value, bool) and isinstance(value, Integral if name in _INTEGERS else Real)
    if not number or not low <= value <= high or value == math.inf:  # type: ignore[operator]  # NaN fails the limits
        raise UsageError(f"{name} must be {wanted} {limits}, got {value!r}.")

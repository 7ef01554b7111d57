"""The n-gram hash: its constants, and the table rows that a token and the tokens before it select.

Owns integer arithmetic only: no file, no array library but numpy. The rows are fetched elsewhere.

Source: transformers 5.24.0, models/qwen4_exp/modeling_qwen4_exp.py (Qwen4ExpTextNGramEmbedding).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, islice

import numpy as np
import numpy.typing as npt

from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig
from slotpy.errors import UsageError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HashConstants:
    """Hold one multiplier per n-gram position, the prime size and first row of each head, and the padded row count."""

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    num_rows: int


def hash_constants(config: Qwen4ExpConfig) -> HashConstants:
    """Derive the constants that a checkpoint also stores as I64 tensors."""
    return _derive(
        config.seed,
        config.vocab_size,
        config.ngram_size,
        config.num_ngram_heads,
        config.ngram_vocab_size_base,
        config.make_ngram_vocab_size_divisible_by,
    )


@lru_cache(maxsize=8)
def _derive(seed: int, vocab_size: int, ngram_size: int, num_heads: int, base: int, divisor: int) -> HashConstants:
    # Python integers: the mixing and its remainder are unsigned 64-bit. `half` keeps token * multiplier below 2**63.
    half = max(1, (2**63 - 1) // vocab_size // 2)
    multipliers = (2 * (_splitmix64(seed + _GAMMA * (position + 1)) % half) + 1 for position in range(ngram_size))
    sizes = tuple(islice(filter(_is_prime, count(base)), num_heads))
    *offsets, total = accumulate(sizes, initial=0)
    return HashConstants(tuple(multipliers), sizes, tuple(offsets), -(-total // divisor) * divisor)


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1))


def empty_history(config: Qwen4ExpConfig) -> Ids:
    """Give the history before the first token: missing tokens count as the n-gram boundary, never as token 0."""
    return np.full(config.ngram_size - 1, config.eos_token_id, np.int64)


def ngram_ids(tokens: npt.ArrayLike, history: Ids, config: Qwen4ExpConfig) -> tuple[Ids, Ids]:
    """Hash `tokens` (T,) after `history` (ngram_size - 1,), oldest first, into table rows (T, num_ngram_heads).

    Returns the rows and the history for the tokens that follow. A boundary token hides everything before it from the
    tokens after it; it still sees what came before itself.

    Raises UsageError for a token outside the vocabulary, whose product would overflow unnoticed.
    """
    known = np.concatenate([history, np.asarray(tokens)], dtype=np.int64, casting="same_kind")  # never from floats
    outside = (known < 0) | (known >= config.vocab_size)
    if outside.any():
        raise UsageError(f"Token id {known[outside][0]} is outside the vocabulary: 0 to {config.vocab_size - 1}.")
    constants, context = hash_constants(config), len(history)
    num_tokens = len(known) - context
    mixed = known[context:] * constants.multipliers[0]
    hidden = np.zeros(num_tokens, bool)
    blocks = []
    for distance in range(1, config.ngram_size):
        before = np.where(hidden, config.eos_token_id, known[context - distance : context - distance + num_tokens])
        hidden |= before == config.eos_token_id
        mixed = mixed ^ (before * constants.multipliers[distance])
        heads = slice((distance - 1) * config.heads_per_ngram, distance * config.heads_per_ngram)
        blocks.append(mixed[:, None] % np.array(constants.head_sizes[heads]) + np.array(constants.head_offsets[heads]))
    return np.concatenate(blocks, axis=1), known[num_tokens:]

"""One conversation's timeline: tokens consumed so far, their state, and generation from there."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slotpy import budget, config
from slotpy.engine.loader import LoadedModel
from slotpy.engine.sampler import Sampler, SamplingParams
from slotpy.errors import CapacityError, UsageError
from slotpy.machine import hardware


@dataclass
class GenerationStats:
    """Measure one generation. Times are wall seconds; `read_s` is time with at least one read in flight.

    Reads include n-gram rows; hits and misses count experts only.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    hits: int = 0
    misses: int = 0
    records_read: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    peak_bytes: int = 0
    finish_reason: str = "cancelled"

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)


class Session:
    """Generate text from a growing list of tokens. One thread; one generation at a time."""

    def __init__(
        self, loaded: LoadedModel, num_valid_ids: int, check: Callable[[bool], object] = lambda between_requests: None
    ) -> None:
        """`num_valid_ids` is the tokenizer's size: ids beyond it are padding rows and are never sampled.

        `check` may resize the cache. It is called with True before a generation and with False before each decode step,
        when no slot is leased: `Governor.check`.
        """
        self._check_memory = check
        self._loaded, self._model, self._num_valid_ids = loaded, loaded.model, num_valid_ids
        self._cancelled = False
        self.stats = GenerationStats()
        self._reset()

    def _reset(self) -> None:
        self.tokens: list[int] = []
        self._state = self._model.new_state()

    def cancel(self) -> None:
        """Ask the running generation to end after its current step. Safe from a signal handler or another thread."""
        self._cancelled = True

    def generate(
        self, tokens: Sequence[int], params: SamplingParams, max_tokens: int | None, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        """Prefill what `tokens` adds to this session, then yield sampled ids until a stop id or a limit.

        The stop id is not yielded. Tokens that do not extend the session start it anew. Closing the iterator ends the
        generation. Raises UsageError for no tokens or ids out of range, CapacityError for a prompt beyond the context.
        """
        room = self._check(tokens)
        max_tokens = room if max_tokens is None else min(max_tokens, room)
        self._cancelled = False
        self.stats = GenerationStats()
        self._check_memory(True)
        meter = _Meter(self._loaded)
        try:
            yield from self._generate(list(tokens), Sampler(params, self._num_valid_ids), max_tokens, stop_ids)
        finally:
            meter.write(self.stats)

    def _generate(
        self, tokens: list[int], sampler: Sampler, max_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[int]:
        stats = self.stats
        started = time.perf_counter()
        logits = self.prefill(tokens)
        stats.prefill_s = time.perf_counter() - started
        if logits is None:
            return
        started = time.perf_counter()
        for i in range(max_tokens):
            token = sampler.sample(logits, tokens)
            stats.decode_tokens, stats.decode_s = i + 1, time.perf_counter() - started
            if token in stop_ids:
                stats.finish_reason = "stop"
                return
            tokens.append(token)
            yield token
            if self._cancelled:
                return
            if i + 1 < max_tokens:
                self._check_memory(False)
                logits = self.step([token])
        stats.finish_reason = "length"

    def prefill(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Consume tokens in passes and give the logits (V,) float32 after the last, or None when cancelled.

        The last token is always computed: where the session already consumed it, it starts anew.
        """
        done = len(self.tokens)
        if done >= len(tokens) or self.tokens != list(tokens[:done]):
            self._reset()
            done = 0
        logits = None
        while done < len(tokens):
            if self._cancelled:
                return None
            end = done + budget.pass_tokens(done, config.PREFILL_CHUNK_TOKENS, config.PREFILL_PRODUCT)
            chunk = tokens[done:end]
            logits = self.step(chunk, upcoming=tokens[end : end + len(chunk)])
            self.stats.prefill_tokens += len(chunk)
            done = end
        return logits

    def step(self, tokens: Sequence[int], *, upcoming: Sequence[int] = ()) -> np.ndarray:
        """Run tokens through the model and give the logits (V,) float32 after the last; `upcoming` tokens come next.

        States are evaluated too, so that no graph outlives the slots it reads. After an error the session is as new:
        some layers had consumed the tokens, others not.
        """
        try:
            streams = self._model.forward(_ids(tokens), self._state, upcoming=_ids(upcoming))
            logits = self._model.logits(streams[-1:])[0].astype(mx.float32)
            mx.eval(logits, self._state.arrays())
        except BaseException:
            self._loaded.abandon()
            self._reset()
            raise
        self._loaded.retire()
        self.tokens += tokens
        return np.array(logits)

    def _check(self, tokens: Sequence[int]) -> int:
        """Refuse tokens that cannot be run, and give how many more the context has room for."""
        if not tokens:
            raise UsageError("There is nothing to continue: the prompt has no tokens.", hint="Give some text.")
        vocab = self._model.config.vocab_size
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise UsageError(f"Token id {bad} is outside the model's vocabulary of {vocab}.")
        room = self._loaded.context_tokens - len(tokens)
        if room < 1:
            raise CapacityError(
                f"The prompt has {len(tokens)} tokens; the context holds {self._loaded.context_tokens}.",
                hint="Shorten the prompt.",
            )
        return room


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


class _Meter:
    """Take the counters' differences over one generation."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._before = self._counters()

    def _counters(self) -> dict[str, float]:
        experts, rows, store = self._loaded.experts, self._loaded.rows, self._loaded.store
        return {
            "hits": experts.table.counters.hits,
            "misses": experts.table.counters.misses,
            "records_read": experts.records_read + rows.records_read,
            "bytes_read": experts.bytes_read + rows.bytes_read,
            "read_s": store.counters().busy_s,
        }

    def write(self, stats: GenerationStats) -> None:
        for name, value in self._counters().items():
            setattr(stats, name, value - self._before[name])
        stats.peak_bytes = hardware.peak_memory_bytes()

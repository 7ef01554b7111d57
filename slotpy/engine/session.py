"""One conversation's timeline: tokens consumed so far, their state, and generation from there."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from slotpy import budget, config
from slotpy.engine.grammar import Constraint
from slotpy.engine.loader import LoadedModel
from slotpy.engine.sampler import Logprobs, Sampled, Sampler, SamplingParams
from slotpy.errors import PromptTooLongError, UsageError
from slotpy.machine import hardware
from slotpy.models.qwen4_exp import StateMark


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
        self._marks: dict[int, StateMark] = {}  # by the number of tokens before them

    def cancel(self) -> None:
        """Ask the running generation to end after its current step. Safe from a signal handler or another thread."""
        self._cancelled = True

    def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        max_tokens: int | None,
        stop_ids: frozenset[int],
        *,
        constraint: Constraint | None = None,
        top_logprobs: int | None = None,
    ) -> Iterator[Sampled]:
        """Prefill what `tokens` adds to this session, then yield sampled tokens until a stop id or a limit.

        The stop id is not yielded. Tokens that do not extend the session start it anew. Closing the iterator ends the
        generation. `constraint` is for this reply alone; whoever iterates may start it between two tokens.
        `top_logprobs` None gives no log-probabilities, a number those of the token and of so many likeliest ones.

        A `cancel` counts from this call on, also before the first token is asked for. Raises: UsageError for no tokens
        or ids out of range, PromptTooLongError for one beyond the context.
        """
        self._cancelled = False
        self.stats = GenerationStats()
        room = self._check(tokens, room_for=1)
        max_tokens = room if max_tokens is None else min(max_tokens, room)
        choose = _Chooser(Sampler(params, self._num_valid_ids), constraint, top_logprobs)
        return self._metered(list(tokens), choose, max_tokens, stop_ids)

    def _metered(
        self, tokens: list[int], choose: "_Chooser", max_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[Sampled]:
        self._check_memory(True)
        meter = _Meter(self._loaded)
        try:
            yield from self._generate(tokens, choose, max_tokens, stop_ids)
        finally:
            meter.write(self.stats)

    def _generate(
        self, tokens: list[int], choose: "_Chooser", max_tokens: int, stop_ids: frozenset[int]
    ) -> Iterator[Sampled]:
        stats = self.stats
        started = time.perf_counter()
        logits = self.prefill(tokens)
        stats.prefill_s = time.perf_counter() - started
        if logits is None:
            return
        started = time.perf_counter()
        for i in range(max_tokens):
            sampled = choose(logits, tokens)
            stats.decode_tokens, stats.decode_s = i + 1, time.perf_counter() - started
            if sampled.token in stop_ids:
                stats.finish_reason = "stop"
                return
            tokens.append(sampled.token)
            yield sampled
            if self._cancelled:
                return
            if i + 1 < max_tokens:
                self._check_memory(False)
                logits = self.step([sampled.token])
        stats.finish_reason = "length"

    def prefill(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Consume tokens in passes and give the logits (V,) float32 after the last, or None when cancelled.

        Goes on from what the session has consumed, or from a mark before the first token that differs.
        """
        done = self._go_back(tokens)
        logits = None
        for chunk, upcoming, is_whole in _passes(tokens, done):
            if self._cancelled:
                return None
            begun = len(self.tokens)
            logits = self.step(chunk, upcoming=upcoming)
            self.stats.prefill_tokens += len(chunk)
            if is_whole and begun == max(self._marks, default=0):
                self._mark()
        return logits

    def _go_back(self, tokens: Sequence[int]) -> int:
        """Forget what `tokens` does not go on from; gives how many of them are consumed, never all."""
        num_common = _num_common(self.tokens, tokens)
        if num_common == len(self.tokens) < len(tokens):
            return num_common
        kept = [position for position in self._marks if position <= num_common and position < len(tokens)]
        if not kept:
            self._reset()
            return 0
        self._marks = {position: self._marks[position] for position in kept}
        self.tokens = self.tokens[: max(kept)]
        self._state.rewind(self._marks[max(kept)])
        return max(kept)

    def _mark(self) -> None:
        """Remember this place: the end of a pass that a new session would make too, so that the bits are the same.

        Few marks are kept, the denser the nearer to the end: most conversations change there.
        """
        end = len(self.tokens)
        self._marks[end] = self._state.mark()
        if len(self._marks) > config.SESSION_MARKS:
            places = [0, *self._marks]
            gaps = {b: (c - a) / (end - a) for a, b, c in zip(places, places[1:], places[2:], strict=False)}
            del self._marks[min(gaps, key=lambda place: gaps[place])]

    def step(self, tokens: Sequence[int], *, upcoming: Sequence[int] = ()) -> np.ndarray:
        """Run tokens through the model and give the logits (V,) float32 after the last; `upcoming` tokens come next.

        After an error the session is as new: some layers had consumed the tokens, others not.
        """
        return self._run(tokens, upcoming, self._model.logits)

    def embed(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Give the final hidden state (D,) float32 of the last token, not normalised, or None when cancelled.

        The session starts anew with it and is left as new. Raises: UsageError for no tokens or ids out of range,
        PromptTooLongError for more than the context holds.
        """
        self._cancelled = False
        self._check(tokens, room_for=0)
        self._check_memory(True)
        self._reset()
        hidden = None
        for chunk, upcoming, _ in _passes(tokens, 0):
            if self._cancelled:
                hidden = None
                break
            hidden = self._run(chunk, upcoming, self._model.hidden)
        self._reset()
        return hidden

    def _run(
        self, tokens: Sequence[int], upcoming: Sequence[int], output: Callable[[mx.array], mx.array]
    ) -> np.ndarray:
        """Run tokens and give the output of the last: states are evaluated too, so no graph outlives its slots."""
        try:
            streams = self._model.forward(_ids(tokens), self._state, upcoming=_ids(upcoming))
            found = output(streams[-1:])[0].astype(mx.float32)
            mx.eval(found, self._state.arrays())
        except BaseException:
            self._loaded.abandon()
            self._reset()
            raise
        self._loaded.retire()
        self.tokens += tokens
        return np.array(found)

    def _check(self, tokens: Sequence[int], room_for: int) -> int:
        """Refuse tokens that cannot be run or leave no room for so many, and give how many the context has room for."""
        if not tokens:
            raise UsageError("There is nothing to continue: the prompt has no tokens.", hint="Give some text.")
        vocab = self._model.config.vocab_size
        bad = next((t for t in tokens if not 0 <= t < vocab), None)
        if bad is not None:
            raise UsageError(f"Token id {bad} is outside the model's vocabulary of {vocab}.")
        room = self._loaded.context_tokens - len(tokens)
        if room < room_for:
            raise PromptTooLongError(
                f"The prompt has {len(tokens)} tokens; the context holds {self._loaded.context_tokens}.",
                hint="Shorten the prompt.",
            )
        return room


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def _passes(tokens: Sequence[int], done: int) -> Iterator[tuple[Sequence[int], Sequence[int], bool]]:
    """Cut the tokens that are not done yet into the chunks of a prefill: (chunk, the next one, whether it is whole).

    The chunks end where those of a new session end, whatever is done already.
    """
    start, end = 0, _pass_end(0)
    while start < len(tokens):
        following = _pass_end(end)
        if end > done:
            yield tokens[max(start, done) : end], tokens[end:following], end <= len(tokens)
        start, end = end, following


def _pass_end(start: int) -> int:
    return start + budget.pass_tokens(start, config.PREFILL_CHUNK_TOKENS, config.PREFILL_PRODUCT)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens at the beginning that are the same."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


@dataclass(frozen=True)
class _Chooser:
    """Choose the tokens of one reply: within its constraint, with log-probabilities if they are asked for."""

    sampler: Sampler
    constraint: Constraint | None
    top_logprobs: int | None

    def __call__(self, logits: np.ndarray, history: Sequence[int]) -> Sampled:
        allowed = logits if self.constraint is None else self.constraint.apply(logits)
        token = self.sampler.sample(allowed, history)
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.top_logprobs is None:
            return Sampled(token, None)
        return Sampled(token, Logprobs.of(logits[: self.sampler.num_valid_ids], token, self.top_logprobs))


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

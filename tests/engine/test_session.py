"""A session's timeline on the golden model: what is prefilled, when it ends, and that nothing leaks between replies."""

import dataclasses
import os
import shutil

import mlx.core as mx
import numpy as np
import pytest

from slotpy import config
from slotpy.engine.loader import EngineOptions, load
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.errors import CapacityError, ReadError, UsageError
from slotpy.slots.resizing import resize_within
from tests.golden_model import GOLDEN, REF, TOKENS, load_golden

GREEDY = SamplingParams(temperature=0)
PROMPT = TOKENS[:20].tolist()


@pytest.fixture(scope="module")
def loaded():
    model = load_golden()
    yield model
    model.close()


@pytest.fixture
def session(loaded):
    return Session(loaded, num_valid_ids=256)


def greedy(session, tokens, count, stop_ids=frozenset()):
    return [sampled.token for sampled in session.generate(tokens, GREEDY, count, stop_ids)]


def test_greedy_reply_follows_the_reference_argmax(session):
    first = greedy(session, TOKENS.tolist(), 1)
    assert first == [int(REF["logits_fp32"][-1].argmax())]


def test_reply_ends_at_a_stop_id_which_is_not_yielded(session):
    reply = greedy(session, PROMPT, 8)
    assert greedy(session, PROMPT, 8, frozenset([reply[3]])) == reply[: reply.index(reply[3])]
    assert session.stats.finish_reason == "stop"


def test_reply_ends_at_the_length_limit(session):
    assert len(greedy(session, PROMPT, 5)) == 5
    assert session.stats.finish_reason == "length"
    assert session.stats.decode_tokens == 5


def test_reply_never_passes_the_context(session, loaded):
    room = loaded.context_tokens - len(PROMPT)
    assert len(greedy(session, PROMPT, None)) == room


# Going back -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_passes(monkeypatch):
    """Passes of eight tokens, so that a short prompt has several."""
    monkeypatch.setattr(config, "PREFILL_CHUNK_TOKENS", 8)


def logits(session, tokens):
    found = session.prefill(tokens).tobytes()
    computed, session.stats.prefill_tokens = session.stats.prefill_tokens, 0
    return found, computed


def fresh(loaded, tokens):
    return logits(Session(loaded, num_valid_ids=256), tokens)[0]


@pytest.mark.parametrize(("num_common", "num_computed"), [(19, 16 + 20 - 32), (16, 4), (15, 12), (9, 12), (7, 20)])
def test_a_prompt_that_differs_goes_on_from_the_last_pass_that_is_the_same(
    session, loaded, short_passes, num_common, num_computed
):
    greedy(session, PROMPT, 6)
    other = [*PROMPT[:num_common], *(token ^ 1 for token in PROMPT[num_common:])]
    session.stats.prefill_tokens = 0
    assert logits(session, other) == (fresh(loaded, other), num_computed)


def test_the_same_prompt_again_computes_its_last_pass_alone(session, loaded, short_passes):
    assert logits(session, PROMPT) == (fresh(loaded, PROMPT), 20)
    for prompt, computed in ((PROMPT, 4), (PROMPT[:16], 8), (PROMPT, 4)):
        assert logits(session, prompt) == (fresh(loaded, prompt), computed)


def test_a_conversation_can_go_back_again_and_again(session, loaded, short_passes):
    long = TOKENS.tolist()[:40]
    session.prefill(long)
    for changed in (30, 26, 25):
        other = [*long[:changed], *(token ^ 1 for token in long[changed:])]
        session.stats.prefill_tokens = 0
        assert logits(session, other) == (fresh(loaded, other), 40 - 24)


def test_passes_end_where_those_of_a_new_session_do(session, loaded, short_passes, monkeypatch):
    session.prefill(PROMPT[:11])
    lengths = []
    step = session.step
    monkeypatch.setattr(session, "step", lambda tokens, **more: lengths.append(len(tokens)) or step(tokens, **more))
    session.prefill(PROMPT)
    assert lengths == [5, 4]
    assert list(session._marks) == [8], "the end of a pass that was cut in two has other bits"


def test_few_places_are_kept_and_the_newest_is_one(session, short_passes):
    session.prefill(TOKENS.tolist()[:48])
    assert len(session._marks) == config.SESSION_MARKS and max(session._marks) == 48


def test_a_place_costs_what_is_planned_for_it(session, loaded, short_passes):
    session.prefill(PROMPT)
    mark = session._marks[16]
    arrays = [mark.ngram_conv]
    for mixer in mark.mixers:
        arrays += [mixer.conv, mixer.recurrent] if hasattr(mixer, "conv") else [mixer.open_keys]
    assert config.SESSION_MARKS * sum(array.nbytes for array in arrays) <= loaded.sizes.prefix_cache_bytes


# Replies --------------------------------------------------------------------------------------------------------------


def test_extending_the_conversation_prefills_only_what_is_new(session):
    reply = greedy(session, PROMPT, 6)
    longer = PROMPT + reply + [9, 10, 11]
    continued = greedy(session, longer, 6)
    # The last token of the reply was never consumed, so it is prefilled with the new ones.
    assert session.stats.prefill_tokens == 4
    assert session.tokens[: len(longer)] == longer
    fresh = Session(session._loaded, num_valid_ids=256)
    assert greedy(fresh, longer, 6) == continued


def test_changed_history_starts_the_session_anew(session, loaded):
    greedy(session, PROMPT, 6)
    other = [3, *PROMPT[1:]]
    again = greedy(session, other, 6)
    assert session.stats.prefill_tokens == len(other)
    assert again == greedy(Session(loaded, num_valid_ids=256), other, 6)


def test_same_prompt_twice_gives_the_same_reply(session):
    assert greedy(session, PROMPT, 6) == greedy(session, PROMPT, 6)


def test_closing_the_iterator_ends_the_reply_and_keeps_the_session_usable(session):
    replies = session.generate(PROMPT, GREEDY, 50, frozenset())
    taken = [next(replies).token for _ in range(3)]
    replies.close()
    assert session.stats.finish_reason == "cancelled"
    assert greedy(session, PROMPT, 3) == taken


def test_cancel_ends_the_reply_after_the_current_token(session):
    taken = []
    for token, _ in session.generate(PROMPT, GREEDY, 50, frozenset()):
        taken.append(token)
        if len(taken) == 4:
            session.cancel()
    assert len(taken) == 4
    assert session.stats.finish_reason == "cancelled"


def test_cancel_before_the_first_token_is_asked_for_counts(session):
    replies = session.generate(PROMPT, GREEDY, 50, frozenset())
    session.cancel()
    assert list(replies) == [] and session.stats.finish_reason == "cancelled"


def test_cancel_during_prefill_stops_between_passes(session, monkeypatch):
    monkeypatch.setattr("slotpy.engine.session.config.PREFILL_CHUNK_TOKENS", 4)
    step = session.step

    def step_then_cancel(tokens, **upcoming):
        session.cancel()
        return step(tokens, **upcoming)

    monkeypatch.setattr(session, "step", step_then_cancel)
    assert greedy(session, PROMPT, 5) == []
    assert session.stats.prefill_tokens == 4


def test_prefill_in_passes_gives_the_same_reply(session, loaded, monkeypatch):
    whole = greedy(session, PROMPT, 6)
    monkeypatch.setattr("slotpy.engine.session.config.PREFILL_CHUNK_TOKENS", 7)
    assert greedy(Session(loaded, num_valid_ids=256), PROMPT, 6) == whole


def test_rows_of_the_next_pass_are_read_while_this_one_computes(loaded, monkeypatch):
    monkeypatch.setattr("slotpy.engine.session.config.PREFILL_CHUNK_TOKENS", 7)
    resize_within(loaded.rows, 1, 1 << 24)
    resize_within(loaded.rows, loaded.rows.records.num_records, 1 << 24)
    before = dataclasses.replace(loaded.rows.table.counters)
    Session(loaded, num_valid_ids=256).prefill(PROMPT)
    counters = loaded.rows.table.counters
    assert counters.prefetch_hits - before.prefetch_hits == counters.prefetches - before.prefetches > 0


def test_seed_reproduces_a_sampled_reply(session):
    params = SamplingParams(temperature=1.5, seed=5)
    first, second = (list(session.generate(PROMPT, params, 12, frozenset())) for _ in range(2))
    assert first == second
    assert first != list(session.generate(PROMPT, SamplingParams(temperature=1.5, seed=6), 12, frozenset()))


class Corridor:
    """Stand in for a Constraint: only every id after the last is allowed, once it has been started."""

    def __init__(self):
        self.active, self.accepted = False, []

    def start(self):
        self.active = True

    def apply(self, logits):
        masked = np.full_like(logits, -np.inf)
        allowed = self.accepted[-1] + 1 if self.active else int(logits.argmax())
        masked[allowed] = logits[allowed]
        return masked

    def accept(self, token):
        self.accepted.append(token)


def test_constraint_holds_from_where_it_is_started(session):
    free = greedy(session, PROMPT, 3)
    corridor, reply = Corridor(), []
    for token, _ in session.generate(PROMPT, GREEDY, 8, frozenset([free[2] + 5]), constraint=corridor):
        reply.append(token)
        if len(reply) == 3:
            corridor.start()
    assert reply == [*free, free[2] + 1, free[2] + 2, free[2] + 3, free[2] + 4]
    assert corridor.accepted == [*reply, free[2] + 5]
    assert session.stats.finish_reason == "stop"


def test_logprobs_are_of_the_raw_logits_over_the_valid_ids(loaded):
    logits = Session(loaded, num_valid_ids=256).prefill(PROMPT).astype(np.float64)
    expected = logits[:200] - np.log(np.exp(logits[:200]).sum())
    params = SamplingParams(temperature=3.0, top_k=4, presence_penalty=2.0, seed=3)
    session, corridor = Session(loaded, num_valid_ids=200), Corridor()
    corridor.accepted.append(41)
    corridor.start()
    ((token, logprobs),) = session.generate(PROMPT, params, 1, frozenset(), constraint=corridor, top_logprobs=5)
    assert token == 42
    assert logprobs.logprob == pytest.approx(expected[42], abs=1e-6)
    best = np.argsort(-expected)[:5]
    assert [i for i, _ in logprobs.top] == best.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(expected[best], abs=1e-6)
    assert [s.logprobs.top for s in session.generate(PROMPT, GREEDY, 2, frozenset(), top_logprobs=0)] == [(), ()]
    assert [s.logprobs for s in session.generate(PROMPT, GREEDY, 2, frozenset())] == [None, None]


def test_embedding_is_what_the_output_matrix_reads(session, loaded):
    hidden = session.embed(TOKENS.tolist())
    assert hidden.dtype == np.float32
    logits = loaded.model.lm_head(mx.array(hidden)[None])[0]
    assert np.abs(np.array(logits) - REF["logits_fp32"][-1]).max() < 1e-4


def test_embedding_starts_anew_and_leaves_the_session_as_new(session, monkeypatch):
    alone = session.embed(PROMPT)
    reply = greedy(session, PROMPT, 4)
    monkeypatch.setattr("slotpy.engine.session.config.PREFILL_CHUNK_TOKENS", 7)
    assert np.abs(session.embed(PROMPT) - alone).max() < 1e-4
    assert session.tokens == []
    assert greedy(session, PROMPT, 4) == reply


def test_embedding_may_fill_the_context_and_no_more(session):
    assert session.embed([1] * 256).shape == (64,)
    with pytest.raises(CapacityError, match="257 tokens"):
        session.embed([1] * 257)
    with pytest.raises(UsageError, match="no tokens"):
        session.embed([])


def test_cancelled_embedding_gives_nothing(session, monkeypatch):
    monkeypatch.setattr("slotpy.engine.session.config.PREFILL_CHUNK_TOKENS", 4)
    run = session._run

    def run_then_cancel(*arguments):
        session.cancel()
        return run(*arguments)

    monkeypatch.setattr(session, "_run", run_then_cancel)
    assert session.embed(PROMPT) is None
    assert session.tokens == []


def test_ids_beyond_the_tokenizer_are_never_sampled(loaded):
    narrow = Session(loaded, num_valid_ids=10)
    reply = narrow.generate(PROMPT, SamplingParams(temperature=2.0, seed=1), 40, frozenset())
    assert max(token for token, _ in reply) < 10


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [([], UsageError, "no tokens"), ([1, 256], UsageError, "256"), ([1] * 256, CapacityError, "256 tokens")],
)
def test_prompts_that_cannot_run_are_refused_with_the_numbers(session, tokens, error, words):
    with pytest.raises(error, match=words):
        greedy(session, tokens, 1)


def test_stats_count_experts_and_reads(loaded):
    session = Session(loaded, num_valid_ids=256)
    greedy(session, PROMPT, 5)
    stats = session.stats
    asked = stats.hits + stats.misses
    config = loaded.model.config
    # Four decode steps ask for each layer's experts singly; a prefill pass asks for each distinct one once.
    assert asked >= 4 * config.num_hidden_layers * config.num_experts_per_tok
    assert stats.peak_bytes > 50 << 20
    assert stats.prefill_tokens == len(PROMPT)
    assert np.isfinite(stats.read_s)


def test_resizing_between_tokens_changes_no_byte_of_the_reply(loaded):
    plain = greedy(Session(loaded, num_valid_ids=256), PROMPT, 12)
    session, taken = Session(loaded, num_valid_ids=256), []
    sizes = [40, 3, 11, 1, 30, 7, 40, 2, 5, 9, 40, 40]
    for size, (token, _) in zip(sizes, session.generate(PROMPT, GREEDY, 12, frozenset()), strict=True):
        taken.append(token)
        resize_within(loaded.experts, size, 1 << 24)
    assert taken == plain


def test_failed_read_ends_the_reply_and_the_next_one_is_right(tmp_path):
    copy = shutil.copytree(GOLDEN, tmp_path / "copy")
    loaded = load(copy, EngineOptions(slots=4, context_tokens=256))
    session = Session(loaded, num_valid_ids=256)
    plain = greedy(session, PROMPT, 6)
    files = {f: (f.read_bytes(), f.stat()) for f in copy.glob("model-*")}
    for file in files:
        os.truncate(file, 5000)
    with pytest.raises(ReadError):
        greedy(session, PROMPT, 6)
    for file, (content, status) in files.items():
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert greedy(session, PROMPT, 6) == plain
    loaded.close()

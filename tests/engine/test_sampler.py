"""Sampling against a slow reference that walks sorted Python lists, written from the rules and not from the code."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotpy.engine.sampler import Logprobs, Sampler, SamplingParams
from slotpy.errors import SlotpyError, UsageError


def reference_distribution(params: SamplingParams, logits: list[float], history: list[int]) -> dict[int, float]:
    """Give {id: probability} of every token that may follow, one rule after the other. Logits of -inf are no tokens."""
    logits = list(logits)
    window = history if params.repeat_last_n == -1 else history[max(0, len(history) - params.repeat_last_n) :]
    for token in set(window):
        if token >= len(logits):
            continue
        if logits[token] > 0:
            logits[token] /= params.repeat_penalty
        else:
            logits[token] *= params.repeat_penalty
        logits[token] -= window.count(token) * params.frequency_penalty + params.presence_penalty
        logits[token] = float(np.float32(logits[token]))
    ranked = sorted((i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return {ranked[0]: 1.0}
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        mass = math.fsum(math.exp(logits[i] - logits[ranked[0]]) for i in ranked)
        kept, held = [], 0.0
        for i in ranked:
            kept.append(i)
            held += math.exp(logits[i] - logits[ranked[0]])
            if held >= params.top_p * mass:
                break
        ranked = kept
    if params.min_p:
        ranked = [i for i in ranked if math.exp(logits[i] - logits[ranked[0]]) >= params.min_p]
    weights = {i: math.exp((logits[i] - logits[ranked[0]]) / params.temperature) for i in ranked}
    total = math.fsum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


# Multiples of a quarter make ties common and keep every sum clear of rounding at the edges.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4) | st.just(-math.inf), min_size=1, max_size=40).filter(
    lambda logits: max(logits) > -math.inf
)


@settings(max_examples=300, deadline=None)
@given(
    logits=LOGITS,
    padding=st.integers(0, 5),
    history=st.lists(st.integers(0, 45), max_size=12),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.3, 0.8, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 3, 10, 1000]),
        top_p=st.sampled_from([0.0, 0.11, 0.53, 0.93, 1.0]),
        min_p=st.sampled_from([0.0, 0.07, 0.5, 1.0]),
        presence_penalty=st.sampled_from([0.0, 0.7, -0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.4]),
        repeat_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        repeat_last_n=st.sampled_from([-1, 0, 1, 4, 64]),
        seed=st.just(0),
    ),
)
def test_sampler_draws_from_the_distribution_of_the_reference(logits, padding, history, params):
    padded = np.array(logits + [99.0] * padding, np.float32)
    ids, weights = Sampler(params, len(logits)).candidates(padded, history)
    found = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    expected = reference_distribution(params, logits, history)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-9)


def test_penalties_follow_the_published_rule():
    # Positive logits are divided, others multiplied; presence counts once, frequency per occurrence in the window.
    params = SamplingParams(repeat_penalty=2, presence_penalty=0.25, frequency_penalty=0.5, repeat_last_n=4)
    logits = np.array([4.0, -0.5, 4.0, 4.0], np.float32)
    ids, weights = Sampler(params, 4).candidates(logits, [3, 0, 0, 1, 900])
    assert ids.tolist() == [0, 1, 2, 3]
    assert np.log(weights) + 4 == pytest.approx([4 / 2 - 0.25 - 2 * 0.5, -0.5 * 2 - 0.25 - 0.5, 4, 4])


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        (SamplingParams(top_p=0.5), [0, 1]),
        (SamplingParams(top_p=0.51), [0, 1, 2]),
        (SamplingParams(top_p=0), [0]),
        (SamplingParams(top_p=1), [0, 1, 2, 3]),
        (SamplingParams(top_k=3), [0, 1, 2]),
        (SamplingParams(top_k=2, top_p=0.5), [0]),
        (SamplingParams(min_p=1), [0, 1, 2, 3]),
    ],
)
def test_edges_keep_the_fewest_and_lowest_ids(params, ids):
    assert Sampler(params, 4).candidates(np.ones(4, np.float32), [])[0].tolist() == ids


def test_ties_stay_ordered_in_a_large_vocabulary():
    logits = np.tile(np.array([0.0, 1.0], np.float32), 5000)
    ids, _ = Sampler(SamplingParams(top_p=0.25), 10_000).candidates(logits, [])
    held = len(ids)
    assert 0 < held < 5000
    assert ids.tolist() == list(range(1, 2 * held, 2))


def test_filters_see_the_distribution_before_temperature():
    params = SamplingParams(temperature=100, top_p=0.9, min_p=0.2)
    assert Sampler(params, 3).candidates(np.array([0.0, 3.0, 1.9], np.float32), [])[0].tolist() == [1, 2]


def test_draws_follow_the_probabilities():
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.95, seed=4)
    logits = np.array([2.0, 1.0, 0.5, 0.25, 0.0, -1.0], np.float32)
    sampler = Sampler(params, 6)
    counts = np.bincount([sampler.sample(logits, []) for _ in range(4000)], minlength=6)
    expected = reference_distribution(params, logits.tolist(), [])
    for token in range(6):
        share = expected.get(token, 0.0)
        assert abs(counts[token] - 4000 * share) <= 4 * math.sqrt(4000 * share * (1 - share))


def test_greedy_is_argmax_with_the_lowest_id_on_ties():
    logits = np.array([1.0, 3.0, 3.0, -2.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=0), 4)
    assert sampler.sample(logits, [1, 1, 1]) == 1


def test_padding_ids_are_never_chosen():
    logits = np.zeros(10, np.float32)
    logits[6:] = 50.0
    assert Sampler(SamplingParams(temperature=0), 6).sample(logits, []) == 0
    sampler = Sampler(SamplingParams(seed=1), 6)
    assert {sampler.sample(logits, []) for _ in range(200)} == set(range(6))


def test_same_seed_gives_same_tokens_and_fresh_seed_is_readable():
    logits = np.linspace(0, 1, 50, dtype=np.float32)

    def reply(seed: int | None) -> tuple[list[int], int]:
        sampler = Sampler(SamplingParams(seed=seed), 50)
        return [sampler.sample(logits, []) for _ in range(30)], sampler.seed

    first, seed = reply(None)
    assert reply(seed)[0] == first
    assert reply(7) == reply(7)
    assert reply(7)[0] != reply(8)[0]
    assert reply(None)[1] != reply(None)[1]


def test_two_samplers_do_not_share_a_random_stream():
    logits = np.zeros(1000, np.float32)
    alone = Sampler(SamplingParams(seed=3), 1000)
    expected = [alone.sample(logits, []) for _ in range(5)]
    one, other = Sampler(SamplingParams(seed=3), 1000), Sampler(SamplingParams(seed=99), 1000)
    found = []
    for _ in range(5):
        other.sample(logits, [])
        np.random.random()
        random.random()
        found.append(one.sample(logits, []))
    assert found == expected


def test_sample_leaves_the_logits_as_they_are():
    logits = np.arange(8, dtype=np.float32)
    params = SamplingParams(temperature=0.5, top_k=3, repeat_penalty=2.0, seed=0)
    Sampler(params, 8).sample(logits, [7, 6])
    assert logits.tolist() == list(range(8))


def test_few_allowed_tokens_among_many_are_all_found():
    logits = np.full(100_000, -np.inf, np.float32)
    logits[[7, 99, 50_000, 99_999]] = [1, 3, 3, 2]
    for params, expected in (
        (SamplingParams(top_k=1), [99]),
        (SamplingParams(top_k=3), [99, 50_000, 99_999]),
        (SamplingParams(top_k=40), [7, 99, 50_000, 99_999]),
        (SamplingParams(top_k=40, top_p=0.5), [99, 50_000]),
        (SamplingParams(top_p=0.5), [99, 50_000]),
        (SamplingParams(min_p=0.3), [99, 50_000, 99_999]),
        (SamplingParams(temperature=1e300), [7, 99, 50_000, 99_999]),
        (SamplingParams(repeat_penalty=1.5, presence_penalty=-9, repeat_last_n=-1), [7, 99, 50_000, 99_999]),
    ):
        assert Sampler(params, len(logits)).candidates(logits, [3, 7])[0].tolist() == expected


@given(logits=LOGITS.map(lambda values: [max(value, -10.0) for value in values]), data=st.data())
@settings(max_examples=100, deadline=None)
def test_logprobs_are_the_log_softmax(logits, data):
    token, num_top = data.draw(st.integers(0, len(logits) - 1)), data.draw(st.integers(0, 20))
    found = Logprobs.of(np.array(logits, np.float32), token, num_top)
    total = math.log(math.fsum(math.exp(value) for value in logits))
    assert found.logprob == pytest.approx(logits[token] - total, abs=1e-12)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:num_top]
    assert [i for i, _ in found.top] == ranked
    assert [value for _, value in found.top] == pytest.approx([logits[i] - total for i in ranked], abs=1e-12)


def test_logprobs_of_far_apart_logits_stay_finite():
    found = Logprobs.of(np.array([-3e38, 80.0, 3e38], np.float32), 0, 3)
    assert np.isfinite(found.logprob)
    assert found.top[0] == (2, 0.0)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_no_weight_is_never_drawn(draw):
    sampler = Sampler(SamplingParams(seed=0), 4)
    sampler._random = type("Fixed", (), {"random": lambda self: draw})()
    logits = np.array([-np.inf, 1.0, 1.0, -np.inf], np.float32)
    assert sampler.sample(logits, []) in (1, 2)


def test_extreme_temperatures_stay_finite():
    logits = np.array([0.0, 5.0, 4.999], np.float32)
    assert Sampler(SamplingParams(temperature=5e-324, seed=0), 3).sample(logits, []) == 1
    hot = Sampler(SamplingParams(temperature=1e300, seed=0), 3)
    assert {hot.sample(logits, []) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("bad", [[0.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_are_refused(bad, temperature):
    with pytest.raises(SlotpyError, match="finite maximum"):
        Sampler(SamplingParams(temperature=temperature), 2).sample(np.array(bad, np.float32), [])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_p", math.nan),
        ("min_p", 2),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1.0),
        ("repeat_last_n", -2),
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", 10**400),
    ],
)
def test_a_bad_option_is_a_usage_error_that_names_it(option, value):
    with pytest.raises(UsageError, match=f"^{option} must be .* got "):
        SamplingParams(**{option: value})


def test_limits_are_inside():
    SamplingParams(temperature=0, top_k=10**9, top_p=0, min_p=1, repeat_last_n=-1, seed=(1 << 64) - 1)
    SamplingParams(top_p=1, min_p=0, seed=0, repeat_last_n=0)


def test_options_win_over_the_generation_config_and_that_over_the_defaults():
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "repetition_penalty": 1.05, "other": 1}
    merged = SamplingParams.merge(config, {"temperature": None, "top_k": 5, "seed": 9})
    assert merged == SamplingParams(temperature=0.6, top_k=5, repeat_penalty=1.05, seed=9)
    assert SamplingParams.merge({}, {}) == SamplingParams()


def test_do_sample_false_is_greedy_unless_the_user_gives_a_temperature():
    config = {"do_sample": False, "temperature": 0.6}
    assert SamplingParams.merge(config, {}).temperature == 0
    assert SamplingParams.merge(config, {"temperature": 0.9}).temperature == 0.9


def test_a_bad_generation_config_is_an_error_and_not_ignored():
    with pytest.raises(UsageError, match="top_p"):
        SamplingParams.merge({"top_p": 7}, {})

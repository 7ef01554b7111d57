import logging
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotpy.engine.sampler import SamplingParams
from slotpy.server.errors import ApiError
from slotpy.server.options import DEFAULTS, clamp_sampling, read_options

INTEGERS = ("top_k", "repeat_last_n", "seed")
NAMES = [field.name for field in fields(SamplingParams)]


def sampling(**options):
    return dict(read_options(options).sampling)


@pytest.mark.parametrize("name", NAMES)
@given(
    value=st.one_of(st.integers(), st.integers(-(10**300), 10**300), st.floats(allow_nan=False, allow_infinity=False))
)
def test_whatever_number_is_sent_the_sampler_takes_it(name, value):
    SamplingParams.merge({}, {**DEFAULTS, **sampling(**{name: value})})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, 1, 0.5, -1, 7])
def test_what_the_sampler_takes_is_not_changed(name, value):
    value = int(value) if name in INTEGERS else float(value)
    try:
        SamplingParams(**{name: value})
    except Exception:
        return
    assert clamp_sampling({name: value}) == ({} if (name, value) == ("seed", -1) else {name: value})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": -1}, {"temperature": 0}),
        ({"top_p": 7}, {"top_p": 1}),
        ({"min_p": 2}, {"min_p": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**9}, {"top_k": 10**9}),
        ({"top_k": 40.7}, {"top_k": 40}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"repeat_last_n": -1}, {"repeat_last_n": -1}),
        ({"repeat_last_n": -7}, {"repeat_last_n": -1}),
        ({"repeat_penalty": 0}, {"repeat_penalty": 1.0}),
        ({"seed": -1}, {}),
        ({"seed": -5}, {"seed": 2**64 - 5}),
        ({"seed": 2**64 + 3}, {"seed": 3}),
        ({"seed": 99999999999999999999999}, {"seed": 99999999999999999999999 % 2**64}),
        ({"temperature": None}, {}),
        ({"typical_p": 0.5, "num_gpu": 0, "num_keep": 4, "use_mmap": True}, {}),
    ],
)
def test_values_mean_the_nearest_that_there_is(given, expected):
    assert sampling(**given) == expected


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"temperature": "a"}, "of type float32"),
        ({"temperature": True}, "of type float32"),
        ({"typical_p": []}, "of type float32"),
        ({"num_ctx": "4096"}, "of type integer"),
        ({"num_thread": {}}, "of type integer"),
        ({"seed": False}, "of type integer"),
        ({"use_mmap": 1}, "of type boolean"),
        ({"stop": "x"}, "of type array"),
        ({"stop": [1]}, "of an array of strings"),
    ],
)
def test_a_wrong_type_is_refused_in_ollamas_words(option, wanted):
    with pytest.raises(ApiError) as caught:
        read_options(option)
    (name,) = option
    assert (caught.value.status, str(caught.value)) == (400, f'option "{name}" must be {wanted}')


def test_what_is_ignored_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        assert sampling(zzz=1, top_k=1) == {"top_k": 1}
        assert sampling(typical_p=0.5) == {}
    assert [message.split(":")[0] for message in caplog.messages] == ["ignored an unknown option", "ignored typical_p"]
    caplog.clear()
    sampling(typical_p=1, num_keep=4, num_gpu=0)
    assert not caplog.messages


@pytest.mark.parametrize(("given", "expected"), [(-1, None), (-2, None), (0, 0), (1, 1), (1.9, 1)])
def test_num_predict_below_zero_is_without_limit(given, expected):
    assert read_options({"num_predict": given}).num_predict == expected


@pytest.mark.parametrize(("given", "expected"), [(-1, None), (0, None), (4096, 4096)])
def test_num_ctx_of_nothing_is_no_wish(given, expected):
    assert read_options({"num_ctx": given}).num_ctx == expected


def test_options_lie_over_the_models_own():
    beneath = {"stop": ["a"], "temperature": 0.1, "num_ctx": 5}
    options = read_options({"stop": ["b"], "temperature": None, "num_ctx": 6}, beneath)
    assert (options.stops, options.sampling, options.num_ctx) == (("b",), {"temperature": 0.1}, 6)
    assert read_options({}).stops == ()

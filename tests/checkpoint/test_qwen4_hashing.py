import json
from pathlib import Path

import numpy as np
import pytest

from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig, parse_config
from slotpy.checkpoint.qwen4_exp.hashing import empty_history, hash_constants, ngram_ids
from slotpy.errors import UsageError
from tests.tiny import read_stored, tiny_config

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen4_tiny"
E = 248044  # the n-gram boundary of the published model


@pytest.fixture(scope="module")
def published() -> Qwen4ExpConfig:
    raw = tiny_config(
        vocab_size=248320, eos_token_id=E, ple_embed_dim=2560, heads_per_ngram=8, ngram_vocab_size_base=20_000_000,
        make_ngram_vocab_size_divisible_by=128, split_ngram_parts=128,
    )  # fmt: skip
    return parse_config(raw, Path("config.json"))


def test_constants_are_those_of_the_published_checkpoint(published: Qwen4ExpConfig):
    constants = hash_constants(published)
    assert constants.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert constants.head_sizes == (
        20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
        20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
    )  # fmt: skip
    assert constants.head_offsets == (
        0, 20000003, 40000026, 60000059, 80000106, 100000165, 120000228, 140000297,
        160000374, 180000455, 200000548, 220000655, 240000802, 260000955, 280001114, 300001275,
    )  # fmt: skip
    assert constants.num_rows == 320001536 == 128 * 2500012


@pytest.mark.parametrize(
    ("token", "before", "heads"),  # `before` is oldest first; heads 0, 1, 8, 9 and 15
    [
        (9707, (E, E), (16410909, 39682429, 169641436, 182022480, 300984276)),
        (11, (E, 9707), (18158303, 36390029, 175132467, 192583600, 307699687)),
        (1879, (9707, 11), (6380558, 26411572, 164226950, 190352573, 312121804)),
        (248044, (11, 1879), (18827606, 27700912, 163793416, 184135950, 318943450)),
        (100, (E, E), (5727835, 21884476, 162363667, 189466439, 305180972)),
        (248319, (E, 100), (5290736, 25470805, 161292076, 186162076, 301476513)),
    ],
)
def test_rows_are_the_published_ones(published: Qwen4ExpConfig, token: int, before: tuple[int, int], heads: tuple):
    ids, history = ngram_ids([token], np.array(before), published)
    assert ids.shape == (1, 16) and ids.dtype == np.int64
    assert tuple(ids[0, [0, 1, 8, 9, 15]]) == heads
    assert history.tolist() == [before[1], token]


def test_a_whole_prompt_gives_the_published_rows(published: Qwen4ExpConfig):
    ids, history = ngram_ids([9707, 11, 1879, E, 100, 248319], empty_history(published), published)
    assert ids[:, 0].tolist() == [16410909, 18158303, 6380558, 18827606, 5727835, 5290736]
    assert ids[:, 15].tolist() == [300984276, 307699687, 312121804, 318943450, 305180972, 301476513]
    assert history.tolist() == [100, 248319]


def test_rows_are_those_of_transformers():
    config = parse_config(json.loads((GOLDEN / "config.json").read_text()), GOLDEN / "config.json")
    reference = read_stored(GOLDEN)
    tokens, expected = reference["input_ids"][1].reshape(-1), reference["fp32.layer1.ngram_ids"][1]
    assert (tokens == config.eos_token_id).sum() >= 3
    ids, history = ngram_ids(tokens, empty_history(config), config)
    assert np.array_equal(ids, expected.reshape(ids.shape))
    assert history.tolist() == tokens[-2:].tolist()


@pytest.mark.parametrize("ngram_size", [2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_give_the_rows_of_the_whole(ngram_size: int, chunk: int):
    heads = (ngram_size - 1) * 2
    config = parse_config(tiny_config(ngram_size=ngram_size, ple_embed_dim=heads * 8), Path("config.json"))
    tokens = np.random.default_rng(0).choice([3, 7, 11, 12], 40)  # 7 is the boundary
    whole, _ = ngram_ids(tokens, empty_history(config), config)
    history, parts = empty_history(config), []
    for start in range(0, len(tokens), chunk):
        ids, history = ngram_ids(tokens[start : start + chunk], history, config)
        parts.append(ids)
    assert np.array_equal(np.concatenate(parts), whole)
    constants = hash_constants(config)
    row = whole - np.array(constants.head_offsets)
    assert (row >= 0).all() and (row < np.array(constants.head_sizes)).all()


def test_no_token_gives_no_row():
    config = parse_config(tiny_config(), Path("config.json"))
    ids, history = ngram_ids(np.empty(0, np.int64), np.array([4, 5]), config)
    assert ids.shape == (0, 4) and history.tolist() == [4, 5]


@pytest.mark.parametrize("token", [-1, 512, 2**62])
def test_a_token_outside_the_vocabulary_is_refused(token: int):
    config = parse_config(tiny_config(), Path("config.json"))
    with pytest.raises(UsageError, match=rf"{token} is outside the vocabulary: 0 to 511"):
        ngram_ids([3, token], empty_history(config), config)


def test_float_tokens_are_refused():
    config = parse_config(tiny_config(), Path("config.json"))
    with pytest.raises(TypeError):
        ngram_ids(np.array([3.0]), empty_history(config), config)

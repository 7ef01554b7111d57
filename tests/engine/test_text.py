"""Encoding and streamed decoding with the demo model's real tokenizer, against the tokenizers library itself."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from slotpy.engine.text import StreamDecoder, Tokenizer, read_json
from slotpy.errors import SlotpyError

DEMO = Path(__file__).parents[2] / "slotpy" / "data" / "demo"

TEXTS = [
    "",
    "Plain words, twice twice.",
    "  leading and trailing  \n\n",
    "naïve café — “quoted” … ½",
    "漢字とかな 한국어 Ελληνικά עברית हिन्दी",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 ❤️ ✈︎",
    "e\u0301 combined, \ufe0f alone, \u200b zero width",
    "\ufffd is a character too \ufffd",
    "\U0001d544\U0001d552 𓀀 \U0010ffff",
    "tab\tnul\x00 escape\x1b[31m",
    "<think>\nsteps\n</think>\n\nanswer",
    "\ufeffbyte order mark",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


def normal(text: str) -> str:
    return tokenizers.normalizers.NFC().normalize_str(text)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_back_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == normal(text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_as_the_library_does_it_alone(tokenizer, text):
    assert tokenizer.encode(text) == tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer):
    ticks, over = [], threading.Event()

    def tick() -> None:
        while not over.wait(0.002):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began_s = time.monotonic()
    tokenizer.encode("word " * 50_000)
    ended_s = time.monotonic()
    over.set()
    thread.join()
    assert len([at_s for at_s in ticks if began_s < at_s < ended_s]) > 5


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_whole_and_hold_no_half_character(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == normal(text)
    assert all(piece.count("\ufffd") == 0 for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_streamed_pieces_join_to_any_text(tokenizer, text):
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == normal(text)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 3049) | st.integers(0, 260), max_size=30))
def test_streamed_pieces_join_to_the_decoding_of_any_ids(tokenizer, ids):
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_of_several_tokens_arrives_with_its_last_byte(tokenizer):
    ids = tokenizer.encode("👍")
    assert len(ids) == 4
    assert streamed(tokenizer, ids) == ["", "", "", "👍", ""]


def test_a_reply_cut_inside_a_character_ends_with_one_replacement(tokenizer):
    ids = tokenizer.encode("a👍")[:-1]
    assert streamed(tokenizer, ids) == ["a", "", "", "", "\ufffd"]
    assert tokenizer.decode(ids) == "a\ufffd"


def test_special_tokens_are_recognised_in_text_and_hidden_in_output(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b<think>")
    assert ids[1] == tokenizer.token_id("<|im_end|>")
    assert ids[3] == tokenizer.token_id("<think>")
    assert streamed(tokenizer, ids) == ["a", "", "b", "<think>", ""]
    assert tokenizer.decode(ids) == "ab<think>"


def test_a_special_token_inside_a_character_does_not_break_it(tokenizer):
    first, *rest = tokenizer.encode("👍")
    ids = [first, tokenizer.token_id("<|im_end|>"), *rest]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "👍"


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b \ud83d\udc4d")) == "a\ufffdb 👍"


def test_num_ids_counts_added_tokens(tokenizer):
    assert tokenizer.num_ids == 4080
    assert tokenizer.token_id("</think>") == 4077
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.token_bytes(4080) == b""


def test_roles_of_special_tokens_are_read(tokenizer):
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_missing_tokenizer_is_an_error_that_says_what_to_copy(tmp_path):
    with pytest.raises(SlotpyError, match=r"has no tokenizer\.json.*Copy tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_config_is_optional(copy):
    (copy / "tokenizer_config.json").unlink()
    assert Tokenizer.load(copy).special_tokens == {}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b""])
def test_a_damaged_file_is_an_error_that_names_it(copy, name, content):
    (copy / name).write_bytes(content)
    with pytest.raises(SlotpyError, match=name):
        Tokenizer.load(copy)


def test_other_than_byte_level_is_refused(copy):
    edit(copy / "tokenizer.json", lambda value: value.update(decoder=None))
    with pytest.raises(SlotpyError, match="byte-level"):
        Tokenizer.load(copy)


def test_limits_of_the_training_run_do_not_cut_prompts(copy):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit(copy / "tokenizer.json", lambda value: value.update(truncation=truncation))
    assert len(Tokenizer.load(copy).encode("one two three four five")) > 3


def test_tokens_declared_only_in_the_config_are_added(copy):
    extra = {"4080": {"content": "<tool>", "special": True}, "4073": {"content": "<|endoftext|>", "special": True}}
    edit(copy / "tokenizer_config.json", lambda value: value.update(added_tokens_decoder=extra))
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.encode("<tool>") == [4080]
    assert tokenizer.decode([4080]) == ""
    assert tokenizer.num_ids == 4081


def test_files_that_disagree_on_an_id_are_refused(copy):
    extra = {"7": {"content": "<|im_end|>", "special": True}}
    edit(copy / "tokenizer_config.json", lambda value: value.update(added_tokens_decoder=extra))
    with pytest.raises(SlotpyError, match=r"4075.* 7\."):
        Tokenizer.load(copy)


def test_added_tokens_spelt_outside_the_byte_alphabet_stand_for_themselves(copy):
    extra = {"4080": {"content": "\uff5cx▁y\uff5c", "special": False}}
    edit(copy / "tokenizer_config.json", lambda value: value.update(added_tokens_decoder=extra))
    tokenizer = Tokenizer.load(copy)
    assert streamed(tokenizer, [4080]) == ["\uff5cx▁y\uff5c", ""]
    assert tokenizer.decode([4080]) == "\uff5cx▁y\uff5c"


def test_read_json_of_an_absent_file_is_empty(tmp_path):
    assert read_json(tmp_path / "absent.json") == {}

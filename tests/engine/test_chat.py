"""Templates, stop ids, stop strings and reasoning: each against a plain reading of the whole text at once."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotpy.engine.chat import ChatTemplate, Delta, ReasoningSplitter, ReplyReader, StopMatcher, load_stop_ids
from slotpy.engine.text import Tokenizer
from slotpy.errors import SlotpyError

DEMO = Path(__file__).parents[2] / "slotpy" / "data" / "demo"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


# Templates ---------------------------------------------------------------------------------------------------------


def render(source: str, messages=USER, tokens=None, **variables) -> str:
    return ChatTemplate(source, tokens or {}).render(messages, **variables)


def test_the_demo_template_renders_chatml():
    template = ChatTemplate.load(DEMO)
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert template.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_enable_thinking_opens_or_closes_the_block_and_none_leaves_it():
    template = ChatTemplate.load(DEMO)
    assert template.render(USER, enable_thinking=True).endswith("assistant\n<think>\n")
    assert template.render(USER, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert template.render(USER).endswith("assistant\n")


@pytest.mark.parametrize(
    ("source", "supported"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}", True),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", True),
        ("{{ messages[0].content }}", False),
        ("{# enable_thinking #}{{ messages[0].thinking }}", False),
    ],
)
def test_supports_thinking_says_whether_the_template_asks(source, supported):
    assert ChatTemplate(source, {}).supports_thinking is supported


def test_both_names_of_the_thinking_switch_are_set():
    assert render("{{ enable_thinking }} {{ thinking }}", enable_thinking=False) == "False False"


def test_what_published_templates_expect_is_there():
    assert render("{{ bos_token }}|{{ messages[0].content }}", tokens={"bos_token": "<s>"}) == "<s>|Hi"
    assert render("{{ {'a': 'é<&>'} | tojson }}") == '{"a": "é<&>"}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{% generation %}kept{% endgeneration %}") == "kept"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}") == "13"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\n") == "x\n"
    assert render("{% set s = namespace(n=0) %}{% for c in 'abc' %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}") == "3"
    assert render("{{ tools is none }} {{ add_generation_prompt }}") == "True True"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_the_templates_own_refusal_is_the_message():
    with pytest.raises(SlotpyError, match="refuses this conversation: Unknown role: robot"):
        render("{{ raise_exception('Unknown role: ' ~ messages[0].role) }}", [{"role": "robot", "content": ""}])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[7].content.x }}", "{{ 1 / 0 }}", "{{ {}['a'].b }}"],
)
def test_a_failing_template_is_an_error_of_the_checkpoint(source):
    with pytest.raises(SlotpyError, match="refuses"):
        render(source)


def test_a_template_that_does_not_parse_is_refused_when_loaded():
    with pytest.raises(SlotpyError, match=r"does not parse.*--raw"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_stay_inside_the_sandbox(source):
    with pytest.raises(SlotpyError):
        render(source)


def write(directory: Path, name: str, value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text)


def test_a_checkpoint_without_a_template_gives_none(tmp_path):
    assert ChatTemplate.load(tmp_path) is None


def test_the_template_file_wins_over_the_config_and_that_over_the_old_file(tmp_path):
    write(tmp_path, "chat_template.json", {"chat_template": "old"})
    assert ChatTemplate.load(tmp_path).render(USER) == "old"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "E"}})
    assert ChatTemplate.load(tmp_path).render(USER) == "config E"
    write(tmp_path, "chat_template.jinja", "file {{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render(USER) == "file E"


def test_the_default_of_several_named_templates_counts(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert ChatTemplate.load(tmp_path).render(USER) == "plain"
    write(tmp_path, "tokenizer_config.json", {"chat_template": named[:1]})
    with pytest.raises(SlotpyError, match="tool_use"):
        ChatTemplate.load(tmp_path)


# Stop ids ----------------------------------------------------------------------------------------------------------


def test_stop_ids_come_from_the_generation_config(tmp_path, tokenizer):
    write(tmp_path, "config.json", {"eos_token_id": 9})
    write(tmp_path, "generation_config.json", {"eos_token_id": [248046, 248044]})
    assert load_stop_ids(tmp_path, tokenizer) == {248046, 248044}
    write(tmp_path, "generation_config.json", {"eos_token_id": 5})
    assert load_stop_ids(tmp_path, tokenizer) == {5}


@pytest.mark.parametrize("config", [{"eos_token_id": 9}, {"text_config": {"eos_token_id": [9]}}])
def test_without_it_the_config_ends_documents_and_the_tokenizer_ends_turns(tmp_path, tokenizer, config):
    write(tmp_path, "config.json", config)
    write(tmp_path, "generation_config.json", {"eos_token_id": None})
    assert load_stop_ids(tmp_path, tokenizer) == {9, tokenizer.token_id("<|im_end|>")}


# Stop strings ------------------------------------------------------------------------------------------------------


def cut(text: str, lengths: list[int]) -> list[str]:
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    return [*pieces, text]


def first_stop(text: str, stops: list[str]) -> str:
    """Give the text before the stop string that is complete first, the longest of those that end together."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", max_size=4), max_size=3),
    lengths=st.lists(st.integers(0, 5), max_size=12),
)
def test_stop_strings_cut_the_text_however_it_arrives(text, stops, lengths):
    matcher = StopMatcher(stops)
    pieces = [matcher.push(piece) for piece in cut(text, lengths)]
    matched = matcher.matched
    assert "".join(pieces) + matcher.flush() == first_stop(text, stops)
    assert matched is None or (matched in stops and matched in text)
    assert (matched is None) == (not any(stop and stop in text for stop in stops))


@pytest.mark.parametrize(("stops", "before"), [(["abcc", "b"], "xa"), (["bc", "abc"], "x"), (["c", "abcc"], "xab")])
def test_of_several_stop_strings_the_one_complete_first_counts(stops, before):
    whole, single = StopMatcher(stops), StopMatcher(stops)
    assert whole.push("xabcc") == "".join(map(single.push, "xabcc")) == before
    assert whole.matched == single.matched


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(piece) for piece in ["Yes.", "\n", "No", "\n\nUs", "e", "r:", " x"]] == [
        "Yes.", "", "\nNo", "", "", "", "",
    ]  # fmt: skip
    assert matcher.matched == "\n\nUser:"


# Reasoning ---------------------------------------------------------------------------------------------------------


def split(text: str, lengths: list[int], *, opened: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    deltas = [delta for piece in cut(text, lengths) for delta in splitter.push(piece)] + splitter.flush()
    assert all(delta.text for delta in deltas)
    reasoning = "".join(delta.text for delta in deltas if delta.reasoning)
    return reasoning, "".join(delta.text for delta in deltas if not delta.reasoning)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nIs it?\n</think>\n\nYes.", "Is it?\n", "Yes."),
        ("\n <think>a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>never closed </thin", "never closed </thin", ""),
        ("<think>a</think>b</think><think>c", "a", "b</think><think>c"),
        ("<think>a < b </ c <think></think> d", "a < b </ c <think>", "d"),
    ],
)
def test_reasoning_is_split_wherever_the_text_is_cut(text, reasoning, answer, opened):
    if opened:
        text = text.lstrip().removeprefix("<think>")
    for size in range(1, len(text) + 1):
        assert split(text, [size] * (len(text) // size), opened=opened) == (reasoning, answer)


@pytest.mark.parametrize("text", ["Yes. <think>no</think>", "\n\n Hello", "<thi", "<thinking>", " ", "<", "</think>x"])
def test_a_reply_that_does_not_start_with_the_tag_is_all_answer(text):
    for size in range(1, len(text) + 1):
        assert split(text, [size] * (len(text) // size), opened=False) == ("", text)


def test_reasoning_arrives_without_waiting_for_its_end():
    splitter = ReasoningSplitter(opened=True)
    assert splitter.push("\nLet me") == [Delta("Let me", reasoning=True)]
    assert splitter.push(" see</th") == [Delta(" see", reasoning=True)]
    assert splitter.push("ink>\n") == []
    assert splitter.push("\nYes") == [Delta("Yes")]


# The whole reply ---------------------------------------------------------------------------------------------------


def read(tokenizer: Tokenizer, text: str, prompt: str | None, stops: tuple[str, ...] = ()) -> tuple[list[Delta], bool]:
    reader = ReplyReader(tokenizer, prompt, stops)
    deltas = []
    for token_id in tokenizer.encode(text):
        deltas += reader.push(token_id)
        if reader.stopped:
            break
    return deltas + reader.flush(), reader.stopped


def joined(deltas: list[Delta], *, reasoning: bool) -> str:
    return "".join(delta.text for delta in deltas if delta.reasoning is reasoning)


def test_a_reply_is_decoded_split_and_stopped(tokenizer):
    deltas, stopped = read(tokenizer, "<think>\n👍 é\n</think>\n\nYes 👍.\nUser: more", "prompt", ("\nUser:",))
    assert stopped
    assert joined(deltas, reasoning=True) == "👍 é\n"
    assert joined(deltas, reasoning=False) == "Yes 👍."


def test_a_prompt_that_opened_the_block_starts_in_reasoning(tokenizer):
    deltas, stopped = read(tokenizer, "so</think>Yes", "…<|im_start|>assistant\n<think>\n")
    assert not stopped
    assert deltas[0].reasoning
    assert joined(deltas, reasoning=True) == "so"
    assert joined(deltas, reasoning=False) == "Yes"


def test_a_tag_typed_by_the_user_does_not_open_the_block(tokenizer):
    deltas, _ = read(tokenizer, "Yes", "user: what does <think> do?\nassistant:\n")
    assert joined(deltas, reasoning=False) == "Yes"


def test_a_raw_completion_is_not_split(tokenizer):
    deltas, _ = read(tokenizer, "<think>a</think>b", None)
    assert deltas and joined(deltas, reasoning=False) == "<think>a</think>b"


def test_a_reply_that_ends_inside_a_character_or_a_stop_string_gives_what_it_has(tokenizer):
    reader = ReplyReader(tokenizer, "prompt", ("END",))
    ids = tokenizer.encode("xE") + tokenizer.encode("👍")[:2]
    deltas = [delta for token_id in ids for delta in reader.push(token_id)]
    assert joined(deltas + reader.flush(), reasoning=False) == "xE\ufffd"
    deltas, stopped = read(tokenizer, "xEN", "prompt", ("END",))
    assert joined(deltas, reasoning=False) == "xEN" and not stopped

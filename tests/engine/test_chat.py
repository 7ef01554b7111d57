"""Chat templates and stop ids."""

import json
import re
from pathlib import Path

import pytest

from slotpy.engine.chat import ChatTemplate, load_stop_ids
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


@pytest.mark.parametrize(
    ("source", "supported"),
    [("{% if tools %}{{ tools | tojson }}{% endif %}", True), ("{# tools #}{{ messages[0].tools }}", False)],
)
def test_supports_tools_says_whether_the_template_shows_them(source, supported):
    assert ChatTemplate(source, {}).supports_tools is supported


def test_both_names_of_the_thinking_switch_are_set():
    assert render("{{ enable_thinking }} {{ thinking }}", enable_thinking=False) == "False False"


def test_a_level_of_reasoning_reaches_the_templates_that_ask_for_one():
    assert render("{{ reasoning_effort }}", reasoning_effort="low") == "low"
    assert render("{{ reasoning_effort is defined }}") == "False"


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

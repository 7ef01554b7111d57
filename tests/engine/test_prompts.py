"""Prompts: what messages become, and what goes when they do not fit."""

import pytest

from slotpy.engine.chat import ChatTemplate
from slotpy.engine.generation import GenerationRequest
from slotpy.engine.prompts import Context, make_prompt, prompt_ids, uniform
from slotpy.errors import CapacityError, UsageError
from tests.engine.fake_model import CHAT, TOKENIZER

PLAIN = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
STRICT = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}{% if m.role == 'alien' %}{{ raise_exception('who?') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}",
    {},
)
CALL = {"id": "call_1", "function": {"name": "look", "arguments": {"at": "x"}}}


def said(role: str, content: object = "", **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def ask(*messages: dict[str, object], **fields: object) -> GenerationRequest:
    return GenerationRequest(messages=messages, **fields)  # type: ignore[arg-type]


def text(request: GenerationRequest, chat: ChatTemplate | None = PLAIN, **options: object) -> str | None:
    return make_prompt(TOKENIZER, chat, request, **options).text  # type: ignore[arg-type]


# Messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_empty_text(content):
    assert uniform([said("assistant", content)]) == [said("assistant", "")]


def test_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    assert uniform([said("user", parts)]) == [said("user", "abc")]


def test_a_part_that_is_no_text_is_refused_by_its_type():
    with pytest.raises(UsageError, match="image_url"):
        uniform([said("user", [{"type": "image_url", "image_url": {"url": "x"}}])])


@pytest.mark.parametrize(
    ("role", "expected"), [("USER", "user"), ("developer", "system"), ("function", "tool"), ("alien", "alien")]
)
def test_roles_get_the_names_that_templates_know(role, expected):
    assert uniform([said(role, "x")])[0]["role"] == expected


def test_a_message_without_role_is_the_users():
    assert uniform([{"content": "x"}]) == [said("user", "x")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"a": 1}, {"a": 1}), ('{"a": "b\nc"}', {"a": "b\nc"}), ("null", {}), ("", {}), (None, {}), ({}, {})],
)
def test_arguments_of_earlier_calls_become_objects(arguments, expected):
    call = {"id": "call_1", "function": {"name": "look", "arguments": arguments}}
    (message,) = uniform([said("assistant", None, tool_calls=[call])])
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": expected}}
    ]


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", [1], "[" * 5000])
def test_arguments_that_are_no_object_are_refused_by_name(arguments):
    with pytest.raises(UsageError, match="look"):
        uniform([said("assistant", "", tool_calls=[{"function": {"name": "look", "arguments": arguments}}])])


def test_a_flat_call_is_a_function_call():
    (message,) = uniform([said("assistant", "", tool_calls=[{"name": "look", "arguments": "{}"}])])
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}


def test_other_fields_stay_and_empty_ones_go():
    (message,) = uniform(
        [said("assistant", "a", thinking="t", tool_name="look", tool_call_id="1", images=["x"], tool_calls=[], x=None)]
    )
    assert message == said("assistant", "a", reasoning_content="t", tool_name="look", name="look", tool_call_id="1")


def test_the_request_keeps_its_messages():
    messages = [said("USER", None, thinking="t")]
    uniform(messages)
    assert messages == [said("USER", None, thinking="t")]


# Rendering ----------------------------------------------------------------------------------------------------------


def test_the_prompt_is_the_rendered_conversation():
    prompt = make_prompt(TOKENIZER, CHAT, ask(said("user", "Hi")))
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.ids == TOKENIZER.encode(prompt.text) == prompt_ids(TOKENIZER, CHAT, ask(said("user", "Hi")))


@pytest.mark.parametrize(
    ("think", "end"), [(None, "assistant\n"), (True, "<think>\n"), (False, "</think>\n\n"), ("high", "<think>\n")]
)
def test_think_is_the_templates_to_obey(think, end):
    assert text(ask(said("user"), think=think), CHAT).endswith(end)


def test_a_level_of_thinking_reaches_the_template():
    chat = ChatTemplate("{{ enable_thinking }} {{ reasoning_effort }}", {})
    assert text(ask(said("user"), think="high"), chat) == "True high"


def test_tools_are_declared_unless_none_may_be_called():
    tool = {"type": "function", "function": {"name": "look"}}
    assert '"look"' in text(ask(said("user"), tools=(tool,)), CHAT)
    assert '"look"' not in text(ask(said("user"), tools=(tool,), tool_choice="none"), CHAT)


def test_an_opening_follows_the_prompt_and_leaves_no_room_for_thinking():
    prompt = make_prompt(TOKENIZER, CHAT, ask(said("user"), think=True), opening="<tool_call>")
    assert prompt.text.endswith("</think>\n\n")
    assert prompt.ids == TOKENIZER.encode(prompt.text + "<tool_call>")


def test_a_last_message_of_the_assistant_is_gone_on_from():
    prompt = make_prompt(TOKENIZER, CHAT, ask(said("user", "Hi"), said("assistant", "Once")))
    assert prompt.text.endswith("</think>\n\n")
    assert prompt.ids == TOKENIZER.encode(prompt.text + "Once")


@pytest.mark.parametrize("last", [said("assistant", ""), said("assistant", "x", tool_calls=[CALL])])
def test_a_last_message_that_begins_no_reply_is_history(last):
    assert "<assistant>" in text(ask(said("user", "Hi"), last))


def test_a_lone_message_of_the_assistant_is_history():
    assert text(ask(said("assistant", "Hi"))) == "<assistant>Hi"


def test_what_a_template_refuses_is_put_conventionally():
    late = ask(said("system", "a"), said("user", "b"), said("system", "c"), said("alien", "d"))
    assert text(late, STRICT) == "<system>a\n\nc<user>b<user>d"
    assert text(late, PLAIN) == "<system>a<user>b<system>c<alien>d"


def test_what_it_refuses_even_so_is_the_requests_fault():
    with pytest.raises(UsageError, match="never"):
        text(ask(said("user")), ChatTemplate("{{ raise_exception('never') }}", {}))


def test_messages_without_a_template_are_refused():
    with pytest.raises(UsageError, match="no chat template"):
        text(ask(said("user")), None)


def test_a_raw_prompt_is_taken_as_it_is():
    prompt = make_prompt(TOKENIZER, None, GenerationRequest(prompt="Hi <|im_end|>"))
    assert prompt.text is None
    assert prompt.ids == TOKENIZER.encode("Hi <|im_end|>")


@pytest.mark.parametrize(("prefix", "begins"), [((), True), ((5,), False)])
def test_a_raw_prompt_gets_the_tokenizers_first_token_where_it_begins(monkeypatch, prefix, begins):
    asked = []
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, **options: asked.append(options) or [9])
    make_prompt(TOKENIZER, None, GenerationRequest(prompt="Hi", prefix_ids=prefix))
    assert asked == [{"add_special_tokens": begins}]


def test_the_prefix_comes_before_the_prompt():
    ids = prompt_ids(TOKENIZER, PLAIN, ask(said("user", "Hi"), prefix_ids=(5, 6)))
    assert ids == [5, 6, *TOKENIZER.encode("<user>Hi")]


# Truncation ---------------------------------------------------------------------------------------------------------


def cut(*messages: dict[str, object], room: int, **fields: object) -> str | None:
    """Render in a context in which so many tokens of prompt fit exactly, and no room is kept for the reply."""
    return text(ask(*messages, **({"max_tokens": 1} | fields)), context=Context(room + 1, 100_000))


def size(text: str) -> int:
    return len(TOKENIZER.encode(text))


HISTORY = [
    said("system", "S"),
    said("user", "first question"),
    said("assistant", "first answer"),
    said("user", "second question"),
    said("assistant", "second answer"),
    said("user", "last question"),
]
AFTER_ONE = "<system>S<user>second question<assistant>second answer<user>last question"


def test_what_fits_exactly_stays_whole():
    whole = text(ask(*HISTORY))
    assert cut(*HISTORY, room=size(whole)) == whole
    assert cut(*HISTORY, room=size(whole) - 1) == AFTER_ONE


def test_the_oldest_question_goes_first_and_its_answer_with_it():
    assert cut(*HISTORY, room=size(AFTER_ONE)) == AFTER_ONE
    assert cut(*HISTORY, room=size(AFTER_ONE) - 1) == "<system>S<user>last question"


def test_system_messages_stay_wherever_they_are():
    messages = [said("user", "old " * 9), said("system", "S"), said("user", "older " * 9), said("user", "new")]
    assert cut(*messages, room=size("<system>S<user>new")) == "<system>S<user>new"


def test_a_call_goes_with_its_results():
    work = [
        said("user", "task"),
        said("assistant", "", tool_calls=[CALL]),
        said("tool", "result one " * 5),
        said("assistant", "", tool_calls=[CALL]),
        said("tool", "two"),
        said("tool", "three"),
    ]
    kept = "<user>task<assistant><tool>two<tool>three"
    assert cut(*work, room=size(kept)) == kept
    assert cut(*work, room=size(kept) - 1) == "<assistant><tool>two<tool>three"


def test_when_some_must_go_a_quarter_is_left_for_the_reply():
    messages = [said("user", f"message {n} " + "x " * 20) for n in range(20)]
    context = Context(size(text(ask(*messages))), 100_000)
    roomy = make_prompt(TOKENIZER, PLAIN, ask(*messages), context)
    tight = make_prompt(TOKENIZER, PLAIN, ask(*messages, max_tokens=1), context)
    assert len(roomy.ids) <= context.tokens - context.tokens // 4 < len(tight.ids) < context.tokens


def test_messages_go_before_a_reply_would_be_cut_off_at_once():
    messages = [said("user", f"message {n} " + "x " * 20) for n in range(20)]
    whole = size(text(ask(*messages)))
    context = Context(whole + whole // 15 + 1, 100_000)
    assert make_prompt(TOKENIZER, PLAIN, ask(*messages), context).num_left_out == 0
    tight = Context(whole + whole // 20, 100_000)
    shortened = make_prompt(TOKENIZER, PLAIN, ask(*messages), tight)
    assert shortened.num_left_out > 0 and len(shortened.ids) <= tight.tokens - tight.tokens // 4
    assert make_prompt(TOKENIZER, PLAIN, ask(*messages, max_tokens=5), tight).num_left_out == 0
    assert make_prompt(TOKENIZER, PLAIN, ask(*messages, truncate=False), tight).num_left_out == 0


def test_a_long_conversation_is_cut_in_few_renderings(monkeypatch):
    messages = [said("user", f"message {n}") for n in range(500)]
    renderings = []
    render = PLAIN.render
    monkeypatch.setattr(PLAIN, "render", lambda *a, **k: renderings.append(1) or render(*a, **k))
    cut(*messages, room=100)
    assert len(renderings) <= 12


def test_when_nothing_more_can_go_the_error_gives_the_numbers():
    system, last = said("system", "S" * 30), said("user", "long " * 30)
    least = size(f"<system>{'S' * 30}<user>{'long ' * 30}")
    with pytest.raises(CapacityError) as refused:
        cut(system, said("user", "old"), last, room=least - 1)
    assert str(refused.value).startswith(f"prompt is too long: {least} tokens, and the context holds {least}")
    assert f"at least {least + 1}" in refused.value.hint


def test_an_error_never_proposes_more_than_the_model_can():
    with pytest.raises(CapacityError) as refused:
        make_prompt(TOKENIZER, PLAIN, ask(said("user", "long " * 30)), Context(10, 10))
    assert refused.value.hint == "Shorten it to at most 9."


def test_without_truncation_a_long_prompt_is_refused():
    with pytest.raises(CapacityError, match=r"^prompt is too long"):
        cut(*HISTORY, room=size(AFTER_ONE), truncate=False)


def test_a_long_raw_prompt_is_refused():
    with pytest.raises(CapacityError, match=r"^prompt is too long"):
        make_prompt(TOKENIZER, None, GenerationRequest(prompt="long " * 30), Context(10, 10))


def test_the_oldest_of_the_prefix_goes_before_any_message():
    prompt = size("<user>Hi")
    request = ask(said("user", "Hi"), prefix_ids=tuple(range(20)))
    assert make_prompt(TOKENIZER, PLAIN, request, Context(prompt + 6, 100)).ids[:5] == list(range(15, 20))
    assert len(make_prompt(TOKENIZER, PLAIN, request, Context(prompt + 1, 100)).ids) == prompt


def test_a_prompt_of_any_length_costs_no_more_than_the_context(monkeypatch):
    lengths = []
    whole = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, **k: lengths.append(len(text)) or whole(text, **k))
    for request in (ask(said("user", " " * 1_000_000)), GenerationRequest(prompt=" " * 1_000_000)):
        with pytest.raises(CapacityError, match=r"^prompt is too long"):
            make_prompt(TOKENIZER, PLAIN, request, Context(10, 100))
    assert max(lengths) < 5000


def test_the_prompt_says_how_many_messages_are_left_out():
    context = Context(size(AFTER_ONE) + 1, 1000)
    assert make_prompt(TOKENIZER, PLAIN, ask(*HISTORY, max_tokens=1), context).num_left_out == 2
    assert make_prompt(TOKENIZER, PLAIN, ask(*HISTORY)).num_left_out == 0


def test_counting_does_not_cut():
    assert len(prompt_ids(TOKENIZER, PLAIN, ask(*HISTORY))) == size(text(ask(*HISTORY)))

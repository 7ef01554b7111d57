"""Replies read token by token, however they are cut: each against a plain reading of the whole text at once."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotpy.engine.generation import TextDelta, TokenLogprob, ToolCall
from slotpy.engine.reply import CallFinder, ReasoningSplitter, ReplyReader, StopMatcher
from slotpy.engine.sampler import Logprobs, Sampled
from slotpy.engine.text import Tokenizer
from slotpy.engine.tools import ToolGrammar

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "slotpy" / "data" / "demo")
JSON, XML = ToolGrammar("json_tools"), ToolGrammar("qwen3_coder")
DECLARED = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
PROMPT = "…<|im_start|>assistant\n"


def cut(text: str, lengths: list[int]) -> list[str]:
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    return [*pieces, text]


def joined(pieces: list[TextDelta | ToolCall], *, reasoning: bool = False) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextDelta) and piece.reasoning is reasoning)


def calls_in(pieces: list[TextDelta | ToolCall]) -> list[tuple[str, dict]]:
    return [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]


# Stop strings ------------------------------------------------------------------------------------------------------


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
    return joined(deltas, reasoning=True), joined(deltas)


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
    assert splitter.push("\nLet me") == [TextDelta("Let me", reasoning=True)]
    assert splitter.push(" see</th") == [TextDelta(" see", reasoning=True)]
    assert splitter.push("ink>\n") == []
    assert splitter.push("\nYes") == [TextDelta("Yes")]


# Tool calls --------------------------------------------------------------------------------------------------------


def find(text: str, lengths: list[int], grammar: ToolGrammar = JSON, *, opening: str = ""):
    finder = CallFinder(grammar, DECLARED, opening)
    pieces = [piece for part in cut(text, lengths) for piece in finder.push(part)] + finder.flush()
    assert all(piece.text for piece in pieces if isinstance(piece, TextDelta))
    assert finder.num_held == 0
    return pieces


def json_call(s: str = "x", name: str = "f") -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": {"s": s}}) + "\n</tool_call>"


def xml_call(s: str = "x") -> str:
    return f"<tool_call>\n<function=f>\n<parameter=s>\n{s}\n</parameter>\n</function>\n</tool_call>"


CALLS = [("f", {"s": "x"}), ("f", {"s": "y"})]


@pytest.mark.parametrize("grammar", [JSON, XML])
@pytest.mark.parametrize(
    ("before", "between", "after", "answer"),
    [
        ("", "", "", ""),
        ("", "\n", "\n", ""),
        ("I look.\n\n", "\n\n", "\n\nDone. ", "I look.Done. "),
        (" <tool", " and <", "tool_call", " <tool and <tool_call"),
    ],
)
def test_calls_are_taken_out_wherever_the_text_is_cut(grammar, before, between, after, answer):
    call = json_call if grammar is JSON else xml_call
    text = before + call("x") + between + call("y") + after
    if between.strip():
        answer = before + between.strip() + after
    for size in [*range(1, 20), len(text)]:
        pieces = find(text, [size] * (len(text) // size), grammar)
        assert joined(pieces) == answer
        assert calls_in(pieces) == CALLS
        found = [piece for piece in pieces if isinstance(piece, ToolCall)]
        assert [call.index for call in found] == [0, 1]
        assert len({call.id for call in found}) == 2
        assert all(re.fullmatch("call_[0-9a-f]{8}", call.id) for call in found)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        " a <tool_call> oops </tool_call> b",
        'a\n<tool_call>\n{"name": "f", "arguments": {"s": "never clo',
        "a\n" + json_call(name="undeclared") + "\n",
        "<tool_call>{<tool_call>" + json_call() + "</tool_call>",
        "</tool_call> <tool_call",
        "a \n\n",
    ],
)
def test_what_is_no_declared_call_stays_text_to_the_letter(text):
    for size in range(1, len(text) + 1):
        assert find(text, [size] * (len(text) // size)) and joined(find(text, [size] * (len(text) // size))) == text
        assert not calls_in(find(text, [size] * (len(text) // size)))


@pytest.mark.parametrize("bad", ["<tool_call>{}</tool_call>", "<tool_call>", "Say <tool_call> and call:"])
def test_a_good_call_after_a_bad_one_is_found(bad):
    text = bad + "\n" + json_call()
    for size in range(1, len(text) + 1):
        pieces = find(text, [size] * (len(text) // size))
        assert joined(pieces) == bad
        assert calls_in(pieces) == CALLS[:1]


@pytest.mark.parametrize(("grammar", "after"), [(JSON, ["\n", " is"]), (XML, ["\n", "<fun", "nel>"])])
def test_a_start_marker_that_is_only_mentioned_holds_nothing_back(grammar, after):
    finder = CallFinder(grammar, DECLARED)
    shown = [finder.push(text) for text in ["<tool_call>", *after]]
    assert [joined(pieces) for pieces in shown] == [*[""] * len(after), "<tool_call>" + "".join(after)]


@pytest.mark.parametrize("text", ["</tool_call>", '"</tool_call>\\', "<tool_call>\n{}\n</tool_call>"])
def test_an_end_marker_inside_an_argument_does_not_end_the_call(text):
    for size in (1, 3, 100):
        for grammar, call in ((JSON, json_call(text)), (XML, xml_call(text))):
            pieces = find(call + "\nok", [size] * (len(call) // size), grammar)
            assert calls_in(pieces) == [("f", {"s": text})]
            assert joined(pieces) == "ok"


def test_an_argument_that_only_mentions_an_opening_is_read_when_the_reply_ends():
    pieces = find(xml_call("write <function=") + "\n", [], XML)
    assert calls_in(pieces) == [("f", {"s": "write <function="})] and joined(pieces) == ""


def test_an_example_of_a_call_inside_an_argument_is_not_called():
    text = xml_call("write: " + xml_call("inner"))
    pieces = find(text, [], XML)
    assert joined(pieces) == text and not calls_in(pieces)


@pytest.mark.parametrize(("grammar", "call"), [(JSON, json_call()), (XML, xml_call())])
def test_a_whole_call_counts_without_its_end_marker(grammar, call):
    for end in ("", "</tool", "\n"):
        pieces = find(call.removesuffix("</tool_call>") + end, [], grammar)
        assert calls_in(pieces) == ([] if end == "</tool" else CALLS[:1])


def test_a_call_cut_short_is_text_in_a_grammar_that_would_take_a_part():
    text = "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value><arg_key>more"
    assert find(text, [], ToolGrammar("glm47")) == [TextDelta(text)]


@pytest.mark.parametrize("opening", ["<tool_call>", '<tool_call>\n{"name": "f", "arguments":'])
def test_a_call_that_the_prompt_opened_is_read(opening):
    body = json_call().removeprefix(opening)
    for size in range(1, len(body) + 1):
        pieces = find(body + "\n" + json_call("y"), [size] * (len(body) // size), opening=opening)
        assert calls_in(pieces) == CALLS and joined(pieces) == ""
    assert joined(find("no call", [], opening=opening)) == f"{opening}no call"


def test_only_white_space_and_a_possible_marker_are_held_back():
    finder = CallFinder(JSON, DECLARED)
    shown = [finder.push(text) for text in ("I", " look", ".\n", "\n", "<b>", " <too", "l>")]
    texts = [[piece.text for piece in pieces] for pieces in shown]
    assert texts == [["I"], [" look"], ["."], [], ["\n\n<b>"], [], [" <tool>"]]


# The whole reply ---------------------------------------------------------------------------------------------------


def read(ids: list[int] | str, prompt: str | None = PROMPT, stops=(), tools=None, opening=""):
    """Push tokens until a stop string; gives the pieces of each push, those of the flush last, and the reader."""
    reader = ReplyReader(TOKENIZER, prompt, stops, tools, DECLARED if tools else (), opening)
    pieces = []
    for token_id in TOKENIZER.encode(ids) if isinstance(ids, str) else ids:
        pieces.append(reader.push(Sampled(token_id, Logprobs(-float(token_id), ()))))
        if reader.stopped:
            break
    return [*pieces, reader.flush()], reader


def flat(pieces: list[list]) -> list:
    return [piece for pushed in pieces for piece in pushed]


def plainly(text: str, stops: list[str], *, opened: bool, tools: bool) -> tuple[str, str, list]:
    """Read a whole reply at once: reasoning, answer, calls."""
    reasoning, answer = "", text
    if match := re.fullmatch(r"(.*?)</think>(.*)" if opened else r"\s*<think>(.*?)</think>(.*)", text, re.DOTALL):
        reasoning, answer = match[1].lstrip(), match[2].lstrip()
    elif opened or re.match(r"\s*<think>", text):
        reasoning, answer = text.removeprefix("" if opened else re.match(r"\s*<think>", text)[0]).lstrip(), ""
    answer = first_stop(answer, stops)
    if not tools:
        return reasoning, answer, []
    calls = []
    shown = ""
    for part in re.split(r"(<tool_call>\s*[{\[].*?(?:</tool_call>|$))", answer, flags=re.DOTALL):
        if call := plain_call(part):
            calls.append(call)
            shown = shown.rstrip() + "\0"
        else:
            shown += part.lstrip() if shown.endswith("\0") else part
    return reasoning, shown.replace("\0", ""), calls


def plain_call(part: str) -> tuple[str, dict] | None:
    try:
        call = json.loads(re.fullmatch(r"<tool_call>(.*?)(?:</tool_call>)?", part, re.DOTALL)[1])
        return call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError):
        return None


FRAGMENTS = st.sampled_from([
    "<think>", "</think>", "<thi", "nk>", "</", "<", "\n", " ", "Yes", "é", "👍", "END", "EN", "D", "<tool_call>",
    "</tool_call>", "<tool_", "call>", json_call(), json_call("é</think>"), "{}",
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    stops=st.lists(st.sampled_from(["END", "\n\n", "D<", "👍"]), max_size=2),
    opened=st.booleans(),
    tools=st.booleans(),
)
@example(["<think>", "END", "</think>", " ", "EN", json_call(), "END"], ["END"], False, True)
def test_what_a_reply_says_does_not_depend_on_where_it_is_cut(fragments, stops, opened, tools):
    ids = [token_id for fragment in fragments for token_id in TOKENIZER.encode(fragment)]
    pieces, reader = read(ids, "<think>\n" if opened else PROMPT, stops, JSON if tools else None)
    reasoning, answer, calls = plainly("".join(fragments), stops, opened=opened, tools=tools)
    assert joined(flat(pieces), reasoning=True) == reasoning
    assert joined(flat(pieces)) == answer
    assert calls_in(flat(pieces)) == calls and reader.num_calls == len(calls)
    assert (reader.stop_sequence is not None) == reader.stopped


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZER.num_ids - 1), max_size=20))
def test_any_tokens_without_tags_join_to_their_decoding(ids):
    pieces, _ = read(ids, None, tools=XML)
    assert joined(flat(pieces)) == TOKENIZER.decode(ids)


def test_every_token_of_plain_text_is_given_at_once():
    ids = TOKENIZER.encode("Yes, it is: 1 < 2 and so on.\nEnd")
    pieces, _ = read(ids, stops=("User:",))
    assert [joined(pushed) for pushed in pieces] == [*(TOKENIZER.decode([token_id]) for token_id in ids), ""]


def test_a_reply_is_decoded_split_and_stopped():
    pieces, reader = read("<think>\n👍 é\nUser: hm\n</think>\n\nYes 👍.\nUser: more", stops=("\nUser:",))
    assert reader.stopped and reader.stop_sequence == "\nUser:"
    assert joined(flat(pieces), reasoning=True) == "👍 é\nUser: hm\n"  # no stop string ends the reasoning
    assert joined(flat(pieces)) == "Yes 👍."


def test_a_prompt_that_opened_the_block_starts_in_reasoning():
    pieces, reader = read("so</think>Yes", "…<|im_start|>assistant\n<think>\n")
    assert not reader.stopped
    assert flat(pieces)[0].reasoning
    assert joined(flat(pieces), reasoning=True) == "so"
    assert joined(flat(pieces)) == "Yes"


def test_in_answer_tells_when_the_reasoning_has_ended():
    reader = ReplyReader(TOKENIZER, "<think>\n")
    told = [reader.in_answer]
    for token_id in TOKENIZER.encode("so</think>Yes"):
        reader.push(Sampled(token_id, None))
        told.append(reader.in_answer)
    thinking = len(TOKENIZER.encode("so</think>"))
    assert told == [False] * thinking + [True] * (len(told) - thinking)
    assert ReplyReader(TOKENIZER, PROMPT).in_answer and ReplyReader(TOKENIZER, None).in_answer


def test_a_tag_typed_by_the_user_does_not_open_the_block():
    pieces, _ = read("Yes", "user: what does <think> do?\nassistant:\n")
    assert joined(flat(pieces)) == "Yes"


def test_a_raw_completion_is_not_split():
    pieces, _ = read("<think>a</think>b", None)
    assert flat(pieces) and joined(flat(pieces)) == "<think>a</think>b"


def test_a_reply_that_ends_inside_a_character_or_a_stop_string_gives_what_it_has():
    pieces, _ = read(TOKENIZER.encode("xE") + TOKENIZER.encode("👍")[:2], stops=("END",))
    assert joined(flat(pieces)) == "xE\ufffd"
    pieces, reader = read("xEN", stops=("END",))
    assert joined(flat(pieces)) == "xEN" and not reader.stopped


def test_a_forced_call_is_read_without_its_start_and_without_reasoning():
    pieces, reader = read(json_call().removeprefix("<tool_call>"), "<think>\n", tools=JSON, opening="<tool_call>")
    assert calls_in(flat(pieces)) == CALLS[:1] and joined(flat(pieces)) == ""
    assert reader.num_calls == 1


# Log-probabilities -------------------------------------------------------------------------------------------------


def tokens_of(delta: TextDelta) -> str:
    return b"".join(logprob.raw for logprob in delta.logprobs).decode()


def test_each_token_comes_with_the_delta_that_its_text_ends_in():
    text = "<think>\nwhy\n</think>\n\nYes 👍 é, <b>\nUs and so on"
    pieces, _ = read(text, stops=("User:",), tools=JSON)
    deltas = [piece for piece in flat(pieces) if isinstance(piece, TextDelta)]
    assert all(delta.text == tokens_of(delta) for delta in deltas if not delta.reasoning)
    assert "".join(tokens_of(delta) for delta in deltas if delta.reasoning) == "why\n"


@settings(max_examples=200, deadline=None)
@given(
    fragments=st.lists(
        st.sampled_from(["Yes", " ", "\n", "é", "👍", "<", "E", "EN", "<tool", "</", " a"]), max_size=12
    ),
    prompt=st.sampled_from([None, PROMPT, "<think>"]),
    tools=st.booleans(),
)
def test_the_tokens_of_a_text_join_to_it(fragments, prompt, tools):
    ids = [token_id for fragment in fragments for token_id in TOKENIZER.encode(fragment)]
    pieces, _ = read(ids, prompt, ("END", "</b>"), JSON if tools else None)
    text = joined(flat(pieces), reasoning=True) or joined(flat(pieces))
    assert "".join(map(tokens_of, flat(pieces))).lstrip() == text.lstrip()  # at the start, a token may lose its space


def test_tokens_of_tags_stop_strings_and_calls_come_with_none():
    text = "<think>a</think>b\n" + json_call() + "\ncEND"
    pieces, reader = read(text, stops=("END",), tools=JSON)
    assert reader.stopped and reader.num_calls == 1
    assert [tokens_of(piece) for piece in flat(pieces) if isinstance(piece, TextDelta)] == ["a", "b", "c"]


def test_a_call_that_is_none_comes_with_its_tokens():
    text = 'a <tool_call>{"name": 1}</tool_call>b <tool_call>no'
    pieces, _ = read(text, tools=JSON)
    assert "".join(tokens_of(piece) for piece in flat(pieces)) == text
    assert max(map(len, pieces)) > 1
    assert not any(piece.logprobs for pushed in pieces for piece in pushed[:-1])  # they end in the last one


def test_half_a_character_at_the_end_comes_with_its_tokens():
    ids = TOKENIZER.encode("👍")[:2]
    pieces, _ = read(ids)
    assert [logprob.raw for logprob in flat(pieces)[0].logprobs] == [TOKENIZER.token_bytes(each) for each in ids]


def test_the_likeliest_tokens_are_given_with_text_and_bytes():
    first, second = TOKENIZER.encode("👍")[0], TOKENIZER.encode("Yes")[0]
    reader = ReplyReader(TOKENIZER, None)
    [delta] = reader.push(Sampled(second, Logprobs(-0.5, ((second, -0.5), (first, -1.5)))))
    half = TOKENIZER.token_bytes(first)
    raw = TOKENIZER.token_bytes(second)
    likeliest = (TokenLogprob(raw.decode(), raw, -0.5), TokenLogprob(half.decode(errors="replace"), half, -1.5))
    assert delta.logprobs == (TokenLogprob(raw.decode(), raw, -0.5, likeliest),)


def test_without_log_probabilities_none_are_given():
    reader = ReplyReader(TOKENIZER, None)
    assert reader.push(Sampled(TOKENIZER.encode("Yes")[0], None))[0].logprobs == ()

"""What shows only when all parts work together: the same reply, however it is asked for."""

import json
import re

import pytest

from tests.ollama.battery import HI, TOOLS, Call, said
from tests.ollama.compare import Answer, send


def with_a(schema: dict) -> dict:
    """An object whose one member is described by `schema`."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


WIDE = {
    "type": "object",
    "properties": {f"k{i}": {"type": "integer"} for i in range(100)},
    "required": [f"k{i}" for i in range(0, 100, 9)],
}
SCHEMAS = {
    "reference": (with_a({"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "integer"}}}, lambda v: type(v["a"]) is int),
    "enum": (with_a({"enum": ["x", "y"]}), lambda v: v["a"] in ("x", "y")),
    "union": (with_a({"anyOf": [{"type": "integer"}, {"type": "null"}]}), lambda v: type(v["a"]) in (int, type(None))),
    "pattern": (with_a({"type": "string", "pattern": "^[a-c]{3}$"}), lambda v: re.fullmatch("[a-c]{3}", v["a"])),
    "list": ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
             lambda v: {type(x) for x in v} == {bool} and 2 <= len(v) <= 3),
    "wide": (WIDE, lambda v: set(WIDE["required"]) <= set(v) <= set(WIDE["properties"])),
    "json": ("json", lambda v: isinstance(v, dict)),
}  # fmt: skip


@pytest.fixture
def post(port):
    """Send a body and give the answer."""

    def send_one(path: str, **body: object) -> Answer:
        return send(Call("", "POST", path, body), "127.0.0.1", port)

    return send_one


def content(answer: Answer, part: str = "content") -> str:
    """Join a part of the messages of an answer in Ollama's dialect."""
    assert answer.status == 200, answer.text
    return "".join(record["message"].get(part, "") for record in answer.records())


@pytest.mark.parametrize("model", ["tinychat", "tinythink"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_shapes_the_answer_and_not_the_thoughts(post, name, model):
    schema, fits = SCHEMAS[name]
    answer = post("/api/chat", model=model, messages=HI, format=schema, options={"num_predict": 2000})
    assert fits(json.loads(content(answer))) and answer.records()[-1]["done_reason"] == "stop"
    assert content(answer, "thinking").strip() == ("let me think" if model == "tinythink" else "")


def test_a_schema_means_the_same_in_every_dialect(post):
    schema, fits = SCHEMAS["enum"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    chat = post("/v1/chat/completions", model="tinychat", messages=HI, response_format=form).records()[0]
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    response = post("/v1/responses", model="tinychat", input="hi", text=text).records()[0]
    generated = post("/api/generate", model="tinychat", prompt="hi", format=schema, stream=False).records()[0]
    texts = [chat["choices"][0]["message"]["content"], response["output"][0]["content"][0]["text"],
             generated["response"]]  # fmt: skip
    assert all(fits(json.loads(text)) for text in texts)


def test_a_schema_that_cannot_be_followed_is_refused_by_name(post):
    schema = {"type": "object", "not": {"required": ["a"]}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for answer in (
        post("/api/chat", model="tiny", messages=HI, format=schema),
        post("/v1/chat/completions", model="tiny", messages=HI, response_format=form, stream=True),
    ):
        assert answer.status == 400 and "not" in answer.text


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": 1e-9}, {"temperature": 1e300}, {"top_k": 10**9}, {"top_k": -3},
        {"top_p": 7}, {"top_p": 0}, {"min_p": 2}, {"repeat_last_n": 0}, {"repeat_last_n": -1, "repeat_penalty": 1.1},
        {"repeat_last_n": 10**9}, {"seed": -5}, {"seed": 2**64}, {"repeat_penalty": 0}, {"presence_penalty": 1e9},
        {"typical_p": 0.1}, {"num_ctx": 1}, {"num_ctx": 10**9}, {"num_keep": 5, "num_batch": 1},
    ],
    ids=str,
)  # fmt: skip
def test_no_sampling_option_hurts_the_next_request(post, options):
    assert post("/api/chat", model="tiny", messages=HI, options=options).status in (200, 400)
    assert content(post("/api/chat", model="tiny", messages=HI)) == "Hello!"


@pytest.mark.parametrize(
    ("limit", "text", "reason", "count"),
    [(-1, "Hello!", "stop", None), (-2, "Hello!", "stop", None), (0, "", "length", 0), (1, "Hello", "length", 1)],
)
def test_num_predict_limits_the_reply(post, limit, text, reason, count):
    answer = post("/api/chat", model="tiny", messages=HI, options={"num_predict": limit})
    last = answer.records()[-1]
    assert (content(answer), last["done_reason"]) == (text, reason)
    assert count is None or last["eval_count"] == count


def test_streamed_and_whole_replies_are_the_same(post):
    text = "Two words, a \N{GRINNING FACE}, 漢字 and\ttabs\n\nand é — done."
    whole = post("/api/chat", model="tinythink", messages=said(f"SAY {text}"), stream=False)
    streamed = post("/api/chat", model="tinythink", messages=said(f"SAY {text}"))
    for part, wanted in [("content", text), ("thinking", "let me think")]:
        assert content(whole, part) == content(streamed, part)
        assert content(whole, part).strip() == wanted
    counts = [answer.records()[-1]["eval_count"] for answer in (whole, streamed)]
    assert counts[0] == counts[1] > 5


def test_logprobs_spell_the_reply(post):
    answer = post("/api/chat", model="tiny", messages=said("SAY 漢字!"), logprobs=True, top_logprobs=3, stream=False)
    (record,) = answer.records()
    spelt = b"".join(bytes(one["bytes"]) for one in record["logprobs"])
    assert spelt.decode() == record["message"]["content"] == "漢字!"
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 3 for one in record["logprobs"])


def test_a_stop_text_ends_the_answer_before_it_and_no_thought(post):
    options = {"stop": ["let me", " there"]}
    answer = post("/api/chat", model="tinythink", messages=said("SAY Hello there you"), options=options)
    assert content(answer) == "Hello"
    assert content(answer, "thinking").strip() == "let me think"
    assert answer.records()[-1]["done_reason"] == "stop"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": }\n</tool_call>',
        '<tool_call>\n{"name": "format_disk", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather"',
        "<tool_call",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_only_looks_like_a_tool_call_stays_text(post, text, stream):
    answer = post("/api/chat", model="tiny", messages=said(f"SAY {text}"), tools=TOOLS, stream=stream)
    assert content(answer).strip() == text
    assert not any("tool_calls" in record["message"] for record in answer.records())


def test_text_before_a_tool_call_is_kept(post):
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    answer = post("/api/chat", model="tiny", messages=said(f"SAY Let me see. {call}"), tools=TOOLS)
    calls = [call for record in answer.records() for call in record["message"].get("tool_calls", [])]
    assert content(answer).strip() == "Let me see."
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Rome"}]


def test_the_context_of_a_reply_continues_it(post):
    first = post("/api/generate", model="tiny", prompt="TURNS", stream=False).records()[0]
    second = post("/api/generate", model="tiny", prompt="TURNS", context=first["context"], stream=False).records()[0]
    assert (first["response"], second["response"]) == ("Turn 1.", "Turn 2.")
    assert second["context"][: len(first["context"])] == first["context"]


def test_embeddings_have_length_one_and_tell_texts_apart(post):
    (one,) = post("/api/embed", model="tinychat", input=["a cat", "a cat", "the sea"]).records()
    cat, again, sea = one["embeddings"]
    assert cat == again != sea
    for dimensions in (None, 8):
        (cut,) = post("/api/embed", model="tinychat", input="a cat", dimensions=dimensions).records()
        assert abs(sum(x * x for x in cut["embeddings"][0]) - 1) < 1e-3
    (raw,) = post("/api/embeddings", model="tinychat", prompt="a cat").records()
    ratio = raw["embedding"][0] / cat[0]
    assert all(abs(x - ratio * y) < 1e-3 for x, y in zip(raw["embedding"], cat, strict=True))


def test_a_prompt_too_long_for_the_context_loses_its_oldest_turns_or_is_refused(post):
    turns = [{"role": "user", "content": f"{i} " + "word " * 60} for i in range(100)]
    assert content(post("/api/chat", model="tiny", messages=[*turns, *said("TURNS")])) != "Turn 101."
    refused = post("/api/chat", model="tiny", messages=turns, truncate=False)
    assert refused.status == 400 and "4096" in refused.text

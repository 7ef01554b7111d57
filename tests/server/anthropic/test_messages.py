"""POST /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Any

import pytest

from slotpy.engine.generation import Failed, TextDelta, ToolCall
from slotpy.errors import BusyError, PromptTooLongError
from slotpy.server.anthropic.messages import ROUTES
from tests.server.fakes import FINISHED, HELLO, TINY, TINYTHINK, FakeServer, finished
from tests.server.late import delay

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "w", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": SCHEMA}}
THOUGHT = (TextDelta("let", True), TextDelta(" me think", True), TextDelta("Hel"), TextDelta("lo"), FINISHED)
CALL = ToolCall(0, "call_0a1b2c3d", "get_weather", {"city": "Paris"})


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tinythink", "max_tokens": 50, "messages": USER, **fields}


def create(*scripts: Any, **fields: Any) -> tuple[FakeServer, Any]:
    server = FakeServer(ROUTES, *scripts)
    return server, server.post("/v1/messages", body(**fields))


def asked(**fields: Any) -> Any:
    server, answer = create(HELLO, **fields)
    assert answer.status == 200, answer.text
    return server.worker.request


def refused(**fields: Any) -> str:
    server, answer = create(HELLO, **fields)
    assert answer.status == 400 and not server.worker.submissions
    told = answer.json
    assert told.keys() == {"type", "error", "request_id"} and told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    return told["error"]["message"]


def events(answer: Any) -> list[dict[str, Any]]:
    told = answer.sse
    assert [name for name, _ in told] == [data["type"] for _, data in told]
    return [data for _, data in told]


def test_an_answer_has_the_recorded_shape():
    _, answer = create(THOUGHT)
    assert answer.headers["Content-Type"] == "application/json"
    told = answer.json
    assert told.pop("id").startswith("msg_")
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": "tinythink",
        "content": [
            {"type": "thinking", "thinking": "let me think", "signature": ""},
            {"type": "text", "text": "Hello"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 3},
    }


def test_a_stream_has_the_recorded_events():
    _, answer = create(THOUGHT, stream=True)
    start, *told = events(answer)
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] > 0
    assert told == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "let"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": " me think"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": 7, "output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def test_a_call_is_a_block_with_one_delta():
    script = (TextDelta("Wait."), CALL, FINISHED)
    _, answer = create(script, stream=True, tools=[WEATHER])
    told = events(answer)[4:]
    assert told[0]["content_block"] == {"type": "tool_use", "id": "call_0a1b2c3d", "name": "get_weather", "input": {}}
    assert told[1]["delta"] == {"type": "input_json_delta", "partial_json": '{"city": "Paris"}'}
    assert told[2] == {"type": "content_block_stop", "index": 1}
    assert told[3]["delta"]["stop_reason"] == "tool_use"
    _, answer = create(script, tools=[WEATHER])
    assert answer.json["content"][1]["input"] == {"city": "Paris"}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (finished(), "end_turn"),
        (finished(reason="length"), "max_tokens"),
        (finished(stop_sequence="#"), "stop_sequence"),
    ],
)
def test_reasons_to_stop(end, reason):
    _, answer = create((TextDelta("Hel"), end), stop_sequences=["#"])
    assert answer.json["stop_reason"] == reason and answer.json["stop_sequence"] == end.stop_sequence


def test_without_parallel_calls_there_is_one():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    second = replace(CALL, index=1, id="call_11111111")
    _, answer = create((CALL, second, FINISHED), tools=[WEATHER], tool_choice=choice)
    assert [block["id"] for block in answer.json["content"]] == ["call_0a1b2c3d"]


def test_silence_is_broken_by_pings(monkeypatch):
    monkeypatch.setattr("slotpy.server.anthropic.messages.KEEP_ALIVE_S", 0.02)
    server = FakeServer(ROUTES, HELLO)
    delay(monkeypatch, server, 0.15)
    told = [event["type"] for event in events(server.post("/v1/messages", body(stream=True)))]
    assert told[:2] == ["message_start", "ping"] and told[-1] == "message_stop"


def test_a_failure_in_the_stream_is_told():
    _, answer = create((TextDelta("Hel"), Failed(RuntimeError("secret"))), stream=True)
    last = events(answer)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and last["request_id"].startswith("req_")
    assert "secret" not in answer.text and "message_stop" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_an_overlong_prompt_is_refused_in_the_words_that_clients_look_for(stream):
    server, answer = create((Failed(PromptTooLongError("prompt is too long: 9 tokens.")),), stream=stream)
    assert not server.worker.request.truncate
    assert answer.status == 400 and answer.json["error"]["message"] == "prompt is too long: 9 tokens."


def test_a_full_queue_is_overload():
    _, answer = create(BusyError("server busy"))
    assert answer.status == 503 and answer.json["error"]["type"] == "overloaded_error"


def test_fields_are_passed_on():
    request = asked(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a", "b"], tools=[WEATHER], system="s")
    assert request.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    assert (request.max_tokens, request.stops, request.tools) == (50, ("a", "b"), (FUNCTION,))
    assert request.messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "hi"})
    assert request.defaults == {"temperature": 1.0, "top_p": 1.0, "top_k": 40}


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "disabled"}}, False),
        ({"model": "tinychat", "thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ({"model": "tinychat", "output_config": {"effort": "max"}}, None),
    ],
)
def test_thinking_is_relaxed(fields, think):
    assert asked(**fields).think == think


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "get_weather"}, "required"),
    ],
)
def test_tool_choice(choice, expected):
    assert asked(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_hosted_tools_are_left_out():
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {**WEATHER, "type": "custom"}]
    assert asked(tools=tools).tools == (FUNCTION,)


def test_a_schema_for_the_answer():
    assert asked(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).format == SCHEMA


def test_blocks_become_messages():
    result = {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "late"}, result]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}]},
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}]
    assert asked(messages=messages, system=system).messages == (
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "Error: no", "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "two", "tool_call_id": "2", "name": "g"},
        {"role": "user", "content": "late"},
    )


def test_documents_of_text_are_text():
    source = {"type": "text", "media_type": "text/plain", "data": "d"}
    content = [{"type": "document", "source": source}, {"type": "text", "text": "q"}]
    assert asked(messages=[{"role": "user", "content": content}]).messages[0]["content"] == "d\nq"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": None}, "model is required"),
        ({"max_tokens": None}, "max_tokens is required and must be positive"),
        ({"max_tokens": -1}, "max_tokens is required and must be positive"),
        ({"messages": []}, "messages is required"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "alien"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "search_result"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"input_schema": SCHEMA}]}, "name"),
        ({"tools": [{"name": "f", "input_schema": [1]}]}, "input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}}, "nope"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "zzz"}}, "zzz"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_done_is_said(fields, words):
    assert words in refused(**fields)


def test_an_unknown_model_is_404():
    _, answer = create(HELLO, model="nosuch")
    assert answer.status == 404 and answer.json["error"] == {
        "type": "not_found_error",
        "message": "model 'nosuch' not found",
    }


def count(**fields: Any) -> Any:
    server = FakeServer(ROUTES, RuntimeError("the engine was asked"), models=[TINY, TINYTHINK])
    return server.post("/v1/messages/count_tokens?beta=true", {"model": "tinythink", "messages": USER, **fields})


def test_tokens_are_counted_with_the_template_and_without_the_engine():
    tokenizer, chat = TINYTHINK.text.tokenizer, TINYTHINK.text.chat
    prompt = chat.render([{"role": "user", "content": "hi"}], enable_thinking=True)
    assert count().json == {"input_tokens": len(tokenizer.encode(prompt))}
    assert count(system="be brief").json["input_tokens"] > count().json["input_tokens"]


def test_a_prompt_to_count_may_end_with_the_assistant():
    assert count(messages=[*USER, {"role": "assistant", "content": "Well,"}]).status == 200


def test_headers_and_query_change_nothing():
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-api-key": "k"}
    assert FakeServer(ROUTES).post("/v1/messages?beta=true", body(), **headers).status == 200

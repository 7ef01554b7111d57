"""POST /v1/responses: what is asked of the engine, and how its events are told."""

import asyncio
import json
import sys
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slotpy.engine.generation import Failed, TextDelta, TokenLogprob, ToolCall
from slotpy.engine.session import GenerationStats
from slotpy.errors import PromptTooLongError
from slotpy.server.app import make_app
from slotpy.server.openai.responses import ROUTES
from slotpy.server.settings import Settings
from tests.server.fakes import FINISHED, HELLO, FakeServer, finished
from tests.server.late import delay

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "get_weather", "description": "w", "parameters": PARAMETERS}
THOUGHT = (TextDelta("let", True), TextDelta(" me think", True), TextDelta("Hel"), TextDelta("lo"), FINISHED)
CALL = ToolCall(0, "call_0a1b2c3d", "get_weather", {"city": "Paris"})
KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "top_logprobs",
        "temperature",
        "reasoning",
        "usage",
        "max_output_tokens",
    ),
    *("max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
}


def respond(*scripts: Any, **body: Any) -> tuple[FakeServer, Any]:
    server = FakeServer(ROUTES, *scripts)
    return server, server.post("/v1/responses", {"model": "tinythink", "input": "hi", **body})


def asked(**body: Any) -> Any:
    server, answer = respond(HELLO, **body)
    assert answer.status == 200, answer.text
    return server.worker.request


def refused(**body: Any) -> str:
    server, answer = respond(HELLO, **body)
    assert answer.status == 400 and not server.worker.submissions
    return answer.json["error"]["message"]


def events(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream: each under its type's name, numbered from 0."""
    told = answer.sse
    assert [name for name, _ in told] == [data["type"] for _, data in told]
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    return [data for _, data in told]


def test_an_answer_has_every_key():
    _, answer = respond((*THOUGHT[:-1], finished(stats=GenerationStats(prefill_tokens=5))))
    body = answer.json
    assert body.keys() == KEYS and body["status"] == "completed" and body["store"] is False
    assert body["completed_at"] >= body["created_at"]
    assert body["usage"] == {
        "input_tokens": 7,
        "output_tokens": 3,
        "total_tokens": 10,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens_details": {"reasoning_tokens": 2},
    }
    reasoning, message = body["output"]
    assert reasoning.pop("id").startswith("rs_") and message.pop("id").startswith("msg_")
    assert reasoning == {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "let me think"}],
        "encrypted_content": "let me think",
    }
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }


def test_a_stream_has_the_recorded_events_and_those_of_summaries():
    _, answer = respond(THOUGHT, stream=True)
    told = events(answer)
    assert [event["type"].removeprefix("response.") for event in told] == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta", "reasoning_summary_text.done"),
        *("reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        "completed",
    ]
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["output"] == []
    assert told[0]["response"].keys() == KEYS
    assert told[2]["item"] == {"id": told[3]["item_id"], "type": "reasoning", "summary": []}
    assert told[3]["part"] == {"type": "summary_text", "text": ""}
    assert told[7]["part"] == {"type": "summary_text", "text": "let me think"}
    assert told[9]["item"] == {
        "id": told[10]["item_id"],
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }
    assert told[10]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert [event["delta"] for event in told if event["type"].endswith("text.delta")] == [
        *("let", " me think", "Hel", "lo")
    ]
    assert [event.get("output_index") for event in told] == [None, None, *[0] * 7, *[1] * 7, None]
    assert told[13]["text"] == told[14]["part"]["text"] == "Hello"
    assert told[-1]["response"]["output"] == [told[8]["item"], told[15]["item"]]
    assert "[DONE]" not in answer.text


def test_a_call_is_an_item_of_its_own():
    _, answer = respond((TextDelta("Wait."), CALL, FINISHED), stream=True, tools=[WEATHER])
    told = events(answer)
    added = next(i for i, event in enumerate(told) if event.get("item", {}).get("type") == "function_call")
    item = {
        "id": told[added]["item"]["id"],
        "type": "function_call",
        "status": "completed",
        "call_id": "call_0a1b2c3d",
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    assert told[added]["item"] == {**item, "status": "in_progress", "arguments": ""}
    assert told[added + 1]["type"] == "response.function_call_arguments.delta"
    assert told[added + 1]["delta"] == told[added + 2]["arguments"] == item["arguments"]
    assert told[added + 3]["item"] == item and told[added + 3]["output_index"] == 1
    assert told[-1]["response"]["output"][1] == item


def test_without_parallel_calls_there_is_one():
    second = ToolCall(1, "call_11111111", "get_weather", {})
    _, answer = respond((CALL, second, FINISHED), tools=[WEATHER], parallel_tool_calls=False)
    assert [item["call_id"] for item in answer.json["output"]] == ["call_0a1b2c3d"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_that_was_cut_off_is_incomplete(stream):
    _, answer = respond((TextDelta("Hel"), finished(reason="length")), stream=stream)
    body = events(answer)[-1]["response"] if stream else answer.json
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"} and body["completed_at"] is None
    if stream:
        assert events(answer)[-1]["type"] == "response.incomplete"


def test_a_failure_in_the_stream_is_told_in_both_ways_that_clients_know():
    _, answer = respond((TextDelta("Hel"), Failed(RuntimeError("secret"))), stream=True)
    error, failed = events(answer)[-2:]
    assert error["type"] == "error" and error["error"]["message"] == error["message"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error" and "secret" not in answer.text


def test_a_failure_before_the_first_event_has_its_status():
    _, answer = respond((Failed(PromptTooLongError("the prompt is too long.")),), stream=True)
    assert answer.status == 400 and answer.json["error"]["message"] == "the prompt is too long."


def test_silence_is_broken_by_events(monkeypatch):
    monkeypatch.setattr("slotpy.server.openai.responses.KEEP_ALIVE_S", 0.02)
    server = FakeServer(ROUTES, HELLO)
    delay(monkeypatch, server, 0.05)
    answer = server.post("/v1/responses", {"model": "tinythink", "input": "hi", "stream": True})
    told = [event["type"].removeprefix("response.") for event in events(answer)]
    assert told[:3] == ["created", "in_progress", "in_progress"] and told[-1] == "completed"


def test_logprobs_are_of_the_answer():
    token = TokenLogprob("Hel", b"Hel", -0.5)
    server, answer = respond((TextDelta("Hel", logprobs=(token,)), FINISHED), top_logprobs=2)
    assert server.worker.request.top_logprobs == 2
    assert answer.json["output"][0]["content"][0]["logprobs"] == [
        {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": []}
    ]
    assert asked(include=["message.output_text.logprobs"]).top_logprobs == 0
    assert asked().top_logprobs is None


def test_fields_are_passed_on_and_echoed():
    schema = {"type": "object"}
    given = {
        "instructions": "be brief",
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
        "metadata": {"a": "b"},
        "tools": [{**WEATHER, "strict": True}],
        "tool_choice": "required",
    }
    server, answer = respond(HELLO, **given)
    request = server.worker.request
    assert (request.max_tokens, request.think, request.format) == (5, "low", schema)
    assert request.sampling == {"temperature": 0.5, "top_p": 0.9} and request.defaults["top_k"] == 40
    assert request.tool_choice == "required"
    assert request.tools == (
        {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": PARAMETERS}},
    )
    for key, value in given.items():
        assert answer.json[key] == value


def test_prompts_are_shortened_only_when_asked():
    assert not asked().truncate
    assert not asked(truncation="disabled").truncate
    assert asked(truncation="auto").truncate


def test_effort_is_relaxed_for_a_model_that_cannot_think():
    assert asked(model="tinychat", reasoning={"effort": "high"}).think is None
    assert asked(reasoning={"effort": "none"}).think is False
    assert asked().think is True


def test_hosted_tools_are_left_out_and_namespaces_flattened():
    tools = [
        {"type": "web_search", "external_web_access": False},
        {"type": "web_search_preview"},
        {"type": "namespace", "name": "mcp__git", "description": "d", "tools": [{**WEATHER, "name": "log"}]},
    ]
    reply = (ToolCall(0, "call_0a1b2c3d", "mcp__git.log", {}), FINISHED)
    server, answer = respond(reply, tools=tools)
    assert [tool["function"]["name"] for tool in server.worker.request.tools] == ["mcp__git.log"]
    item = answer.json["output"][0]
    assert (item["name"], item["namespace"]) == ("log", "mcp__git")


def test_a_named_tool_is_the_only_one_and_required():
    request = asked(tools=[WEATHER, {**WEATHER, "name": "b"}], tool_choice={"type": "function", "name": "b"})
    assert [tool["function"]["name"] for tool in request.tools] == ["b"] and request.tool_choice == "required"


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "1", "name": "log", "namespace": "git", "arguments": '{"n": 1}'},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "\n"}]},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"role": "user", "content": "go on"},
    ]
    assert asked(input=items, instructions="i").messages == (
        {"role": "system", "content": "i\n\nd"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "\n",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "git.log", "arguments": {"n": 1}}},
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "one", "tool_call_id": "1", "name": "git.log"},
        {"role": "tool", "content": "two", "tool_call_id": "2", "name": "f"},
        {"role": "user", "content": "go on"},
    )


def test_reasoning_that_says_nothing_leaves_no_message():
    items = [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, {"role": "user", "content": "q"}]
    assert asked(input=items).messages == ({"role": "user", "content": "q"},)


@pytest.mark.parametrize("odd", [5, "x", {"text": "x"}, [5], [None]])
def test_lists_that_are_none_are_passed_over(odd):
    items = [{"type": "reasoning", "summary": odd, "content": odd}, {"role": "user", "content": "q"}]
    request = asked(input=items, tools=[{"type": "namespace", "name": "n", "tools": odd}])
    assert request.messages == ({"role": "user", "content": "q"},) and request.tools == ()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": ""}, "model is required"),
        ({"input": None}, "input must be"),
        ({"input": []}, "input must be"),
        ({"input": 5}, "input must be"),
        ({"input": [5]}, "items of type null"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "images"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "custom"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "parameters"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"reasoning": {"effort": "zzz"}}, "invalid reasoning value"),
        ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
    ],
)
def test_what_cannot_be_done_is_said(body, words):
    assert words in refused(**body)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_response_is_kept(method):
    answer = FakeServer(ROUTES).ask(method, "/v1/responses/resp_1")
    assert answer.status == 404 and answer.json["error"]["type"] == "not_found_error"
    assert "resp_1" in answer.json["error"]["message"]


def test_a_body_may_be_packed():
    async def ask() -> int:
        server = TestServer(make_app(FakeServer(ROUTES, HELLO).service, Settings(), ROUTES))
        await server.start_server(auto_decompress=False)  # as the real one
        async with TestClient(server) as client:
            data = zstd.compress(json.dumps({"model": "tinythink", "input": "hi"}).encode())
            return (await client.post("/v1/responses", data=data, headers={"Content-Encoding": "zstd"})).status

    assert asyncio.run(ask()) == 200


def test_text_is_ascii_on_the_wire():
    _, answer = respond((TextDelta("\u2028é"), FINISHED), stream=True)
    assert answer.raw.isascii() and json.loads(answer.text.split("data: ")[-1])["response"]["output"]

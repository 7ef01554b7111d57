"""POST /v1/chat/completions: what is asked of the engine, and how its events are told."""

import json
from dataclasses import replace
from typing import Any

import pytest

from slotpy.engine.generation import Failed, TextDelta, TokenLogprob, ToolCall
from slotpy.errors import BusyError, PromptTooLongError
from slotpy.server.openai.chat import ROUTES
from tests.server.fakes import FINISHED, HELLO, TINY, FakeServer, finished, model
from tests.server.late import delay

USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time"}}
THOUGHT = (TextDelta("let", True), TextDelta(" me think", True), TextDelta("Hello!"), FINISHED)
CALLS = (
    TextDelta("Wait. "),
    ToolCall(0, "call_0a1b2c3d", "get_weather", {"city": "Zürich"}),
    ToolCall(1, "call_4e5f6071", "get_time", {}),
    FINISHED,
)


def chat(*scripts: Any, models: Any = None, **body: Any) -> tuple[FakeServer, Any]:
    server = FakeServer(ROUTES, *scripts) if models is None else FakeServer(ROUTES, *scripts, models=models)
    return server, server.post("/v1/chat/completions", {"model": "tiny", "messages": USER, **body})


def asked(**body: Any) -> Any:
    server, answer = chat(HELLO, **body)
    assert answer.status == 200, answer.text
    return server.worker.request


def refused(**body: Any) -> str:
    server, answer = chat(HELLO, **body)
    assert answer.status == 400 and not server.worker.submissions
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json["error"]["type"] == "invalid_request_error"
    return answer.json["error"]["message"]


def chunks(answer: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    events = answer.sse
    assert all(name is None for name, _ in events) and events[-1] == (None, "[DONE]")
    return [data for _, data in events[:-1]]


def deltas(answer: Any) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks(answer) if chunk["choices"]]


def test_an_answer_has_the_recorded_shape():
    _, answer = chat(HELLO)
    assert answer.headers["Content-Type"] == "application/json"
    body = answer.json
    assert body.pop("id").startswith("chatcmpl-") and isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp_slotpy",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def test_a_stream_gives_the_role_once_and_the_reason_in_an_empty_delta():
    _, answer = chat(HELLO, stream=True)
    told = chunks(answer)
    assert deltas(answer) == [{"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in told] == [None, None, "stop"]
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in told)
    assert len({(chunk["id"], chunk["created"]) for chunk in told}) == 1


def test_usage_comes_in_a_chunk_of_its_own_only_when_asked_for():
    _, answer = chat(HELLO, stream=True, stream_options={"include_usage": True})
    told = chunks(answer)
    assert told[-1]["choices"] == [] and told[-1]["usage"]["total_tokens"] == 10
    assert all("usage" not in chunk for chunk in told[:-1])


def test_an_empty_reply_still_gives_the_role():
    _, answer = chat((FINISHED,), stream=True)
    assert deltas(answer) == [{"role": "assistant", "content": ""}, {}]


def test_reasoning_has_both_names():
    _, answer = chat(THOUGHT)
    message = answer.json["choices"][0]["message"]
    assert message["content"] == "Hello!"
    assert message["reasoning"] == message["reasoning_content"] == "let me think"


def test_streamed_reasoning_has_empty_content_beside_it():
    _, answer = chat(THOUGHT, stream=True)
    assert deltas(answer) == [
        {"role": "assistant", "content": "", "reasoning": "let", "reasoning_content": "let"},
        {"content": "", "reasoning": " me think", "reasoning_content": " me think"},
        {"content": "Hello!"},
        {},
    ]


def test_tool_calls_come_whole_with_index_and_id():
    _, answer = chat(CALLS, stream=True, tools=[WEATHER, TIME])
    told = deltas(answer)
    assert told[1]["tool_calls"] == [
        {
            "index": 0,
            "id": "call_0a1b2c3d",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Z\\u00fcrich"}'},
        }
    ]
    assert told[2]["tool_calls"][0]["index"] == 1
    assert chunks(answer)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_answer_has_the_calls_of_the_stream():
    _, answer = chat(CALLS, tools=[WEATHER, TIME])
    choice = answer.json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Wait. "
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather", "get_time"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich"}


def test_without_parallel_calls_there_is_one():
    _, answer = chat(CALLS, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert len(answer.json["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("events", [HELLO, CALLS])
@pytest.mark.parametrize("stream", [True, False])
def test_the_token_limit_is_the_reason_also_after_a_call(events, stream):
    _, answer = chat((*events[:-1], finished(reason="length")), stream=stream)
    last = chunks(answer)[-1] if stream else answer.json
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_failure_before_the_first_event_has_its_status():
    _, answer = chat((Failed(PromptTooLongError("prompt is too long: 9 tokens.")),), stream=True)
    assert answer.status == 400
    assert answer.json["error"]["message"] == "prompt is too long: 9 tokens."
    assert answer.json["error"]["code"] == "context_length_exceeded"


def test_a_failure_in_the_stream_is_told_and_nothing_says_done():
    _, answer = chat((TextDelta("Hel"), Failed(RuntimeError("secret"))), stream=True)
    _, last = answer.sse[-1]
    assert last["error"]["type"] == "api_error" and "secret" not in answer.text
    assert "[DONE]" not in answer.text


def test_a_full_queue_is_503():
    _, answer = chat(BusyError("server busy, please try again.  maximum pending requests exceeded"))
    assert answer.status == 503 and answer.json["error"]["type"] == "api_error"


def test_silence_is_broken_by_empty_deltas(monkeypatch):
    monkeypatch.setattr("slotpy.server.openai.chat.KEEP_ALIVE_S", 0.02)
    server = FakeServer(ROUTES, HELLO)
    delay(monkeypatch, server, 0.05)
    answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": USER, "stream": True})
    told = deltas(answer)
    assert told[0] == {"role": "assistant", "content": ""} and {"content": ""} in told[1:]
    assert [delta for delta in told[1:] if delta != {"content": ""}] == [{"content": "Hel"}, {"content": "lo"}, {}]


def test_logprobs_are_of_the_answer():
    rival = TokenLogprob("é", "é".encode(), -1.5)
    token = TokenLogprob("Hel", b"Hel", -0.5, (TokenLogprob("Hel", b"Hel", -0.5), rival))
    thought = TokenLogprob("hm", b"hm", -0.1)
    script = (TextDelta("hm", True, (thought,)), TextDelta("Hel", logprobs=(token,)), FINISHED)
    entry = {
        "token": "Hel",
        "logprob": -0.5,
        "bytes": [72, 101, 108],
        "top_logprobs": [
            {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]},
            {"token": "é", "logprob": -1.5, "bytes": [195, 169]},
        ],
    }
    server, answer = chat(script, logprobs=True, top_logprobs=2)
    assert answer.json["choices"][0]["logprobs"] == {"content": [entry]}
    assert server.worker.request.top_logprobs == 2
    _, answer = chat(script, logprobs=True, top_logprobs=2, stream=True)
    told = [chunk["choices"][0].get("logprobs") for chunk in chunks(answer)]
    assert told == [None, {"content": [entry]}, None]


def test_a_probability_of_nothing_is_a_number():
    token = TokenLogprob("x", b"x", float("-inf"))
    _, answer = chat((TextDelta("x", logprobs=(token,)), FINISHED), logprobs=True)
    assert answer.json["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_without_logprobs_none_are_asked_for():
    assert asked(top_logprobs=3).top_logprobs is None
    assert asked(logprobs=True).top_logprobs == 0


def test_sampling_defaults_lie_below_the_model():
    request = asked()
    assert request.defaults == {"temperature": 1.0, "top_p": 1.0, "top_k": 40}
    assert request.sampling == {} and request.max_tokens is None and request.truncate


def test_the_request_wins_over_the_models_own_parameters():
    mine = model("mine:latest", parameters={"temperature": 0.1, "top_k": 7, "stop": ["#"], "num_predict": 9})
    server, _ = chat(HELLO, models=[mine], model="mine", temperature=3, stop=["\n", "x"])
    assert server.worker.request.sampling == {"temperature": 3.0, "top_k": 7}
    assert server.worker.request.stops == ("\n", "x") and server.worker.request.max_tokens == 9


def test_sampling_fields_are_brought_within_limits():
    request = asked(temperature=-1, top_p=7, top_k=10**12, min_p=2, presence_penalty=0.5, frequency_penalty=1, seed=-5)
    assert request.sampling == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 10**12,
        "min_p": 1.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 1.0,
        "seed": 2**64 - 5,
    }


def test_the_newer_name_of_the_token_limit_wins():
    assert asked(max_tokens=4).max_tokens == 4
    assert asked(max_tokens=4, max_completion_tokens=5).max_tokens == 5
    assert asked(max_tokens=-1).max_tokens is None


def test_stop_may_be_one_string():
    assert asked(stop="x").stops == ("x",)
    assert "stop" in refused(stop=[1])


def test_nulls_are_absent():
    names = ["stream", "stop", "tools", "temperature", "max_tokens", "response_format", "stream_options", "seed", "n"]
    assert asked(**dict.fromkeys(names)).sampling == {}


def test_values_that_change_nothing_are_accepted():
    values = {"n": 1, "logit_bias": {}, "tools": [], "functions": [], "store": False, "user": "u", "metadata": {}}
    assert asked(**values, logprobs=False, frequency_penalty=0, response_format={"type": "text"}).format is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "[] is too short - 'messages'"),
        ({"n": 2}, "n must be 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "tools"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
        ({"reasoning_effort": "zzz"}, 'invalid reasoning value: "zzz"'),
        ({"reasoning_effort": "high"}, "does not support thinking"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function", "function": {}}]}, "name"),
        ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "nope"),
        ({"model": "tinychat", "tools": [WEATHER]}, "does not support tools"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"temperature": "hot"}, "ChatCompletionRequest.temperature of type float64"),
    ],
)
def test_what_cannot_be_done_is_said(body, words):
    assert words in refused(**body)


@pytest.mark.parametrize("url", ["http://x/y.png", "data:image/png;base64,iVBORw0KGgo="])
def test_images_are_refused(url):
    message = refused(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert "images are not supported" in message
    assert ("not fetched" in message) == url.startswith("http")


def test_an_unknown_model_is_404():
    server, answer = chat(HELLO, model="nosuch")
    assert answer.status == 404 and not server.worker.submissions
    assert answer.json["error"] == {
        "message": "model 'nosuch' not found",
        "type": "not_found_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"", "EOF"), (b"[]", "json: cannot unmarshal array into Go value of type openai.ChatCompletionRequest")],
)
def test_bodies_are_read_as_recorded(raw, message):
    answer = FakeServer(ROUTES).post("/v1/chat/completions", raw)
    assert (answer.status, answer.json["error"]["message"]) == (400, message)


def test_formats():
    schema = {"type": "object", "$defs": {"A": {"default": None}}}
    assert asked(response_format={"type": "json_object"}).format == "json"
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    assert asked(response_format=wanted).format == schema


@pytest.mark.parametrize(
    ("body", "think"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning": {"effort": "high"}}, "high"),
    ],
)
def test_reasoning_effort_is_passed_on(body, think):
    assert asked(model="tinythink", **body).think == think


def test_a_model_without_thinking_is_asked_for_none():
    assert asked().think is None
    assert asked(reasoning_effort="none").think is False


def test_tools_are_offered_as_declared():
    request = asked(tools=[WEATHER, {**TIME, "extra": 1}])
    assert request.tools == (WEATHER, TIME) and request.tool_choice == "auto"


def test_a_named_tool_is_the_only_one_and_required():
    request = asked(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert request.tools == (TIME,) and request.tool_choice == "required"
    assert asked(tools=[WEATHER], tool_choice="required").tools == (WEATHER,)


def test_a_choice_of_none_hides_the_tools():
    request = asked(model="tinychat", tools=[WEATHER], tool_choice="none")
    assert request.tools == () and request.tool_choice == "none"


def test_system_messages_are_merged_and_come_first():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "d"},
        {"role": "system", "content": [{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]},
    ]
    assert asked(messages=messages).messages == (
        {"role": "system", "content": "d\n\ns1s2"},
        {"role": "user", "content": "a"},
    )


def test_the_models_own_system_message_gives_way_to_the_requests():
    mine = replace(TINY, system="mine", messages=({"role": "user", "content": "earlier"},))
    server, _ = chat(HELLO, models=[mine])
    assert [m["content"] for m in server.worker.request.messages] == ["mine", "earlier", "hi"]
    server, _ = chat(HELLO, models=[mine], messages=[{"role": "system", "content": "yours"}, *USER])
    assert [m["content"] for m in server.worker.request.messages] == ["yours", "earlier", "hi"]


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_tool_results_are_named_and_put_in_the_order_of_their_calls():
    calls = [call("1", "a", '{"x": 1}'), call("2", "b", "null"), call("3", "c", "")]
    history = [
        *USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls},
        result("3", "third"),
        result("odd", "nobody's"),
        result("1", [{"type": "text", "text": "first"}]),
        {"role": "user", "content": "go on"},
    ]
    _, assistant, *results, last = asked(messages=history).messages
    assert assistant["content"] == "" and assistant["reasoning_content"] == "hm"
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"x": 1}, {}, {}]
    assert [(m.get("name"), m["content"]) for m in results] == [("a", "first"), ("c", "third"), (None, "nobody's")]
    assert last["content"] == "go on"


@pytest.mark.parametrize("arguments", ["{bad", "[1]", "5"])
def test_arguments_that_are_no_object_are_refused(arguments):
    history = [*USER, {"role": "assistant", "tool_calls": [call("1", "f", arguments)]}, result("1", "r")]
    assert "invalid tool call arguments" in refused(messages=history)


def test_a_handler_that_is_done_cancels_what_it_asked():
    server, _ = chat(HELLO, stream=True)
    assert server.worker.submissions[0].cancelled == 1

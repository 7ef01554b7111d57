import json
import time
from typing import Any

import pytest

from slotpy.engine.generation import Failed, LoadRequest, TextDelta, TokenLogprob, ToolCall, UnloadRequest
from slotpy.errors import BusyError, CapacityError, PromptTooLongError
from slotpy.server.ollama.chat import ROUTES
from slotpy.server.settings import Settings
from tests.server.fakes import FINISHED, HELLO, LOADED, MODELS, UNLOADED, FakeServer, finished, model
from tests.server.live import live

USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "w", "parameters": {"type": "object", "properties": {}}},
}
THOUGHT = (TextDelta("let", True), TextDelta(" me think", True), *HELLO)
CALLS = (
    ToolCall(0, "call_0a1b2c3d", "get_weather", {"city": "Paris"}),
    ToolCall(1, "call_4e5f6071", "get_time", {"tz": "UTC"}),
    FINISHED,
)
METRICS = [
    *("total_duration", "load_duration", "prompt_eval_count"),
    *("prompt_eval_duration", "eval_count", "eval_duration"),
]


def chat(*scripts: Any, models=MODELS, **body: Any):
    server = FakeServer(ROUTES, *scripts, models=models)
    answer = server.post("/api/chat", {"model": "tiny", "messages": USER, **body})
    return server.worker, answer


def asked(**body: Any):
    worker, answer = chat(HELLO, **body)
    assert answer.status == 200, answer.text
    return worker.request


def refused(status: int = 400, **body: Any) -> str:
    worker, answer = chat(HELLO, **body)
    assert answer.status == status, answer.text
    assert not worker.submissions
    return answer.json["error"]


def test_streams_a_record_for_each_piece_with_keys_in_ollamas_order():
    _, answer = chat(HELLO)
    first, second, last = answer.records
    assert list(first) == ["model", "created_at", "message", "done"]
    assert first["message"] == {"role": "assistant", "content": "Hel"}
    assert second["message"] == {"role": "assistant", "content": "lo"}
    assert not first["done"] and not second["done"]
    assert list(last) == ["model", "created_at", "message", "done", "done_reason", *METRICS]
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert [last[name] for name in METRICS] == [61_000_743, 6_901_992, 7, 12_500_000, 3, 30_000_000]
    assert all(record["created_at"].endswith("Z") for record in answer.records)


def test_without_stream_one_object_says_all():
    _, answer = chat(THOUGHT, stream=False)
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.json["message"] == {"role": "assistant", "content": "Hello", "thinking": "let me think"}
    assert answer.json["done"] is True
    assert list(answer.json)[-6:] == METRICS


def test_counts_of_zero_are_sent_too():
    _, answer = chat((finished(completion_tokens=0, decode_ns=0, load_ns=0),), stream=False)
    assert [answer.json[name] for name in ("eval_count", "eval_duration", "load_duration")] == [0, 0, 0]


def test_echoes_the_name_as_it_was_asked_for():
    _, answer = chat(HELLO, model="TINY:latest", stream=False)
    assert answer.json["model"] == "TINY:latest"


def test_thinking_is_apart_from_content_which_is_always_there():
    _, answer = chat(THOUGHT)
    messages = [record["message"] for record in answer.records]
    assert messages[0] == {"role": "assistant", "content": "", "thinking": "let"}
    assert messages[2] == {"role": "assistant", "content": "Hel"}


def test_tool_calls_come_whole_with_arguments_as_an_object():
    _, answer = chat(CALLS)
    first, second, last = answer.records
    function = {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    assert first["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0a1b2c3d", "function": function}],
    }
    assert second["message"]["tool_calls"][0]["function"]["index"] == 1
    assert (last["done"], last["done_reason"]) == (True, "stop")
    _, answer = chat(CALLS, stream=False)
    assert [call["id"] for call in answer.json["message"]["tool_calls"]] == ["call_0a1b2c3d", "call_4e5f6071"]
    assert answer.json["message"]["content"] == ""


def test_non_ascii_text_is_escaped():
    _, answer = chat((TextDelta("\u2028é😀"), FINISHED))
    assert answer.raw.isascii()
    assert answer.records[0]["message"]["content"] == "\u2028é😀"


def test_logprobs_come_before_the_metrics():
    best = TokenLogprob("é", b"\xc3\xa9", -1.5)
    hel = TokenLogprob("Hel", b"Hel", -0.5, top=(best,))
    script = (TextDelta("Hel", logprobs=(hel,)), TextDelta("é", logprobs=(best,)), FINISHED)
    _, answer = chat(script, stream=False, logprobs=True, top_logprobs=1)
    other = {"token": "é", "logprob": -1.5, "bytes": [195, 169]}
    first = {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": [other]}
    assert answer.json["logprobs"] == [first, other]
    assert list(answer.json) == ["model", "created_at", "message", "done", "done_reason", "logprobs", *METRICS]
    _, answer = chat(script, logprobs=True, top_logprobs=1)
    assert [record.get("logprobs") for record in answer.records] == [[first], [other], None]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False, "top_logprobs": 2}, None),
    ],
)
def test_logprobs_are_given_when_asked_for(body, expected):
    assert asked(**body).top_logprobs == expected


@pytest.mark.parametrize("number", [-1, 21])
def test_top_logprobs_out_of_range_is_refused(number):
    assert refused(logprobs=True, top_logprobs=number) == "top_logprobs must be between 0 and 20"


def test_an_error_before_the_first_record_has_its_own_status():
    _, answer = chat(BusyError("server busy, please try again.  maximum pending requests exceeded"))
    assert answer.status == 503
    assert answer.json == {"error": "server busy, please try again.  maximum pending requests exceeded"}
    _, answer = chat((Failed(PromptTooLongError("the prompt is too long")),))
    assert (answer.status, answer.json) == (400, {"error": "the prompt is too long"})


def test_an_error_after_the_first_record_is_the_last_line():
    _, answer = chat((TextDelta("par"), Failed(CapacityError("no memory"))))
    assert answer.status == 200
    assert answer.records[1:] == [{"error": "no memory"}]
    _, answer = chat((TextDelta("par"), Failed(RuntimeError("secret"))), stream=False)
    assert answer.status == 500
    assert "secret" not in answer.text


def test_the_job_is_left_when_the_answer_is_out():
    for stream in (True, False):
        worker, _ = chat(HELLO, stream=stream)
        assert worker.submissions[0].cancelled


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_job(stream):
    body = json.dumps({"model": "tiny", "messages": USER, "stream": stream}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with live(ROUTES, Settings(), (TextDelta("Hel"),)) as server:
        submissions = server.service.worker.submissions
        with server.connect() as connection:
            connection.sendall(head + body)
            if stream:
                assert connection.recv(1)
            wait_until(lambda: submissions)
            assert not submissions[0].cancelled
        wait_until(lambda: submissions[0].cancelled)


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_unknown_invalid_and_missing_models():
    assert refused(404, model="nosuch") == "model 'nosuch' not found"
    assert refused(400, model="a b c!") == "invalid model name"
    assert refused(400, model="") == "model is required"
    assert refused(400, model=None) == "model is required"


@pytest.mark.parametrize("messages", [[], None])
@pytest.mark.parametrize("stream", [True, False])
def test_no_messages_loads(messages, stream):
    options = {"num_ctx": 2048}
    worker, answer = chat((LOADED,), model="TINY", messages=messages, stream=stream, keep_alive=-1, options=options)
    assert worker.submissions[0].request == LoadRequest(2048)
    assert worker.submissions[0].keep_alive_s == float("inf")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.json["model"] == "TINY"
    assert list(answer.json) == ["model", "created_at", "message", "done", "done_reason"]
    assert answer.json["message"] == {"role": "assistant", "content": ""}
    assert answer.json["done_reason"] == "load"


@pytest.mark.parametrize("keep_alive", [0, "0s"])
def test_no_messages_and_no_time_to_stay_unloads(keep_alive):
    worker, answer = chat((UNLOADED,), messages=[], keep_alive=keep_alive)
    assert worker.request == UnloadRequest()
    assert answer.json["done_reason"] == "unload"


def test_keep_alive_goes_with_the_request():
    worker, _ = chat(HELLO, keep_alive="1h30m")
    assert worker.submissions[0].keep_alive_s == 5400
    worker, _ = chat(HELLO)
    assert worker.submissions[0].keep_alive_s is None
    assert refused(keep_alive=True) == "Unsupported type: 'bool'"


@pytest.mark.parametrize(
    ("name", "think", "expected"),
    [
        ("tinythink", None, True),
        ("tinythink", True, True),
        ("tinythink", False, False),
        ("tinythink", "high", "high"),
        ("tinychat", None, None),
        ("tinychat", False, None),
    ],
)
def test_models_that_can_think_do_unless_told_otherwise(name, think, expected):
    assert asked(model=name, think=think).think == expected


def test_think_is_refused_for_other_values_and_other_models():
    values = '"high", "medium", "low", "max", true, or false'
    assert refused(model="tinychat", think=True) == '"tinychat" does not support thinking'
    assert refused(model="tinychat", think="low") == '"tinychat" does not support thinking'
    assert refused(model="tinythink", think="ultra") == f'invalid think value: "ultra" (must be {values})'
    assert refused(model="tinythink", think=1) == f"think must be a boolean or string ({values})"


def test_tools_go_to_models_that_can_use_them():
    assert asked(tools=[TOOL]).tools == (TOOL,)
    assert asked(model="tinychat", tools=[]).tools == ()
    assert refused(model="tinychat", tools=[TOOL]) == '"tinychat" does not support tools'
    assert refused(tools=[{"type": "function"}]) == "every tool needs a function with a name"
    assert "ChatRequest.tools" in refused(tools="x")


def test_a_conversation_with_calls_and_results_arrives_whole():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "1", "tool_name": "f", "tool_call_id": "1"},
    ]
    assert asked(messages=messages).messages == tuple(messages)


def test_messages_of_odd_form_are_accepted():
    odd = [{"role": "USER", "content": "x"}, {"role": "alien", "content": None}, {"role": "user"}, {}]
    assert len(asked(messages=odd).messages) == 4
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert "ChatRequest.messages.content of type string" in refused(messages=parts)


def test_the_models_own_messages_come_first():
    example = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"})
    own = model("own", "tools", system="be nice", messages=example)
    system = {"role": "system", "content": "be nice"}
    assert asked(model="own", models=[own]).messages == (system, *example, *USER)
    asking = [{"role": "System", "content": "be rude"}, *USER]
    assert asked(model="own", models=[own], messages=asking).messages == (*example, *asking)


def test_options_of_the_request_win_over_the_models():
    own = model("own", parameters={"temperature": 0.1, "stop": ["<x>"], "num_predict": 9, "num_ctx": 99_999})
    request = asked(model="own", models=[own])
    assert (request.sampling, request.stops, request.max_tokens) == ({"temperature": 0.1}, ("<x>",), 9)
    assert request.context_tokens == own.context_length
    request = asked(model="own", models=[own], options={"temperature": 0.7, "stop": ["y"], "num_predict": None})
    assert (request.sampling, request.stops, request.max_tokens) == ({"temperature": 0.7}, ("y",), 9)
    assert request.defaults == {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.0}
    assert refused(options={"temperature": "a"}) == 'option "temperature" must be of type float32'


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), ("", None), ("json", "json"), ({"type": "object"}, {"type": "object"})]
)
def test_format_is_json_or_a_schema(given, expected):
    assert asked(format=given).format == expected


@pytest.mark.parametrize(("given", "shown"), [("xml", r'"\"xml\""'), ([1], '"[1]"'), (True, '"true"')])
def test_another_format_is_refused(given, shown):
    assert refused(format=given) == f'invalid format: {shown}; expected "json" or a valid JSON Schema object'


def test_truncate_is_passed_on():
    assert asked().truncate is True
    assert asked(truncate=False).truncate is False


@pytest.mark.parametrize(
    ("image", "error"),
    [
        ("!!!", "illegal base64 data at input byte 0"),
        ("data:image/png;base64,iVBORw0KGgo=", "illegal base64 data at input byte 4"),
        ("iVBORw0KGg", "illegal base64 data at input byte 8"),
        ("iVBORw0K\r\nGgo=", "this model is missing data required for image input"),
    ],
)
def test_images_are_refused_never_ignored(image, error):
    assert refused(messages=[{"role": "user", "content": "x", "images": [image]}]) == error
    assert asked(messages=[{"role": "user", "content": "x", "images": []}])


def test_debug_render_only_shows_the_prompt_and_runs_nothing():
    worker, answer = chat(HELLO, model="tinythink", _debug_render_only=True)
    assert not worker.submissions
    assert list(answer.json) == ["model", "created_at", "message", "done", "_debug_info"]
    assert answer.json["message"] == {"role": "", "content": ""}
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert answer.json["_debug_info"] == {"rendered_template": prompt}

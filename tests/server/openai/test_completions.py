"""POST /v1/completions."""

from typing import Any

import pytest

from slotpy.engine.generation import Failed, TextDelta, TokenLogprob
from slotpy.server.openai.completions import ROUTES
from tests.server.fakes import FINISHED, HELLO, FakeServer, finished, model

TOKENS = (TokenLogprob("Hel", b"Hel", -0.5, (TokenLogprob("é", "é".encode(), -1.5),)), TokenLogprob("lo", b"lo", -0.25))
SCORED = (TextDelta("Hel", logprobs=TOKENS[:1]), TextDelta("lo", logprobs=TOKENS[1:]), FINISHED)


def complete(*scripts: Any, models: Any = None, **body: Any) -> tuple[FakeServer, Any]:
    server = FakeServer(ROUTES, *scripts) if models is None else FakeServer(ROUTES, *scripts, models=models)
    return server, server.post("/v1/completions", {"model": "tiny", "prompt": "x", **body})


def asked(**body: Any) -> Any:
    server, answer = complete(HELLO, **body)
    assert answer.status == 200, answer.text
    return server.worker.request


def test_an_answer_has_the_recorded_shape():
    _, answer = complete((TextDelta("hm", True), *HELLO))
    body = answer.json
    assert body.pop("id").startswith("cmpl-") and isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "fp_slotpy",
        "choices": [{"text": "Hello", "index": 0, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def test_a_stream_has_usage_in_every_chunk_only_when_asked_for():
    _, answer = complete((TextDelta("hm", True), *HELLO), stream=True, stream_options={"include_usage": True})
    *told, done = [data for _, data in answer.sse]
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in told] == [
        [{"text": "", "index": 0, "finish_reason": None}],
        [{"text": "Hel", "index": 0, "finish_reason": None}],
        [{"text": "lo", "index": 0, "finish_reason": None}],
        [{"text": "", "index": 0, "finish_reason": "stop"}],
        [],
    ]
    assert [chunk["usage"]["total_tokens"] for chunk in told] == [0, 0, 0, 0, 10]
    _, answer = complete(HELLO, stream=True)
    assert "usage" not in answer.text


def test_a_failure_in_the_stream_is_told():
    _, answer = complete((TextDelta("Hel"), Failed(RuntimeError())), stream=True)
    assert "error" in answer.sse[-1][1] and "[DONE]" not in answer.text


def test_the_prompt_is_a_users_message():
    request = asked(prompt=["a"], max_tokens=4, stop="#", seed=3, temperature=0)
    assert request.messages == ({"role": "user", "content": "a"},) and request.prompt is None
    assert (request.max_tokens, request.stops) == (4, ("#",))
    assert request.sampling == {"seed": 3, "temperature": 0.0}
    assert request.defaults["temperature"] == 1.0


def test_nothing_is_thought_that_could_not_be_told():
    assert asked(model="tinythink").think is False


def test_a_model_without_a_template_continues_the_prompt():
    server, _ = complete(HELLO, models=[model("tiny:latest", template="")])
    assert server.worker.request.prompt == "x" and server.worker.request.messages is None


def test_an_empty_prompt_ends_with_a_reason_of_this_dialect():
    _, answer = complete((finished(reason="stop", completion_tokens=0),), prompt="")
    assert answer.json["choices"][0] == {"text": "", "index": 0, "finish_reason": "stop"}


def test_logprobs_are_columns():
    server, answer = complete(SCORED, logprobs=1)
    assert server.worker.request.top_logprobs == 1
    assert answer.json["choices"][0]["logprobs"] == {
        "tokens": ["Hel", "lo"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"é": -1.5}, {}],
        "text_offset": [0, 3],
    }


def test_streamed_logprobs_go_on_counting():
    _, answer = complete(SCORED, logprobs=0, stream=True)
    told = [data["choices"][0]["logprobs"] for _, data in answer.sse[:-1]]
    assert [each and each["text_offset"] for each in told] == [[0], [3], None]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": []}, "empty list"),
        ({"prompt": ["a", "b"]}, "one string"),
        ({"prompt": [1, 2]}, "one string"),
        ({"prompt": 5}, "one string"),
        ({"echo": True}, "echo"),
        ({"suffix": "y"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2}, "n must be 1"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20"),
    ],
)
def test_what_cannot_be_done_is_said(body, words):
    server, answer = complete(HELLO, **body)
    assert answer.status == 400 and words in answer.json["error"]["message"]
    assert not server.worker.submissions


def test_values_that_change_nothing_are_accepted():
    assert asked(echo=False, suffix="", best_of=1, n=1, logit_bias={}, user="u").top_logprobs is None


def test_no_model_is_not_found():
    answer = FakeServer(ROUTES).post("/v1/completions", {})
    assert (answer.status, answer.json["error"]["message"]) == (404, "model '' not found")

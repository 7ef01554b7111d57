from typing import Any

import pytest

from slotpy.engine.generation import LoadRequest, TextDelta, TokenLogprob, UnloadRequest
from slotpy.server.ollama.generate import ROUTES
from tests.server.fakes import FINISHED, HELLO, LOADED, MODELS, TINY, UNLOADED, FakeServer, model

METRICS = [
    *("total_duration", "load_duration", "prompt_eval_count"),
    *("prompt_eval_duration", "eval_count", "eval_duration"),
]


def generate(*scripts: Any, models=MODELS, **body: Any):
    server = FakeServer(ROUTES, *scripts, models=models)
    answer = server.post("/api/generate", {"model": "tiny", "prompt": "x", **body})
    return server.worker, answer


def asked(**body: Any):
    worker, answer = generate(HELLO, **body)
    assert answer.status == 200, answer.text
    return worker.request


def refused(status: int = 400, **body: Any) -> str:
    worker, answer = generate(HELLO, **body)
    assert answer.status == status, answer.text
    assert not worker.submissions
    return answer.json["error"]


def test_streams_records_with_keys_in_ollamas_order():
    script = (TextDelta("let", True), *HELLO)
    _, answer = generate(script)
    first, second, _, last = answer.records
    assert list(first) == ["model", "created_at", "response", "thinking", "done"]
    assert (first["response"], first["thinking"], first["done"]) == ("", "let", False)
    assert list(second) == ["model", "created_at", "response", "done"]
    assert second["response"] == "Hel"
    assert list(last) == ["model", "created_at", "response", "done", "done_reason", "context", *METRICS]
    assert (last["response"], last["done_reason"], last["context"]) == ("", "stop", [3, 4, 5])


def test_without_stream_one_object_says_all():
    _, answer = generate((TextDelta("let", True), *HELLO), stream=False)
    assert (answer.json["response"], answer.json["thinking"]) == ("Hello", "let")
    assert answer.json["done"] is True and answer.json["eval_count"] == 3


def test_logprobs_come_last():
    logprob = TokenLogprob("Hel", b"Hel", -0.5)
    _, answer = generate((TextDelta("Hel", logprobs=(logprob,)), FINISHED), stream=False, logprobs=True)
    assert list(answer.json)[-1] == "logprobs"
    assert answer.json["logprobs"] == [{"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]}]


def test_unknown_and_invalid_models():
    assert refused(404, model="nosuch") == "model 'nosuch' not found"
    assert refused(404, model="") == "model '' not found"
    assert refused(400, model="::") == "invalid model name"


@pytest.mark.parametrize("prompt", ["", None])
def test_no_prompt_loads_or_unloads(prompt):
    worker, answer = generate((LOADED,), prompt=prompt)
    assert worker.request == LoadRequest()
    assert list(answer.json) == ["model", "created_at", "response", "done", "done_reason"]
    assert (answer.json["response"], answer.json["done_reason"]) == ("", "load")
    worker, answer = generate((UNLOADED,), prompt=prompt, keep_alive=0, options=None)
    assert worker.request == UnloadRequest()
    assert answer.json["done_reason"] == "unload"


def test_the_prompt_is_a_users_message_after_the_models_own():
    example = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"})
    own = model("own", system="be nice", messages=example)
    user = {"role": "user", "content": "x"}
    request = asked(model="own", models=[own])
    assert request.messages == ({"role": "system", "content": "be nice"}, *example, user)
    request = asked(model="own", models=[own], system="be rude")
    assert request.messages == ({"role": "system", "content": "be rude"}, *example, user)


def test_a_context_comes_before_the_prompt_and_holds_the_models_own_already():
    own = model("own", system="be nice", messages=({"role": "user", "content": "1"},))
    request = asked(model="own", models=[own], context=[1, 2])
    assert (request.prefix_ids, request.messages) == ((1, 2), ({"role": "user", "content": "x"},))
    request = asked(model="own", models=[own], context=[1, 2], system="s")
    assert request.messages[0] == {"role": "system", "content": "s"}


def test_a_raw_prompt_is_taken_as_it_is():
    request = asked(raw=True)
    assert (request.prompt, request.messages) == ("x", None)
    for field in ({"system": "s"}, {"template": "t"}, {"context": [1]}):
        assert refused(raw=True, **field) == "raw mode does not support template, system, or context"


def test_a_model_without_a_template_continues_the_prompt():
    base = model("base", template="")
    request = asked(model="base", models=[base])
    assert (request.prompt, request.messages) == ("x", None)
    assert asked(model="base", models=[base], system="s").messages is not None  # which the engine will refuse


def test_a_suffix_is_refused():
    assert refused(suffix="y") == '"tiny" does not support insert'
    assert asked(suffix="")


def test_a_template_is_refused_unless_it_is_the_models_own():
    assert "raw" in refused(template="{{ .Prompt }}")
    assert asked(template=TINY.template) and asked(template="")


def test_shared_fields_reach_the_request():
    request = asked(
        model="tinythink",
        think="low",
        format="json",
        options={"num_predict": 5, "seed": 1, "num_ctx": 512},
        keep_alive=1,
        truncate=False,
    )
    assert (request.think, request.format, request.max_tokens, request.truncate) == ("low", "json", 5, False)
    assert (request.sampling, request.context_tokens) == ({"seed": 1}, 512)
    assert "think" in refused(think=True)
    assert "format" in refused(format="xml")
    assert "base64" in refused(images=["!!!"])
    assert "image input" in refused(images=["iVBORw0KGgo="])


def test_debug_render_only_shows_the_prompt_and_runs_nothing():
    worker, answer = generate(HELLO, _debug_render_only=True, system="s")
    assert not worker.submissions
    assert list(answer.json) == ["model", "created_at", "response", "done", "_debug_info"]
    prompt = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert answer.json["_debug_info"] == {"rendered_template": prompt}
    _, answer = generate(HELLO, _debug_render_only=True, raw=True)
    assert answer.json["_debug_info"] == {"rendered_template": "x"}

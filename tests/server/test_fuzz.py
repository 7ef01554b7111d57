"""A short run of the fuzzer, with a seed of its own, and proof that its judge sees what is wrong."""

import json

import pytest
from aiohttp import web

from slotpy.server.routes import ROUTES
from tests.server.fuzz import Runner, Watch
from tests.server.fuzz_cases import BODIES, ENDPOINTS, make_case
from tests.server.process import started
from tests.server.wellformed import Wrong, check
from tests.server.wire import Answer

SEED, NUM_CASES = 5, 160
BODILESS = (
    "/api/me",
    "/api/signout",
    "/api/experimental/web_search",
    "/api/experimental/web_fetch",
    "/api/blobs/{digest}",
)


def test_fuzzed_requests_get_proper_answers_and_leave_nothing_behind():
    with started() as server:
        watch = Watch(server)
        runner = Runner(server.port, SEED)
        runner.run(NUM_CASES, 30.0)
        problems = watch.problems()
    assert runner.num_cases == NUM_CASES
    assert len({answer[:3] for answer in runner.answers}) >= 5, runner.answers
    assert not runner.failures, "\n".join(runner.failures)
    assert not problems, "\n".join(problems)


def test_every_endpoint_is_fuzzed():
    routes = {(route.method, route.path) for route in ROUTES if isinstance(route, web.RouteDef)}
    assert routes < set(ENDPOINTS)
    assert {path for method, path in routes if method in ("POST", "PUT")} - set(BODIES) == set(BODILESS)
    cases = [make_case(SEED, number) for number in range(4000)]
    sent = {(each.method, each.path) for case in cases for each in case.requests}
    assert {(method, path) for method, path in routes if "{" not in path} <= sent
    assert {case.kind for case in cases} == {"fields", "bytes", "paths", "headers", "pipeline", "gone"}


def test_a_case_is_the_same_every_time():
    assert [make_case(SEED, number) for number in range(100)] == [make_case(SEED, number) for number in range(100)]


JSON = "application/json; charset=utf-8"
LAST = {"done": True, "done_reason": "stop", "total_duration": 1, "load_duration": 0, "prompt_eval_count": 1}
LAST |= {"prompt_eval_duration": 1, "eval_count": 1}


@pytest.mark.parametrize(
    ("path", "status", "content_type", "body", "complaint"),
    [
        ("/api/chat", 500, JSON, b'{"error":"x"}', "status 500"),
        ("/api/chat", 502, JSON, b'{"error":"x"}', "status 502"),
        ("/api/chat", 400, JSON, b'{"error":"internal error (KeyError)"}', "a bug"),
        ("/api/chat", 400, JSON, b'{"error":"Traceback (most recent call last)"}', "traceback"),
        ("/api/chat", 400, JSON, b'{"message":"x"}', "ollama dialect"),
        ("/v1/completions", 400, JSON, b'{"error":{"message":"x"}}', "openai dialect"),
        ("/v1/messages", 400, JSON, b'{"type":"error","error":{"message":"x"}}', "anthropic dialect"),
        ("/api/chat", 400, "text/plain", b"400: Bad Request", "status 400 as text"),
        ("/nosuch", 404, "text/plain", b"404: Not Found", "Go's"),
        ("/api/show", 200, JSON, b'{"a":NaN}', "NaN"),
        ("/api/show", 200, JSON, '{"a":"\u00e4"}'.encode(), "ASCII"),
        ("/api/show", 200, JSON, b'{"error":"x"}', "with status 200"),
        ("/api/chat", 200, JSON, json.dumps(LAST | {"eval_count": 1.5}).encode(), "whole numbers"),
        ("/api/chat", 200, "application/x-ndjson", b'{"done":false}\n', "ends with"),
        ("/api/chat", 200, "application/x-ndjson", json.dumps(LAST).encode(), "last line"),
        ("/api/chat", 200, "application/x-ndjson", json.dumps(LAST).encode() + b"\n\n", "no JSON"),
        ("/api/chat", 200, "application/x-ndjson", (json.dumps(LAST) + "\n").encode() * 2, "after its end"),
        ("/api/pull", 200, "application/x-ndjson", b'{"status":"pulling"}\n', "ends with"),
        ("/v1/completions", 200, "text/event-stream", b'data: {"choices":[]}\n\ndata: [DONE]\n\n', "finish reasons"),
        ("/v1/completions", 200, "text/event-stream", b"data: [DONE]\n", "last event"),
        ("/v1/messages", 200, "text/event-stream", b'event: ping\ndata: {"type":"ping"}\n\n', "goes from ping"),
        (
            "/v1/responses",
            200,
            "text/event-stream",
            b'event: a\ndata: {"type":"a","sequence_number":1}\n\n',
            "sequence",
        ),
    ],
)
def test_an_answer_that_is_not_well_formed_is_seen(path, status, content_type, body, complaint):
    with pytest.raises(Wrong, match=complaint):
        check("POST", path, Answer(status, {"content-type": content_type}, body))

"""Every request of the battery is answered as Ollama answers it, but for the differences that are listed."""

import json

import pytest

from tests.ollama.battery import battery
from tests.ollama.compare import (
    FREE,
    HERE,
    Answer,
    Difference,
    broken_rules,
    differences,
    expected,
    findings,
    send,
    shape,
    unexplained,
)

EXPECTED, LISTED = expected(), differences()
NAMES = [call.name for call in battery(0)]


@pytest.fixture(scope="session")
def answers(port):
    """The answers to all calls, sent in their order once."""
    return {call.name: (call, send(call, "127.0.0.1", port)) for call in battery(port)}


@pytest.mark.parametrize("name", NAMES)
def test_answers_as_ollama_does(answers, name):
    call, got = answers[name]
    assert unexplained(name, findings(EXPECTED[name], got), LISTED) == [], got.text[:1000]
    assert broken_rules(call, got) == [], got.text[:1000]


def test_every_listed_difference_is_still_one(answers):
    listed = differences()
    for name, (_, got) in answers.items():
        unexplained(name, findings(EXPECTED[name], got), listed)
    assert {entry.reason: entry.unused for entry in listed if entry.unused} == {}


def test_the_readme_tells_how_many_are_alike(answers):
    alike = sum(findings(EXPECTED[name], got) == [] for name, (_, got) in answers.items())
    line = f"{len(answers)} requests: {alike} answered alike, {len(answers) - alike} differ as listed"
    assert line in (HERE / "README.md").read_text(encoding="utf-8")


def test_every_call_has_an_expected_answer_and_no_answer_is_without_a_call():
    assert sorted(NAMES) == sorted(EXPECTED)


JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson", "transfer-encoding": "chunked"}
STREAM = '{"a":"x","done":false}\n{"a":"y","done":false}\n{"done":true}\n'


@pytest.mark.parametrize(
    ("wanted", "got", "found"),
    [
        (Answer(200, JSON, '{"a":1}'), Answer(200, JSON, '{"a":2}'), []),
        (Answer(200, JSON, '{"a":1}'), Answer(404, JSON, '{"a":1}'), ["status: 200 → 404"]),
        (Answer(200, JSON, '{"a":1}'), Answer(200, JSON, '{"a":1.5}'), ["body.a: integer → number"]),
        (Answer(200, JSON, '{"a":1.5}'), Answer(200, JSON, '{"a":1}'), []),
        (Answer(200, JSON, '{"a":1}'), Answer(200, JSON, '{"b":"1"}'), ["body.a: missing", "body.b: extra"]),
        (Answer(200, JSON, '{"a":[{"b":1},{"b":2}]}'), Answer(200, JSON, '{"a":[{"b":3}]}'), []),
        (Answer(200, JSON, '{"a":[{"b":1}]}'), Answer(200, JSON, '{"a":[]}'), ["body.a: {b} missing"]),
        (Answer(200, JSON, '{"role":"user"}'), Answer(200, JSON, '{"role":"tool"}'), ["body.role: =user → =tool"]),
        (Answer(200, NDJSON, STREAM), Answer(200, NDJSON, STREAM[STREAM.index("\n") + 1 :]), []),
        (Answer(200, NDJSON, STREAM), Answer(200, NDJSON, '{"done":true}\n'), ["body: {a,done=False} missing"]),
        (Answer(200, NDJSON, STREAM), Answer(200, JSON, '{"done":true}'), [
            "content-type: application/x-ndjson → application/json", "framing: ndjson → json"]),
    ],
)  # fmt: skip
def test_comparing_finds_what_a_client_can_tell_apart(wanted, got, found):
    assert findings(wanted, got) == found


@pytest.mark.parametrize("name", [name for name, answer in EXPECTED.items() if answer.framing == "json"])
def test_comparing_notices_every_key_that_is_missing_or_of_another_type(name):
    wanted = EXPECTED[name]
    for changed in changes(json.loads(wanted.text)):
        got = Answer(wanted.status, wanted.headers, json.dumps(changed))
        assert findings(wanted, got) != [], changed


def changes(value):
    """Give the value without each of its keys, and with each made of another type, at every depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(value, dict):
            yield {other: item for other, item in value.items() if other != key}
            yield {**value, key: None if isinstance(inner, bool) else True}
        if key in FREE or (isinstance(value, list) and key > 0):
            continue
        for changed in changes(inner):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield copy


def test_model_facts_compare_under_any_architecture():
    facts = {"general.architecture": "llama", "llama.context_length": 1}
    assert shape(facts) == {"general.architecture": "string", "<architecture>.context_length": "integer"}


def test_an_entry_without_use_is_found():
    entry = Difference("BETTER", ["chat/*", "gone/*"], ["status: 500 → 400"], "because")
    assert entry.explains("chat/x", "status: 500 → 400")
    assert not entry.explains("chat/x", "status: 500 → 404")
    assert entry.unused == ["gone/*"]

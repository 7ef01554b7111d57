"""What every answer has to be, whatever was asked: its status allowed, its body whole and in its path's dialect."""

import json
from collections.abc import Callable
from typing import Any

from slotpy.server.errors import dialect_of
from tests.server.wire import Answer

_STATUSES = {200, 201, 204, 301, 307, 400, 401, 403, 404, 405, 408, 413, 417, 431}
_METRICS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count")
_PLAIN = {404: b"404 page not found", 405: b"405 method not allowed"}
_OTHERS_FAULT = (b"The scripted engine fails here", b"pull model manifest", b"HF_HUB_OFFLINE")
"""What an answer with status 500 has to be about: a script that says so, or another host, as Ollama has it."""


class Wrong(Exception):
    """Say what is wrong with an answer."""


def check(method: str, path: str, answer: Answer, *, framed: bool = True) -> None:
    """Check an answer to a request; `framed` is whether the request was one by the rules of HTTP.

    Raises: Wrong.
    """
    raw, status = answer.body, answer.status
    if b"Traceback" in raw or b'File "' in raw:
        raise Wrong("a traceback for the client")
    if b"internal error (" in raw:
        raise Wrong("a bug")
    _check_status(answer, framed)
    content_type = answer.headers.get("content-type", "")
    if method == "HEAD" or not raw:
        return
    if content_type in ("application/json", "application/json; charset=utf-8"):
        value = _parse(raw)
        if status == 200:
            _check_object(path, value)
        else:
            _check_error(path, value)
    elif content_type == "application/x-ndjson":
        _check_records(path, raw)
    elif content_type == "text/event-stream":
        _check_events(path, raw)
    elif content_type.startswith("text/plain"):
        _check_text(path, answer, framed)
    elif not (content_type == "text/html; charset=utf-8" and status in (301, 307)):
        raise Wrong(f"content type {content_type}")


def _check_status(answer: Answer, framed: bool) -> None:
    status = answer.status
    if status == 500:
        if not any(text in answer.body for text in _OTHERS_FAULT):
            raise Wrong(f"status 500: {answer.body[:200]!r}")
    elif status not in _STATUSES and (framed or status not in (501, 505)):
        raise Wrong(f"status {status}")
    location = answer.headers.get("location", "/")
    if not location.startswith("/") or location.startswith("//"):  # that would be another host
        raise Wrong(f"redirected to {location}")


def _check_text(path: str, answer: Answer, framed: bool) -> None:
    status, raw = answer.status, answer.body
    if status == 200:
        if path != "/metrics" and raw != b"Ollama is running":
            raise Wrong("text where there should be JSON")
    elif status in _PLAIN:
        if raw != _PLAIN[status]:
            raise Wrong("another text than Go's")
    elif framed and status != 417:
        raise Wrong(f"status {status} as text")


def _check_error(path: str, value: Any) -> None:
    dialect = dialect_of(path)
    if dialect == "ollama":
        good = isinstance(value.get("error"), str) and value["error"]
    elif dialect == "openai":
        good = value.keys() == {"error"} and value["error"].keys() == {"message", "type", "param", "code"}
        good = good and value["error"]["message"]
    else:
        good = (
            value.keys() == {"type", "error", "request_id"} and value["type"] == "error" and value["error"]["message"]
        )
    if not good:
        raise Wrong(f"no error of the {dialect} dialect")


def _check_object(path: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise Wrong("no object")
    if path in ("/api/chat", "/api/generate"):
        if "_debug_info" not in value:
            _check_last(value)
    elif path.startswith("/v1/chat/") or path == "/v1/completions":
        [choice] = value["choices"]
        if choice["finish_reason"] not in ("stop", "length", "tool_calls"):
            raise Wrong(f"finish_reason {choice['finish_reason']}")
    elif path == "/v1/responses" and value["status"] not in ("completed", "incomplete"):
        raise Wrong(f"status {value['status']}")
    elif path == "/v1/messages" and value["stop_reason"] is None:
        raise Wrong("no stop_reason")
    elif "error" in value and path != "/v1/responses":
        raise Wrong("an error with status 200")


def _check_last(record: Any) -> None:
    if record.get("done") is not True or record.get("done_reason") not in ("stop", "length", "load", "unload"):
        raise Wrong(f"ends with {record}")
    if record["done_reason"] in ("stop", "length") and not all(type(record.get(name)) is int for name in _METRICS):
        raise Wrong(f"no whole numbers in {record}")


def _check_records(path: str, raw: bytes) -> None:
    if not raw.endswith(b"\n"):
        raise Wrong("no end of the last line")
    records = [_parse(line) for line in raw[:-1].split(b"\n")]
    *before, last = records
    if any("error" in record or record.get("done") for record in before):
        raise Wrong("goes on after its end")
    if "error" in last:
        _check_error(path, last)
    elif path in ("/api/chat", "/api/generate"):
        _check_last(last)
    elif last != {"status": "success"}:
        raise Wrong(f"ends with {last}")


def _check_events(path: str, raw: bytes) -> None:
    if not raw.endswith(b"\n\n"):
        raise Wrong("no end of the last event")
    events: list[tuple[str | None, Any]] = []
    for block in raw[:-2].split(b"\n\n"):
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        if not fields.keys() <= {b"event", b"data"}:
            raise Wrong(f"event {block!r}")
        name, data = fields.get(b"event"), fields[b"data"]
        events.append((None if name is None else name.decode(), None if data == b"[DONE]" else _parse(data)))
    ends: Callable[[list[tuple[str | None, Any]]], None] = _check_chunks
    if path == "/v1/responses":
        ends = _check_response
    elif path == "/v1/messages":
        ends = _check_message
    ends(events)


def _check_chunks(events: list[tuple[str | None, Any]]) -> None:
    *chunks, last = [data for _, data in events]
    if last is None:
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        if not reasons or reasons[-1] is None or any(reasons[:-1]):
            raise Wrong(f"finish reasons {reasons}")
    else:
        _check_error("/v1/chat/completions", last)
    if any("choices" not in (chunk or {}) for chunk in chunks):
        raise Wrong("goes on after its end")


def _check_response(events: list[tuple[str | None, Any]]) -> None:
    if [data["sequence_number"] for _, data in events] != list(range(len(events))):
        raise Wrong("events out of sequence")
    if any(name != data["type"] for name, data in events):
        raise Wrong("an event under another name")
    if events[-1][0] not in ("response.completed", "response.incomplete", "response.failed"):
        raise Wrong(f"ends with {events[-1]}")


def _check_message(events: list[tuple[str | None, Any]]) -> None:
    names = [name for name, _ in events]
    if any(name != data["type"] for name, data in events):
        raise Wrong("an event under another name")
    if names[0] != "message_start" or names[-1] not in ("message_stop", "error"):
        raise Wrong(f"goes from {names[0]} to {names[-1]}")
    if names[-1] == "message_stop" and names.count("content_block_start") != names.count("content_block_stop"):
        raise Wrong("blocks that do not end")


def _parse(raw: bytes) -> Any:
    def refuse(word: str) -> None:
        raise Wrong(f"{word} in JSON")

    try:
        return json.loads(raw.decode("ascii"), parse_constant=refuse)
    except ValueError as error:
        raise Wrong(f"no JSON in ASCII: {error}, {raw[:200]!r}") from error

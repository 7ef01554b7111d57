"""Compare a server's answers with Ollama's: what a client can tell apart, and nothing else.

Equal must be: status, content type, the headers in HEADERS, framing, the sequence of records or events with repeats
folded, and the shape of all JSON: keys, types, and values that are part of the protocol. Texts, ids and numbers are
free. `Differences` lists what is meant to differ; an entry that no longer explains anything is an error.
"""

import difflib
import fnmatch
import http.client
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ollama.battery import Call

HERE = Path(__file__).parent
HEADERS = ("location", "vary", "access-control-allow-origin", "access-control-allow-methods", "access-control-max-age")
# Strings that are words of the protocol, so their values count.
WORDS = {"done_reason", "finish_reason", "object", "owned_by", "role", "status", "stop_reason", "type"}
# Go writes a float without a fraction as a whole number.
FLOATS = {"frequency_penalty", "logprob", "presence_penalty", "temperature", "top_p"}
# What a reply or a model happens to hold.
FREE = {"arguments", "bytes", "tensors"}
METRICS = (
    *("total_duration", "load_duration"),
    *("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")
KINDS = ("BETTER", "NOT APPLICABLE", "RECORDED BY CHANCE")


@dataclass(frozen=True)
class Answer:
    """What came back. Header names are lower case; the text is what the chunks join to."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def framing(self) -> str:
        """Tell how the text is to be read: empty, text, json, ndjson or sse."""
        media = self.headers.get("content-type", "").partition(";")[0]
        known = {"application/json": "json", "application/x-ndjson": "ndjson", "text/event-stream": "sse"}
        return known.get(media, "text") if self.text else "empty"

    def records(self) -> list[Any]:
        """Read the text's JSON: one value, a value for each line, or (event, value) for each SSE message."""
        if self.framing == "ndjson":
            return [json.loads(line) for line in self.text.splitlines()]
        if self.framing == "sse":
            return [_message(block) for block in self.text.removesuffix("\n\n").split("\n\n")]
        return [json.loads(self.text)] if self.framing == "json" else []


def send(call: Call, host: str, port: int, timeout_s: float = 30.0) -> Answer:
    """Send one request on a connection of its own, as raw as it is written."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.putrequest(call.method, call.path, skip_host=True, skip_accept_encoding=True)
        headers: dict[str, str | None] = {"Host": f"{host}:{port}", "Connection": "close"}
        if call.raw_body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(call.raw_body))}
        for name, value in (headers | dict(call.headers)).items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(call.raw_body)
        response = connection.getresponse()
        text = response.read().decode("utf-8")
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, text)
    finally:
        connection.close()


def expected() -> dict[str, Answer]:
    """Read the answers to expect, by call: recorded ones, and those written from the contract where none is."""
    text = "".join((HERE / name).read_text(encoding="utf-8") for name in ("traces.jsonl", "written.jsonl"))
    lines = [json.loads(line) for line in text.splitlines()]
    own = [line for line in lines if "like" not in line]
    answers = {line["name"]: Answer(line["status"], line["headers"], line["text"]) for line in own}
    return answers | {line["name"]: answers[line["like"]] for line in lines if "like" in line}


def findings(wanted: Answer, got: Answer) -> list[str]:
    """List what differs, each as `where: wanted → got`."""
    found = list(_scalar("status", wanted.status, got.status))
    if (wanted.status < 400) != (got.status < 400):
        return found  # all else differs by that; `broken_rules` looks at the form of errors
    found += _scalar("content-type", *(answer.headers.get("content-type") for answer in (wanted, got)))
    for name in HEADERS:
        if name in wanted.headers or name not in ("vary", "location"):
            found += _scalar(name, wanted.headers.get(name), got.headers.get(name))
    if wanted.framing != got.framing:
        return [*found, f"framing: {wanted.framing} → {got.framing}"]
    if wanted.framing == "text":
        found += _scalar("text", wanted.text, got.text)
    if wanted.framing in ("ndjson", "sse") and "transfer-encoding" not in got.headers:
        found.append("transfer-encoding: chunked → none")
    found += _compare("body", *([fold(shape(r) for r in a.records())] for a in (wanted, got)))
    return list(dict.fromkeys(found))


def shape(value: Any, key: str = "") -> Any:
    """Give a value's form: types for values, except words of the protocol; lists with repeats folded."""
    if key in FREE:
        return type(value).__name__
    if isinstance(value, dict):
        architecture = value.get("general.architecture")
        return {_neutral(name, architecture): shape(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        shapes = [shape(item) for item in value]
        numbers = [s for s in shapes if s in ("integer", "number")]
        return ["number"] if numbers == shapes and "number" in numbers else fold(shapes)
    if isinstance(value, str):
        return f"={_masked(value)}" if key in WORDS or key == "event" else "string"
    if value is None or isinstance(value, bool):
        return f"={value}" if key == "done" else "null" if value is None else "boolean"
    return "number" if isinstance(value, float) or key in FLOATS else "integer"


def fold(shapes: Iterable[Any]) -> list[Any]:
    """Keep one of neighbours that are alike."""
    return [one for one, _ in itertools.groupby(shapes)]


def broken_rules(call: Call, answer: Answer) -> list[str]:
    """List what no answer may do, recorded or not: what has broken real clients."""
    broken = []
    if not answer.text.isascii():
        broken.append("is not ASCII: some clients take U+2028 or U+0085 for the end of a line")
    if answer.framing == "ndjson":
        if not answer.text.endswith("\n") or "\n\n" in answer.text or answer.text.startswith("\n"):
            broken.append("has an empty line, or no newline at the end")
        last = answer.records()[-1]
        if not (last.get("done") is True or last.get("status") == "success" or "error" in last):
            broken.append("does not end with done, success or an error")
    if answer.framing in ("ndjson", "json") and call.path in ("/api/chat", "/api/generate"):
        broken += _final_record(answer.records()[-1])
    if answer.framing == "sse":
        lines = filter(None, answer.text.split("\n"))
        broken += [f"has the line {line!r}" for line in lines if not line.startswith(("data: ", "event: "))]
    if answer.status >= 400 and answer.framing == "json":
        broken += _error_form(call, answer.records()[0])
    if answer.framing == "json" and "content-length" not in answer.headers:
        broken.append("has no content-length")
    return broken


def _error_form(call: Call, error: Any) -> Iterator[str]:
    wanted: Any = {"error": "string"}
    if call.path.startswith("/v1/messages"):
        inner = {"type": error["error"]["type"], "message": "string"}
        wanted = {"type": "=error", "error": inner, "request_id": "string"}
    elif call.path.startswith("/v1/"):
        code = "null" if error["error"]["code"] is None else "string"
        inner = {"message": "string", "type": error["error"]["type"], "param": "null", "code": code}
        wanted = {"error": inner}
    # The type's name is compared with the recorded one, and free where the status differs.
    got = shape({key: value for key, value in error.items() if key != "signin_url"})
    if isinstance(got.get("error"), dict):
        got["error"]["type"] = got["error"]["type"].removeprefix("=")
    yield from _compare("error's form", wanted, got)


def _final_record(record: dict[str, Any]) -> Iterator[str]:
    if record.get("done_reason") in ("stop", "length"):
        yield from (f"ends without a whole number {name}" for name in METRICS if type(record.get(name)) is not int)
    if "created_at" in record and not TIME.fullmatch(record["created_at"]):
        yield f"created_at is {record['created_at']}, no RFC 3339 time with a zone"


@dataclass
class Difference:
    """One listed difference: which calls, which findings, and why. Patterns are those of a shell; `[` is itself."""

    kind: str
    calls: list[str]
    findings: list[str]
    reason: str
    used: set[str] = field(default_factory=set)

    def explains(self, call: str, finding: str) -> bool:
        """Tell whether this entry covers a finding, and remember which of its patterns did."""
        calls = [pattern for pattern in self.calls if _matches(call, pattern)]
        found = [pattern for pattern in self.findings if _matches(finding, pattern)]
        if calls and found:
            self.used.update(calls + found)
        return bool(calls and found)

    @property
    def unused(self) -> list[str]:
        """Give the patterns that have explained nothing."""
        return [pattern for pattern in self.calls + self.findings if pattern not in self.used]


def differences() -> list[Difference]:
    """Read the list of differences that are meant."""
    entries = tomllib.loads((HERE / "differences.toml").read_text(encoding="utf-8"))["difference"]
    listed = [Difference(**entry) for entry in entries]
    assert all(entry.kind in KINDS for entry in listed), KINDS
    return listed


def unexplained(call: str, found: Iterable[str], listed: Iterable[Difference]) -> list[str]:
    """Give the findings that no entry of the list explains."""
    return [one for one in found if not any([entry.explains(call, one) for entry in listed])]


def _compare(path: str, wanted: Any, got: Any) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(got, dict):
        yield from (f"{path}.{key}: missing" for key in wanted if key not in got)
        yield from (f"{path}.{key}: extra" for key in got if key not in wanted)
        for key in wanted.keys() & got.keys():
            yield from _compare(f"{path}.{key}", wanted[key], got[key])
    elif isinstance(wanted, list) and isinstance(got, list):
        if len(wanted) == len(got):
            pairs = list(zip(wanted, got, strict=True))
        else:
            names = [[_label(one) for one in each] for each in (wanted, got)]
            matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
            matches = [(m.a + i, m.b + i) for m in matcher.get_matching_blocks() for i in range(m.size)]
            yield from (f"{path}: {names[0][i]} missing" for i in range(len(wanted)) if i not in dict(matches))
            yield from (f"{path}: {names[1][j]} extra" for j in range(len(got)) if j not in {j for _, j in matches})
            pairs = [(wanted[i], got[j]) for i, j in matches]
        for one, other in pairs:
            yield from _compare(path, one, other)
    elif wanted != got and (wanted, got) != ("number", "integer"):
        yield f"{path}: {_label(wanted)} → {_label(got)}"


def _scalar(name: str, wanted: object, got: object) -> Iterator[str]:
    if wanted != got:
        yield f"{name}: {wanted} → {got}"


def _label(shape: Any) -> str:
    """Name a shape: an event by its name, an object by its keys and words."""
    if isinstance(shape, dict):
        words = {key: str(inner) for key, inner in shape.items() if str(inner).startswith("=")}
        return words.get("event", "{" + ",".join(key + words.get(key, "") for key in sorted(shape)) + "}")
    return "[" + " ".join(map(_label, shape)) + "]" if isinstance(shape, list) else str(shape)


def _message(block: str) -> dict[str, Any]:
    """Read one SSE message. `[DONE]` is an event's name here, because that is what it says."""
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    if fields["data"] == "[DONE]":
        return {"event": "[DONE]"}
    named = {"event": fields["event"]} if "event" in fields else {}
    return {**named, "data": json.loads(fields["data"])}


def _neutral(name: str, architecture: object) -> str:
    prefix = f"{architecture}."
    return "<architecture>." + name.removeprefix(prefix) if name.startswith(prefix) else name


def _masked(word: str) -> str:
    return re.sub(r"[0-9a-f]{12,}", "<digest>", word)


def _matches(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))

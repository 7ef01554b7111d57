"""What the fuzzer sends: cases made of a seed and a number, the same ones every time.

Bodies are made of the Structs that the handlers read them with, so that a new field is fuzzed from its first day.
"""

import gzip
import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from slotpy.server import gojson
from slotpy.server.anthropic import messages
from slotpy.server.gojson import Anything, ListOf, Scalar, Struct
from slotpy.server.ollama import chat, create, embed, generate, models, pull
from slotpy.server.openai import chat as openai_chat
from slotpy.server.openai import completions, embeddings, responses
from slotpy.server.routes import ROUTES
from tests.server import wire
from tests.server.fuzz_values import (
    HEADERS,
    HINTS,
    ITEMS,
    MADE,
    NAMES,
    NUMBERS,
    ODD_HEADERS,
    ODD_NAMES,
    OPTIONS,
    PARTS,
    SCRIPTS,
    TEXTS,
    TOKENS,
    VALID,
)

BODIES = {
    "/api/chat": chat.CHAT,
    "/api/generate": generate.GENERATE,
    "/api/embed": embed.EMBED,
    "/api/embeddings": embed.EMBEDDINGS,
    "/api/show": models._SHOW,
    "/api/create": create._CREATE,
    "/api/copy": create._COPY,
    "/api/delete": create._DELETE,
    "/api/pull": pull._PULL,
    "/api/push": pull._PUSH,
    "/v1/chat/completions": openai_chat.CHAT,
    "/v1/completions": completions.COMPLETION,
    "/v1/embeddings": embeddings.EMBED,
    "/v1/responses": responses.RESPONSES,
    "/v1/messages": messages.MESSAGES,
    "/v1/messages/count_tokens": messages.MESSAGES,
}
"""The body that each path reads; the others read none."""

ENDPOINTS = sorted(
    {(route.method, route.path) for route in ROUTES if isinstance(route, web.RouteDef)} | {("GET", "/metrics")}
)
_REPLYING = [path for path in BODIES if path.startswith("/v1/") or path in ("/api/chat", "/api/generate")]
_COMPUTED = ("/api/embed", "/v1/embeddings")
"""Paths whose answers the scripted engine computes with the demo: short texts only, at 7 ms a token."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO", "get")


class Raw(str):
    """JSON text to be written as it is."""


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may repeat."""


@dataclass(frozen=True)
class Sent:
    """One request as bytes, and the method and path by which its answer is judged."""

    method: str
    path: str
    data: bytes


@dataclass(frozen=True)
class Case:
    """What one connection sends.

    `framed` says that all of it are requests by the rules of HTTP, so each must be answered; otherwise any number of
    answers will do. `together` sends all at once. `leaves_after` counts the bytes of answers after which the client is
    gone, `sends` those it sends at all.
    """

    number: int
    kind: str
    requests: tuple[Sent, ...]
    framed: bool = True
    together: bool = False
    sends: int | None = None
    leaves_after: int | None = None


def make_case(seed: int, number: int) -> Case:
    """Make a case; the kinds take turns."""
    rng = random.Random(f"{seed}/{number}")
    return _KINDS[number % len(_KINDS)](number, rng)


def _fields(number: int, rng: random.Random) -> Case:
    """A body of the right fields with all kinds of values."""
    path = rng.choice(list(BODIES))
    while True:
        body = write(_body(path, rng), rng).encode("utf-8", "surrogatepass")
        if not path.startswith(_COMPUTED) or len(body) < 500:
            return Case(number, "fields", (_sent(path, body),))


def _bytes(number: int, rng: random.Random) -> Case:
    """A body that works, damaged."""
    path = rng.choice(list(BODIES))
    body = _damaged(json.dumps(_valid(path, rng)).encode(), rng)
    return Case(number, "bytes", (_sent(path, body),))


def _paths(number: int, rng: random.Random) -> Case:
    """Any method on any path, near to one that exists or far from it."""
    method, path = rng.choice(ENDPOINTS)
    digest = rng.choice(["sha256:" + "0" * 64, "x", "sha256:", "%2e%2e%2fx", "sha256-" + "a" * 64])
    model = rng.choice(["tiny", "a/b", "%00", "tiny/", "\u00e4"])
    path = path.replace("{digest}", digest).replace("{id:.+}", model).replace("{id}", "resp_1")
    if rng.random() < 0.5:
        method = rng.choice(_METHODS)
    if rng.random() < 0.5:
        path = rng.choice([
            *(path + "/", "/" + path, path.replace("/", "//"), path.upper(), path + "%2f", path + "/..", path + "/x"),
            *(path.replace("a", "%61"), path + "%00", path + "%zz", path + "/" + "x" * 3000, "*", "/%ff", "//x.org/y"),
            *("http://x.org" + path, path + ";a=b", "/.." + path, path + "#f", path + "\\", "/" + "%41" * 500),
        ])  # fmt: skip
    query = rng.choice(["", "", "?", "?beta=true", "?a=b&a=c", "?" + "q" * 2000, "?%00=%ff", "?a=<x>"])
    body = rng.choice([None, None, b"", b"{}", b'{"model":"tiny"}', b"\xff\x00"])
    if path == "*" or path.startswith(("http:", "//")) or method in ("get", "FOO") or not path.isascii():
        method = "GET" if method == "HEAD" else method  # what is no request has an answer with a body
        asked = unquote(path.removeprefix("http://x.org"))
        return Case(number, "paths", (Sent(method, asked, wire.request(method, path + query, body)),), framed=False)
    sent = Sent(method, unquote(path.partition("#")[0]), wire.request(method, path + query, body))
    return Case(number, "paths", (sent,))


def _headers(number: int, rng: random.Random) -> Case:
    """A request that works under headers that need not."""
    if rng.random() < 0.05:
        return Case(number, "headers", (Sent("GET", "?", _garbage(rng)),), framed=False)
    others = ("GET", "/api/tags", b""), ("OPTIONS", "/api/chat", b"")
    method, path, body = rng.choice([("POST", *_working(rng)), *others])
    if rng.random() < 0.1:
        body = gzip.compress(body, mtime=0)
    framed = rng.random() < 0.5
    lines = [f"{method} {path} HTTP/1.1", *rng.sample(HEADERS, rng.randrange(4))]
    if framed:
        once = {line.partition(":")[0]: line for line in lines if not line.startswith("Host:")}
        lines = [*once.values(), "Host: 127.0.0.1"]
        lines += [f"Content-Length: {len(body)}"] if body else []
    else:
        lines += rng.sample(ODD_HEADERS, rng.randrange(1, 4))
        lines += rng.choice([[], ["Host: 127.0.0.1"], ["Host: a", "Host: b"]])
        lines += [f"Content-Length: {len(body)}"] if rng.random() < 0.3 else []
        lines[0] = f"{method} {path} HTTP/" + rng.choice(["1.1"] * 9 + ["1.0", "0.9", "2.0", "9.99", "1.1 x", "x"])
        if rng.random() < 0.4:
            body = _chunked(body, rng)
    end = "\r\n" if framed or rng.random() < 0.9 else "\n"
    data = (end.join(lines) + end * 2).encode("latin-1") + body
    return Case(number, "headers", (Sent(method, path, data),), framed=framed)


def _garbage(rng: random.Random) -> bytes:
    """Give bytes of other protocols, or of none."""
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300)
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return rng.choice([tls, http2, b"\r\n" * 50, rng.randbytes(rng.randrange(1, 2000)), b"\0"])


def _pipeline(number: int, rng: random.Random) -> Case:
    """Several requests on one connection, at once or one after the other."""
    requests = []
    for _ in range(rng.randrange(2, 6)):
        method, path, body = rng.choice([("POST", *_working(rng)), ("GET", "/", None), ("HEAD", "/api/tags", None)])
        requests.append(Sent(method, path, wire.request(method, path, body)))
    return Case(number, "pipeline", tuple(requests), together=rng.random() < 0.5)


def _gone(number: int, rng: random.Random) -> Case:
    """A client that leaves in the middle of its request or of the answer."""
    path, body = _working(rng)
    if rng.random() < 0.5 and path == "/api/chat":
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "SLOW"}]}).encode()
    sent = _sent(path, body)
    sends = rng.randrange(len(sent.data)) if rng.random() < 0.5 else None
    leaves_after = None if sends is not None else rng.choice([0, 1, 20, 200, 300, 1000])
    return Case(number, "gone", (sent,), framed=False, sends=sends, leaves_after=leaves_after)


_KINDS = (_fields, _fields, _fields, _bytes, _paths, _headers, _pipeline, _gone)


def _working(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(list(BODIES))
    return path, json.dumps(_valid(path, rng)).encode()


def _sent(path: str, body: bytes) -> Sent:
    method = "DELETE" if path == "/api/delete" else "POST"
    return Sent(method, path, wire.request(method, path, body))


def _valid(path: str, rng: random.Random) -> dict[str, Any]:
    """Give a body that works; some ask for more than a greeting."""
    valid = {"model": rng.choice(NAMES if path in _REPLYING else ["tiny"])} | rng.choice(VALID[path])
    if rng.random() < 0.4:
        return dict(json.loads(json.dumps(valid).replace('"hi"', json.dumps(rng.choice(SCRIPTS)))))
    return valid


def _body(path: str, rng: random.Random) -> Any:
    """Make a body: one that works with some fields changed, or one of any fields."""
    if rng.random() < 0.03:
        return _anything(rng)
    struct = BODIES[path]
    made = [(name, kind) for name, kind in struct._fields.values() if rng.random() < rng.choice([0.1, 0.5])]
    fields = Pairs((_varied(name, rng), _value(kind, name, path, rng, 0)) for name, kind in made)
    if rng.random() < 0.8:
        changed = {name for name, _ in made[: rng.randrange(4)]}
        valid = Pairs(_valid(path, rng).items())
        fields = Pairs([*valid, *(pair for pair in fields if pair[0] in changed)])
    if rng.random() < 0.1:
        fields.append((rng.choice(TEXTS), _anything(rng)))
    return fields


def _value(kind: gojson.Kind, name: str, path: str, rng: random.Random, depth: int) -> Any:
    roll = rng.random()
    if roll < 0.06:
        return _anything(rng)
    if roll < 0.12:
        return None
    hinted = _hints(name, path, rng)
    if hinted and roll < 0.85:
        return rng.choice(hinted)
    if isinstance(kind, Struct):
        fields = [(key, inner) for key, inner in kind._fields.values() if rng.random() < 0.6]
        return Pairs((_varied(key, rng), _value(inner, key, path, rng, depth + 1)) for key, inner in fields)
    if isinstance(kind, ListOf):
        return [_value(kind._element, name, path, rng, depth + 1) for _ in range(rng.randrange(4))]
    if isinstance(kind, Anything):
        return _anything(rng)
    assert isinstance(kind, Scalar)
    objects = [{}, {"a": None}, {"type": "object"}]
    made: list[Any] = {str: TEXTS, bool: [True, False], dict: objects}.get(kind._types[0], NUMBERS)
    return rng.choice(made)


def _hints(name: str, path: str, rng: random.Random) -> list[Any]:
    if name in ("model", "name", "destination", "source", "from"):
        if path in ("/api/delete", "/api/create", "/api/copy") and name not in ("source", "from"):
            return MADE
        return NAMES * 3 + ODD_NAMES
    if name == "options":
        names = rng.sample(sorted(OPTIONS), rng.randrange(5))
        return [{"num_predict": 8} | {each: rng.choice(OPTIONS[each]) for each in names}]
    if name == "content":
        return [*TEXTS, [rng.choice(PARTS) for _ in range(rng.randrange(4))]]
    if name == "input":
        return [*TEXTS, [rng.choice(ITEMS if path == "/v1/responses" else TEXTS) for _ in range(rng.randrange(5))]]
    if name in ("prompt", "system", "instructions", "thinking") and path != "/v1/messages":
        return TEXTS
    return HINTS.get(name, [])


def _anything(rng: random.Random, depth: int = 0) -> Any:
    roll = rng.random()
    if roll < 0.1 and depth == 0:
        deep = rng.choice([150, 199, 201, 5000])
        return Raw("[" * deep + "]" * deep if rng.random() < 0.5 else '{"a":' * deep + "1" + "}" * deep)
    if roll < 0.2 and depth < 3:
        return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if roll < 0.3 and depth < 3:
        return Pairs((rng.choice(TEXTS), _anything(rng, depth + 1)) for _ in range(rng.randrange(4)))
    if roll < 0.35:
        return Raw(rng.choice(TOKENS))
    return rng.choice([None, True, False, rng.choice(TEXTS), rng.choice(NUMBERS)])


def _varied(name: str, rng: random.Random) -> str:
    """Write a key in another case, sometimes: it is the same one to Go."""
    return rng.choice([name.upper(), name.title(), name.replace("s", "\u017f")]) if rng.random() < 0.05 else name


def write(value: Any, rng: random.Random) -> str:
    """Write JSON, with repeated keys and odd white space; lone surrogates as escapes or raw."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, Pairs):
        pairs = [*value, rng.choice(value)] if value and rng.random() < 0.03 else value
        return "{" + ",".join(f"{write(key, rng)}: {write(item, rng)}" for key, item in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(write(item, rng) for item in value) + "]"
    return json.dumps(value, ensure_ascii=rng.random() < 0.7)


_BYTES = [
    *(
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\x00",
        b"\xf4\x90\x80\x80",
        b"\\ud800",
        b"\\u12",
        b"null",
        b"1e999",
        b"/*x*/",
    ),
    *(b'"', b"{", b"}", b",", b":", b"[", b"\\"),
]
_BEFORE = [b"\xef\xbb\xbf", b"\xff\xfe", b" \n\t", b")]}'\n"]
_AFTER = [b"{}", b" garbage", b"\x00", bytes(1000), b"]", b'{"model":']


def _damaged(body: bytes, rng: random.Random) -> bytes:
    """Damage bytes in one to three ways."""
    data = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        place, way = rng.randrange(len(data) + 1), rng.randrange(8)
        if way == 0:
            del data[place:]
        elif way == 1 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif way == 2:
            data[:0] = rng.choice(_BEFORE)
        elif way == 3:
            data += rng.choice(_AFTER)
        elif way == 4:
            del data[place : place + rng.randrange(1, 10)]
        elif way == 5:
            data[place:place] = data[rng.randrange(len(data) + 1) :][:50]
        else:
            data[place:place] = rng.choice(_BYTES)
    return bytes(data)


_CHUNK_ENDS = [
    *(
        b"\r\n0\r\n\r\n",
        b"\r\n0\r\nTrailer: x\r\n\r\n",
        b"0\r\n\r\n",
        b"\r\n",
        b"",
        b"\n0\n\n",
        b"\r\n0\r\nbad\r\n\r\n",
    ),
]


def _chunked(body: bytes, rng: random.Random) -> bytes:
    """Send a body in chunks, mostly not quite as the rules have it."""
    length = b"%x" % len(body)
    size = rng.choice([length, length + b";ext=1", length + b" ", b"zz", b"-1", b"F" * 17, b"", b"0x5", b"5"])
    return size + b"\r\n" + body + rng.choice(_CHUNK_ENDS)

"""The battery: raw HTTP requests with which an Ollama server can be told from an imitation. Data only.

Names are `group/what`. Models, as in the recorded servers: tinychat only completes, tiny knows tools, tinythink tools
and thinking. `tests/scripted.py` explains the words in capitals, which ask for a certain reply.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One request. `body` is sent as JSON, text or bytes as they are; a header of None is left out."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def raw_body(self) -> bytes | None:
        """Give the bytes to send."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "w",
    "parameters": {
        "type": "object",
        "required": ["city"],
        "properties": {"city": {"type": "string", "description": "c"}},
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
PLAIN_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}

DIALOGUES = {
    "ollama": ["chat", "generate", "embed", "embeddings", "show", "pull", "push", "create", "copy"],
    "openai": ["chat/completions", "completions", "embeddings", "responses", "messages"],
}
POSTS = [f"/api/{name}" for name in DIALOGUES["ollama"]] + [f"/v1/{name}" for name in DIALOGUES["openai"]]
HELLO_DIGEST = "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
ZERO_DIGEST = "sha256:" + "0" * 64


def said(text: str) -> list[dict[str, Any]]:
    """A conversation of one user's turn."""
    return [{"role": "user", "content": text}]


def battery(port: int) -> list[Call]:
    """All requests, in the order to send them: some see what earlier ones left. `port` is the server's own."""
    groups = (small(), origins(port), bodies(), lookups(), chat(), keep_alive(), messages(), thinking(), tools(),
              formats(), options(), decoding(), logprobs_and_errors(), generate(), embed(), described(), openai_chat(),
              openai_rest(), anthropic(), managing())  # fmt: skip
    calls = [call for group in groups for call in group]
    assert len({call.name for call in calls}) == len(calls), "names are unique"
    return calls


def small() -> Iterator[Call]:
    for name, method, path in [
        ("root", "GET", "/"), ("root-head", "HEAD", "/"), ("version", "GET", "/api/version"),
        ("version-head", "HEAD", "/api/version"), ("tags-head", "HEAD", "/api/tags"), ("status", "GET", "/api/status"),
        ("unknown-path", "GET", "/nope"), ("get-chat", "GET", "/api/chat"), ("trailing-slash", "GET", "/api/tags/"),
        ("double-slash", "GET", "//api/tags"), ("v1-unknown-path", "GET", "/v1/nope"),
        ("v1-trailing-slash", "GET", "/v1/models/"), ("head-chat", "HEAD", "/api/chat"),
        ("options-chat", "OPTIONS", "/api/chat"),
    ]:  # fmt: skip
        yield Call(f"small/{name}", method, path)
    yield Call("small/post-root", "POST", "/", b"")
    yield Call("small/me", "POST", "/api/me", b"")
    yield Call("small/signout", "POST", "/api/signout", b"")
    yield Call("small/unknown-api", "POST", "/api/nope", {})
    yield Call("small/post-tags", "POST", "/api/tags", {})
    yield Call("small/post-delete", "POST", "/api/delete", {"model": "x"})
    yield Call("small/put-chat", "PUT", "/api/chat", {})
    yield Call("small/web-search", "POST", "/api/experimental/web_search", {"query": "x"})
    yield Call("small/recommendations", "GET", "/api/experimental/model-recommendations")


def origins(port: int) -> Iterator[Call]:
    wanted = {"Access-Control-Request-Method": "POST"}
    named = {**wanted, "Access-Control-Request-Headers": "content-type,authorization"}
    yield Call("origin/preflight", "OPTIONS", "/api/chat", None, {"Origin": "http://localhost:3000", **named})
    yield Call("origin/preflight-evil", "OPTIONS", "/api/chat", None, {"Origin": "http://evil.example", **wanted})
    for name, origin in [
        ("local", "http://localhost:3000"), ("evil", "http://evil.example"), ("extension", "chrome-extension://abc"),
        ("vscode", "vscode-webview://abc"), ("null", "null"), ("same", f"http://127.0.0.1:{port}"),
    ]:  # fmt: skip
        yield Call(f"origin/{name}", "GET", "/api/tags", None, {"Origin": origin})
    for name, host in [("evil", "evil.example"), ("lan", "192.168.1.5:11434"), ("local", "box.local")]:
        yield Call(f"host/{name}", "GET", "/api/tags", None, {"Host": host})


def bodies() -> Iterator[Call]:
    for path in POSTS:
        for name, body in [
            ("empty", b""), ("bad-json", "{bad"), ("empty-object", {}), ("array", "[]"), ("null", "null"),
            ("model-int", {"model": 5}),
        ]:  # fmt: skip
            yield Call(f"body/{name}{path}", "POST", path, body)
    yield Call("body/empty/api/delete", "DELETE", "/api/delete", b"")


def lookups() -> Iterator[Call]:
    for path, body in [
        ("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "x"}), ("/api/embed", {"input": "x"}),
        ("/api/embeddings", {"prompt": "x"}), ("/api/show", {}), ("/api/push", {}),
        ("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}), ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"max_tokens": 5, "messages": HI}),
    ]:  # fmt: skip
        yield Call(f"unknown{path}", "POST", path, {"model": "nosuch", **body})
    yield Call("unknown/api/show-by-name", "POST", "/api/show", {"name": "nosuch"})
    yield Call("unknown/api/copy", "POST", "/api/copy", {"source": "nosuch", "destination": "y"})
    yield Call("unknown/api/create", "POST", "/api/create", {"model": "new", "from": "nosuch"})
    yield Call("unknown/api/delete", "DELETE", "/api/delete", {"model": "nosuch"})
    yield Call("unknown/api/delete-by-name", "DELETE", "/api/delete", {"model": "", "name": "nosuch"})
    yield Call("unknown/v1/models", "GET", "/v1/models/nosuch")
    yield Call("unknown/v1/models-slash", "GET", "/v1/models/a%2Fb")
    yield Call("unknown/cloud", "POST", "/api/chat", {"model": "x:cloud", "messages": HI})
    yield Call("name/chat", "POST", "/api/chat", {"model": "a b c!", "messages": HI})
    yield Call("name/show", "POST", "/api/show", {"model": "a b"})
    yield Call("name/generate", "POST", "/api/generate", {"model": "::", "prompt": "x"})
    yield Call("name/case", "POST", "/api/show", {"model": "TinyChat"})


def ask(name: str, model: str = "tinychat", path: str = "/api/chat", **fields: Any) -> Call:
    """A chat request that says hi unless `messages` say otherwise."""
    body = {"model": model, "messages": HI, **fields}
    return Call(name, "POST", path, {key: value for key, value in body.items() if value is not ...})


def chat() -> Iterator[Call]:
    yield ask("chat/stream")
    yield ask("chat/whole", stream=False)
    yield ask("chat/stream-null", stream=None)
    yield ask("chat/nulls", format=None, options=None, tools=None, keep_alive=None, think=None, logprobs=None)
    yield ask("chat/no-messages", messages=[])
    yield ask("chat/missing-messages", messages=...)
    yield ask("chat/null-messages", messages=None)
    yield ask("chat/limit", messages=said("LIMIT"), stream=False)
    yield ask("chat/rendered", "tinythink", _debug_render_only=True)


def keep_alive() -> Iterator[Call]:
    values = {"zero": 0, "zero-text": "0s", "bad": "abc", "bare": "300", "bool": True, "ever": -1}
    for name, value in values.items():
        yield ask(f"keep-alive/{name}", messages=[], keep_alive=value)
    yield Call("keep-alive/ps-ever", "GET", "/api/ps")
    yield ask("keep-alive/minutes", messages=[], keep_alive="5m")
    yield ask("keep-alive/fraction", messages=[], keep_alive=1.5)


def messages() -> Iterator[Call]:
    for name, message in [
        ("role-alien", {"role": "alien", "content": "x"}), ("role-upper", {"role": "USER", "content": "x"}),
        ("content-null", {"role": "user", "content": None}), ("content-missing", {"role": "user"}),
        ("content-parts", {"role": "user", "content": [{"type": "text", "text": "x"}]}),
        ("image-no-base64", {"role": "user", "content": "x", "images": ["!!!"]}),
        ("image-data-url", {"role": "user", "content": "x", "images": ["data:image/png;base64,iVBORw0KGgo="]}),
        ("image-unseen", {"role": "user", "content": "x", "images": ["iVBORw0KGgo="]}),
    ]:  # fmt: skip
        yield ask(f"message/{name}", messages=[message], stream=False)
    yield ask("message/text", messages="hi")


def thinking() -> Iterator[Call]:
    yield ask("think/unable", think=True)
    yield ask("think/unable-off", think=False, stream=False)
    yield ask("think/bad-level", "tinythink", think="ultra")
    yield ask("think/number", "tinythink", think=1)
    yield ask("think/default", "tinythink")
    yield ask("think/off", "tinythink", think=False)
    yield ask("think/high", "tinythink", think="high", stream=False)
    yield ask("think/tool", "tinythink", messages=said("TOOL"), tools=TOOLS)
    yield ask("think/two-tools", "tinythink", messages=said("TOOL TWOTOOLS"), tools=TOOLS, stream=False)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    yield ask("think/format", "tinythink", format=schema)


def tools() -> Iterator[Call]:
    yield ask("tools/unable", tools=TOOLS)
    yield ask("tools/stream", "tiny", messages=said("TOOL"), tools=TOOLS)
    yield ask("tools/whole", "tiny", messages=said("TOOL"), tools=TOOLS, stream=False)
    yield ask("tools/none", tools=[], stream=False)
    yield ask("tools/text", "tiny", tools="x")
    result = {"role": "tool", "content": "1", "tool_name": "f"}
    text = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    yield ask("tools/arguments-text", "tiny", messages=[text, result], stream=False)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    asked = {"role": "user", "content": "q"}
    yield ask("tools/arguments-object", "tiny", messages=[asked, call, result], stream=False)


def formats() -> Iterator[Call]:
    for name, value in [("json", "json"), ("empty", ""), ("bad", "xml")]:
        yield ask(f"format/{name}", format=value, stream=False)
    yield Call("format/bad-stream", "POST", "/api/generate", {"model": "tiny", "prompt": "x", "format": "xml"})
    array = {"model": "tiny", "prompt": "x", "format": [1], "stream": False}
    yield Call("format/array", "POST", "/api/generate", array)


def options() -> Iterator[Call]:
    for name, value in [
        ("temperature-text", {"temperature": "a"}), ("unknown", {"zzz": 1}), ("num_ctx-text", {"num_ctx": "4096"}),
        ("stop-text", {"stop": "x"}), ("stop-numbers", {"stop": [1]}), ("seed-negative", {"seed": -5}),
        ("num_predict-minus-1", {"num_predict": -1}), ("num_predict-minus-2", {"num_predict": -2}),
        ("num_predict-0", {"num_predict": 0}), ("float-for-int", {"top_k": 40.7}),
        ("int-for-float", {"temperature": 1}), ("int-for-bool", {"use_mmap": 1}), ("null", {"temperature": None}),
        ("temperature-negative", {"temperature": -1}), ("top_p-big", {"top_p": 7}),
        ("array", [1]), ("mirostat", {"mirostat": 1}), ("num_gpu", {"num_gpu": 0}),
    ]:  # fmt: skip
        yield ask(f"option/{name}", options=value, stream=False)
    text = '{"model":"tinychat","messages":[{"role":"user","content":"hi"}],"options":{%s}%s}'
    yield Call("option/nan", "POST", "/api/chat", text % ('"temperature":NaN', ""))
    yield Call("option/1e999", "POST", "/api/chat", text % ('"temperature":1e999', ""))
    yield Call("option/huge-int", "POST", "/api/chat", text % ('"seed":99999999999999999999999', ',"stream":false'))


def decoding() -> Iterator[Call]:
    hi = '"messages":[{"role":"user","content":"hi"}]'
    for name, body in [
        ("twice", '{"model":"nosuch","model":"tinychat",' + hi + ',"stream":false}'),
        ("case", '{"Model":"tinychat","MESSAGES":[{"role":"user","content":"hi"}],"Stream":false}'),
        ("trailing", '{"model":"tinychat",' + hi + ',"stream":false} garbage'),
        ("no-utf8", b'{"model":"tinychat","messages":[{"role":"user","content":"a\xff\xfe"}],"stream":false}'),
        ("surrogate", '{"model":"tinychat","messages":[{"role":"user","content":"\\ud800"}],"stream":false}'),
        ("deep", '{"model":"tinychat",' + hi + ',"x":' + "[" * 11000 + "]" * 11000 + ',"stream":false}'),
    ]:
        yield Call(f"decoding/{name}", "POST", "/api/chat", body)
    tinychat = {"model": "tinychat"}
    yield Call("decoding/two-documents", "POST", "/api/show", '{"model":"tinychat"}{"model":"x"}')
    yield Call("decoding/bom", "POST", "/api/show", b'\xef\xbb\xbf{"model":"tinychat"}')
    yield Call("decoding/no-type", "POST", "/api/show", tinychat, {"Content-Type": None})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    yield Call("decoding/form-type", "POST", "/api/show", tinychat, form)
    yield Call("decoding/gzip", "POST", "/api/show", b"\x1f\x8b\x08\x00", {"Content-Encoding": "gzip"})
    yield ask("decoding/stream-text", stream="false")
    yield ask("decoding/unknown-field", stream=False, foo=1)


def logprobs_and_errors() -> Iterator[Call]:
    yield ask("logprobs/whole", "tiny", logprobs=True, top_logprobs=2, stream=False)
    yield Call("logprobs/stream", "POST", "/api/generate", {"model": "tiny", "prompt": "x", "logprobs": True})
    yield ask("logprobs/21", logprobs=True, top_logprobs=21)
    yield ask("error/first", messages=said("ERR400"))
    for name, word in [("first", "ERR400"), ("middle", "ERRMID")]:
        whole = {"model": "tiny", "prompt": word, "stream": False}
        yield Call(f"error/{name}-whole", "POST", "/api/generate", whole)
    yield Call("error/middle", "POST", "/api/generate", {"model": "tiny", "prompt": "ERRMID"})


def generate() -> Iterator[Call]:
    x, whole = {"prompt": "x"}, {"prompt": "x", "stream": False}
    for name, model, fields in [
        ("stream", "tiny", x), ("whole", "tiny", whole), ("load", "tiny", {}), ("unload", "tiny", {"keep_alive": 0}),
        ("raw", "tiny", {"prompt": "x", "raw": True, "stream": False}),
        ("raw-system", "tiny", {"prompt": "x", "raw": True, "system": "s"}),
        ("suffix", "tiny", {"prompt": "x", "suffix": "y", "stream": False}),
        ("suffix-unable", "tinychat", {"prompt": "x", "suffix": "y", "stream": False}),
        ("template", "tiny", {"prompt": "x", "template": "{{ .Prompt }}", "stream": False}),
        ("template-bad", "tiny", {"prompt": "x", "template": "{{ .", "stream": False}),
        ("context", "tiny", {"prompt": "x", "context": [1, 2], "stream": False}),
        ("think", "tinythink", x), ("rendered", "tiny", {"prompt": "x", "_debug_render_only": True}),
    ]:  # fmt: skip
        yield Call(f"generate/{name}", "POST", "/api/generate", {"model": model, **fields})


def embed() -> Iterator[Call]:
    for name, path, fields in [
        ("one", "/api/embed", {"input": "x"}), ("list", "/api/embed", {"input": ["a", "b"], "dimensions": 2}),
        ("no-texts", "/api/embed", {"input": []}), ("empty", "/api/embed", {"input": ""}), ("none", "/api/embed", {}),
        ("number", "/api/embed", {"input": 5}), ("mixed", "/api/embed", {"input": ["a", 1]}),
        ("old", "/api/embeddings", {"prompt": "x"}), ("old-empty", "/api/embeddings", {"prompt": ""}),
        ("v1", "/v1/embeddings", {"input": ["a", "b"]}),
        ("v1-base64", "/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("v1-bad-format", "/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
        ("v1-tokens", "/v1/embeddings", {"input": [1, 2]}), ("v1-no-texts", "/v1/embeddings", {"input": []}),
    ]:  # fmt: skip
        yield Call(f"embed/{name}", "POST", path, {"model": "tinychat", **fields})


def described() -> Iterator[Call]:
    yield Call("described/show", "POST", "/api/show", {"model": "tinychat"})
    yield Call("described/show-verbose", "POST", "/api/show", {"model": "tinychat", "verbose": True})
    yield Call("described/tags", "GET", "/api/tags")
    yield Call("described/ps", "GET", "/api/ps")
    yield Call("described/v1-models", "GET", "/v1/models")
    yield Call("described/v1-model", "GET", "/v1/models/tinychat")


def openai_chat() -> Iterator[Call]:
    usage = {"stream_options": {"include_usage": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    nothing = ["stream", "stop", "tools", "temperature", "max_tokens", "response_format", "stream_options", "logprobs",
               "seed"]  # fmt: skip
    bad_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    for name, model, fields in [
        ("whole", "tinychat", {}), ("stream", "tinychat", {"stream": True}),
        ("usage", "tinychat", {"stream": True, **usage}), ("n-2", "tinychat", {"n": 2}),
        ("max_tokens-0", "tinychat", {"max_tokens": 0}),
        ("max_completion_tokens", "tinychat", {"max_completion_tokens": 5}), ("stop-text", "tinychat", {"stop": "x"}),
        ("json-object", "tinychat", {"response_format": {"type": "json_object"}}),
        ("json-schema", "tinychat", {"response_format": schema}),
        ("text-format", "tinychat", {"response_format": {"type": "text"}}),
        ("bad-effort", "tinychat", {"reasoning_effort": "zzz"}), ("tools-unable", "tinychat", {"tools": TOOLS}),
        ("tool_choice-none", "tinychat", {"tool_choice": "none"}), ("nulls", "tinychat", dict.fromkeys(nothing)),
        ("logprobs", "tinychat", {"logprobs": True, "top_logprobs": 1}), ("no-messages", "tinychat", {"messages": []}),
        ("parts", "tinychat", {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}),
        ("image-url", "tinychat", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]}),
        ("content-null", "tinychat", {"messages": [{"role": "user", "content": None}]}),
        ("think", "tinythink", {}), ("think-stream", "tinythink", {"stream": True}),
        ("think-none", "tinythink", {"reasoning_effort": "none"}),
        ("tool-stream", "tinythink", {"messages": said("TOOL"), "tools": TOOLS, "stream": True, **usage}),
        ("two-tools", "tinythink", {"messages": said("TOOL TWOTOOLS"), "tools": TOOLS}),
        ("bad-arguments", "tiny", {"messages": [
            {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [bad_call]},
            {"role": "tool", "tool_call_id": "1", "content": "r"}]}),
        ("error-first", "tinychat", {"messages": said("ERR400"), "stream": True}),
        ("error-middle", "tiny", {"messages": said("ERRMID"), "stream": True}),
        ("developer", "tinychat", {"messages": [
            {"role": "developer", "content": "d"}, {"role": "user", "content": "hi"}]}),
    ]:  # fmt: skip
        yield ask(f"v1-chat/{name}", model, "/v1/chat/completions", **fields)


def openai_rest() -> Iterator[Call]:
    for name, fields in [
        ("whole", {"prompt": "x"}), ("list", {"prompt": ["a"]}), ("empty", {"prompt": ""}),
        ("stream", {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}),
    ]:  # fmt: skip
        yield Call(f"v1-completions/{name}", "POST", "/v1/completions", {"model": "tiny", **fields})
    tool = {"type": "function", "name": "get_weather", "description": "w", "parameters": PLAIN_CITY}
    for name, fields in [
        ("whole", {"input": "hi"}), ("stream", {"input": "hi", "stream": True}),
        ("tool-stream", {"input": "TOOL", "stream": True, "tools": [tool]}),
        ("previous", {"input": "hi", "previous_response_id": "resp_1"}),
    ]:  # fmt: skip
        yield Call(f"v1-responses/{name}", "POST", "/v1/responses", {"model": "tinythink", **fields})


def anthropic() -> Iterator[Call]:
    tool = {"name": "get_weather", "input_schema": PLAIN_CITY}
    for name, fields in [
        ("whole", {}), ("stream", {"stream": True}),
        ("tool-stream", {"messages": said("TOOL"), "stream": True, "tools": [tool]}),
        ("no-max_tokens", {"max_tokens": ...}),
        ("no-messages", {"max_tokens": 5, "messages": []}),
        ("think-unable", {"model": "tinychat", "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ]:  # fmt: skip
        fields = {"max_tokens": 50, **fields}
        yield ask(f"v1-messages/{name}", fields.pop("model", "tinythink"), "/v1/messages", **fields)
    yield ask("v1-messages/count_tokens", "tinythink", "/v1/messages/count_tokens", max_tokens=50)


def managing() -> Iterator[Call]:
    yield Call("manage/copy", "POST", "/api/copy", {"source": "tinychat", "destination": "cp1"})
    yield Call("manage/copy-bad-name", "POST", "/api/copy", {"source": "tinychat", "destination": "a b"})
    yield Call("manage/delete", "DELETE", "/api/delete", {"name": "cp1"})
    yield Call("blob/head-missing", "HEAD", f"/api/blobs/{ZERO_DIGEST}")
    yield Call("blob/head-malformed", "HEAD", "/api/blobs/zzz")
    yield Call("blob/mismatch", "POST", f"/api/blobs/{ZERO_DIGEST}", b"hello")
    yield Call("blob/new", "POST", f"/api/blobs/{HELLO_DIGEST}", b"hello")
    yield Call("blob/again", "POST", f"/api/blobs/{HELLO_DIGEST}", b"hello")
    for name, fields in [
        ("create", {"model": "c1", "from": "tinychat", "system": "s", "parameters": {"temperature": 0.1}}),
        ("create-whole", {"model": "c2", "from": "tinychat", "stream": False}), ("create-nothing", {"model": "c3"}),
        ("create-bad-parameter", {"model": "c4", "from": "tinychat", "parameters": {"zzz": 1}}),
    ]:  # fmt: skip
        yield Call(f"manage/{name}", "POST", "/api/create", fields)
    yield Call("manage/show-created", "POST", "/api/show", {"model": "c1"})
    yield Call("manage/pull", "POST", "/api/pull", {"model": "nosuch-model-xyz"})
    yield Call("manage/pull-whole", "POST", "/api/pull", {"model": "nosuch-model-xyz", "stream": False})
    yield Call("manage/pull-bad-name", "POST", "/api/pull", {"model": "a b"})

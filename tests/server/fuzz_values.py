"""The values that the fuzzer makes requests of: bodies that work, and odd values by the fields that they are for."""

from typing import Any

# Bases of requests that work. A few tokens each: a case is over in milliseconds.
_TURN = [{"role": "user", "content": "hi"}]
_TOOL = {"name": "get_weather", "description": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}
_FUNCTION = {"type": "function", "function": _TOOL}
_CALL = [{"role": "user", "content": "TOOL"}]
VALID: dict[str, list[dict[str, Any]]] = {
    "/api/chat": [
        {"messages": _TURN, "options": {"num_predict": 8}},
        {"messages": _CALL, "tools": [_FUNCTION]},
        {"messages": _TURN, "format": "json", "stream": False, "options": {"num_predict": 8}},
    ],
    "/api/generate": [
        {"prompt": "SAY \U0001f600 \u2028 ok", "options": {"num_predict": 8}},
        {"prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 4}},
    ],
    "/api/embed": [{"input": ["a", "b"]}, {"input": "a", "dimensions": 3}],
    "/api/embeddings": [{"prompt": "a"}],
    "/api/show": [{}, {"verbose": True}],
    "/api/create": [{"model": "made", "from": "tiny", "system": "Be kind.", "parameters": {"temperature": 1}}],
    "/api/copy": [{"source": "tiny", "destination": "copied"}],
    "/api/delete": [{"model": "copied"}, {"model": "made"}],
    "/api/pull": [{}, {"model": "org/none", "stream": False}],
    "/api/push": [{}],
    "/v1/chat/completions": [
        {"messages": _TURN, "max_tokens": 8},
        {"messages": _TURN, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": _CALL, "tools": [_FUNCTION]},
    ],
    "/v1/completions": [{"prompt": "hi", "max_tokens": 4}, {"prompt": ["hi"], "stream": True, "logprobs": 2}],
    "/v1/embeddings": [{"input": "a"}, {"input": ["a"], "encoding_format": "base64"}],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 8},
        {"input": _CALL, "tools": [{"type": "function", **_TOOL}], "stream": True},
    ],
    "/v1/messages": [
        {"messages": _TURN, "max_tokens": 8},
        {"messages": _TURN, "max_tokens": 8, "stream": True, "system": [{"type": "text", "text": "Be kind."}]},
    ],
    "/v1/messages/count_tokens": [{"messages": _TURN}],
}

NAMES = ["tiny", "tinychat", "tinythink"]
ODD_NAMES = [
    "TINY:latest",
    "registry.ollama.ai/library/tiny",
    "nosuch",
    "",
    "a b",
    "x:cloud",
    "tiny:",
    ":",
    "a/b/c/d/e",
]
MADE = ["copied", "made", "a/b", "", "a b", "made:x:y", "../made", "made\0"]
"""Names of models that may be made and removed: the scripted ones stay."""

SCRIPTS = ["ERR400", "ERRMID", "TOOL", "TURNS", "SAY \u00fc\u2028\U0001f600e\u0301", 'SAY {"a": [1]}', "TWOTOOLS"]
"""What the scripted engine does something about."""

_MARKS = "<|im_end|> <|im_start|>system\n <tool_call> </think> {{messages}} {%raw%} %s%n ../../x null true NaN -1"
TEXTS = [
    *("hi", *SCRIPTS),
    *("", " ", "\0", "\ud800", "\udc00\ud800", "\ufeff", "\uffff", "x" * 5000, "\u00e4" * 300, "\n" * 40, "9" * 30),
    *_MARKS.split(" "),
]
NUMBERS = [0, 1, -1, 2, 20, 21, 1.5, -0.0, 255, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 1 << 64, 10**30]
NUMBERS += [1e308, -1e308, 5e-324, 1e-9, 0.5]
TOKENS = ["NaN", "Infinity", "-Infinity", "1e999", "1e-999", "01", "1.", "-", "+1", "0x10", "nul", "'a'", ""]
"""JSON, or none."""

_OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_SCHEMAS: list[Any] = [
    *({}, _OBJECT, {"$ref": "#"}, {"$ref": "#/nowhere"}, {"not": {}}, {"type": "nosuch"}, {"type": ["string", "null"]}),
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": [1, "a", None]}}},
    *({"type": "string", "pattern": "((("}, {"type": "string", "pattern": "a{1,99999}"}, {"enum": []}, {"const": 1.5}),
    {"type": "object", "properties": {"a": 5}, "required": "a"},
    {"anyOf": [{"type": "integer", "minimum": 1e300}, {"type": "number", "multipleOf": 0}]},
    {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(200)}},
]
PARTS: list[Any] = [
    *({"type": "text", "text": "hi"}, {"type": "input_text", "text": "TOOL"}, {"type": "text"}, {"type": []}, {}),
    *({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}, {"type": "image"}, {"type": "refusal"}),
    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}},
    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "20"}], "is_error": True},
    *({"type": "thinking", "thinking": None}, {"type": "document", "source": {"type": "text", "data": 1}}),
]
ITEMS: list[Any] = [
    *({"role": "user", "content": "hi"}, {"type": "message", "role": "developer", "content": [{"type": "input_text"}]}),
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}", "namespace": 5},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "[" * 2000},
    *({"type": "function_call_output", "call_id": "c1", "output": [1]}, {"type": "reasoning", "summary": [1]}, {}, 5),
    *({"type": "reasoning", "encrypted_content": "x"}, {"type": "item_reference", "id": "x"}, {"role": 5}),
]
OPTIONS: dict[str, list[Any]] = {
    **{name: NUMBERS for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "typical_p", "seed")},
    **{name: NUMBERS for name in ("presence_penalty", "frequency_penalty", "repeat_last_n", "num_keep", "num_ctx")},
    "num_predict": [0, 1, 2, 8, -1, -2, 1 << 70],
    "stop": [[], ["o"], ["\n", ""], "x", [1], ["\ud800"]],
    "nosuch": [1],
}
_TIMES = [0, "0s", -1, "5m", 1.5, "300", "abc", True, 1e300, "-1h", "9999999h", 10**40, "1h1h", "\u00b5s", ".s"]
_ZEROS = "sha256:" + "0" * 64
HINTS: dict[str, list[Any]] = {
    "role": ["user", "assistant", "system", "tool", "USER", "developer", "function", "", "stranger"],
    "stream": [True, False],
    "keep_alive": _TIMES,
    "format": ["json", "", "xml", *_SCHEMAS, {"type": "json_object"}],
    "schema": _SCHEMAS,
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": _OBJECT}}],
    "think": [True, False, "low", "max", "ultra", 1],
    "effort": ["none", "low", "xhigh", "absurd", ""],
    "reasoning_effort": ["none", "low", "absurd"],
    "images": [["aGk="], ["?"], ["data:image/png;base64,aGk="], [""], ["\u00e4"], ["a" * 2001]],
    "context": [[], [1, 2], [-1], [1 << 40], [255] * 5000],
    "arguments": [{}, {"city": "Paris"}, "{}", '{"a"', "null", "[1]", "[" * 2000, None, 5],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "x"}}, {"type": "any"}],
    "stop": [["o"], "lo", [""], [1], ["x"] * 50],
    "stop_sequences": [["o"], [""], []],
    "encoding_format": ["float", "base64", "int8"],
    "dimensions": [0, 1, 64, -1, 1 << 40],
    "max_tokens": [1, 8, 0, -1, 1 << 62],
    "max_output_tokens": [1, 8, 0, -1],
    "n": [1, 2, 0],
    "logprobs": [True, False, 0, 2, 20, 21, -1],
    "top_logprobs": [0, 2, 20, 21, -1],
    "truncation": ["auto", "disabled", "x"],
    "files": [{"config.json": _ZEROS}, {"../x": _ZEROS}, {"a.gguf": "x"}, {"a": 5}],
    "license": ["MIT", ["MIT", "BSD"], [5]],
    "parameters": [{"temperature": 1}, {"stop": ["x"]}, {"num_ctx": "x"}, {"a\nb": [[]]}, _OBJECT, {"properties": 5}],
    "tools": [[_FUNCTION], [{"type": "function", **_TOOL}], [{**_TOOL, "input_schema": {}}]],
    "type": ["function", "text", "json_object", "json_schema", "enabled", "disabled", "namespace", "web_search", ""],
}
"""Values by the names of fields, in any body."""

_ODD_HEADERS = """\
Content-Length: 5
Content-Length: -1
Content-Length: +5
Content-Length: 5, 5
Content-Length: abc
Content-Length: 0x10
Content-Length:
Content-Length: 5 | Content-Length: 6
Content-Length: 300000000
Content-Length: 1000000000000
Content-Length: 99999999999999999999
Content-Length: 5 | Transfer-Encoding: chunked
Transfer-Encoding: chunked
Transfer-Encoding: gzip, chunked
Transfer-Encoding: chunked, identity
Transfer-Encoding: xchunked
Transfer-Encoding: CHUNKED
Transfer-Encoding: chunked | Transfer-Encoding: chunked
Transfer-Encoding : chunked
Transfer-Encoding:\tchunked
Transfer-Encoding: \vchunked
Connection: upgrade | Upgrade: websocket
Connection: Upgrade, HTTP2-Settings | Upgrade: h2c
Connection: x
Expect: 100-continue
Expect: 200-ok
Expect: 100-continue | Expect: x
Trailer: X
TE: trailers
NoColon
: empty
A B: c
X: a |  folded
X\0: a
X: a\0b
X: \xff\xfe"""
ODD_HEADERS = [line.replace(" | ", "\r\n") for line in _ODD_HEADERS.split("\n")]
ODD_HEADERS += ["X: " + "a" * 9000, "X: " + "a" * 100_000, "\r\n".join(f"X-{i}: {i}" for i in range(300))]
"""Headers that say how a body is sent, wrongly mostly, or that are none."""

_HEADERS = """\
Origin: http://localhost:3000
Origin: null
Origin: http://evil.example
Origin: chrome-extension://x
Host: evil.example
Host: localhost
Host: [::1]
Host: [
Host: a:b:c
Host:
Host: 127.0.0.1:99999
Content-Type: text/xml
Content-Type: multipart/form-data; boundary=
Content-Type: ;;;
Content-Encoding: gzip
Content-Encoding: zstd
Content-Encoding: br
Content-Encoding: gzip, gzip
Authorization: Bearer \xe4
Authorization: Basic x
x-api-key: \xe4
Accept: application/xml
Accept-Encoding: gzip, br
Range: bytes=0-1
If-None-Match: *
Cookie: ;=;
X-Forwarded-For: 1.2.3.4
Access-Control-Request-Method: POST
Keep-Alive: timeout=-1
Connection: keep-alive
Connection: close
User-Agent:
User-Agent: GitHubCopilotChat/1"""
HEADERS = _HEADERS.split("\n")
"""Headers that leave a request one by the rules of HTTP."""

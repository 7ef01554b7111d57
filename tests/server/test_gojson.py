import json
import math
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotpy.server.errors import ApiError
from slotpy.server.gojson import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    MAX_DEPTH,
    MAX_VALUES,
    OBJECT,
    STRING,
    ListOf,
    NothingSent,
    Struct,
    parse,
)

MESSAGE = Struct("api.Message", {"role": STRING, "content": STRING, "images": ListOf(STRING)})
CHAT = Struct(
    "api.ChatRequest",
    {
        "model": STRING,
        "messages": ListOf(MESSAGE),
        "stream": BOOL,
        "options": OBJECT,
        "top_logprobs": INT,
        "temperature": FLOAT,
        "think": ANY,
        "keep_alive": ANY,
    },
)


def refusal(raw: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        CHAT.read(raw)
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b'{"Model":"a","STREAM":false}', {"model": "a", "stream": False}),
        (b'{"model":"a","model":"b"}', {"model": "b"}),
        (b'{"model":"a","MODEL":"b"}', {"model": "b"}),
        ('{"me\u017f\u017fages":[],"to\u212a":1}'.encode(), {"messages": []}),
        ('{"me\u00dfages":[]}'.encode(), {}),
        (b'{"model":null,"messages":null,"stream":null,"options":null,"think":null}', {}),
        (b'{"unknown":[{"x":1}],"model":"a"}', {"model": "a"}),
        (b'{"model":"a"} garbage', {"model": "a"}),
        (b' \t\r\n{"model":"a"}{"model":"b"}', {"model": "a"}),
        (b"null", {}),
        (b'{"messages":[{"Role":"user","x":1},null]}', {"messages": [{"role": "user"}, {}]}),
        (b'{"messages":[{"images":[null,"a"]}]}', {"messages": [{"images": ["", "a"]}]}),
        (b'{"options":{"Stop":["x"],"seed":null}}', {"options": {"Stop": ["x"], "seed": None}}),
        (b'{"options":{"seed":99999999999999999999999}}', {"options": {"seed": 99999999999999999999999}}),
        (b'{"temperature":1,"top_logprobs":-0}', {"temperature": 1.0, "top_logprobs": 0}),
        (b'{"think":"high","keep_alive":1.5}', {"think": "high", "keep_alive": 1.5}),
    ],
)
def test_bodies_are_read_the_go_way(raw, read):
    assert CHAT.read(raw) == read


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb'{"model":"a\ud800b"}', "a\ufffdb"),
        (rb'{"model":"\ud83d\ude00 \udc00\ud800"}', "\U0001f600 \ufffd\ufffd"),
        (b'{"model":"a\xff\xfe"}', "a\ufffd\ufffd"),
        (b'{"model":"\xe2\x82"}', "\ufffd\ufffd"),
        (b'{"model":"\xed\xa0\x80"}', "\ufffd\ufffd\ufffd"),
        (b'{"model":"\x7f"}', "\x7f"),
    ],
)
def test_what_is_no_text_becomes_the_replacement_character_byte_by_byte(raw, text):
    assert CHAT.read(raw) == {"model": text}


# The texts that Ollama 0.33 gives, as recorded; only the last two groups are ours.
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "missing request body"),
        (b" \n", "missing request body"),
        (b"{bad", "invalid character 'b' looking for beginning of object key string"),
        (b"[]", "json: cannot unmarshal array into Go value of type api.ChatRequest"),
        (b'{"model":5}', "json: cannot unmarshal number into Go struct field ChatRequest.model of type string"),
        (
            b'{"options":[1]}',
            "json: cannot unmarshal array into Go struct field ChatRequest.options of type map[string]interface {}",
        ),
        (
            b'{"messages":"hi"}',
            "json: cannot unmarshal string into Go struct field ChatRequest.messages of type []api.Message",
        ),
        (b'{"stream":"false"}', "json: cannot unmarshal string into Go struct field ChatRequest.stream of type bool"),
        (
            b'{"messages":[{"content":[]}]}',
            "json: cannot unmarshal array into Go struct field ChatRequest.messages.content of type string",
        ),
        (b"\xef\xbb\xbf{}", "invalid character '\u00ef' looking for beginning of value"),
        (b"\x1f\x8b\x08\x00", "invalid character '\\x1f' looking for beginning of value"),
        (b'{"model":NaN}', "invalid character 'N' looking for beginning of value"),
        (b'{"model":-Infinity}', "invalid character 'I' in numeric literal"),
        (b'{"model":', "unexpected EOF"),
        (b'{"model":"a', "unexpected EOF"),
        (b'{"model" 1}', "invalid character '1' after object key"),
        (b'{"model":"a",}', "invalid character '}' looking for beginning of object key string"),
        (b'{"model":"\x01"}', "invalid character '\\x01' in string literal"),
        (b'{"model":"\\x"}', "invalid character 'x' in string escape code"),
        (b"{'model':1}", "invalid character '\\'' looking for beginning of object key string"),
    ],
)  # fmt: skip
def test_refusals_have_gos_text(raw, text):
    assert refusal(raw) == text


@pytest.mark.parametrize(
    "raw",
    [
        b'{"top_logprobs":1.0}', b'{"top_logprobs":9223372036854775808}', b'{"temperature":true}',
        b'{"temperature":"1"}', b'{"stream":1}', b'{"stream":[]}', b'{"model":{}}', b'{"messages":[5]}',
        b'{"messages":{}}', b'{"options":"x"}',
        b'{"x":1e999}', b'{"x":1' + b"0" * 309 + b"}", b'{"x":1' + b"0" * 9000 + b"}", b"5", b'"x"', b"true", b"1.x",
        b"1e", b'{"x":01}', b'{"x":1.}', b'{"x":.5}', b'{"x":+1}', b'{"x":tru}', b'{"x":"\n"}', b'[1,]', b"\x00",
        b'{"x":1 "y":2}',
    ],
)  # fmt: skip
def test_what_go_refuses_is_refused(raw):
    refusal(raw)


@pytest.mark.parametrize("raw", [b"1.x", b"1e", b"-", b"-x", b"1.e5", b"1.5ex"])
def test_half_a_number_is_none(raw):
    with pytest.raises(ApiError, match="numeric literal"):
        parse(raw)
    assert parse(b"-1.5e+3 rest") == -1500.0


def test_the_word_for_an_empty_body_is_the_dialects():
    with pytest.raises(ApiError, match=r"^EOF$"):
        CHAT.read(b"", empty="EOF")
    with pytest.raises(NothingSent):
        parse(b" ")


@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_is_accepted_up_to_a_limit_and_refused_however_deep(brackets):
    opening, closing = brackets
    inner = b"1"
    assert parse(opening * MAX_DEPTH + inner + closing * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 11_000, 500_000):
        assert refusal(b'{"x":' + opening * (depth - 1) + inner + closing * (depth - 1) + b"}") == "exceeded max depth"
    assert parse(b"[[]," + opening * (MAX_DEPTH - 1) + inner + closing * (MAX_DEPTH - 1) + b"]")
    assert parse(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001


@pytest.mark.parametrize("values", [b"0," * MAX_VALUES, b"[" * MAX_VALUES, b"{}," * (MAX_VALUES // 2)])
def test_a_body_of_countless_values_is_refused_before_they_take_the_memory(values):
    tracemalloc.start()
    with pytest.raises(ApiError, match="more than 4000000 values") as caught:
        parse(b"[" + values + b"]")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.status == 413 and peak_bytes < 3 * len(values)


def test_a_large_body_is_read_quickly():
    image = b"iVBO" * (8 << 20)
    assert len(CHAT.read(b'{"messages":[{"images":["' + image + b'"]}]}')["messages"][0]["images"][0]) == len(image)


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
PIECES = st.sampled_from(
    [b'{"model":', b'"messages":[', b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"d83d", b"null", b"true",
     b"NaN", b"-", b"1", b"0", b".", b"e9", b" ", b"\n", b"\xff", b"\xed\xa0\x80", b"a", b"\xef\xbb\xbf", b"\x00"]
)  # fmt: skip


@PATIENT
@given(VALUES, st.booleans())
def test_every_value_that_json_writes_is_read_as_json_reads_it(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse(text.encode(errors="surrogatepass")) == value


@settings(PATIENT, max_examples=300)
@given(st.lists(PIECES, max_size=20).map(b"".join) | st.binary(max_size=60))
def test_any_bytes_give_a_value_or_an_api_error(raw):
    try:
        value = parse(raw)
    except ApiError as error:
        assert error.status == 400 and str(error).isprintable()
        try:
            json.loads(raw, parse_constant=lambda word: 1 / 0)
        except (ValueError, ZeroDivisionError):
            return
        # What json alone accepts: a byte order mark, other encodings, numbers too large.
        assert raw.startswith(b"\xef\xbb\xbf") or b"\x00" in raw or b"e9" in raw
        return
    json.dumps(value, allow_nan=False).encode("utf-8")
    try:
        expected = json.loads(raw.decode())
    except ValueError:
        return  # bytes after the value, or mended ones in it
    assert value == expected or b"\\u" in raw


@PATIENT
@given(VALUES)
def test_fields_are_of_their_kind_or_refused(value):
    try:
        body = CHAT.read(json.dumps(dict.fromkeys(("model", "temperature", "stream"), value)).encode())
    except ApiError as error:
        assert str(error).startswith("json: cannot unmarshal")
        return
    assert isinstance(body.get("model", ""), str) and isinstance(body.get("stream", True), bool)
    assert math.isfinite(body.get("temperature", 0.0))

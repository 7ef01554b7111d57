"""Replies under a grammar, from a model that knows nothing: noise for logits, judged by json and jsonschema."""

import json

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from slotpy.engine.grammar import GrammarCompiler
from slotpy.engine.sampler import Sampler, SamplingParams
from slotpy.engine.text import Tokenizer
from slotpy.errors import SlotpyError, UsageError

STOPS = ("<|end|>", "<|im_end|>")


def make_tokenizer(alphabet=None):
    """Build a byte-level tokenizer of all bytes, some longer tokens, two stop tokens, and a tag that is text."""
    longer = ['{"', '":', '",', '"}', "}}", "],", "ĠĠ", "ĊĊ", "Ċ", "tru", "12", 'Ġ"', "Ã©Ã", '\\"', "key_1"]
    spellings = sorted(pre_tokenizers.ByteLevel.alphabet()) + longer if alphabet is None else list(alphabet)
    merges = [("Ċ", "Ċ")] if alphabet is None else []
    backend = tokenizers.Tokenizer(models.BPE({s: i for i, s in enumerate(dict.fromkeys(spellings))}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken("<call>", special=False), *(AddedToken(name, special=True) for name in ("<|start|>", *STOPS))]
    )
    return Tokenizer(backend, {})


TOKENIZER = make_tokenizer()
STOP_IDS = frozenset(TOKENIZER.token_id(stop) for stop in STOPS)
COMPILER = GrammarCompiler(TOKENIZER, STOP_IDS)
NUM_LOGITS = TOKENIZER.num_ids + 7  # a model pads its vocabulary

# Once a reply is long enough: what ends strings, numbers, arrays and objects, and above all the end itself.
ENDING = np.zeros(NUM_LOGITS, np.float32)
for weight, texts in ((6, "0123456789truefalsn:"), (9, ","), (12, '"}]'), (30, STOPS)):
    ENDING[[TOKENIZER.token_id(text) for text in texts]] = weight

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]}
SCHEMAS = {
    "object": OBJECT,
    "anything": {},
    "recursive $ref": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["name", "next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "enum and const": {
        "type": "object",
        "properties": {"c": {"enum": ["red", 3, None, {"x": [1]}]}, "d": {"const": "é\n\"<|end|><|start|>"}},
        "required": ["c", "d"],
    },
    "array": {"type": "array", "items": {"type": "number", "minimum": -3, "maximum": 7.5}, "minItems": 2},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 4}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "y": {"type": "string"}}, "required": ["k"]},
        ]
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"maxLength": 3, "type": "string"}}, "required": ["b"]},
        ]
    },
    "200 keys": {
        "type": "object",
        "properties": {f"key_{i}": {"type": ["boolean", "null"]} for i in range(200)},
        "required": [f"key_{i}" for i in range(0, 200, 50)],
    },
    "zod record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
    "pattern properties": {"patternProperties": {"^s_": {"type": "string"}}, "additionalProperties": False},
    "numbers": {"type": "array", "items": {"type": "integer", "multipleOf": 7, "minimum": 10}, "maxItems": 3},
}  # fmt: skip

SAMPLING = (
    {},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    {"repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": -1, "temperature": 1.5},
    {"temperature": 0},
)


def text_of(ids):
    return b"".join(TOKENIZER.token_bytes(i) for i in ids).decode(errors="surrogateescape")


def noise_reply(constraint, seed, num_free, params, limit=900):
    """Sample from noise; after `num_free` tokens it leans towards the end. Gives the ids, and whether they ended."""
    sampler, noise, ids = Sampler(params, TOKENIZER.num_ids), np.random.default_rng(seed), []
    for i in range(limit):
        logits = noise.uniform(-1, 1, NUM_LOGITS).astype(np.float32)
        logits[TOKENIZER.num_ids :] = 50
        token = sampler.sample(constraint.apply(logits + ENDING if i >= num_free else logits), ids)
        constraint.accept(token)
        if token in STOP_IDS:
            return ids, True
        assert TOKENIZER.token_bytes(token)
        ids.append(token)
    return ids, False


def started(*arguments):
    constraint = COMPILER.compile(*arguments)
    constraint.start()
    return constraint


def feed(constraint, text):
    for character in text:
        constraint.accept(TOKENIZER.token_id({" ": "Ġ", "\n": "Ċ"}.get(character, character)))


def allowed(constraint):
    """Give the texts that may come next; a stop token's is its name."""
    ids = np.flatnonzero(constraint.apply(np.zeros(NUM_LOGITS, np.float32)) == 0).tolist()
    names = dict(zip((TOKENIZER.token_id(stop) for stop in STOPS), STOPS, strict=True))
    return {names[i] if i in names else TOKENIZER.token_bytes(i).decode(errors="replace") for i in ids}


@pytest.mark.parametrize("params", SAMPLING, ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_noise_becomes_a_valid_document_whenever_it_is_told_to_end(name, params):
    # That a reply cut short anywhere can still be ended means that what was there was a prefix of a valid one.
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for seed in range(4):
        ids, ended = noise_reply(started(SCHEMAS[name]), seed, seed * 7, SamplingParams(seed=seed, **params))
        assert ended, text_of(ids)
        validator.validate(json.loads(text_of(ids)))


@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_json_is_any_object(params):
    for seed in range(6):
        ids, ended = noise_reply(started("json"), seed, seed * 7, SamplingParams(seed=seed, **params))
        assert ended, text_of(ids)
        assert isinstance(json.loads(text_of(ids)), dict)


def test_sampling_filters_look_only_at_what_is_allowed():
    # Everything forbidden is likelier than what is allowed: a filter over the whole vocabulary would leave nothing.
    logits = np.full(NUM_LOGITS, 9.0, np.float32)
    logits[[TOKENIZER.token_id(digit) for digit in "0123456789"]] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8.5]
    constraint = started({"enum": [1, 5, 8]})
    masked = constraint.apply(logits)
    for params, expected in (
        ({"top_k": 2}, "58"),
        ({"top_p": 0.9}, "8"),
        ({"min_p": 0.04}, "58"),
        ({"temperature": 0}, "8"),
        ({"repeat_penalty": 2.0}, "158"),
    ):
        sampler = Sampler(SamplingParams(**params), TOKENIZER.num_ids)
        found = sampler.candidates(masked, [TOKENIZER.token_id("5"), TOKENIZER.token_id("z")])[0]
        assert text_of(found) == expected


def test_only_stop_ids_may_follow_a_complete_reply():
    constraint = started(OBJECT)
    feed(constraint, '{"a":1')
    assert "}" in allowed(constraint)
    assert not allowed(constraint) & set(STOPS)
    feed(constraint, "}")
    assert allowed(constraint) == set(STOPS)
    constraint.accept(TOKENIZER.token_id("<|im_end|>"))


def test_a_stop_token_that_is_no_control_token_may_not_stand_in_a_string():
    call = TOKENIZER.token_id("<call>")
    compiler = GrammarCompiler(TOKENIZER, frozenset([call]))
    for schema in ({"const": "a<call>z"}, {"type": "string"}):
        constraint = compiler.compile(schema)
        constraint.start()
        feed(constraint, '"a')
        assert "<call>" not in allowed(constraint)
        feed(constraint, '<call>z"')
        assert allowed(constraint) == {"<call>"}


def test_a_reply_that_may_end_or_go_on_allows_both():
    constraint = started({"type": "integer"})
    feed(constraint, "12")
    assert allowed(constraint) == {*STOPS, *"0123456789", "12"}


def test_padding_special_and_empty_tokens_are_never_allowed_inside():
    constraint = started({"type": "string"})
    feed(constraint, '"')
    masked = constraint.apply(np.zeros(NUM_LOGITS, np.float32))
    assert np.isneginf(masked[TOKENIZER.num_ids :]).all()
    assert all(TOKENIZER.token_bytes(i) for i in np.flatnonzero(masked == 0).tolist())
    assert "<call>" in allowed(constraint)  # a tag that is no control token is text, as the decoder has it


@pytest.mark.parametrize(
    ("blanks", "fits"),
    [
        ("", True),
        (" ", True),
        ("\n", True),
        ("\n" + 32 * " ", True),
        ("  ", False),
        ("\n\n", False),
        (" \n", False),
        ("\n" + 33 * " ", False),
    ],
)
def test_runs_of_blanks_are_a_space_or_one_indentation(blanks, fits):
    constraint = started(OBJECT)
    if fits:
        feed(constraint, "{" + blanks + '"a":' + blanks + "1" + blanks + "}")
    else:
        with pytest.raises(SlotpyError):
            feed(constraint, "{" + blanks + '"a"')


def test_objects_are_closed_where_the_schema_is_silent():
    constraint = started(OBJECT)
    feed(constraint, '{"a":1,"b":true')
    assert "," not in allowed(constraint)
    for items in (OBJECT, [OBJECT]):
        nested = started({"type": "array", "items": items})
        feed(nested, '[{"a":1,"b":true')
        assert "," not in allowed(nested)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({**OBJECT, "additionalProperties": True}, '{"a":1,"c":'),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 2}, '{"a":1,'),
        ({**OBJECT, "required": ["z"]}, '{"z":'),
        ({**OBJECT, "patternProperties": {"^c": {}}}, '{"a":1,"c":1'),
        ({"allOf": [OBJECT, {"properties": {"c": {"type": "null"}}}]}, '{"a":1,"c":null'),
        ({**OBJECT, "anyOf": [{"properties": {"c": {"const": 1}}, "required": ["c"]}]}, '{"a":1,"c":1'),
        ({"properties": {}}, '{"a":1'),
        ({"enum": [{"properties": {"a": 1}}]}, '{"properties": {"a": 1}'),
    ],
)
def test_objects_stay_open_where_more_is_asked_for(schema, text):
    feed(started(schema), text)


def test_many_optional_keys_are_no_obstacle():
    constraint = started({"type": "object", "properties": {f"k{i}": {} for i in range(700)}})
    feed(constraint, '{"k698":1,"k699":2')
    assert "}" in allowed(constraint)


def test_compiling_leaves_the_schema_as_it_is():
    before = json.dumps(OBJECT)
    COMPILER.compile(OBJECT)
    assert json.dumps(OBJECT) == before


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "null"}}, "not supported: not"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "not supported: uniqueItems"),
        ({"if": {}, "then": {}}, "not supported: if, then"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "not supported: propertyNames"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf .* Use anyOf"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not supported: not"),
        ({"type": "string", "format": "shoe-size"}, "shoe-size"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "[a"}, "unclosed"),
        ({"type": "nope"}, "nope"),
        ({"properties": 5}, "properties"),
        ({"required": [[]], "properties": {"a": {}}}, "required"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"enum": [10**400]}, "out of range"),
        ({"const": "\ud800"}, "cannot be read"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "nothing fits"),
        ({"properties": {f"k{i}": {} for i in range(2000)}}, "too large: 2001 schemas"),
        ({"const": "x" * (1 << 18)}, "too large: 1 schemas"),
        ("xml", "xml"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_a_usage_error_that_names_it(schema, words):
    with pytest.raises(UsageError, match=words) as raised:
        COMPILER.compile(schema)
    assert "\n" not in str(raised.value)


def test_a_bottomless_schema_is_a_usage_error():
    schema: dict = {}
    for _ in range(10_000):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="nested too deep"):
        COMPILER.compile(schema)


def test_nothing_is_held_back_before_the_start():
    constraint = COMPILER.compile("json")
    logits = np.zeros(NUM_LOGITS, np.float32)
    assert constraint.apply(logits) is logits
    feed(constraint, "so...")
    assert not constraint.active
    constraint.start()
    assert constraint.active
    assert {"{", "\n", "\n\n"} <= allowed(constraint)


def test_one_blank_line_may_stand_between_reasoning_and_reply():
    constraint = COMPILER.compile("json", frozenset([TOKENIZER.token_id("<call>")]))
    feed(constraint, "hm")
    constraint.start()
    constraint.accept(TOKENIZER.token_id("ĊĊ"))
    assert allowed(constraint) == {"{", '{"', "<call>"}
    assert allowed(started("json")) == {"{", '{"'}


def test_an_exempt_token_may_only_open_the_reply_and_ends_the_constraint():
    call = TOKENIZER.token_id("<call>")
    constraint = started("json", frozenset([call]))
    assert allowed(constraint) == {"{", '{"', "<call>"}
    constraint.accept(call)
    constraint.start()
    assert not constraint.active
    feed(constraint, "free")
    other = started("json", frozenset([call]))
    feed(other, "{")
    assert "<call>" not in allowed(other)


def test_a_damaged_logit_is_still_seen_under_a_constraint():
    for fault in (np.nan, np.inf):
        logits = np.zeros(NUM_LOGITS, np.float32)
        logits[TOKENIZER.token_id("z")] = fault
        with pytest.raises(SlotpyError, match="finite maximum"):
            Sampler(SamplingParams(seed=1), TOKENIZER.num_ids).sample(started("json").apply(logits), [])


def test_apply_leaves_the_logits_as_they_are():
    logits = np.arange(NUM_LOGITS, dtype=np.float32)
    masked = started("json").apply(logits)
    assert masked.dtype == np.float32
    assert logits.tolist() == list(range(NUM_LOGITS))
    assert masked[TOKENIZER.token_id("{")] == logits[TOKENIZER.token_id("{")]


def test_a_dead_end_is_an_error_and_never_the_end_of_a_reply():
    # This tokenizer has no digits.
    tokenizer = make_tokenizer('{"a:')
    constraint = GrammarCompiler(tokenizer, frozenset([tokenizer.token_id("<|end|>")])).compile(OBJECT)
    constraint.start()
    with pytest.raises(SlotpyError, match="cannot be kept to its format: nothing fits it"):
        for text in '{"a":':
            constraint.accept(tokenizer.token_id(text))
        constraint.apply(np.zeros(tokenizer.num_ids, np.float32))


def test_a_token_outside_the_grammar_is_an_error():
    constraint = started("json")
    with pytest.raises(SlotpyError, match="cannot be kept to its format") as raised:
        feed(constraint, "x")
    assert "state" not in str(raised.value)


def test_two_replies_do_not_share_their_place_in_the_grammar():
    first, second = started("json"), started("json")
    feed(first, "{")
    assert allowed(second) == {"{", '{"'}

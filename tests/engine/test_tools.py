"""Tool grammars: which one a checkpoint has, and calls as the models write them, whole or broken, through mlx-lm."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotpy.engine.chat import ChatTemplate
from slotpy.engine.tools import ToolGrammar

DEMO = Path(__file__).parents[2] / "slotpy" / "data" / "demo"
JSON, XML = ToolGrammar("json_tools"), ToolGrammar("qwen3_coder")
ALL = ["glm47", "json_tools", "laguna", "longcat", "minicpm5", "minimax_m2", "muse_spark", "qwen3_coder"]


def declare(properties: dict | None = None, name: str = "f", **schema) -> list[dict]:
    parameters = {"type": "object", "properties": properties or {}} | schema
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


def as_json(name: str = "f", **arguments) -> str:
    return "\n" + json.dumps({"name": name, "arguments": arguments}) + "\n"


def as_xml(name: str = "f", **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n<function={name}>\n{parameters}</function>\n"


def test_a_call_is_opened_with_its_name_where_only_one_can_be_meant():
    assert JSON.opening(declare(name="f")) == '<tool_call>\n{"name": "f", "arguments":'
    assert XML.opening(declare(name="f")) == "<tool_call>\n<function=f"
    assert JSON.opening(declare(name='"')) == '<tool_call>\n{"name": "\\"", "arguments":'
    assert ToolGrammar("glm47").opening(declare()) == "<tool_call>"
    for grammar in (JSON, XML):
        assert grammar.opening(declare(name="f") + declare(name="g")) == "<tool_call>"


# Which grammar -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ('<tool_call>\n{"name": …', "json_tools"),
        ("<tool_call>{name}<arg_key>", "glm47"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
        ("<longcat_tool_call>", "longcat"),
        ('<function name="f"><param name="p">', "minicpm5"),
        ("<atem:function_calls>", "muse_spark"),
    ],
)
def test_the_template_tells_the_grammar(tmp_path, template, name):
    assert ToolGrammar.of(tmp_path, f"{{% if tools %}}{template}{{% endif %}}") == ToolGrammar(name)


def test_a_template_without_calls_has_none(tmp_path):
    assert ToolGrammar.of(tmp_path, "{{ messages[0].content }}") is None


def test_the_tokenizer_config_wins_over_the_template_if_it_names_a_grammar_that_is_read(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tool_parser_type": "laguna"}')
    assert ToolGrammar.of(tmp_path, "<tool_call>") == ToolGrammar("laguna")
    for other in ('"other.module"', "[]", "null"):
        config.write_text(f'{{"tool_parser_type": {other}}}')
        assert ToolGrammar.of(tmp_path, "<tool_call>") == JSON


@pytest.mark.parametrize("name", ALL)
def test_the_markers_are_mlx_lms(name):
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    grammar = ToolGrammar(name)
    assert (grammar.start, grammar.end) == (module.tool_call_start, module.tool_call_end)
    assert grammar.end  # a call without one would last to the end of the reply


def test_telling_the_grammar_imports_neither_mlx_lm_nor_transformers():
    code = (
        "import sys; from pathlib import Path; from slotpy.engine.tools import ToolGrammar;"
        "assert ToolGrammar.of(Path('.'), '<tool_call>'); assert 'mlx_lm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO.parents[2])


# Calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tools", '{"name": "f", "arguments": {"s": "a b", "n": 3}}'),
        ("json_tools", '{"name": "f", "parameters": {"s": "a b", "n": 3}}'),
        ("json_tools", '{"name": "f", "arguments": "{\\"s\\": \\"a b\\", \\"n\\": 3}"}'),
        ("qwen3_coder", "<function=f>\n<parameter=s>\na b\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"),
        ("qwen3_coder", "<function=f><parameter=s>a b</parameter><parameter=n>3</parameter></function>\n\n"),
        ("glm47", "f<arg_key>s</arg_key><arg_value>a b</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"),
        (
            "minimax_m2",
            '<invoke name="f"><parameter name="s">a b</parameter><parameter name="n">3</parameter></invoke>',
        ),
        ("minicpm5", '"f"><param name="s">a b</param><param name="n">3</param>'),
        (
            "longcat",
            "f<longcat_arg_key>s</longcat_arg_key><longcat_arg_value>a b</longcat_arg_value>"
            "<longcat_arg_key>n</longcat_arg_key><longcat_arg_value>3</longcat_arg_value>",
        ),
        (
            "muse_spark",
            '<atem:invoke name="f"><atem:parameter name="s">a b</atem:parameter>'
            '<atem:parameter name="n">3</atem:parameter></atem:invoke>',
        ),
    ],
)
def test_each_grammar_gives_name_and_typed_arguments(name, text):
    tools = declare({"s": {"type": "string"}, "n": {"type": "integer"}})
    assert ToolGrammar(name).parse(text, tools) == [("f", {"s": "a b", "n": 3})]


def test_what_the_demo_template_writes_is_read_back():
    chat = ChatTemplate.load(DEMO)
    call = {"type": "function", "function": {"name": "f", "arguments": {"s": 'é\n"', "x": [1, None]}}}
    text = chat.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    grammar = ToolGrammar.of(DEMO, chat.source)
    body = text.partition(grammar.start)[2].partition(grammar.end)[0]
    assert grammar.parse(body, declare()) == [("f", call["function"]["arguments"])]


def test_one_pair_of_markers_may_hold_several_calls():
    text = json.dumps([{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}])
    assert JSON.parse(text, declare() + declare(name="g")) == [("f", {}), ("g", {"a": 1})]
    assert JSON.parse(text, declare()) == []  # all or nothing: what is not passed on as a call is shown as text


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}', ', "arguments": "null"'])
def test_a_call_may_have_no_arguments(arguments):
    assert JSON.parse(f'{{"name": "f"{arguments}}}', declare()) == [("f", {})]
    assert XML.parse("<function=f>\n</function>", declare()) == [("f", {})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '"f"',
        "{}",
        '{"name": null, "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"name": "g", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "a"}',
        '{"name": "f", "arguments": {"s": "\\x"}}',
        '{"name": "f"}{"name": "f"}',
        '{"name": "f", "arguments": {"s": "cut',
        '{"a":' * 30_000,
    ],
)
def test_json_that_is_no_declared_call_gives_none(text):
    assert JSON.parse(text, declare()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f()",
        as_xml("g", s="x"),
        "<function=>\n</function>",
        "<function=f>\n<parameter=s>\ncut",
        "<function=f>\n<parameter=s>\nno end\n</function>",
        "<function=f>\nlost\n<parameter=s>\nx\n</parameter>\n</function>",
        as_xml(s="x") + as_xml(s="y"),
        as_xml(s=f"an example: <tool_call>{as_xml(s='inner')}</tool_call>"),
        "<parameter=s>" * 20_000,
        "<function=f>" + "<parameter=s>" * 20_000,
    ],
)
def test_xml_of_which_the_parser_would_drop_a_part_gives_none(text):
    assert XML.parse(text, declare({"s": {"type": "string"}})) == []


@pytest.mark.parametrize("tools", [[], [{}], [{"function": None}], [{"function": {"name": 3}}], [{"name": "f"}]])
def test_without_a_declaration_there_is_no_call(tools):
    assert JSON.parse(as_json(), tools) == []


@pytest.mark.parametrize("parameters", [None, True, [], {"properties": []}, {"type": 3}, {"$ref": "#/$defs/none"}])
def test_a_declaration_without_a_usable_schema_leaves_values_alone(parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert JSON.parse(as_json(a="1", b=2), tools) == [("f", {"a": "1", "b": 2})]
    assert XML.parse(as_xml(a="1"), tools) == [("f", {"a": "1"})]


def test_arguments_are_values_that_json_can_hold():
    assert JSON.parse('{"name": "f", "arguments": {"a": [NaN, -1e999]}}', declare()) == [
        ("f", {"a": ["NaN", "-Infinity"]})
    ]
    glm = "f<arg_key>a</arg_key><arg_value>{}</arg_value>".format
    assert ToolGrammar("glm47").parse(glm("{1: (2, None)}"), declare()) == [("f", {"a": {"1": [2, None]}})]
    assert ToolGrammar("glm47").parse(glm("b'x'"), declare()) == []


MARKUP = st.sampled_from([
    "<function=f>", "</function>", "<parameter=s>", "</parameter>", "<tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<invoke", "</invoke>", "<param", "</param>", "{", "}", "[", "]", '"', ":", ",",
    "name", "arguments", "f", "s", "null", "1", "-", "(", ")", "=", "\\", "'", "é", " ", "\n",
])  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(text=st.lists(MARKUP, max_size=20).map("".join) | st.text(max_size=20))
def test_no_text_makes_a_grammar_raise_or_give_what_json_cannot_hold(name, text):
    for _, arguments in ToolGrammar(name).parse(text, declare({"s": {"type": "string"}})):
        json.dumps(arguments, allow_nan=False)


@pytest.mark.parametrize(
    ("grammar", "text", "begins"),
    [
        (JSON, "", None), (JSON, "\n ", None), (JSON, "\n{", True), (JSON, "[{", True), (JSON, "f", False),
        (XML, "\n<func", None), (XML, "<function=f", True), (XML, "<functions", False), (XML, "{", False),
        (ToolGrammar("glm47"), "", True), (ToolGrammar("glm47"), "anything", True),
    ],
)  # fmt: skip
def test_the_beginning_tells_a_call_where_the_grammar_does(grammar, text, begins):
    assert grammar.begins(text) is begins


@pytest.mark.parametrize(
    ("grammar", "text", "breaks_off"),
    [
        (JSON, '{"a": "', True), (JSON, '{"a": "\\"', True), (JSON, '{"a": "\\\n"', False), (JSON, '{"a": "b"', False),
        (XML, "<function=f>", True), (XML, as_xml(s="x"), False), (XML, "no call", False),
        (ToolGrammar("glm47"), 'f<arg_key>"', False),
    ],
)  # fmt: skip
def test_a_call_breaks_off_inside_an_argument(grammar, text, breaks_off):
    assert grammar.breaks_off(text) is breaks_off


# Types -------------------------------------------------------------------------------------------------------------

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "text", ["2024", "00123", "false", "null", "1.10", "None", "[1]", '{"a": 1}', "", "  x ", '"x"']
)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "integer"]},
        {"type": "STRING"},
        {"anyOf": [{"type": "string"}, {"type": "number"}]},
        {"$ref": "#/$defs/Text"},
        {"allOf": [{"$ref": "#/$defs/Text"}], "description": "d"},
        {"enum": ["2024", "x"]},
        {"const": "x"},
    ],
)
def test_a_declared_string_stays_a_string(text, schema):
    tools = declare({"s": schema}, **{"$defs": {"Text": {"type": "string"}}})
    assert XML.parse(as_xml(s=text), tools) == [("f", {"s": text})]
    assert JSON.parse(as_json(s=text), tools) == [("f", {"s": text})]


@pytest.mark.parametrize("schema", [OPTIONAL, {"type": ["string", "null"]}, {"type": "string", "nullable": True}])
def test_an_optional_string_stays_a_string_and_may_be_null(schema):
    tools = declare({"s": schema})
    for text, value in (("1.10", "1.10"), ("false", "false"), ("null", None)):
        assert XML.parse(as_xml(s=text), tools) == [("f", {"s": value})]
    for value in ("null", None, "3"):
        assert JSON.parse(as_json(s=value), tools) == [("f", {"s": value})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "7.0", 7),
        ({"type": "integer"}, "1e20", 10**20),
        ({"type": "integer"}, "7.5", "7.5"),
        ({"type": "integer"}, "inf", "inf"),
        ({"type": "integer"}, "1e999", "1e999"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "null", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array", "items": {"type": "integer"}}, '[1, "2", "x"]', [1, 2, "x"]),
        ({"type": "array", "items": {"type": "string"}}, '[1, "2", 1.5, true]', ["1", "2", "1.5", "true"]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": 1e999, "b": NaN}', {"a": "Infinity", "b": "NaN"}),
        ({"type": "object"}, "{1: b'x'}", "{1: b'x'}"),
        ({"type": "object"}, "[" * 5000, "[" * 5000),
        ({}, "12", "12"),
        ({}, '{"a": [1]}', {"a": [1]}),
        ({"enum": [1, 2]}, "2", 2),
        (OPTIONAL | {"default": None}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": OPTIONAL}]}, "[1, null]", ["1", None]),
    ],
)
def test_bare_text_becomes_the_declared_type_or_stays_as_written(schema, text, value):
    [(_, arguments)] = XML.parse(as_xml(a=text), declare({"a": schema}))
    assert arguments == {"a": value} and type(arguments["a"]) is type(value)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, 7.0, 7),
        ({"type": "integer"}, 7.5, 7.5),
        ({"type": "integer"}, None, None),
        ({"type": "number"}, 7, 7),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, 1, 1),
        ({"type": "string"}, 2024, "2024"),
        ({"type": "string"}, False, "false"),
        ({"type": "string"}, {"a": "é"}, '{"a": "é"}'),
        ({"type": "string"}, None, None),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"properties": {"a": {"type": "string"}}}, '{"a": 1}', {"a": "1"}),
        ({"type": "float"}, "1.5", 1.5),
        ({"type": "Int"}, "1", 1),
        ({"type": "list"}, "[1]", [1]),
        ({}, '{"a": 1}', '{"a": 1}'),
        (True, "1", "1"),
    ],
)
def test_a_json_value_of_another_type_is_converted_if_nothing_is_lost(schema, written, value):
    [(_, arguments)] = JSON.parse(as_json(a=written), declare({"a": schema}))
    assert arguments == {"a": value} and type(arguments["a"]) is type(value)


def test_types_are_found_through_references_and_nested_objects():
    person = {
        "type": "object",
        "properties": {"year": {"type": "string"}, "friends": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}}},
        "additionalProperties": {"type": "integer"},
    }
    tools = declare({"p": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]}}, **{"$defs": {"a/b": person}})
    value = {"year": 1999, "friends": [{"year": 2000, "friends": [], "n": "3"}]}
    expected = {"year": "1999", "friends": [{"year": "2000", "friends": [], "n": 3}]}
    assert JSON.parse(as_json(p=value), tools) == [("f", {"p": expected})]
    assert XML.parse(as_xml(p=json.dumps(value)), tools) == [("f", {"p": expected})]


def test_references_in_circles_and_schemas_that_double_end():
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    defs = {"$defs": doubling | {"d60": {"type": "integer"}, "me": {"$ref": "#/$defs/me"}}}
    tools = declare({"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/me"}}, **defs)
    assert JSON.parse(as_json(a="3", b="3"), tools) == [("f", {"a": 3, "b": "3"})]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_json_arguments_without_a_schema_are_what_was_written(arguments):
    assert JSON.parse(json.dumps({"name": "f", "arguments": arguments}), declare()) == [("f", arguments)]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30).filter(lambda text: text.lower() != "null"))
@example("def f(x):\n    return '</div>' < x\n\n")
@example("about <parameter=x> and </function>")
def test_a_string_in_xml_is_what_was_written(text):
    assert XML.parse(as_xml(s=text), declare({"s": {"type": "string"}})) == [("f", {"s": text})]

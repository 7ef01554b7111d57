"""Whatever a /v1 request holds, it is read or refused: no other exception leaves the readers."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotpy.engine.generation import GenerationRequest
from slotpy.engine.prompts import uniform
from slotpy.errors import UsageError
from slotpy.server.anthropic import messages
from slotpy.server.errors import ApiError
from slotpy.server.gojson import Struct
from slotpy.server.openai import chat, completions, responses
from slotpy.server.openai.responses_input import Tools
from slotpy.server.turns import conversation
from tests.server.fakes import TINY, TINYTHINK

NAMES = [
    *(
        "type",
        "role",
        "content",
        "text",
        "name",
        "function",
        "arguments",
        "tool_calls",
        "id",
        "call_id",
        "tool_call_id",
    ),
    *("tools", "parameters", "input_schema", "source", "data", "url", "image_url", "summary", "output"),
    *("namespace", "schema", "json_schema", "format", "effort", "input", "tool_use_id", "thinking", "description"),
]
WORDS = [
    *(
        "text",
        "function",
        "namespace",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "image",
        "none",
    ),
    *("user", "assistant", "tool", "system", "tool_use", "tool_result", "document", "image_url", "auto"),
    *("json_schema", "any", "enabled", "low", "{}", "{bad", "\ud800", "web_search", "custom", "input_image", "refusal"),
]
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.sampled_from(WORDS)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
)


def respond(body: dict[str, Any]) -> GenerationRequest:
    return responses._generation(TINYTHINK, body, Tools(body.get("tools", ())))


READERS = {
    "chat": (chat.CHAT, lambda body: chat._generation(TINYTHINK, body)),
    "completions": (completions.COMPLETION, lambda body: completions._generation(TINYTHINK, body)),
    "responses": (responses.RESPONSES, respond),
    "messages": (messages.MESSAGES, lambda body: messages._generation(TINYTHINK, body)),
}
SHAPED = {
    "messages": st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), min_size=1, max_size=3),
    "tools": st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), max_size=2),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_body_is_read_or_refused(name, data):
    struct, read = READERS[name]
    fields = [*fields_of(struct)]
    body = {"messages": [{"role": "user", "content": "x"}], "input": "x"}
    for field in data.draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        body[field] = data.draw(SHAPED.get(field, VALUES))
    try:
        asked = read({"messages": [], **struct.read(json.dumps(body).encode())})
        if asked.messages:
            uniform(asked.messages)
    except (ApiError, UsageError):
        return
    assert isinstance(asked, GenerationRequest)


def fields_of(struct: Struct) -> list[str]:
    return [name for name, _ in struct._fields.values()]


def test_a_records_messages_come_before_the_requests():
    record = (
        {"role": "system", "content": "s"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    )
    asked = [{"role": "system", "content": "t"}, {"role": "user", "content": "u"}]
    mine = replace(TINY, system="unheard", messages=record)
    assert conversation(mine, asked) == ({"role": "system", "content": "s\n\nt"}, record[1], asked[1])

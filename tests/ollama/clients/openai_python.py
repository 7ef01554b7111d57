"""openai-python: the `openai` package of PyPI, pointed at /v1."""

import json

import openai
from checks import check, main, raises
from pydantic import BaseModel

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
TOOL = [{"role": "user", "content": "TOOL"}]


class Answer(BaseModel):
    a: int


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


@check
def lists_models(url):
    client = client_of(url)
    assert "tinychat:latest" in [model.id for model in client.models.list()]
    assert client.models.retrieve("tinychat").owned_by == "library"


@check
def chats(url):
    choice = client_of(url).chat.completions.create(model="tinychat", messages=HI).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello!", "stop")


@check
def streams_with_usage_at_the_end(url):
    options = {"include_usage": True}
    create = client_of(url).chat.completions.create
    *chunks, last = create(model="tinychat", messages=HI, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello!"
    assert last.choices == [] and last.usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in chunks)


@check
def calls_tools(url):
    client = client_of(url)
    choice = client.chat.completions.create(model="tinythink", messages=TOOL, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    history = [*TOOL, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    again = client.chat.completions.create(model="tinythink", messages=history, tools=TOOLS)
    assert again.choices[0].message.content == "Hello!"


@check
def streams_tool_calls_whole(url):
    with client_of(url).chat.completions.stream(model="tinythink", messages=TOOL, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [(call.function.name, call.type) for call in message.tool_calls] == [("get_weather", "function")]


@check
def obeys_tool_choice(url):
    create = client_of(url).chat.completions.create
    none = create(model="tinythink", messages=TOOL, tools=TOOLS, tool_choice="none").choices[0]
    assert not none.message.tool_calls
    required = create(model="tinythink", messages=TOOL, tools=TOOLS, tool_choice="required").choices[0]
    assert required.message.tool_calls


@check
def parses_into_a_model(url):
    for model in ("tinychat", "tinythink"):
        parsed = client_of(url).chat.completions.parse(model=model, messages=HI, response_format=Answer)
        assert isinstance(parsed.choices[0].message.parsed, Answer)


@check
def gives_reasoning_under_both_names(url):
    message = client_of(url).chat.completions.create(model="tinythink", messages=HI).choices[0].message
    for name in ("reasoning", "reasoning_content"):
        assert message.model_extra[name].strip() == "let me think"


@check
def stops_at_the_limit(url):
    create = client_of(url).chat.completions.create
    for limit in ({"max_tokens": 1}, {"max_completion_tokens": 1}):
        assert create(model="tinychat", messages=HI, **limit).choices[0].finish_reason == "length"


@check
def embeds_in_base64(url):
    """The package asks for base64 by itself."""
    data = client_of(url).embeddings.create(model="tinychat", input=["a", "b"]).data
    assert len(data) == 2 and all(isinstance(x, float) for x in data[0].embedding)


@check
def completes(url):
    client = client_of(url)
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == "Hello!"
    parts = client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join(part.choices[0].text for part in parts) == "Hello!"


@check
def gives_responses(url):
    client = client_of(url)
    assert client.responses.create(model="tinythink", input="hi").output_text == "Hello!"
    kinds = [event.type for event in client.responses.create(model="tinythink", input="hi", stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    tool = {"type": "function", **TOOLS[0]["function"]}
    with client.responses.stream(model="tinythink", input="TOOL", tools=[tool]) as stream:
        assert stream.get_final_response().output[-1].name == "get_weather"
    parsed = client.responses.parse(model="tinythink", input="hi", text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)


@check
def raises_errors(url):
    create = client_of(url).chat.completions.create
    raises(openai.NotFoundError, lambda: create(model="nosuch", messages=HI))
    raises(openai.BadRequestError, lambda: create(model="tinychat", messages=[]))
    middle = [{"role": "user", "content": "ERRMID"}]
    raises(openai.APIError, lambda: list(create(model="tiny", messages=middle, stream=True)))


if __name__ == "__main__":
    main()

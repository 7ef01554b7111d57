"""anthropic-python: the `anthropic` package of PyPI; Claude Code speaks the same protocol."""

import anthropic
from checks import check, main, raises

HI = [{"role": "user", "content": "hi"}]
TOOL = [{"role": "user", "content": "TOOL"}]
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]


def client_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)


@check
def answers(url):
    message = client_of(url).messages.create(model="tinychat", max_tokens=20, messages=HI)
    assert ([block.text for block in message.content], message.stop_reason) == (["Hello!"], "end_turn")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


@check
def thinks_and_streams(url):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client_of(url).messages.stream(model="tinythink", max_tokens=50, messages=HI, thinking=thinking) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking.strip(), message.content[1].text) == ("let me think", "Hello!")


@check
def uses_tools(url):
    client = client_of(url)
    message = client.messages.create(model="tinythink", max_tokens=90, messages=TOOL, tools=TOOLS)
    call = message.content[-1]
    assert (message.stop_reason, call.type, call.input) == ("tool_use", "tool_use", {"city": "Paris"})
    with client.messages.stream(model="tinythink", max_tokens=90, messages=TOOL, tools=TOOLS) as stream:
        assert stream.get_final_message().content[-1].input == {"city": "Paris"}
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]
    history = [*TOOL, {"role": "assistant", "content": message.content}, {"role": "user", "content": result}]
    again = client.messages.create(model="tinythink", max_tokens=50, messages=history, tools=TOOLS)
    assert again.content[-1].text == "Hello!"


@check
def stops(url):
    create = client_of(url).messages.create
    assert create(model="tinychat", max_tokens=1, messages=HI).stop_reason == "max_tokens"
    cut = create(model="tinychat", max_tokens=20, messages=HI, stop_sequences=["lo"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "lo", "Hel")


@check
def counts_tokens(url):
    client = client_of(url)
    counted = client.messages.count_tokens(model="tinychat", messages=HI).input_tokens
    assert counted == client.messages.create(model="tinychat", max_tokens=20, messages=HI).usage.input_tokens


@check
def takes_the_beta_path(url):
    message = client_of(url).beta.messages.create(model="tinychat", max_tokens=20, messages=HI, betas=["x-2025-01-01"])
    assert message.content[0].text == "Hello!"


@check
def raises_errors(url):
    create = client_of(url).messages.create
    raises(anthropic.NotFoundError, lambda: create(model="nosuch", max_tokens=5, messages=HI))
    raises(anthropic.BadRequestError, lambda: create(model="tinychat", max_tokens=5, messages=[]))
    middle = [{"role": "user", "content": "ERRMID"}]
    raises(anthropic.APIError, lambda: list(create(model="tiny", max_tokens=50, messages=middle, stream=True)))


if __name__ == "__main__":
    main()

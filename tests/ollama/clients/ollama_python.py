"""ollama-python: the `ollama` package of PyPI."""

import tempfile
from pathlib import Path

import ollama
from checks import check, main, raises

HI = [{"role": "user", "content": "hi"}]


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: where
    """
    return f"rain in {city}"


@check
def lists_and_describes(url):
    client = ollama.Client(url)
    assert {"tiny:latest", "tinychat:latest", "tinythink:latest"} <= {m.model for m in client.list().models}
    shown = client.show("tinythink")
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities)
    assert shown.modelinfo["general.parameter_count"] > 0
    client.ps()


@check
def chats(url):
    reply = ollama.Client(url).chat("tinychat", messages=HI)
    assert (reply.message.content, reply.done_reason) == ("Hello!", "stop")
    assert reply.eval_count > 0 and reply.total_duration > 0


@check
def streams_what_lines_might_be_split_at(url):
    text = "a\u2028b\u2029c\x85d \N{GRINNING FACE} 漢字 é"
    parts = ollama.Client(url).chat("tinychat", messages=say(f"SAY {text}"), stream=True)
    assert "".join(part.message.content for part in parts) == text


@check
def calls_tools_and_takes_their_result(url):
    client = ollama.Client(url)
    for stream in (False, True):
        replies = client.chat("tinythink", messages=say("TOOL"), tools=[get_weather], stream=stream)
        (call,) = [call for r in (replies if stream else [replies]) for call in r.message.tool_calls or []]
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    history = [*say("TOOL"), {"role": "assistant", "tool_calls": [call]}, result]
    assert client.chat("tinythink", messages=history, tools=[get_weather]).message.content == "Hello!"


@check
def thinks_when_asked(url):
    client = ollama.Client(url)
    for think, thoughts in [(True, "let me think"), (None, "let me think"), (False, None)]:
        message = client.chat("tinythink", messages=HI, think=think).message
        assert (message.content, message.thinking and message.thinking.strip()) == ("Hello!", thoughts)


@check
def keeps_to_a_schema(url):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for model in ("tinychat", "tinythink"):
        assert '"a"' in ollama.Client(url).chat(model, messages=HI, format=schema).message.content


@check
def generates(url):
    client = ollama.Client(url)
    assert client.generate("tiny", "x").response == "Hello!"
    assert "".join(part.response for part in client.generate("tiny", "x", stream=True)) == "Hello!"


@check
def gives_logprobs(url):
    reply = ollama.Client(url).chat("tiny", messages=HI, logprobs=True, top_logprobs=2)
    assert "".join(one.token for one in reply.logprobs) == "Hello!"
    assert all(len(one.top_logprobs) == 2 for one in reply.logprobs)


@check
def embeds(url):
    client = ollama.Client(url)
    vectors = client.embed("tinychat", ["a", "b"]).embeddings
    assert len(vectors) == 2 and all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)
    assert len(client.embeddings("tinychat", "a").embedding) == len(vectors[0])


@check
def copies_creates_and_deletes(url):
    client = ollama.Client(url)
    client.copy("tinychat", "copied")
    assert [p.status for p in client.create("created", from_="tinychat", system="s", stream=True)][-1] == "success"
    assert {"copied:latest", "created:latest"} <= {m.model for m in client.list().models}
    client.delete("copied")
    client.delete("created")
    assert raises(ollama.ResponseError, lambda: client.delete("copied")).status_code == 404


@check
def sends_blobs(url):
    with tempfile.TemporaryDirectory() as directory:
        (path := Path(directory) / "x.bin").write_bytes(b"hello")
        assert ollama.Client(url).create_blob(path).startswith("sha256:2cf24dba")


@check
def raises_errors(url):
    client = ollama.Client(url)
    assert raises(ollama.ResponseError, lambda: client.chat("nosuch", messages=HI)).status_code == 404
    raises(ollama.ResponseError, lambda: list(client.generate("tiny", "ERRMID", stream=True)))
    assert raises(ollama.ResponseError, lambda: client.generate("tiny", "ERR400")).status_code == 400


if __name__ == "__main__":
    main()

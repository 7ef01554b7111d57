"""LiteLLM, by its three ways to an Ollama server. It fetches prices at import unless told not to."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import check, main

litellm.suppress_debug_info = True
HI = [{"role": "user", "content": "hi"}]
TOOL = [{"role": "user", "content": "TOOL"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}}}]  # fmt: skip


@check
def completes_by_three_providers(url):
    for provider, base in [("ollama", url), ("ollama_chat", url), ("openai", f"{url}/v1")]:
        reply = litellm.completion(model=f"{provider}/tinychat", messages=HI, api_base=base, api_key="any")
        assert reply.choices[0].message.content == "Hello!", provider


@check
def streams(url):
    parts = litellm.completion(model="ollama_chat/tinychat", messages=HI, api_base=url, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello!"


@check
def calls_tools(url):
    reply = litellm.completion(model="ollama_chat/tinythink", messages=TOOL, tools=TOOLS, api_base=url)
    assert reply.choices[0].message.tool_calls[0].function.name == "get_weather"


@check
def passes_reasoning_effort_on(url):
    message = litellm.completion(model="ollama_chat/tinythink", messages=HI, api_base=url, reasoning_effort="low")
    assert message.choices[0].message.reasoning_content.strip() == "let me think"


@check
def embeds(url):
    assert len(litellm.embedding(model="ollama/tinychat", input=["a"], api_base=url).data) == 1


@check
def finds_out_about_the_model(url):
    info = litellm.get_model_info(model="ollama/tinythink", api_base=url)
    assert info["supports_function_calling"] is True
    assert info["max_tokens"] == 4096


if __name__ == "__main__":
    main()

"""langchain-ollama: LangChain's own client of the Ollama API."""

from checks import check, main, raises
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}}}]  # fmt: skip


class Answer(BaseModel):
    a: int


@check
def chats_and_streams(url):
    chat = ChatOllama(model="tinychat", base_url=url, validate_model_on_init=True)
    assert chat.invoke("hi").content == "Hello!"
    assert "".join(part.content for part in chat.stream("hi")) == "Hello!"


@check
def validates_the_model(url):
    raises(ValueError, lambda: ChatOllama(model="nosuch", base_url=url, validate_model_on_init=True))


@check
def binds_tools_and_sends_their_results(url):
    chat = ChatOllama(model="tinythink", base_url=url).bind_tools(TOOLS)
    asked = HumanMessage("TOOL")
    reply = chat.invoke([asked])
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = ToolMessage("rain", tool_call_id=reply.tool_calls[0]["id"])
    assert chat.invoke([asked, reply, result]).content == "Hello!"


@check
def structures_output_by_each_method(url):
    for method in ("json_schema", "json_mode", "function_calling"):
        asked = {"json_schema": "hi", "json_mode": 'SAY {"a": 1}', "function_calling": "TOOL"}[method]
        chat = ChatOllama(model="tinythink", base_url=url).with_structured_output(Answer, method=method)
        assert isinstance(chat.invoke(asked), Answer), method


@check
def tells_reasoning_apart(url):
    reply = ChatOllama(model="tinythink", base_url=url, reasoning=True).invoke("hi")
    assert reply.additional_kwargs["reasoning_content"].strip() == "let me think"


@check
def embeds_and_completes(url):
    assert len(OllamaEmbeddings(model="tinychat", base_url=url).embed_documents(["a"])[0]) > 1
    assert OllamaLLM(model="tiny", base_url=url).invoke("x") == "Hello!"


if __name__ == "__main__":
    main()

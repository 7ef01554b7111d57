"""What programs too big to install here send, in their order, with what they do to the answers.

Sources: open-webui/open-webui, backend/open_webui/routers/ollama.py; microsoft/vscode-copilot-chat,
src/extension/byok/vscode-node/ollamaProvider.ts; zed-industries/zed, crates/ollama/src/ollama.rs; continuedev/continue,
core/llm/llms/Ollama.ts. Claude Code's requests follow https://docs.anthropic.com/en/api/messages
"""

import json
import re
from datetime import datetime

import pytest

from tests.ollama.battery import HI, TOOLS, Call, said
from tests.ollama.compare import send


@pytest.fixture
def ask(port):
    """Send a request; give what its answer holds, which must be no error."""

    def send_one(method: str, path: str, body: object = None, **headers: str):
        answer = send(Call("", method, path, body, headers), "127.0.0.1", port)
        assert answer.status == 200, answer.text
        records = answer.records()
        return records if answer.framing in ("ndjson", "sse") else records[0]

    return send_one


def test_open_webui_connects_lists_chats_and_unloads(ask):
    version = ask("GET", "/api/version")["version"]
    assert [int(part) for part in re.sub(r"^v|-.*", "", version).split(".")] >= [0, 1, 16]
    model = next(m["model"] for m in ask("GET", "/api/tags")["models"] if m["model"].startswith("tinychat"))
    assert ask("POST", "/api/show", {"name": model})["capabilities"] == ["completion"]
    body = {"model": model, "messages": HI, "options": {"temperature": 0.5}, "stream": True}
    *parts, last = ask("POST", "/api/chat", body)
    assert "".join(part["message"]["content"] for part in parts) == "Hello!" and last["done"]
    (loaded,) = ask("GET", "/api/ps")["models"]
    assert loaded["model"] == model
    assert datetime.fromisoformat(loaded["expires_at"]).tzinfo is not None
    unloaded = ask("POST", "/api/generate", {"model": model, "keep_alive": 0, "prompt": ""})
    assert unloaded["done_reason"] == "unload"
    assert ask("GET", "/api/ps")["models"] == []


def test_open_webui_asks_for_titles_and_embeddings(ask):
    body = {"model": "tinychat:latest", "messages": said("SAY A title"), "stream": False, "max_tokens": 1000}
    assert ask("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "A title"
    assert len(ask("POST", "/api/embed", {"model": "tinychat:latest", "input": ["a", "b"]})["embeddings"]) == 2


def test_copilot_chat_finds_models_and_runs_tools(ask):
    agent = {"User-Agent": "GitHubCopilotChat/0.32.0"}
    assert [int(part) for part in ask("GET", "/api/version", **agent)["version"].split("-")[0].split(".")] >= [0, 6, 4]
    assert "tinythink:latest" in [model["model"] for model in ask("GET", "/api/tags", **agent)["models"]]
    shown = ask("POST", "/api/show", {"model": "tinythink:latest"}, **agent)
    info = shown["model_info"]
    assert info["general.basename"] == "tinythink:latest"
    assert info[f"{info['general.architecture']}.context_length"] == 4096
    assert "tools" in shown["capabilities"]
    body = {"model": "tinythink:latest", "messages": said("TOOL"), "tools": TOOLS, "stream": True, "n": 1,
            "temperature": 0.1, "top_p": 1, "stream_options": {"include_usage": True}}  # fmt: skip
    chunks = [message["data"] for message in ask("POST", "/v1/chat/completions", body, **agent)[:-1]]
    calls = [c for chunk in chunks for choice in chunk["choices"] for c in choice["delta"].get("tool_calls", [])]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}]
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["tool_calls"]


def test_zed_lists_models_and_sends_tool_results(ask):
    assert all(type(model["size"]) is int and model["modified_at"] for model in ask("GET", "/api/tags")["models"])
    assert "tools" in ask("POST", "/api/show", {"model": "tinythink:latest"})["capabilities"]
    body = {
        "model": "tinythink:latest",
        "messages": said("TOOL"),
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": 2048, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
        "tools": TOOLS,
        "think": True,
    }
    records = ask("POST", "/api/chat", body)
    (call,) = [call for record in records for call in record["message"].get("tool_calls", [])]
    function = {name: call["function"][name] for name in ("name", "arguments")}
    history = [
        *said("TOOL"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}], "thinking": None},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    ]
    *parts, last = ask("POST", "/api/chat", {**body, "messages": history})
    assert "".join(part["message"]["content"] for part in parts) == "Hello!"
    assert last["prompt_eval_count"] > 0 and last["eval_count"] > 0


def test_continue_reads_parameters_and_keeps_the_model(ask):
    made = {"model": "set", "from": "tinychat", "parameters": {"stop": ["a b", "c"], "num_ctx": 2048}, "stream": False}
    ask("POST", "/api/create", made)
    lines = ask("POST", "/api/show", {"name": "set"})["parameters"].split("\n")
    read = [re.fullmatch(r"(\S+)\s+((?:\".*\")|\S+)", line).groups() for line in lines]
    assert sorted(read) == [("num_ctx", "2048"), ("stop", '"a b"'), ("stop", '"c"')]
    body = {"model": "set", "messages": HI, "options": {"num_ctx": 2048, "mirostat": 0, "num_thread": 4},
            "keep_alive": 1800, "stream": True}  # fmt: skip
    assert "".join(part["message"]["content"] for part in ask("POST", "/api/chat", body)) == "Hello!"
    raw = {"model": "set", "prompt": "x", "raw": True, "keep_alive": 1800, "stream": True}
    assert "".join(part["response"] for part in ask("POST", "/api/generate", raw)) == "Hello!"


def test_claude_code_counts_tokens_and_streams_tools(ask):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "any"}
    tool = {"name": "Bash", "description": "run", "input_schema": {
        "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}  # fmt: skip
    cached = {"type": "ephemeral"}
    body = {
        "model": "tinythink",
        "max_tokens": 200,
        "system": [{"type": "text", "text": "You are brief.", "cache_control": cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "TOOL", "cache_control": cached}]}],
        "tools": [tool],
        "metadata": {"user_id": "someone"},
    }
    counted = {name: body[name] for name in ("model", "system", "messages", "tools")}
    assert ask("POST", "/v1/messages/count_tokens?beta=true", counted, **headers)["input_tokens"] > 0
    events = [message["data"] for message in ask("POST", "/v1/messages?beta=true", {**body, "stream": True}, **headers)]
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == ["thinking", "tool_use"]
    assert next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta") == "tool_use"

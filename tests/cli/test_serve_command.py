"""`slotpy serve`: what its options and variables come to, and one life with the demo from start to end."""

import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from slotpy import config
from slotpy.cli import serve as serve_module
from slotpy.cli.main import cli
from slotpy.demo import demo_directory
from slotpy.engine.loader import EngineOptions
from slotpy.errors import UsageError
from slotpy.lock import holder


@pytest.fixture
def served(monkeypatch):
    """Give what `serve` was called with, and no server."""
    for name in config.SERVER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve_module, "_log_to_stderr", lambda debug: None)  # the level would stay for other tests
    calls: list[tuple] = []
    monkeypatch.setattr(serve_module, "serve", lambda *args: calls.append(args))
    return calls


def invoke(*args: str):
    result = CliRunner().invoke(cli, ["serve", *args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_options_reach_the_settings_and_the_engine(served, monkeypatch):
    monkeypatch.setenv("OLLAMA_KEEP_ALIVE", "1h")
    monkeypatch.setenv("OLLAMA_CONTEXT_LENGTH", "2048")
    monkeypatch.setenv("OLLAMA_MAX_QUEUE", "7")
    invoke("--host", "0.0.0.0:80", "--api-key", "k", "--origins", "http://a", "--slots", "64", "--direct-io")
    ((service, settings, preload),) = served
    assert (settings.url, settings.api_key, settings.origins, settings.keep_alive_s) == (
        "http://0.0.0.0:80", "k", ("http://a",), 3600.0,
    )  # fmt: skip
    assert preload is None
    assert service.worker._options == EngineOptions(slots=64, direct_io=True, context_tokens=2048)
    assert (service.worker._max_queue, service.worker._keep_alive_s) == (7, 3600.0)
    invoke("--context", "99", "--keep-alive", "-1", "--memory-gb", "2")
    service, settings, _ = served[1]
    assert service.worker._options == EngineOptions(memory_bytes=2 << 30, context_tokens=99)
    assert settings.keep_alive_s == float("inf")


def test_a_model_is_a_name_or_a_directory(served, tmp_path):
    invoke("demo")
    assert served[0][2].name == "demo:latest"
    place = tmp_path / "My Model"
    shutil.copytree(demo_directory(), place)
    invoke(str(place))
    _, _, preload = served[1]
    assert (preload.name, preload.directory) == ("My-Model:latest", place)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nosuch"], "'nosuch' not found. Run `slotpy pull nosuch`"),
        (["--slots", "1", "--cache-gb", "1"], "both size the cache"),
        (["--keep-alive", "soon"], "--keep-alive soon is no time"),
        (["--host", "a:b"], "--host a:b: b is no port"),
        (["--memory-gb", "-1"], "--memory-gb"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_bound(served, args, text):
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        invoke(*args)
    assert not served


def test_help_lists_every_variable():
    text = CliRunner().invoke(cli, ["serve", "--help"], terminal_width=110).output
    for name, what in config.SERVER_VARIABLES.items():
        assert f"  {name:<25} {what}\n" in text


def test_the_demo_is_served_until_the_reply_that_runs_at_the_end(slotpy_home, tmp_path):
    command = "from slotpy.cli.main import main; main()"
    arguments = ["serve", "demo", "--port", "0", "--slots", "64"]
    with subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
        reader.start()
        deadline = time.monotonic() + 60
        while not any("is loaded" in line for line in lines):
            assert time.monotonic() < deadline and process.poll() is None, lines
            time.sleep(0.05)
        port = int(next(line for line in lines if "listening" in line).rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = {"model": "demo", "messages": [{"role": "user", "content": "What is a lighthouse?"}]}
        connection.request("POST", "/api/chat", json.dumps(body | {"options": {"num_predict": 2000, "seed": 1}}))
        response = connection.getresponse()
        first = json.loads(response.readline())
        assert not first["done"]
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        last = json.loads(response.read().splitlines()[-1])
        assert last.get("done") or last == {"error": "the server is shutting down"}
        assert process.wait(10) == 0 and time.monotonic() - began < 5
        reader.join(5)
        connection.close()
    assert lines[-1].rstrip().endswith("ended"), lines
    assert holder(slotpy_home) == (None, False), "the model lock is given back"

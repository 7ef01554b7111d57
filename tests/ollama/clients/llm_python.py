"""llm with its plugin llm-ollama: the command `llm`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import check, main

LLM = Path(sys.executable).with_name("llm")


def run(url: str, *arguments: str) -> str:
    """Run `llm` in a home of its own, and give what it prints."""
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"OLLAMA_HOST": url, "LLM_USER_PATH": home, "HOME": home}
        command = [LLM, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@check
def lists_every_model_by_itself(url):
    """The plugin takes models of one digest for one."""
    listed = run(url, "models", "list")
    assert all(f"Ollama: ollama/{name}:latest" in listed for name in ("tiny", "tinychat", "tinythink"))


@check
def prompts(url):
    assert run(url, "-m", "ollama/tinychat", "hi") == "Hello!"
    assert run(url, "-m", "ollama/tinychat", "--no-stream", "hi") == "Hello!"


@check
def keeps_to_a_schema(url):
    assert '"a"' in run(url, "-m", "ollama/tinychat", "--schema", "a int", "hi")


@check
def runs_tools(url):
    function = "def get_weather(city: str) -> str:\n    return 'rain in ' + city"
    assert run(url, "-m", "ollama/tinythink", "--functions", function, "TOOL").endswith("Hello!")


if __name__ == "__main__":
    main()

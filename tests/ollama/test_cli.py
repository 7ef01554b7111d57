"""The real Ollama command line (0.9.3), on the scripted server: what people type, and what they then see.

`make test-ollama` makes the program, on x86-64 Linux; elsewhere name one in $OLLAMA_CLI.
"""

import json
import os
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotpy.demo import demo_directory
from tests.hub.conftest import use_endpoint
from tests.hub.fault_hub import FaultHub

CLI = Path(os.environ.get("OLLAMA_CLI", Path(__file__).parents[2] / "build" / "ollama-cli" / "ollama"))

pytestmark = pytest.mark.skipif(not CLI.exists(), reason=f"no Ollama command line at {CLI}: run `make test-ollama`")


@pytest.fixture
def environment(port, tmp_path):
    return os.environ | {"OLLAMA_HOST": f"127.0.0.1:{port}", "HOME": str(tmp_path), "TERM": "dumb"}


@pytest.fixture
def ollama(environment):
    """Run `ollama ARGUMENTS` to its end, which must come."""

    def run(*arguments: str, host: str | None = None, code: int | None = 0, **options) -> str:
        changed = environment | ({"OLLAMA_HOST": host} if host else {})
        options = {"stdin": subprocess.DEVNULL, **options}
        done = subprocess.run([CLI, *arguments], env=changed, capture_output=True, text=True, timeout=20, **options)
        assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "goroutine" not in done.stderr, done.stderr
        return _plain(done.stdout + done.stderr)

    return run


class Terminal:
    """A program in a terminal: what is typed, what is shown."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (50, 200))
        # The colour of the background is not asked for under this name; nobody here would answer.
        environment = environment | {"TERM": "screen"}
        self._program = subprocess.Popen(
            [CLI, *arguments], env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._terminal = ours
        self._shown = ""

    def wait_for(self, text: str, timeout_s: float = 10.0) -> str:
        """Read until `text` is shown, and give what came up to it."""
        until = time.monotonic() + timeout_s
        while text not in _plain(self._shown):
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{text!r} did not come, only {_plain(self._shown)!r}"
            try:
                self._shown += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError as error:  # what Linux says when the other end is closed
                raise AssertionError(f"it ended before {text!r}, after {_plain(self._shown)!r}") from error
        before, _, self._shown = _plain(self._shown).partition(text)
        return before

    def type(self, line: str) -> None:
        os.write(self._terminal, f"{line}\r".encode())

    def ask(self, line: str) -> str:
        """Type a line at the prompt and give what is shown until the next prompt."""
        self.type(line)
        self.wait_for(line)
        return self.wait_for(">>> ")

    def interrupt(self) -> None:
        self._program.send_signal(signal.SIGINT)

    def close(self) -> int:
        """Wait for the program to end by itself; give its exit code."""
        try:
            return self._program.wait(5)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the program however it is."""
        self._program.kill()
        self._program.wait()
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1


@pytest.fixture
def terminal(environment) -> Iterator[Terminal]:
    shown = Terminal(["run", "tinychat"], environment)
    try:
        shown.wait_for(">>> ")
        yield shown
    finally:
        shown.kill()


def test_version_is_the_servers(ollama):
    assert re.search(r"ollama version is \d+\.\d+\.\d+", ollama("--version"))


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "localhost:{}", "http://127.0.0.1:{}", "http://127.0.0.1:{}/"])
def test_any_form_of_the_address_reaches_it(ollama, port, form):
    assert "tinychat:latest" in ollama("list", host=form.format(port))


def test_list_shows_id_size_and_age(ollama):
    (row,) = [line for line in ollama("list").splitlines() if line.startswith("tinythink")]
    assert re.fullmatch(r"tinythink:latest\s+[0-9a-f]{12}\s+\d+ MB\s+.* ago\s*", row)


def test_ps_shows_the_model_while_it_is_loaded(ollama):
    ollama("stop", "tiny", code=None)
    ollama("run", "tiny", "hi")
    (row,) = ollama("ps").splitlines()[1:]
    assert re.match(r"tiny:latest\s+[0-9a-f]{12}\s+[\d.]+ [MG]B\s+100% [CG]PU", row)
    assert "minutes from now" in row
    ollama("stop", "tiny")
    assert ollama("ps").splitlines()[1:] == []


@pytest.mark.parametrize(("keep", "shown"), [("-1s", "Forever"), ("10m", "minutes from now"), ("0s", None)])
def test_keepalive_is_kept(ollama, keep, shown):
    ollama("run", "--keepalive", keep, "tiny", "hi")
    rows = ollama("ps").splitlines()[1:]
    assert (shown in rows[0]) if shown else rows == []
    ollama("stop", "tiny")


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        (None, "context length"), ("--modelfile", "FROM"), ("--template", "<|im_start|>"), ("--license", "WordNet"),
        ("--parameters", ""), ("--system", ""), ("--verbose", "general.architecture"),
    ],
)  # fmt: skip
def test_show_shows_each_part(ollama, option, shown):
    assert shown in ollama("show", "tinythink", *([option] if option else []))


def test_show_shows_what_a_model_can(ollama):
    assert {"completion", "tools", "thinking"} <= set(ollama("show", "tinythink").split())


def test_run_answers(ollama):
    assert ollama("run", "tinychat", "hi").strip() == "Hello!"


def test_run_takes_the_prompt_from_a_pipe(ollama):
    assert ollama("run", "tinychat", stdin=None, input="SAY piped").strip() == "piped"


def test_run_verbose_shows_finite_rates(ollama):
    shown = ollama("run", "--verbose", "tinychat", "hi")
    assert len(re.findall(r"^(?:total|load|prompt eval|eval) (?:duration|count|rate):", shown, re.M)) == 8 - 2 + 1
    rates = [float(rate) for rate in re.findall(r"rate:\s+([\d.]+) tokens/s", shown)]
    assert len(rates) == 2 and all(0 < rate < 1e9 for rate in rates)


def test_run_shows_or_hides_thinking(ollama):
    assert "Thinking..." in (shown := ollama("run", "tinythink", "hi")) and "let me think" in shown
    assert ollama("run", "--think=false", "tinythink", "hi").strip() == "Hello!"
    hidden = ollama("run", "--hidethinking", "tinythink", "hi")
    assert "let me think" not in hidden and "Hello!" in hidden


def test_run_format_json_prints_json(ollama):
    assert isinstance(json.loads(ollama("run", "--format", "json", "tinychat", "hi")), dict)


def test_run_of_an_unknown_model_fails_at_once(ollama):
    assert "Error" in ollama("run", "nosuch", "hi", code=1)


def test_stop_of_an_unknown_model_says_so(ollama):
    assert 'couldn\'t find model "nosuch" to stop' in ollama("stop", "nosuch", code=1)


def test_copies_are_listed_run_and_removed(ollama):
    ollama("cp", "tinychat", "twin")
    assert "twin:latest" in ollama("list")
    assert ollama("run", "twin", "hi").strip() == "Hello!"
    ollama("rm", "twin")
    assert "twin:latest" not in ollama("list")
    assert "not found" in ollama("rm", "twin", code=1)


def test_create_builds_on_a_model(ollama, tmp_path):
    (tmp_path / "Modelfile").write_text('FROM tinychat\nSYSTEM """Be brief."""\nPARAMETER temperature 0.5\n')
    assert "success" in ollama("create", "brief", "-f", str(tmp_path / "Modelfile"))
    assert "temperature" in ollama("show", "--parameters", "brief")
    assert "Be brief." in ollama("show", "--system", "brief")
    assert ollama("run", "brief", "hi").strip() == "Hello!"
    ollama("rm", "brief")


def test_create_from_a_gguf_is_refused_clearly(ollama, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(64))
    (tmp_path / "Modelfile").write_text(f"FROM {tmp_path}/x.gguf\n")
    assert "GGUF" in ollama("create", "x", "-f", str(tmp_path / "Modelfile"), code=1)


def test_pull_of_what_is_here_succeeds(ollama):
    assert "success" in ollama("pull", "tinychat")


def test_pull_draws_its_progress_and_the_model_can_be_run(ollama, environment, monkeypatch):
    files = {path.name: path.read_bytes() for path in demo_directory().iterdir() if path.suffix != ".md"}
    with FaultHub(files, repo="org/pulled") as hub:
        use_endpoint(monkeypatch, hub.url)
        shown = Terminal(["pull", "org/pulled"], environment)
        try:
            progress = shown.wait_for("success", timeout_s=30)
            assert shown.close() == 0
        finally:
            shown.kill()
    assert "pulling manifest" in progress and re.search(r"pulling [0-9a-f]{12}.*100%.*MB", progress)
    assert "org/pulled:latest" in ollama("list")
    assert "Hello" in ollama("run", "org/pulled", "--think=false", "hi")
    assert "deleted 'org/pulled'" in ollama("rm", "org/pulled")


def test_pull_of_an_unknown_model_fails(ollama):
    assert "Error" in ollama("pull", "nosuch", code=1)


def test_push_fails_in_words(ollama):
    assert "Error" in ollama("push", "someone/tinychat", code=1)


def test_a_dialogue_keeps_its_history(terminal):
    assert "Turn 1." in terminal.ask("TURNS")
    assert "Turn 2." in terminal.ask("TURNS")
    assert "Cleared" in terminal.ask("/clear")
    assert "Turn 1." in terminal.ask("TURNS")
    assert "parameter 'num_ctx' to '2048'" in terminal.ask("/set parameter num_ctx 2048")
    assert "Hello!" in terminal.ask("hi")
    assert "qwen4_exp" in terminal.ask("/show info")
    terminal.type("/bye")
    assert terminal.close() == 0


def test_interrupting_an_answer_lets_the_next_one_begin(terminal):
    terminal.type("SLOW")
    terminal.wait_for("slow slow slow")
    began = time.monotonic()
    terminal.interrupt()
    terminal.wait_for(">>> ")
    assert "Hello!" in terminal.ask("hi")
    assert time.monotonic() - began < 2


def test_a_dialogue_can_be_saved(terminal, ollama):
    assert "Turn 1." in terminal.ask("TURNS")
    assert "Created new model 'kept'" in terminal.ask("/save kept")
    assert "kept:latest" in ollama("list")
    ollama("rm", "kept")


def _plain(text: str) -> str:
    """Remove what only moves a terminal's cursor, colours it, or spins."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\u2800-\u28ff]", "", text).replace("\r", "")

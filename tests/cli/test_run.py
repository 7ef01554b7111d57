"""`slotpy run` on a scripted engine: what reaches stdout, stderr and the exit code; then a real terminal (a pty)."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner, Result
from fake_engine import DEMO, FakeEngine, fail

from slotpy.cli import run as run_module
from slotpy.engine.chat import ChatTemplate
from slotpy.engine.generation import TextDelta
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import SamplingParams
from slotpy.errors import SlotpyError, UsageError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a directory with the only file that `run` itself reads."""
    config = {"do_sample": True, "temperature": 0.5, "top_k": 20, "max_new_tokens": 50}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return tmp_path


def invoke(monkeypatch, engine: FakeEngine, *args: object, stdin: str | bytes | None = None) -> Result:
    monkeypatch.setattr(run_module, "Engine", engine)
    return CliRunner().invoke(run_module.run, [str(arg) for arg in args], input=stdin)


def test_a_prompt_is_answered_on_stdout_and_measured_on_stderr(monkeypatch, model):
    engine = FakeEngine(["Hello 👍 é"])
    result = invoke(monkeypatch, engine, model, "Hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello 👍 é\n"
    prompt = ChatTemplate.load(DEMO).render([{"role": "user", "content": "Hi"}])
    prefilled, decoded = (len(engine.tokenizer.encode(text)) for text in (prompt, "Hello 👍 é"))
    assert result.stderr.splitlines() == [
        "note: 2 vision tensors are left out",
        f"prefill {prefilled} tokens, {prefilled / 0.5:.1f} tok/s | decode {decoded} tokens, {decoded / 2:.1f} tok/s"
        " | hit rate 75.0% | read 3 MiB in 12 records, 0.31 GB/s | peak memory 512 MiB",
    ]
    assert engine.closed


def test_the_prompt_goes_through_the_chat_template(monkeypatch, model):
    engine = FakeEngine(["x"])
    invoke(monkeypatch, engine, model, "Hi", "--system", "Be brief.")
    assert engine.calls[0].prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert engine.calls[0].stop_ids == engine.stop_ids


def test_a_pipe_gets_the_answer_as_it_is(monkeypatch, model):
    engine = FakeEngine(["a\x1b[31mb\x07\n"])
    assert invoke(monkeypatch, engine, model, "Hi").stdout == "a\x1b[31mb\x07\n"


def test_raw_continues_the_text_and_leaves_tags_alone(monkeypatch, model):
    engine = FakeEngine(["<think>a</think>b"])
    result = invoke(monkeypatch, engine, model, "Once", "--raw")
    assert engine.calls[0].prompt == "Once"
    assert result.stdout == "<think>a</think>b\n"


def test_only_a_raw_prompt_gets_what_the_tokenizer_puts_before_a_text(monkeypatch, model):
    engine = FakeEngine(["x", "x"])
    engine.tokenizer._backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", engine.tokenizer.token_id("<|endoftext|>"))]
    )
    invoke(monkeypatch, engine, model, "Once", "--raw")
    invoke(monkeypatch, engine, model, "Once")
    assert engine.calls[0].prompt == "<|endoftext|>Once"
    assert engine.calls[1].prompt.startswith("<|im_start|>user\nOnce")


def test_a_piped_prompt_is_read_whole_without_its_last_newline(monkeypatch, model):
    engine = FakeEngine(["x"])
    invoke(monkeypatch, engine, model, "--raw", stdin=b"two\nlines \xff\n\n")
    assert engine.calls[0].prompt == "two\nlines ï¿½\n"  # U+FFFD, as byte-level tokens spell it


def test_an_empty_pipe_is_a_usage_error(monkeypatch, model):
    result = invoke(monkeypatch, FakeEngine(), model, stdin="")
    assert isinstance(result.exception, UsageError)


def test_a_given_prompt_leaves_standard_input_alone(monkeypatch, model):
    engine = FakeEngine(["x"])
    invoke(monkeypatch, engine, model, "--raw", "Hi", stdin="not this")
    assert engine.calls[0].prompt == "Hi"


def test_sampling_options_win_over_the_models_defaults(monkeypatch, model):
    engine = FakeEngine(["x", "x"])
    invoke(monkeypatch, engine, model, "Hi", "--seed", 4)
    assert engine.calls[0].params == SamplingParams(temperature=0.5, top_k=20, seed=4)
    assert engine.calls[0].max_tokens == 50
    options = {
        "temperature": 0.0, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repeat_penalty": 1.1, "repeat_last_n": 7, "seed": 5,
    }  # fmt: skip
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    invoke(monkeypatch, engine, model, "Hi", "--max-tokens", 9, *flags)
    assert engine.calls[1].params == SamplingParams(**options)
    assert engine.calls[1].max_tokens == 9


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], EngineOptions()),
        (["--slots", 8, "--direct-io"], EngineOptions(slots=8, direct_io=True)),
        (["--cache-gb", 0.5], EngineOptions(cache_bytes=1 << 29)),
    ],
)
def test_loading_options_reach_the_engine(monkeypatch, model, flags, options):
    engine = FakeEngine(["x"])
    assert invoke(monkeypatch, engine, model, "Hi", *flags).exit_code == 0
    assert engine.options == options


@pytest.mark.parametrize(
    "flags",
    [
        ["--slots", 8, "--cache-gb", 1],
        ["--raw", "--think"],
        ["--raw", "--no-think"],
        ["--raw", "--system", "x"],
        ["--temperature", "nan"],
        ["--top-p", 2],
    ],
)
def test_options_that_cannot_be_right_are_usage_errors(monkeypatch, model, flags):
    engine = FakeEngine(["x"])
    result = invoke(monkeypatch, engine, model, "Hi", *flags)
    assert isinstance(result.exception, UsageError)
    assert engine.options is None  # refused before the model is loaded


@pytest.mark.parametrize("flags", [["--slots", 0], ["--cache-gb", 0], ["--max-tokens", 0], ["--top-q", 1]])
def test_click_refuses_unknown_options_and_values(monkeypatch, model, flags):
    assert invoke(monkeypatch, FakeEngine(["x"]), model, "Hi", *flags).exit_code == 2


def test_think_switches_the_template(monkeypatch, model):
    engine = FakeEngine(["Sure.\n</think>\n\nYes.", "Yes."])
    result = invoke(monkeypatch, engine, model, "Hi", "--think")
    assert engine.calls[0].prompt.endswith("<think>\n")
    assert result.stdout == "Yes.\n"  # a pipe gets the answer alone
    assert "Sure.\n" in result.stderr
    invoke(monkeypatch, engine, model, "Hi", "--no-think")
    assert engine.calls[1].prompt.endswith("<think>\n\n</think>\n\n")


def test_think_needs_a_template_with_the_switch(monkeypatch, model):
    engine = FakeEngine(["x"])
    engine.chat = ChatTemplate("{{ messages[0].content }}", {})
    assert isinstance(invoke(monkeypatch, engine, model, "Hi", "--think").exception, UsageError)
    assert invoke(monkeypatch, engine, model, "Hi", "--no-think").exit_code == 0


def test_a_model_without_a_template_needs_raw(monkeypatch, model):
    engine = FakeEngine(["x"])
    engine.chat = None
    result = invoke(monkeypatch, engine, model, "Hi")
    assert isinstance(result.exception, UsageError)
    assert "--raw" in str(result.exception)
    assert invoke(monkeypatch, engine, model, "Hi", "--raw").stdout == "x\n"


def test_stop_strings_end_the_reply_and_the_generation(monkeypatch, model, tmp_path):
    engine = FakeEngine(["One two END three four five six"])
    stats = tmp_path / "stats.json"
    result = invoke(monkeypatch, engine, model, "Hi", "--stop", " END", "--stop", "six", "--stats-json", stats)
    assert result.stdout == "One two\n"
    record = json.loads(stats.read_text())
    assert record["finish_reason"] == "stop"
    assert record["decode_tokens"] < len(engine.tokenizer.encode("One two END three four five six"))


def test_stats_json_holds_the_measurements_and_the_seed_drawn(monkeypatch, model, tmp_path):
    engine = FakeEngine(["Hello there"])
    stats = tmp_path / "stats.json"
    invoke(monkeypatch, engine, model, "Hi", "--max-tokens", 1, "--stats-json", stats)
    record = json.loads(stats.read_text())
    assert record["model"] == str(model)
    assert record["seed"] == engine.calls[0].params.seed is not None
    assert (record["decode_tokens"], record["finish_reason"], record["hits"]) == (1, "length", 3)


def test_stats_json_that_cannot_be_written_is_refused_before_loading(monkeypatch, model):
    engine = FakeEngine(["x"])
    result = invoke(monkeypatch, engine, model, "Hi", "--stats-json", model / "absent" / "stats.json")
    assert result.exit_code == 2
    assert engine.options is None


def test_an_unknown_model_is_an_error_with_a_hint(monkeypatch):
    result = invoke(monkeypatch, FakeEngine(), "no/such/model", "Hi")
    assert isinstance(result.exception, UsageError)
    assert "demo" in str(result.exception)


def test_an_error_while_generating_reaches_the_error_map(monkeypatch, model):
    engine = FakeEngine([fail("disk is gone")])
    result = invoke(monkeypatch, engine, model, "Hi")
    assert isinstance(result.exception, SlotpyError)
    assert engine.closed


def test_ctrl_c_prints_what_there_is_with_measurements_and_exits_130(monkeypatch, model):
    engine = FakeEngine(["one two three four five six"])
    engine.on_token = lambda index: signal.raise_signal(signal.SIGINT) if index == 2 else None
    before = signal.getsignal(signal.SIGINT)
    result = invoke(monkeypatch, engine, model, "Hi")
    assert result.exit_code == 130
    assert result.stdout == engine.tokenizer.decode(engine.tokenizer.encode("one two three four five six")[:3]) + "\n"
    assert "decode 3 tokens" in result.stderr
    assert engine.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait(monkeypatch, model):
    engine = FakeEngine(["one two three"])
    engine.on_token = lambda index: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    result = invoke(monkeypatch, engine, model, "Hi")
    assert result.exit_code == 130
    assert engine.closed
    assert "decode" not in result.stderr


def test_a_failed_reply_leaves_the_conversation_as_before(monkeypatch):
    engine = FakeEngine(["one", fail("disk is gone"), "two"])
    settings = run_module.Settings(SamplingParams(seed=1), None, (), raw=False, system="Be brief.", think=None)
    conversation = run_module.Conversation(engine, settings, "demo", None)
    conversation.reply("a")
    with pytest.raises(SlotpyError):
        conversation.reply("b")
    conversation.reply("c")
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*)<\|im_end\|>", engine.calls[2].prompt)
    assert turns == [("system", "Be brief."), ("user", "a"), ("assistant", "one"), ("user", "c")]
    assert [call.session for call in engine.calls] == [1, 1, 2]  # the broken session is not used again


def test_a_reply_becomes_a_message_with_its_reasoning_apart(capsys):
    screen = run_module.Screen()
    for delta in (TextDelta("why", reasoning=True), TextDelta("a"), TextDelta("b")):
        screen.show(delta)
    assert screen.message() == {"content": "ab", "reasoning_content": "why"}
    assert capsys.readouterr() == ("ab", "why\n\n")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["plain"], "plain"),
        (['"""one"""'], "one"),
        (['"""', "two", 'lines"""'], "\ntwo\nlines"),
        (['"""a', 'b"""'], "a\nb"),
        (['say """hi"""'], 'say """hi"""'),
    ],
)
def test_three_quotes_begin_and_end_a_message_of_several_lines(monkeypatch, lines, message):
    left = list(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: left.pop(0))
    assert run_module._read_message() == message
    assert not left


# A terminal --------------------------------------------------------------------------------------------------------


class Terminal:
    """Run `slotpy run` on the scripted engine behind a pty."""

    def __init__(self, replies: list[str], *args: str) -> None:
        self._master, slave = os.openpty()
        here = Path(__file__).parent
        environment = os.environ | {
            "REPLIES": "|".join(replies),
            "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]),
            "TERM": "dumb",
        }
        command = [sys.executable, str(here / "fake_engine.py"), "demo", *args]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.output = ""

    def expect(self, text: str) -> str:
        """Read until `text` comes, and give everything before it since the last call."""
        assert self.shows(text, within_s=20), f"waited for {text!r}, have {self.output!r}"
        before, _, self.output = self.output.partition(text)
        return before

    def shows(self, text: str, *, within_s: float) -> bool:
        """Read until `text` comes or the time is over."""
        deadline = time.monotonic() + within_s
        while text not in self.output:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            self.output += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
        return True

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.close()


def test_a_conversation_at_a_terminal(terminal):
    long_reply = " ".join(f"number {n}" for n in range(400))
    replies = ["First.", "Second.", long_reply, "!disk is gone", "After."]
    t = Terminal(replies, "--temperature", "0")
    terminal.append(t)
    t.expect(">>> ")
    t.send("Hello\n")
    assert "First.\n" in t.expect("prefill ")
    first = int(re.match(r"\d+", t.expect(">>> "))[0])
    t.send('"""two\nlines"""\n')
    t.expect("... ")
    assert "Second.\n" in t.expect("prefill ")
    assert int(re.match(r"\d+", t.expect(">>> "))[0]) > 2 * first - 5  # the prompt carries the first exchange
    t.send("Count\n")
    t.expect("number 3")
    t.interrupt()
    assert "number 399" not in t.expect("prefill ")
    t.expect(">>> ")
    # A signal that arrives just before readline begins to wait is lost to it, as it is to a person: press again.
    while not t.shows("/bye leaves", within_s=1.0):
        t.interrupt()
    t.expect("/bye leaves")
    t.expect(">>> ")
    t.send("Hello\n")
    t.expect("slotpy: disk is gone")
    t.expect(">>> ")
    t.send("/clear\n")
    t.expect("forgotten")
    t.expect(">>> ")
    t.send("Hello\n")
    assert "After.\n" in t.expect("prefill ")
    assert int(re.match(r"\d+", t.expect(">>> "))[0]) == first
    t.send("/nonsense\n")
    t.expect("is no command")
    t.expect(">>> ")
    t.send("/?\n")
    t.expect("/clear")
    t.expect(">>> ")
    t.send("/bye\n")
    assert t.process.wait(10) == 0


def test_a_terminal_gets_reasoning_dimmed_and_control_characters_as_pictures(terminal):
    t = Terminal(["why not</think>a\x1b[31mb\x07"], "Hi", "--think")
    terminal.append(t)
    shown = t.expect("prefill ")
    assert "\x1b[2mwhy not\x1b[0m" in shown.replace("\x1b[0m\x1b[2m", "")
    assert "\n\na␛[31mb␇\n" in shown
    assert t.process.wait(10) == 0


def test_end_of_input_leaves_the_conversation(terminal):
    t = Terminal([])
    terminal.append(t)
    t.expect(">>> ")
    t.send("\x04")
    assert t.process.wait(10) == 0

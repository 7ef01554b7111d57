"""`slotpy run`: one reply, or a conversation, streamed to the terminal.

Owns what is read from and written to the terminal. The engine generates, engine/reply.py tells text from tags.
"""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import click

from slotpy import config
from slotpy.cli.sizing_options import sizing_options
from slotpy.engine.engine import Engine, resolve_model
from slotpy.engine.generation import TextDelta, ToolCall
from slotpy.engine.loader import EngineOptions
from slotpy.engine.reply import ReplyReader
from slotpy.engine.sampler import SamplingParams, fresh_seed
from slotpy.engine.session import GenerationStats
from slotpy.engine.text import read_json
from slotpy.errors import SlotpyError, UsageError
from slotpy.lock import ModelLock
from slotpy.units import format_bytes, format_rate

with contextlib.suppress(ImportError):  # gives `input` line editing and history; not every Python is built with it
    import readline  # noqa: F401

INTERRUPTED = 130  # 128 + SIGINT, as shells count it

HELP = '''/clear   forget the conversation
/bye     leave (so does Ctrl-D)
"""      begin and end a message of several lines
Ctrl-C   end the reply'''

# A model may emit any byte, and escape sequences would drive the terminal: show their pictures instead.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROL_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Hold what the command line says about every reply."""

    params: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    raw: bool
    system: str | None
    think: bool | None


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--think/--no-think", default=None, help="Let the model reason first, or not; default: the template's.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Stop after this many; default: the model's.")
@click.option("--stop", "stops", multiple=True, help="Stop before this text; may be given several times.")
@click.option("--seed", type=int, help="Repeat a reply: the seed of its random choices.")
@click.option("--temperature", type=float, help="Spread of the choice; 0 takes the likeliest token.")
@click.option("--top-k", type=int, help="Choose among this many tokens; 0: all.")
@click.option("--top-p", type=float, help="Choose among the likeliest tokens that hold this share; 1: all.")
@click.option("--min-p", type=float, help="Leave out tokens below this share of the likeliest; 0: none.")
@click.option("--presence-penalty", type=float, help="Subtract this from tokens that occurred; 0: off.")
@click.option("--frequency-penalty", type=float, help="Subtract this per occurrence; 0: off.")
@click.option("--repeat-penalty", type=float, help="Divide tokens that occurred by this; 1: off.")
@click.option("--repeat-last-n", type=int, help="Tokens the penalties look back on; 0: none, -1: all.")
@sizing_options
@click.option("--stats-json", type=click.File("w", lazy=False), help="Write each reply's measurements, a line each.")
def run(
    model: str,
    prompt: str | None,
    raw: bool,
    system: str | None,
    think: bool | None,
    max_tokens: int | None,
    stops: tuple[str, ...],
    stats_json: IO[str] | None,
    engine_options: EngineOptions,
    **sampling: Any,
) -> None:
    """Answer PROMPT with MODEL: a checkpoint directory, or `demo`.

    Without PROMPT it is read from standard input: all of a pipe, or message by message from a terminal. The answer goes
    to standard output; reasoning too on a terminal, else to standard error, where the measurements go.
    """
    if raw and (system is not None or think is not None):
        raise UsageError("--raw uses no chat template, so --system and --think mean nothing.", hint="Leave out --raw.")
    try:
        directory = resolve_model(model)
        defaults = read_json(directory / "generation_config.json")
        params = SamplingParams.merge(defaults, sampling)
        if max_tokens is None:
            max_tokens = defaults.get("max_new_tokens")
        settings = Settings(params, max_tokens, stops, raw, system, think)
        interactive = prompt is None and sys.stdin.isatty()
        if prompt is None and not interactive:
            prompt = _read_piped_prompt()
        with ModelLock.acquire(config.home(), model), Engine.open(directory, engine_options) as engine:
            for note in engine.notes:
                click.echo(f"note: {note}", err=True)
            conversation = Conversation(engine, settings, model, stats_json)
            if prompt is None:
                talk(conversation)
            elif conversation.reply(prompt):
                sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(INTERRUPTED)


class Conversation:
    """Keep the messages so far and the session that has consumed them; say each reply while it is generated."""

    def __init__(self, engine: Engine, settings: Settings, model: str, stats_json: IO[str] | None) -> None:
        """Raises UsageError when the checkpoint's chat template cannot do what the settings ask."""
        self._engine, self._settings, self._model, self._stats_json = engine, settings, model, stats_json
        if not settings.raw and engine.chat is None:
            raise UsageError(f"{model} has no chat template.", hint=f"Run `slotpy run {model} --raw`.")
        if settings.think and engine.chat is not None and not engine.chat.supports_thinking:
            raise UsageError(f"{model} has no switch for thinking.", hint="Leave out --think.")
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._session = self._engine.new_session()
        system = self._settings.system
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def reply(self, text: str) -> bool:
        """Answer `text`, then print the measurements. Tells whether Ctrl-C cut the answer short.

        Raises: SlotpyError from rendering, reading or sampling; the conversation is then as before `text`.
        """
        settings, engine = self._settings, self._engine
        before = list(self._messages)
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = None if engine.chat is None or settings.raw else self._render(engine.chat.render)
            tokens = engine.tokenizer.encode(text if prompt is None else prompt, add_special_tokens=prompt is None)
            reader = ReplyReader(engine.tokenizer, prompt, settings.stops)
            params = settings.params
            if params.seed is None:
                params = dataclasses.replace(params, seed=fresh_seed())
            screen = Screen()
            with _interrupts(self._session.cancel) as interrupts:
                for delta in self._deltas(tokens, params, reader):
                    assert isinstance(delta, TextDelta)  # the reader was given no tools
                    screen.show(delta)
            screen.end()
        except (SlotpyError, KeyboardInterrupt):
            self._messages = before
            self._session = self._engine.new_session()  # a step that broke off may have left its state between tokens
            raise
        self._messages.append({"role": "assistant"} | screen.message())
        self._report(self._session.stats, reader.stopped, params)
        return bool(interrupts)

    def _render(self, render: Callable[..., str]) -> str:
        return render(self._messages, enable_thinking=self._settings.think)

    def _deltas(self, tokens: list[int], params: SamplingParams, reader: ReplyReader) -> Iterator[TextDelta | ToolCall]:
        settings, engine = self._settings, self._engine
        for sampled in self._session.generate(tokens, params, settings.max_tokens, engine.stop_ids):
            yield from reader.push(sampled)
            if reader.stopped:
                self._session.cancel()  # ends the iteration
        yield from reader.flush()

    def _report(self, stats: GenerationStats, stopped: bool, params: SamplingParams) -> None:
        click.echo(describe(stats), err=True)
        if self._stats_json is not None:
            record: dict[str, object] = {"model": self._model, "seed": params.seed} | stats.as_dict()
            if stopped:  # the engine only knows that it was told to end
                record["finish_reason"] = "stop"
            self._stats_json.write(json.dumps(record) + "\n")
            self._stats_json.flush()


class Screen:
    """Write one reply as it comes.

    The answer goes to standard output; reasoning goes there dimmed if that is a terminal, else to standard error, so
    that a pipe gets the answer alone.
    """

    def __init__(self) -> None:
        self._reasoning, self._answer = "", ""
        self._aside = not sys.stdout.isatty()

    def show(self, delta: TextDelta) -> None:
        """Write a piece at once."""
        if delta.reasoning:
            self._reasoning += delta.text
            self._write(delta.text, err=self._aside, dim=True)
            return
        if self._reasoning and not self._answer:
            self._end_reasoning()
        self._answer += delta.text
        self._write(delta.text, err=False)

    def end(self) -> None:
        """End the reply's last line."""
        if self._reasoning and not self._answer:
            self._end_reasoning()
        elif not self._answer.endswith("\n"):
            click.echo()

    def message(self) -> dict[str, str]:
        """Give the reply as a message's fields, under the names that chat templates read."""
        reasoning = {"reasoning_content": self._reasoning} if self._reasoning else {}
        return {"content": self._answer} | reasoning

    def _end_reasoning(self) -> None:
        click.echo("\n" if self._reasoning.endswith("\n") else "\n\n", nl=False, err=self._aside)

    def _write(self, text: str, *, err: bool, dim: bool = False) -> None:
        stream = sys.stderr if err else sys.stdout
        if stream.isatty():
            text = text.translate(_CONTROL_PICTURES)
            text = click.style(text, dim=True) if dim else text
        stream.write(text)  # not click.echo, which takes escape sequences out of what a pipe gets
        stream.flush()


def talk(conversation: Conversation) -> None:
    """Answer messages from the terminal until /bye or Ctrl-D."""
    click.echo("Type a message, or /? for help.", err=True)
    while True:
        try:
            text = _read_message()
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /bye leaves.", err=True)
            continue
        except EOFError:
            click.echo(err=True)
            return
        if text.strip() == "/bye":
            return
        if text.strip() == "/clear":
            conversation.clear()
            click.echo("The conversation is forgotten.", err=True)
        elif text.startswith("/"):
            known = text.strip() in ("/?", "/help")
            click.echo(HELP if known else f"{text.split()[0]} is no command; /? lists them.", err=True)
        elif text.strip():
            try:
                conversation.reply(text)
            except SlotpyError as error:
                click.echo(f"slotpy: {error}", err=True)


def describe(stats: GenerationStats) -> str:
    """Put one reply's measurements into a line."""
    looked_up = stats.hits + stats.misses
    hit_rate = f"{stats.hits / looked_up:.1%}" if looked_up else "-"
    return (
        f"prefill {_tokens(stats.prefill_tokens, stats.prefill_s)}"
        f" | decode {_tokens(stats.decode_tokens, stats.decode_s)}"
        f" | hit rate {hit_rate}"
        f" | read {format_bytes(stats.bytes_read)} in {stats.records_read} records,"
        f" {format_rate(stats.bytes_read, stats.read_s)}"
        f" | peak memory {format_bytes(stats.peak_bytes)}"
    )


def _tokens(count: int, seconds: float) -> str:
    rate = f"{count / seconds:.1f}" if seconds > 0 else "-"
    return f"{count} token{'' if count == 1 else 's'}, {rate} tok/s"


@contextlib.contextmanager
def _interrupts(cancel: Callable[[], None]) -> Iterator[list[int]]:
    """Make the first Ctrl-C call `cancel` and the second raise KeyboardInterrupt; yields the signals so far.

    An exception at any point could leave a slot half filled; a request is answered between two tokens.
    """
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_piped_prompt() -> str:
    """Read all of standard input, without the newline that ends it."""
    text = sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
    if not text:
        raise UsageError("There is no prompt: standard input is empty.", hint='Try slotpy run MODEL "Hello".')
    return text


def _read_message() -> str:
    line = input(">>> ")
    if not line.startswith('"""'):
        return line
    lines = [line.removeprefix('"""')]
    while not lines[-1].endswith('"""'):
        lines.append(input("... "))
    return "\n".join(lines).removesuffix('"""')

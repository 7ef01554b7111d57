"""A reply's tokens to what it says: reasoning, answer and tool calls, each as soon as it is certain.

Owns decoding into deltas, stop strings, think tags and where tool calls begin and end. Works on text and ids alone:
knows no model, no prompt template and no wire format. tools.py reads the calls. Serves the command line and the worker.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from slotpy.engine.chat import THINK_CLOSE, THINK_OPEN
from slotpy.engine.generation import TextDelta, TokenLogprob, ToolCall
from slotpy.engine.sampler import Sampled
from slotpy.engine.text import StreamDecoder, Tokenizer
from slotpy.engine.tools import ToolGrammar


class ReplyReader:
    """Turn one reply's tokens into the pieces to show.

    They are decoded and split into reasoning and answer; the answer is cut at a stop string, and tool calls are taken
    out of it. `prompt` is the rendered conversation that the reply continues, or None for a raw completion, which is
    not split. With `tools` and the `declared` functions, calls are looked for; `opening` is the beginning of one that
    the prompt has already.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | None,
        stops: Sequence[str] = (),
        tools: ToolGrammar | None = None,
        declared: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._splitter: ReasoningSplitter | None = None
        if prompt is not None and not opening:
            self._splitter = ReasoningSplitter(opened=prompt.rstrip().endswith(THINK_OPEN))
        self._stops = StopMatcher(stops)
        self._calls = None if tools is None else CallFinder(tools, declared, opening)
        self._num_decoded = 0
        self._unplaced: list[tuple[int, TokenLogprob]] = []  # with the length of the text up to the token's end

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string ended the reply: nothing more will come of further tokens."""
        return self._stops.matched is not None

    @property
    def stop_sequence(self) -> str | None:
        """Give the stop string that ended the reply."""
        return self._stops.matched

    @property
    def in_answer(self) -> bool:
        """Tell whether the next token is answer. At the start it is, unless the prompt opened the reasoning."""
        return self._splitter is None or self._splitter.in_answer

    @property
    def num_calls(self) -> int:
        """Count the tool calls so far."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, sampled: Sampled) -> list[TextDelta | ToolCall]:
        """Give the pieces that this token makes certain."""
        text = self._decoder.push(sampled.token)
        self._num_decoded += len(text)
        if sampled.logprobs is not None:
            end = self._num_decoded + (0 if text else 1)  # without text it is part of the next character
            self._unplaced.append((end, self._logprob(sampled)))
        pieces = self._read(self._split(text))
        held = sum(stage.num_held for stage in (self._splitter, self._stops, self._calls) if stage is not None)
        return self._place_logprobs(pieces, self._num_decoded - held)

    def flush(self) -> list[TextDelta | ToolCall]:
        """End the reply: give everything held back."""
        text = self._decoder.flush()
        self._num_decoded += len(text)
        deltas = self._split(text)
        if self._splitter is not None:
            deltas += self._splitter.flush()
        pieces = self._read(deltas) + self._find_calls(self._stops.flush())
        if self._calls is not None:
            pieces += self._calls.flush()
        return self._place_logprobs(pieces, self._num_decoded)

    def _split(self, text: str) -> list[TextDelta]:
        return [TextDelta(text)] if self._splitter is None else self._splitter.push(text)

    def _read(self, deltas: Sequence[TextDelta]) -> list[TextDelta | ToolCall]:
        pieces: list[TextDelta | ToolCall] = []
        for delta in deltas:
            pieces += [delta] if delta.reasoning else self._find_calls(self._stops.push(delta.text))
        return pieces

    def _find_calls(self, text: str) -> list[TextDelta | ToolCall]:
        if self._calls is not None:
            return self._calls.push(text)
        return [TextDelta(text)] if text else []

    def _place_logprobs(self, pieces: list[TextDelta | ToolCall], num_released: int) -> list[TextDelta | ToolCall]:
        """Hand the last delta the tokens that the released text ends with, and drop those whose text is not shown."""
        start = num_released - sum(len(piece.text) for piece in pieces if isinstance(piece, TextDelta))
        placed = tuple(logprob for end, logprob in self._unplaced if start < end <= num_released)
        self._unplaced = [(end, logprob) for end, logprob in self._unplaced if end > num_released]
        for i, piece in reversed(list(enumerate(pieces))):
            if placed and isinstance(piece, TextDelta):
                pieces[i] = dataclasses.replace(piece, logprobs=placed)
                break
        return pieces

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprobs is not None
        top = tuple(self._token(token_id, logprob) for token_id, logprob in sampled.logprobs.top)
        return self._token(sampled.token, sampled.logprobs.logprob, top)

    def _token(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(raw.decode(errors="replace"), raw, logprob, top)


class ReasoningSplitter:
    """Tell a reply's reasoning from its answer, in text that arrives in pieces.

    Reasoning is one block, at the start: opened by the prompt (`opened`) or by the reply's first visible characters.
    Tags after that are text. White space next to the tags, outside the reasoning, is dropped.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "reasoning" if opened else "start"
        self._held = ""
        self._trimming = True

    @property
    def in_answer(self) -> bool:
        """Tell whether no reasoning is open."""
        return self._state != "reasoning"

    @property
    def num_held(self) -> int:
        """Count the characters held back."""
        return len(self._held)

    def push(self, text: str) -> list[TextDelta]:
        """Give the pieces that are certain by now."""
        deltas: list[TextDelta] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._start(text)
        if self._state == "reasoning":
            text = self._reasoning(text, deltas)
        if self._state == "answer":
            self._emit(text, deltas, reasoning=False)
        return deltas

    def flush(self) -> list[TextDelta]:
        """Give what was held back as a possible tag: the reply ended, so it was none."""
        deltas: list[TextDelta] = []
        self._trimming = self._trimming and self._state != "start"
        self._emit(self._held, deltas, reasoning=self._state == "reasoning")
        self._held = ""
        return deltas

    def _start(self, text: str) -> str:
        visible = text.lstrip()
        if visible.startswith(THINK_OPEN):
            self._state = "reasoning"
            return visible[len(THINK_OPEN) :]
        if THINK_OPEN.startswith(visible):
            self._held = text
        else:
            self._state, self._trimming = "answer", False
        return text

    def _reasoning(self, text: str, deltas: list[TextDelta]) -> str:
        """Emit the reasoning in `text` and give what follows it."""
        before, tag, after = text.partition(THINK_CLOSE)
        if tag:
            self._emit(before, deltas, reasoning=True)
            self._state, self._trimming = "answer", True
            return after
        held = _overlap(text, THINK_CLOSE)
        self._held = text[len(text) - held :]
        self._emit(text[: len(text) - held], deltas, reasoning=True)
        return ""

    def _emit(self, text: str, deltas: list[TextDelta], *, reasoning: bool) -> None:
        if self._trimming:
            text = text.lstrip()
        if text:
            self._trimming = False
            deltas.append(TextDelta(text, reasoning))


class StopMatcher:
    """Find the first stop string in text that arrives in pieces, however it is cut.

    The first is the one that is complete first; what follows the start of a possible stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        """Count the characters held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Give the text that is certain to come before any stop string; nothing more after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Give what was held back: the reply ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held


class CallFinder:
    """Take the tool calls out of an answer that arrives in pieces.

    What stands between the markers but is no call of a declared tool stays text, markers included. White space next to
    a call is dropped, so it is held back where a call may follow. `opening` is the beginning of a call that the answer
    goes on from.
    """

    def __init__(self, grammar: ToolGrammar, declared: Sequence[Mapping[str, Any]], opening: str = "") -> None:
        self._grammar, self._declared = grammar, declared
        self._start, self._end = grammar.start, grammar.end
        self._in_call = False
        self._held = ""  # white space and perhaps a part of the start marker; in a call, all before its body
        self._body: list[str] = []
        self._num_body = 0
        self._begins: bool | None = None
        self._trimming = False
        self.num_calls = 0
        self.push(opening)

    @property
    def num_held(self) -> int:
        """Count the characters held back."""
        return len(self._held) + self._num_body

    def push(self, text: str) -> list[TextDelta | ToolCall]:
        """Give the pieces that are certain by now."""
        pieces: list[TextDelta | ToolCall] = []
        while text:
            text = self._read_call(text, pieces) if self._in_call else self._read_text(text, pieces)
        return pieces

    def flush(self) -> list[TextDelta | ToolCall]:
        """End the answer: give what was held back, as a call if it is a whole one."""
        pieces: list[TextDelta | ToolCall] = []
        body = "".join(self._body)
        whole = body.rstrip().removesuffix(self._end)  # an argument may have made its end look like a part of it
        if not (self._grammar.is_closed and self._emit_calls(whole, pieces)):
            self._emit_text(self._held + body, pieces)
        self._leave_call()
        return pieces

    def _read_text(self, text: str, pieces: list[TextDelta | ToolCall]) -> str:
        """Emit what comes before a call and give what follows its start marker."""
        text = self._held + text
        before, marker, after = text.partition(self._start)
        certain = before if marker else text[: len(text) - _overlap(text, self._start)]
        shown = certain.rstrip()
        self._emit_text(shown, pieces)
        self._held = text[len(shown) : len(before) + len(marker)]
        self._in_call = bool(marker)
        return after

    def _read_call(self, text: str, pieces: list[TextDelta | ToolCall]) -> str:
        """Emit the call if it ends in `text`, and give what follows it."""
        self._body.append(text)
        self._num_body += len(text)
        if self._begins is None:
            body = "".join(self._body)
            self._begins = self._grammar.begins(body)
            if self._begins is False:  # the marker was only mentioned: nothing has to wait for an end marker
                self._emit_text(self._held, pieces)
                self._leave_call()
                return body
        reach = len(text) + len(self._end) - 1  # so far back the marker may begin: no token is searched twice
        if self._end not in _last(self._body, reach):
            return ""
        body = "".join(self._body)
        at = body.find(self._end, max(0, len(body) - reach))
        while at >= 0 and self._grammar.breaks_off(body[:at]):
            at = body.find(self._end, at + 1)
        if at < 0:
            return ""
        after = body[at + len(self._end) :]
        if not self._emit_calls(body[:at], pieces):
            self._emit_text(self._held + body[: at + len(self._end)], pieces)
        self._leave_call()
        return after

    def _emit_calls(self, body: str, pieces: list[TextDelta | ToolCall]) -> bool:
        calls = self._grammar.parse(body, self._declared)
        for name, arguments in calls:
            pieces.append(ToolCall(self.num_calls, f"call_{secrets.token_hex(4)}", name, arguments))
            self.num_calls += 1
            self._trimming = True
        return bool(calls)

    def _emit_text(self, text: str, pieces: list[TextDelta | ToolCall]) -> None:
        if self._trimming:
            text = text.lstrip()
        if text:
            self._trimming = False
            pieces.append(TextDelta(text))

    def _leave_call(self) -> None:
        self._in_call, self._begins, self._held, self._body, self._num_body = False, None, "", [], 0


def _last(pieces: Sequence[str], length: int) -> str:
    """Give the end of the pieces joined: at least `length` characters, if there are so many."""
    text = ""
    for piece in reversed(pieces):
        text = piece + text
        if len(text) >= length:
            break
    return text


def _overlap(text: str, stop: str) -> int:
    """Give the length of the longest beginning of `stop`, short of the whole, that `text` ends with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)

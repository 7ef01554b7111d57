"""An engine that says what a test tells it to, on the demo's tokenizer and template; nothing is computed.

A reply is a list of texts and callables. Texts become tokens; a callable runs when it is reached: to wait for the test,
or to raise.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from slotpy.demo import demo_directory
from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import Logprobs, Sampled
from slotpy.engine.session import GenerationStats
from slotpy.engine.text import Tokenizer
from slotpy.engine.tools import ToolGrammar

Reply = Sequence[str | Callable[[], object]]

DEMO = demo_directory()
TOKENIZER = Tokenizer.load(DEMO)
CHAT = ChatTemplate.load(DEMO)
assert CHAT is not None


class FakeModel:
    """What all engines of one test share: the replies to come, and a record of what was done."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.log: list[str] = []
        self.calls: list[SimpleNamespace] = []
        self.before_open: Callable[[], object] = lambda: None
        self.check: Callable[[bool], object] = lambda between_requests: None

    def open(self, directory: Path, options: EngineOptions) -> "FakeEngine":
        self.log.append(f"open {directory.name} {options.context_tokens}")
        self.before_open()
        return FakeEngine(self, directory, options)


class FakeEngine:
    max_context_tokens = 2000

    def __init__(self, model: FakeModel, directory: Path, options: EngineOptions) -> None:
        self._model, self._directory = model, directory
        self.context_tokens = min(options.context_tokens or 1000, self.max_context_tokens)
        self.tokenizer, self.chat, self.stop_ids = TOKENIZER, CHAT, load_stop_ids(DEMO, TOKENIZER)
        self.tools = ToolGrammar("json_tools")
        self.grammar = SimpleNamespace(compile=FakeConstraint)
        self.defaults: dict[str, Any] = {}
        self.notes = ("a note",)
        self.loaded = SimpleNamespace(plan="plan")
        self.governor = SimpleNamespace(check=lambda between: model.check(between), as_dict=lambda: {"managed": False})

    def counters(self) -> dict[str, int]:
        return {"num_slots": 4}

    def new_session(self) -> "FakeSession":
        self._model.log.append("session")
        return FakeSession(self._model, self.stop_ids)

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self._model.log.append(f"close {self._directory.name}")


class FakeSession:
    def __init__(self, model: FakeModel, stop_ids: frozenset[int]) -> None:
        self._model, self._stop_ids, self._cancelled = model, stop_ids, False
        self.stats = GenerationStats()

    def cancel(self) -> None:
        self._cancelled = True

    def generate(
        self, tokens: Any, params: Any, max_tokens: int, stop_ids: Any, *, constraint: Any, top_logprobs: Any
    ) -> Iterator[Sampled]:
        self._cancelled = False
        self._model.calls.append(
            SimpleNamespace(tokens=tokens, params=params, max_tokens=max_tokens, constraint=constraint)
        )
        return self._reply(max_tokens, constraint, None if top_logprobs is None else Logprobs(-0.5, ()))

    def _reply(self, max_tokens: int, constraint: Any, logprobs: Logprobs | None) -> Iterator[Sampled]:
        self.stats = stats = GenerationStats(prefill_s=0.25, decode_s=0.5)
        reply = self._model.replies.pop(0) if self._model.replies else ["Hello!"]
        if max_tokens == 0:
            stats.finish_reason = "length"
            return
        for part in reply:
            if callable(part):
                part()
                continue
            for token in TOKENIZER.encode(part):
                if constraint is not None:
                    constraint.log.append((TOKENIZER.decode([token]), constraint.started))
                stats.decode_tokens += 1
                yield Sampled(token, logprobs)
                if self._cancelled:
                    return
                if stats.decode_tokens == max_tokens:
                    stats.finish_reason = "length"
                    return
        stats.decode_tokens += 1  # the stop id
        stats.finish_reason = "stop"

    def embed(self, tokens: Sequence[int]) -> np.ndarray | None:
        self._cancelled = False
        part = self._model.replies.pop(0)[0] if self._model.replies else None
        if callable(part):
            part()
        return None if self._cancelled else np.full(3, len(tokens), np.float32)


class FakeConstraint:
    """Log each token with whether the grammar held for it."""

    def __init__(self, format: Any, exempt_ids: frozenset[int]) -> None:
        self.format, self.exempt_ids, self.started = format, exempt_ids, False
        self.log: list[tuple[str, bool]] = []

    def start(self) -> None:
        self.started = True


class Gate:
    """A place where the engine's thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._reached.set()
        assert self._open.wait(10), "the test never opened the gate"

    def wait_reached(self) -> None:
        assert self._reached.wait(10), "the engine never came here"

    def open(self) -> None:
        self._open.set()


def fail(error: Exception) -> Callable[[], object]:
    def raise_it() -> object:
        raise error

    return raise_it

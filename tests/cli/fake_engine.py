"""A scripted engine: real tokenizer and template of the demo model, replies written by the test, no MLX work.

`python fake_engine.py ARGS...` runs `slotpy run ARGS` on it. The replies come from $REPLIES, divided by bars; one that
starts with `!` is an error.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slotpy.cli import run as run_module
from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import Sampled, SamplingParams
from slotpy.engine.session import GenerationStats
from slotpy.engine.text import Tokenizer
from slotpy.errors import SlotpyError

DEMO = Path(run_module.__file__).parents[1] / "data" / "demo"


@dataclasses.dataclass
class Call:
    """What one `generate` was asked for."""

    session: int
    prompt: str
    params: SamplingParams
    max_tokens: int | None
    stop_ids: frozenset[int]


class FakeEngine:
    """Answer with the next of `replies`; a callable among them runs when it is asked for, e.g. to raise."""

    def __init__(self, replies: Sequence[str | Callable[[], str]] = (), token_s: float = 0.0) -> None:
        self.replies = list(replies)
        self.token_s = token_s
        self.tokenizer = Tokenizer.load(DEMO)
        self.chat: ChatTemplate | None = ChatTemplate.load(DEMO)
        self.stop_ids = load_stop_ids(DEMO, self.tokenizer)
        self.notes: tuple[str, ...] = ("2 vision tensors are left out",)
        self.calls: list[Call] = []
        self.options: EngineOptions | None = None
        self.num_sessions = 0
        self.closed = False
        self.on_token: Callable[[int], None] = lambda index: None

    def open(self, model: object, options: EngineOptions | None = None) -> "FakeEngine":
        self.options = options
        return self

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def new_session(self) -> "FakeSession":
        self.num_sessions += 1
        return FakeSession(self, self.num_sessions)


class FakeSession:
    def __init__(self, engine: FakeEngine, number: int) -> None:
        self._engine, self._number, self._cancelled = engine, number, False
        self.stats = GenerationStats()

    def cancel(self) -> None:
        self._cancelled = True

    def generate(
        self, tokens: Sequence[int], params: SamplingParams, max_tokens: int | None, stop_ids: frozenset[int]
    ) -> Iterator[Sampled]:
        engine = self._engine
        prompt = "".join(engine.tokenizer._backend.id_to_token(t) or "" for t in tokens)
        prompt = prompt.replace("Ġ", " ").replace("Ċ", "\n")
        engine.calls.append(Call(self._number, prompt, params, max_tokens, stop_ids))
        reply = engine.replies.pop(0)
        self._cancelled = False
        self.stats = GenerationStats(
            prefill_tokens=len(tokens), prefill_s=0.5, decode_s=2.0, hits=3, misses=1, records_read=12,
            bytes_read=3 << 20, read_s=0.01, peak_bytes=512 << 20,
        )  # fmt: skip
        for index, token in enumerate(engine.tokenizer.encode(reply() if callable(reply) else reply)):
            if index == max_tokens:
                self.stats.finish_reason = "length"
                return
            self.stats.decode_tokens += 1
            yield Sampled(token, None)
            engine.on_token(index)
            if self._cancelled:
                return
            time.sleep(engine.token_s)
        self.stats.finish_reason = "stop"


def fail(message: str) -> Callable[[], str]:
    def raise_it() -> str:
        raise SlotpyError(message)

    return raise_it


if __name__ == "__main__":
    replies = [fail(reply[1:]) if reply.startswith("!") else reply for reply in os.environ["REPLIES"].split("|")]
    engine = FakeEngine(replies, token_s=0.01)
    run_module.Engine = engine  # type: ignore[assignment,misc]
    run_module.resolve_model = lambda model: DEMO  # type: ignore[assignment]
    run_module.run(sys.argv[1:], prog_name="slotpy run")

"""An engine that says what a script has it say, on the demo model's real parts; no model is computed.

Real are the loaded demo, its tokenizer, templates, governor and counters, and of a session everything but `step`: that
gives logits in which the script's next token stands out. So sampling, grammars, log-probabilities, tool calls and the
worker are the product's own. Three models differ in their chat template: `tinychat` only chats, `tiny` knows tools,
`tinythink` tools and thinking.

Words in the last turn that is not the model's ask for a reply:

    TOOL      a call of the first tool the prompt declares (TWOTOOLS: two); after its result the reply is plain
    SAY x     the text x
    TURNS     how many turns the user has had
    SLOW      200 tokens, 20 ms apart
    LIMIT     words without end
    ERR400    an error before the first token
    ERRMID    an error after two tokens

Anything else is answered with "Hello!". Where a grammar or a sampler leaves the script, what ends a reply soonest is
likeliest: the end, closing brackets, quotes, digits.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slotpy.demo import demo_directory
from slotpy.engine.engine import Engine
from slotpy.engine.loader import EngineOptions, load
from slotpy.engine.session import Session
from slotpy.engine.text import Tokenizer
from slotpy.errors import PromptTooLongError, SlotpyError

MODELS = ("tinychat", "tiny", "tinythink")
_TURN = "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') ~ '<|im_end|>\\n' }}"
_CHAT = "{%- for message in messages %}" + _TURN + "{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
_SCRIPTED, _END = 40.0, 20.0
_CLOSERS = {"}": 9.0, "]": 8.0, '"': 7.0, ",": 3.0} | {str(digit): 5.0 for digit in range(10)}
_END_ID = "<|im_end|>"


def write_models(directory: Path) -> list[Path]:
    """Write the three models: the demo's files by links, each with its own template. Gives their directories."""
    full = (demo_directory() / "chat_template.jinja").read_text(encoding="utf-8")
    without_comment = full[full.index("#}") + 2 :].lstrip()
    tools = re.sub(r"    \{%- if enable_thinking is defined %\}.*?\{%- endif %\}\n", "", without_comment, flags=re.S)
    templates = {"tinychat": _CHAT, "tiny": tools, "tinythink": full}
    for name in MODELS:
        (directory / name).mkdir(parents=True)
        for path in demo_directory().iterdir():
            if path.name != "chat_template.jinja":
                (directory / name / path.name).symlink_to(path)
        (directory / name / "chat_template.jinja").write_text(templates[name], encoding="utf-8")
    return [directory / name for name in MODELS]


class ScriptedEngine(Engine):
    """The demo, loaded, under the tokenizer and template of another directory."""

    @classmethod
    def open(cls, model: str | Path, options: EngineOptions | None = None) -> "ScriptedEngine":
        """Open one of the models that `write_models` wrote."""
        return cls(load(demo_directory(), options or EngineOptions()), Path(model))

    def new_session(self) -> "ScriptedSession":
        return ScriptedSession(self)


class ScriptedSession(Session):
    """A session whose every prompt has a script."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._tokenizer = engine.tokenizer
        self._likely = _likely(self._tokenizer, engine.loaded.checkpoint.config.vocab_size)
        self._script: list[int] = []
        self._decoding = False
        self._pause_s = 0.0
        self._fails_at: int | None = None
        super().__init__(engine.loaded, num_valid_ids=engine.tokenizer.num_ids, check=engine.governor.check)

    def prefill(self, tokens: Sequence[int]) -> np.ndarray | None:
        self._decoding = False
        super().prefill(tokens)
        if self._cancelled:
            return None
        prompt = self._tokenizer._backend.decode(list(tokens), skip_special_tokens=False)
        asked = last_turn(prompt)
        if "ERR400" in asked:
            raise PromptTooLongError("The scripted engine refuses this prompt.", hint="Do not say ERR400.")
        self._pause_s = 0.02 if "SLOW" in asked else 0.0
        self._fails_at = 2 if "ERRMID" in asked else None
        self._script = [*self._tokenizer.encode(reply_to(prompt)), self._tokenizer.token_id(_END_ID)]
        self._decoding = True
        return self._logits()

    def step(self, tokens: Sequence[int], *, upcoming: Sequence[int] = ()) -> np.ndarray:
        self.tokens += tokens
        if not self._decoding:
            return self._likely
        if self._fails_at is not None:
            self._fails_at -= 1
            if self._fails_at == 0:
                self._reset()
                raise SlotpyError("The scripted engine fails here.", hint="Do not say ERRMID.")
        time.sleep(self._pause_s)
        kept = [i for i, token in enumerate(self._script[:2]) if token == tokens[0]]
        self._script = self._script[kept[0] + 1 :] if kept else []
        return self._logits()

    def _logits(self) -> np.ndarray:
        """Have the script's next token stand out, and less so the one after: a grammar may forbid white space."""
        logits = self._likely.copy()
        logits[self._script[1:2]] = _SCRIPTED - 10
        logits[self._script[:1]] = _SCRIPTED
        return logits


def last_turn(prompt: str) -> str:
    """Give the text of the last turn that is not the model's; of a prompt without turns, all of it."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", prompt, flags=re.S)
    others = [text for role, text in turns if role != "assistant"]
    return others[-1] if others else prompt


def reply_to(prompt: str) -> str:
    """Write the script of the reply to a rendered prompt, reasoning included where the prompt opened it."""
    asked = last_turn(prompt)
    reply = "Hello!"
    if "TOOL" in asked and "Tools:\n" in prompt:
        reply = "\n".join([_call(prompt)] * (2 if "TWOTOOLS" in asked else 1))
        begun = next((n for n in range(len(reply), 0, -1) if prompt.endswith(reply[:n])), 0)  # where one is required
        reply = reply[begun:]
    elif said := re.search(r"SAY (.*)", asked, flags=re.S):
        reply = said[1]
    elif "TURNS" in asked:
        reply = f"Turn {prompt.count('<|im_start|>user')}."
    elif "SLOW" in asked:
        reply = " slow" * 200
    elif "LIMIT" in asked:
        reply = " more" * 4000
    return ("let me think\n</think>\n\n" if prompt.endswith("<think>\n") else "") + reply


def _call(prompt: str) -> str:
    """Write a call of the first declared tool, with "Paris" for every text it wants and 1 for everything else."""
    declared = json.loads(prompt.partition("Tools:\n")[2].partition("\n")[0])
    function: dict[str, Any] = declared.get("function", declared)
    properties = (function.get("parameters") or {}).get("properties") or {}
    arguments = {name: "Paris" if field.get("type", "string") == "string" else 1 for name, field in properties.items()}
    call = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _likely(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Give the logits (V,) of a reply that should end: float32, the end first, then what closes JSON."""
    logits = np.zeros(vocab_size, dtype=np.float32)
    for text, value in [*_CLOSERS.items(), (_END_ID, _END)]:
        token = tokenizer.token_id(text)
        if token is not None:
            logits[token] = value
    return logits

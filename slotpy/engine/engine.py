"""The engine: everything that the command line and the server may touch."""

from pathlib import Path
from types import TracebackType
from typing import Any

from slotpy import config
from slotpy.demo import demo_directory
from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.grammar import GrammarCompiler
from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.engine.session import Session
from slotpy.engine.text import Tokenizer, read_json
from slotpy.engine.tools import ToolGrammar
from slotpy.errors import UsageError
from slotpy.governor import Governor
from slotpy.hub.library import check_verified
from slotpy.hub.names import parse_name
from slotpy.machine.pressure import probe


def resolve_model(model: str | Path) -> Path:
    """Find a model's directory: a path to one, the name of a pulled one, or `demo`, which is written on first use.

    Raises: UsageError for a model that is not here; CheckpointError for a pulled one that is not verified.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        if str(model) == "demo":
            return demo_directory()
        name = parse_name(str(model))
        path = name.directory(config.models_dir())
        if not path.is_dir():
            raise UsageError(f"{name.text} is not here.", hint=f"Run `slotpy pull {name.text}`.")
    check_verified(path)
    return path


class Engine:
    """A loaded model with its tokenizer and chat template. Use it from one thread; close it when done.

    `governor` keeps its size right; sessions ask it. While the engine is idle, whoever owns it may too. `tools` is None
    for a model whose template knows no tools or writes calls in a form that nobody reads. `defaults` is the
    checkpoint's generation_config.json.
    """

    def __init__(self, loaded: LoadedModel, directory: Path) -> None:
        self.loaded = loaded
        self.governor = Governor(loaded, floor_slots=loaded.sizes.floor_slots, probe=probe())
        self.tokenizer = Tokenizer.load(directory)
        self.chat = ChatTemplate.load(directory)
        self.stop_ids = load_stop_ids(directory, self.tokenizer)
        self.tools = None if self.chat is None else ToolGrammar.of(directory, self.chat.source)
        self.grammar = GrammarCompiler(self.tokenizer, self.stop_ids)
        self.defaults: dict[str, Any] = read_json(directory / "generation_config.json")
        self.notes = loaded.notes

    @classmethod
    def open(cls, model: str | Path, options: EngineOptions | None = None) -> "Engine":
        """Load a model directory or a named model. Raises SlotpyError subclasses for what a user can mend.

        A command that does so holds `lock.ModelLock` meanwhile.
        """
        directory = resolve_model(model)
        loaded = load(directory, options or EngineOptions())
        try:
            return cls(loaded, directory)
        except BaseException:
            loaded.close()
            raise

    @property
    def context_tokens(self) -> int:
        """How many tokens prompt and reply have together."""
        return self.loaded.context_tokens

    @property
    def max_context_tokens(self) -> int:
        """The most that the model was made for."""
        return self.loaded.sizes.max_context_tokens

    def counters(self) -> dict[str, int]:
        """Give what the expert slots did since loading. Safe from any thread."""
        experts = self.loaded.experts
        return {
            "num_slots": experts.num_slots,
            "hits": experts.table.counters.hits,
            "misses": experts.table.counters.misses,
            "records_read": experts.records_read,
            "bytes_read": experts.bytes_read,
            "resident_bytes": self.loaded.plan.ledger.resident_bytes,
        }

    def new_session(self) -> Session:
        """Begin a conversation. The governor looks before each reply, and for memory pressure before each token."""
        return Session(self.loaded, num_valid_ids=self.tokenizer.num_ids, check=self.governor.check)

    def close(self) -> None:
        self.loaded.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

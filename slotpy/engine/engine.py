"""The engine: everything that the command line and the server may touch."""

from pathlib import Path
from types import TracebackType

from slotpy.demo import demo_directory
from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.engine.session import Session
from slotpy.engine.text import Tokenizer
from slotpy.errors import UsageError


def resolve_model(model: str | Path) -> Path:
    """Find a model's directory: a path to one, or `demo`."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if str(model) == "demo":
        return demo_directory()
    raise UsageError(f"There is no model {str(model)!r} here.", hint="Give a checkpoint directory, or `demo`.")


class Engine:
    """A loaded model with its tokenizer and chat template. Use it from one thread; close it when done."""

    def __init__(self, loaded: LoadedModel, directory: Path) -> None:
        self.loaded = loaded
        self.tokenizer = Tokenizer.load(directory)
        self.chat = ChatTemplate.load(directory)
        self.stop_ids = load_stop_ids(directory, self.tokenizer)
        self.notes = loaded.notes

    @classmethod
    def open(cls, model: str | Path, options: EngineOptions | None = None) -> "Engine":
        """Load a model directory or a named model. Raises SlotpyError subclasses for what a user can mend."""
        directory = resolve_model(model)
        return cls(load(directory, options or EngineOptions()), directory)

    def new_session(self) -> Session:
        return Session(self.loaded, num_valid_ids=self.tokenizer.num_ids)

    def close(self) -> None:
        self.loaded.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

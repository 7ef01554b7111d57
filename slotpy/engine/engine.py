"""The engine: everything that the command line and the server may touch."""

from pathlib import Path
from types import TracebackType

from slotpy import config
from slotpy.demo import demo_directory
from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.engine.session import Session
from slotpy.engine.text import Tokenizer
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

    `governor` keeps its size right; sessions ask it. While the engine is idle, whoever owns it may too.
    """

    def __init__(self, loaded: LoadedModel, directory: Path) -> None:
        self.loaded = loaded
        self.governor = Governor(loaded, floor_slots=loaded.sizes.floor_slots, probe=probe())
        self.tokenizer = Tokenizer.load(directory)
        self.chat = ChatTemplate.load(directory)
        self.stop_ids = load_stop_ids(directory, self.tokenizer)
        self.notes = loaded.notes

    @classmethod
    def open(cls, model: str | Path, options: EngineOptions | None = None) -> "Engine":
        """Load a model directory or a named model. Raises SlotpyError subclasses for what a user can mend.

        A command that does so holds `lock.ModelLock` meanwhile.
        """
        directory = resolve_model(model)
        return cls(load(directory, options or EngineOptions()), directory)

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

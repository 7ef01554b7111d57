"""`slotpy serve`: answer Ollama's, OpenAI's and Anthropic's clients over HTTP.

Owns options and log format; `slotpy.server` does the rest.
"""

import dataclasses
import logging
from pathlib import Path

import click

from slotpy import config
from slotpy.cli.sizing_options import sizing_options
from slotpy.engine.engine import Engine
from slotpy.engine.loader import EngineOptions
from slotpy.engine.worker import Worker
from slotpy.errors import UsageError
from slotpy.lock import ModelLock
from slotpy.server.errors import ApiError
from slotpy.server.library.library import Library, Model
from slotpy.server.serve import serve
from slotpy.server.service import Service
from slotpy.server.settings import Settings

_EPILOG = "\b\nEnvironment variables; an option of the same meaning wins:\n" + "\n".join(
    f"  {name:<25} {what}" for name, what in config.SERVER_VARIABLES.items()
)


@click.command("serve", epilog=_EPILOG)
@click.argument("model", required=False)
@click.option("--host", help="Address to listen on, as in OLLAMA_HOST; default 127.0.0.1:11434.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0: any.")
@click.option("--api-key", help="Key that clients must give; needed where other machines can connect.")
@click.option("--insecure", is_flag=True, help="Let other machines connect without a key.")
@click.option("--origins", help="Web origins that may call, beside local ones; with commas, * matches anything.")
@click.option("--keep-alive", help="How long a model stays loaded: 5m, 1h30m, or seconds; negative: for ever.")
@sizing_options
def serve_command(
    model: str | None,
    host: str | None,
    port: int | None,
    api_key: str | None,
    insecure: bool,
    origins: str | None,
    keep_alive: str | None,
    engine_options: EngineOptions,
) -> None:
    """Serve models to clients of Ollama, OpenAI and Anthropic, until Ctrl-C.

    Every pulled model and the demo can be asked for; each is loaded when it first is. MODEL, a name or a directory,
    is loaded at once.
    """
    settings = Settings.read(
        config.server_variables(),
        host=host,
        port=port,
        origins=origins,
        api_key=api_key,
        insecure=insecure,
        keep_alive=keep_alive,
        context_tokens=engine_options.context_tokens,
    )
    _log_to_stderr(settings.debug)
    library, preload = _library(model)
    worker = Worker(
        Engine.open,
        dataclasses.replace(engine_options, context_tokens=settings.context_tokens),
        max_queue=settings.max_queue,
        keep_alive_s=settings.keep_alive_s,
        lock=lambda name: ModelLock.acquire(config.home(), name),
    )
    serve(Service(library, worker), settings, preload)


def _library(model: str | None) -> tuple[Library, Model | None]:
    """Give the models to serve, and the one that was named. Raises UsageError for one that cannot be."""
    directory = Path(model).expanduser().resolve() if model and Path(model).expanduser().is_dir() else None
    library = Library(config.models_dir(), config.home(), [directory] if directory else [])
    if model is None:
        return library, None
    for served in library.list() if directory else ():
        if served.directory == directory:
            return library, served
    try:
        return library, library.find(directory.name if directory else model)
    except ApiError as error:
        hint = f"Run `slotpy pull {model}`, or `slotpy list` for what is here."
        raise UsageError(f"{str(error).rstrip('.')}.", hint=hint) from error


def _log_to_stderr(debug: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("slotpy").setLevel(logging.DEBUG if debug else logging.INFO)

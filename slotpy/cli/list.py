"""The command `slotpy list`."""

import click

from slotpy import config
from slotpy.hub.library import list_models
from slotpy.units import format_bytes


@click.command("list")
def list_command() -> None:
    """List the models that were pulled: name, size, revision, and whether they can be used."""
    stored = list_models(config.models_dir())
    if not stored:
        click.echo(f"No models in {config.models_dir()}. Try `slotpy pull qwen3.8-flash-next`.")
        return
    width = max(len(model.manifest.model) for model in stored)
    for model in stored:
        total = model.manifest.nbytes
        state = "ready" if model.is_complete else f"{100 * model.present_bytes // max(total, 1)} % verified, pull again"
        revision = model.manifest.sources[0].revision[:12] if model.manifest.sources else "-"
        click.echo(f"{model.manifest.model:<{width}}  {format_bytes(total):>9}  {revision}  {state}")

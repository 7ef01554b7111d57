"""The command `slotpy rm`."""

from pathlib import Path

import click

from slotpy import config
from slotpy.errors import UsageError
from slotpy.hub.library import list_models, remove_model
from slotpy.hub.names import parse_name
from slotpy.units import format_bytes


@click.command("rm")
@click.argument("model")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm_command(model: str, yes: bool) -> None:
    """Remove a pulled MODEL. Asks first; files that slotpy did not write stay."""
    directory = parse_name(model).directory(config.models_dir())
    stored = {model.directory: model for model in list_models(config.models_dir())}.get(directory)
    if stored is None:
        raise UsageError(f"{model} is not in {config.models_dir()}.", hint="`slotpy list` shows what is.")
    size = format_bytes(_bytes_on_disk(directory))
    if not yes:
        click.confirm(f"Remove {stored.manifest.model} ({size}) from {directory}?", abort=True)
    left = remove_model(directory)
    click.echo(f"Removed {stored.manifest.model}: {size}.")
    if left:
        click.echo(f"Left, since slotpy did not write it: {', '.join(left)} in {directory}.", err=True)


def _bytes_on_disk(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.iterdir())

"""The `slotpy` command. Owns the map from errors to messages and exit codes; each subcommand has its own file."""

import sys

import click

from slotpy import __version__
from slotpy.cli.check import check
from slotpy.cli.convert import convert_command
from slotpy.cli.doctor import doctor
from slotpy.cli.list import list_command
from slotpy.cli.pack import pack_command
from slotpy.cli.pull import pull_command
from slotpy.cli.rm import rm_command
from slotpy.cli.run import run
from slotpy.cli.serve import serve_command
from slotpy.errors import SlotpyError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slotpy")
def cli() -> None:
    """Run mixture-of-experts models that are bigger than memory."""


for command in (
    run, serve_command, pull_command, list_command, rm_command, check, pack_command, convert_command, doctor,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run the command line: a SlotpyError becomes one message and its exit code; a bug keeps its traceback."""
    try:
        cli(standalone_mode=True)
    except SlotpyError as error:
        click.echo(f"slotpy: {error}", err=True)
        sys.exit(error.exit_code)

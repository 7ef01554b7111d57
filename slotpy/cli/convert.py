"""The command `slotpy convert DIR OUT`: its options, progress and closing lines around engine/convert.py."""

from pathlib import Path

import click

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.cli.progress import ProgressLine, resumable
from slotpy.engine.convert import Conversion, convert
from slotpy.units import format_bytes


@click.command("convert")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(("4", "8")), default="4", show_default=True, help="Bits of a weight.")
@click.option(
    "--group-size",
    type=click.Choice(("32", "64", "128")),
    default="64",
    show_default=True,
    help="Weights that share a scale and a bias. Rows that it does not divide get a smaller one.",
)
def convert_command(directory: Path, out: Path, bits: str, group_size: str) -> None:
    """Quantise the official BF16 or FP8 checkpoint in DIR into the new directory OUT, in the MLX layout.

    DIR is only read. After an interruption the same command goes on where it stopped; on a finished OUT it checks
    every byte.
    """
    with resumable(out):
        conversion = convert(
            open_checkpoint(directory), out, bits=int(bits), group_size=int(group_size), progress=ProgressLine()
        )
    for line in _summary(conversion):
        click.echo(line)


def _summary(conversion: Conversion) -> list[str]:
    checkpoint = conversion.checkpoint
    total = format_bytes(sum(file.nbytes for file in conversion.files))
    experts, rows = checkpoint.experts, checkpoint.rows
    lines = [
        f"{checkpoint.directory}: {total} in {len(conversion.files)} files, every one with its SHA-256.",
        f"experts: {experts.num_records} of {format_bytes(experts.record_nbytes)}.",
        f"rows: {rows.num_records} of {format_bytes(rows.record_nbytes)}.",
        *conversion.notes,
    ]
    if conversion.left_out:
        lines.append(f"Not copied: {', '.join(conversion.left_out)}.")
    return lines

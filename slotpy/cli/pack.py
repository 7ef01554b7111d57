"""The command `slotpy pack DIR OUT`: its progress and the closing lines around checkpoint/pack.py."""

from pathlib import Path

import click

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.manifest import PackManifest
from slotpy.checkpoint.pack import pack
from slotpy.cli.progress import ProgressLine, resumable
from slotpy.units import format_bytes


@click.command("pack")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
def pack_command(directory: Path, out: Path) -> None:
    """Rewrite the checkpoint in DIR to the new directory OUT, one aligned read per expert and n-gram row.

    DIR is only read. After an interruption the same command goes on where it stopped; on a finished OUT it checks
    every byte against the manifest.
    """
    with resumable(out):
        manifest = pack(open_checkpoint(directory), out, progress=ProgressLine())
    for line in _summary(manifest):
        click.echo(line)


def _summary(manifest: PackManifest) -> list[str]:
    total = format_bytes(sum(file.nbytes for file in manifest.files))
    lines = [f"{manifest.directory}: {total} in {len(manifest.files)} files, every one with its SHA-256."]
    for kind, records in manifest.records.items():
        lines.append(f"{kind}: {records.num_records} records of {format_bytes(records.stride)}.")
    if manifest.left_out:
        lines.append(f"Not copied: {', '.join(manifest.left_out)}.")
    return lines

"""The command `slotpy pack DIR OUT`: progress, Ctrl-C and the closing lines around checkpoint/pack.py."""

import sys
import time
from pathlib import Path

import click

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.manifest import PackManifest
from slotpy.checkpoint.pack import pack
from slotpy.units import format_bytes, format_rate

_REDRAW_S = 0.2
_INTERRUPTED = 130


@click.command("pack")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.pass_context
def pack_command(context: click.Context, directory: Path, out: Path) -> None:
    """Rewrite the checkpoint in DIR to the new directory OUT, one aligned read per expert and n-gram row.

    DIR is only read. After an interruption the same command goes on where it stopped; on a finished OUT it checks
    every byte against the manifest.
    """
    try:
        manifest = pack(open_checkpoint(directory), out, progress=_ProgressLine())
    except KeyboardInterrupt:
        click.echo(f"\nStopped. Run the same command again: it goes on from here ({out}).", err=True)
        context.exit(_INTERRUPTED)
    for line in _summary(manifest):
        click.echo(line)


class _ProgressLine:
    """Draw one line over and over on a terminal; print one line a file elsewhere. Goes to standard error."""

    def __init__(self) -> None:
        self._begin = self._drawn = time.monotonic()
        self._name = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty():
            if name != self._name:
                click.echo(f"{name}: {format_bytes(done)} of {format_bytes(total)} done", err=True)
        elif now - self._drawn >= _REDRAW_S or done == total:
            self._drawn = now
            rate = format_rate(done, now - self._begin)
            text = f"{name}  {format_bytes(done)} of {format_bytes(total)}  {100 * done // total} %  {rate}"
            click.echo(f"\r{text:<79}", err=True, nl=done == total)
        self._name = name


def _summary(manifest: PackManifest) -> list[str]:
    total = format_bytes(sum(file.nbytes for file in manifest.files))
    lines = [f"{manifest.directory}: {total} in {len(manifest.files)} files, every one with its SHA-256."]
    for kind, records in manifest.records.items():
        lines.append(f"{kind}: {records.num_records} records of {format_bytes(records.stride)}.")
    if manifest.left_out:
        lines.append(f"Not copied: {', '.join(manifest.left_out)}.")
    return lines

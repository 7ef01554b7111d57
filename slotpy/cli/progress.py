"""What the commands that write for a long time share: one progress line, and Ctrl-C that leaves work to go on with."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from slotpy.units import format_bytes, format_rate

_REDRAW_S = 0.2
_INTERRUPTED = 130


class ProgressLine:
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


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Turn Ctrl-C into a word on how to go on and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\nStopped. Run the same command again: it goes on from here ({out}).", err=True)
        click.get_current_context().exit(_INTERRUPTED)

"""The command `slotpy pull`: its progress, and the closing lines around hub/pull.py."""

import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from slotpy import config
from slotpy.cli.progress import resumable
from slotpy.demo import demo_directory
from slotpy.errors import CheckpointError
from slotpy.hub.events import Event, FileProgress, Waiting
from slotpy.hub.names import parse_name
from slotpy.hub.pull import Report, pull, verify
from slotpy.hub.transfer import Limits
from slotpy.units import format_bytes

_LINE_EVERY_S = 60.0


@click.command("pull")
@click.argument("model")
@click.option(
    "--connections",
    type=click.IntRange(1, 64),
    help="Use exactly this many connections. Default: one, and more while that makes it faster.",
)
@click.option("--verify", "verify_only", is_flag=True, help="Read every byte again, name what is wrong, fetch nothing.")
def pull_command(model: str, connections: int | None, verify_only: bool) -> None:
    """Download MODEL, or what is missing or wrong of it, and check the SHA-256 of every file.

    MODEL is a short name (qwen3.8-flash-next, demo), or a hub repository: org/repo, org/repo@revision or
    hf.co/org/repo. It can be stopped at any time; the same command goes on where it stopped. `slotpy list` shows what
    is here.
    """
    if model == "demo":
        click.echo(demo_directory())
        return
    directory = Path(model).expanduser()
    if verify_only:
        _verify(model, directory if directory.is_dir() else parse_name(model).directory(config.models_dir()))
        return
    name = parse_name(model)
    directory = name.directory(config.models_dir())
    with resumable(directory), _make_display() as display:
        pulled = pull(name, config.models_dir(), Limits(connections=connections), display)
    for line in pulled.left_out:
        click.echo(f"Not there, and not needed: {line}", err=True)
    revisions = ", ".join(f"{source.repo} at {source.revision[:12]}" for source in pulled.manifest.sources)
    click.echo(f"{directory}: {format_bytes(pulled.manifest.nbytes)}, every file verified. From {revisions}.")


def _verify(model: str, directory: Path) -> None:
    with resumable(directory), _make_display() as display:
        wrong = verify(model, directory, display)
    for result in wrong:
        click.echo(f"{result.entry.path} {result.problem}", err=True)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} files are wrong",
            file=directory,
            hint=f"Run `slotpy pull {model}`: it fetches only what is wrong.",
        )
    click.echo(f"{directory}: every byte is right.")


class _Terminal:
    """Draw a bar for each file that moves and one for the total, with rate and time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}
        self._totals = _Totals()

    def __enter__(self) -> Report:
        self._progress.start()
        self._tasks[""] = self._progress.add_task("total", total=None)
        return self._show

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def _show(self, event: Event) -> None:
        if isinstance(event, Waiting):
            self._progress.console.print(f"Waiting {event.seconds:.0f} s: {event.reason}", markup=False)
        if not isinstance(event, FileProgress):
            return
        self._totals.add(event)
        if event.path not in self._tasks:
            self._tasks[event.path] = self._progress.add_task(event.path, total=event.total_bytes, visible=False)
        moving = 0 < event.completed_bytes < event.total_bytes
        self._progress.update(self._tasks[event.path], completed=event.completed_bytes, visible=moving)
        resumed = f", {format_bytes(self._totals.resumed)} from before" if self._totals.resumed else ""
        description = f"total{resumed}"
        self._progress.update(
            self._tasks[""], completed=self._totals.completed, total=self._totals.total, description=description
        )


class _Lines:
    """Print a line a minute, for logs."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> Report:
        return self._show

    def __exit__(self, *exception: object) -> None:
        if self._totals.total:
            click.echo(self._line(), err=True)

    def _show(self, event: Event) -> None:
        if isinstance(event, Waiting):
            if event.seconds >= 1:
                click.echo(f"waiting {event.seconds:.0f} s: {event.reason}", err=True)
        elif isinstance(event, FileProgress):
            self._totals.add(event)
            now = time.monotonic()
            if now - self._last >= _LINE_EVERY_S:
                self._last = now
                click.echo(self._line(), err=True)

    def _line(self) -> str:
        totals = self._totals
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = max(0, totals.completed - totals.resumed) / seconds
        left = f", {(totals.total - totals.completed) / rate / 60:.0f} min left" if rate else ""
        resumed = f" ({format_bytes(totals.resumed)} from before)" if totals.resumed else ""
        return (
            f"{format_bytes(totals.completed)} of {format_bytes(totals.total)}{resumed}, "
            f"{100 * totals.completed // max(totals.total, 1)} %, {rate / 1e6:.1f} MB/s{left}"
        )


class _Totals:
    """Add up what the files say. Each file's last word counts, so nothing is counted twice."""

    def __init__(self) -> None:
        self._files: dict[str, FileProgress] = {}

    def add(self, event: FileProgress) -> None:
        self._files[event.path] = event

    @property
    def total(self) -> int:
        return sum(file.total_bytes for file in self._files.values())

    @property
    def completed(self) -> int:
        return sum(file.completed_bytes for file in self._files.values())

    @property
    def resumed(self) -> int:
        return sum(file.resumed_bytes for file in self._files.values())


def _make_display() -> _Terminal | _Lines:
    return _Terminal() if sys.stderr.isatty() else _Lines()

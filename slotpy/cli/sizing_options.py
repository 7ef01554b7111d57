"""The options that size a model in memory, the same for every command that loads one."""

import functools
from collections.abc import Callable
from typing import Any

import click

from slotpy.budget import gib_to_bytes
from slotpy.engine.loader import EngineOptions
from slotpy.errors import UsageError

_OPTIONS = (
    click.option("--slots", type=click.IntRange(min=1), help="Experts kept in memory; default: what fits."),
    click.option("--cache-gb", type=click.FloatRange(min=0, min_open=True), help="The same, as GiB of memory."),
    click.option("--memory-gb", type=float, help="Size the whole process, in GiB; never resized."),
    click.option("--memory-limit-gb", type=float, help="Let it move with what is free, up to this many GiB."),
    click.option("--context", type=click.IntRange(min=1), help="Tokens to have room for; default: by memory."),
    click.option("--direct-io", is_flag=True, help="Read past the operating system's page cache."),
)


def sizing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets what they say as `engine_options`. Raises UsageError when called."""

    @functools.wraps(command)
    def sized(
        *arguments: Any,
        slots: int | None,
        cache_gb: float | None,
        memory_gb: float | None,
        memory_limit_gb: float | None,
        context: int | None,
        direct_io: bool,
        **options: Any,
    ) -> Any:
        if slots is not None and cache_gb is not None:
            raise UsageError("--slots and --cache-gb both size the cache.", hint="Give one of them.")
        engine_options = EngineOptions(
            slots=slots,
            cache_bytes=_bytes(cache_gb, "--cache-gb"),
            memory_bytes=_bytes(memory_gb, "--memory-gb"),
            memory_limit_bytes=_bytes(memory_limit_gb, "--memory-limit-gb"),
            direct_io=direct_io,
            context_tokens=context,
        )
        return command(*arguments, engine_options=engine_options, **options)

    for option in reversed(_OPTIONS):
        sized = option(sized)
    return sized


def _bytes(gib: float | None, knob: str) -> int | None:
    return None if gib is None else gib_to_bytes(gib, knob)

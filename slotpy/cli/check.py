"""`slotpy check`: compare a model with a reference, and with itself at every cache size."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from slotpy import native
from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.checkpoint.pack import pack
from slotpy.engine.check import Variant, compare_with_reference, digest
from slotpy.engine.engine import resolve_model
from slotpy.engine.loader import EngineOptions
from slotpy.errors import UsageError

TOLERANCE = 1e-4
PACK_LIMIT_BYTES = 2 << 30


@click.group()
def check() -> None:
    """Check that a model's output is right, and the same at every cache size."""


@check.command()
@click.argument("model")
@click.option(
    "--reference",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="safetensors file with input_ids and logits_fp32.",
)
@click.option("--slots", type=click.IntRange(min=1), help="Expert slots; default: what fits the memory.")
def reference(model: str, reference: Path, slots: int | None) -> None:
    """Compare MODEL's logits, computed in float32, with a reference: fails above 1e-4."""
    worst = 0.0
    for name, error in compare_with_reference(resolve_model(model), reference, EngineOptions(slots=slots)):
        click.echo(f"{name:<16} max abs error {error:.3e}")
        worst = max(worst, error)
    click.echo(f"max abs error {worst:.3e} (limit {TOLERANCE:.0e})")
    if not worst <= TOLERANCE:
        sys.exit(1)


@check.command("cache-sizes")
@click.argument("model")
@click.option("--slots", "sizes", help="Comma-separated slot counts and `all`; default: from under one token's up.")
@click.option("--tokens", type=click.IntRange(min=1), default=24, show_default=True, help="Tokens to decode.")
@click.option(
    "--packed",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A packed copy of MODEL; default: a temporary one, up to 2 GiB.",
)
def cache_sizes(model: str, sizes: str | None, tokens: int, packed: Path | None) -> None:
    """Run MODEL greedily at several cache sizes, layouts and readers: fails unless all digests are equal."""
    directory = resolve_model(model)
    checkpoint = open_checkpoint(directory)
    with _packed_copy(checkpoint, packed) as copy:
        layouts = {"original": directory} | ({"packed": copy} if copy is not None else {})
        readers = [True, False] if native.find() is not None else [False]
        digests = set()
        for slots in _parse_sizes(sizes, checkpoint):
            for layout, path in layouts.items():
                for reader in readers:
                    variant = Variant(path, layout, slots, reader)
                    found, hit_rate = digest(variant, tokens, EngineOptions())
                    click.echo(f"{variant.describe()}  hit rate {hit_rate:6.1%}  {found}")
                    digests.add(found)
    click.echo("identical" if len(digests) == 1 else f"{len(digests)} different digests")
    if len(digests) != 1:
        sys.exit(1)


def _parse_sizes(text: str | None, checkpoint: Checkpoint) -> list[int]:
    """Turn `8,32,all` into slot counts. By default the least is half of what one layer asks for at one token."""
    every = checkpoint.experts.num_records
    if text is None:
        per_layer, layers = checkpoint.config.num_experts_per_tok, checkpoint.config.num_hidden_layers
        return sorted({max(1, per_layer // 2), per_layer, per_layer * layers // 2, every // 4, every})
    try:
        sizes = [every if part.strip() == "all" else int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--slots {text!r} is not a list of numbers and `all`.", hint="Try --slots 8,32,all."
        ) from None
    if min(sizes) < 1:
        raise UsageError(f"--slots {text!r} has a size below one.", hint="Try --slots 8,32,all.")
    return [min(size, every) for size in sizes]


@contextmanager
def _packed_copy(checkpoint: Checkpoint, packed: Path | None) -> Iterator[Path | None]:
    if packed is not None or checkpoint.packed:
        yield packed
        return
    total = checkpoint.experts.num_records * checkpoint.experts.record_nbytes
    if total > PACK_LIMIT_BYTES:
        click.echo("packed layout left out: pack the model with `slotpy pack` and name the copy with --packed")
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "packed"
        pack(checkpoint, copy)
        yield copy

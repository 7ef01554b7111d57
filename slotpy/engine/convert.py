"""Convert an official checkpoint to the MLX affine layout, quantised by MLX itself.

Owns reading, quantising and the files. What the converted checkpoint consists of is decided in
checkpoint/qwen4_exp/mlx_form.py, how its writing survives interruptions in checkpoint/writing.py. The source is only
read, a slice at a time.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from slotpy import config
from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.checkpoint.formats import WeightFormat
from slotpy.checkpoint.header import parse_json_object
from slotpy.checkpoint.index import INDEX_NAME, TensorIndex, resolve_directory
from slotpy.checkpoint.outputs import Output, SourceState, describe_source, make_header, plan_copies
from slotpy.checkpoint.qwen4_exp.mlx_form import MlxWeight, mlx_config, plan_weights
from slotpy.checkpoint.records import DTYPE_BYTES
from slotpy.checkpoint.writing import (
    Journal,
    Progress,
    WrittenFile,
    refuse_foreign,
    refuse_full_disk,
    refuse_overlap,
    write_outputs,
    writing,
)
from slotpy.engine.loader import row_scale
from slotpy.errors import UsageError
from slotpy.layers.switch import scale_blocks
from slotpy.slots.backings.unified import MLX_DTYPES

JOURNAL_NAME = "slotpy-convert.jsonl"
"""Stays in the finished directory: the source, the options, and the size and SHA-256 of every file."""

MAX_FILE_BYTES = 5 << 30
# Values in flight. Decoding FP8 takes three float32 arrays of this size: 200 MiB.
_SLICE_VALUES = 16 << 20
_DTYPES = MLX_DTYPES | {"I64": mx.int64}
_COMMAND = "convert"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Conversion:
    """Say what was written: the converted checkpoint, opened; `notes` on the source; files that were not copied."""

    checkpoint: Checkpoint
    files: tuple[WrittenFile, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


def convert(
    checkpoint: Checkpoint,
    out: Path,
    *,
    bits: int,
    group_size: int,
    progress: Progress = lambda name, done, total: None,
) -> Conversion:
    """Write `checkpoint` in the MLX affine layout to the directory `out`, or finish what an earlier call began there.

    Values are rounded to BF16 and quantised on MLX's default device. Bytes of an earlier call are hashed again, not
    trusted; on a finished directory that is all that happens. May be killed at any time.

    Raises: UsageError for a quantised source and for an `out` that must not be written to; CheckpointError when an
    earlier call converted another state of the source, or with other options; CapacityError when the disk is too
    small; ReadError when the source cannot be read or changes meanwhile; SlotpyError when `out` cannot be written.
    """
    _refuse_converted(checkpoint)
    config.prepare_mlx_environment()
    mx.set_cache_limit(config.ALLOCATOR_CACHE_BYTES)
    out = out.resolve()
    refuse_overlap(resolve_directory(checkpoint.directory), out)
    asked = WeightFormat("affine", bits, group_size)
    source, outputs, left_out = _plan(checkpoint, asked)
    # Two devices or releases of MLX may round differently, and the parts of one weight must come from the same.
    quantiser = f"mlx {version('mlx')} on {mx.default_device()}"
    form = {"format_version": _FORMAT_VERSION, "bits": bits, "group_size": group_size, "quantiser": quantiser}
    with writing(out):
        refuse_foreign(out, JOURNAL_NAME)
        refuse_full_disk(out, outputs)
        out.mkdir(parents=True, exist_ok=True)
        with Journal(out / JOURNAL_NAME, _COMMAND) as journal:
            journal.begin(source, form, outputs)
            files = write_outputs(out, outputs, journal, progress)
    return Conversion(open_checkpoint(out), files, checkpoint.notes, left_out)


def _refuse_converted(checkpoint: Checkpoint) -> None:
    if checkpoint.packed:
        raise UsageError(f"{checkpoint.directory} is packed.", hint="Convert the checkpoint that it was packed from.")
    if checkpoint.layout not in ("bf16", "fp8"):
        raise UsageError(
            f"{checkpoint.directory} is quantised already ({checkpoint.layout}).",
            hint="Run it as it is, or convert the official BF16 or FP8 checkpoint.",
        )


def _plan(checkpoint: Checkpoint, asked: WeightFormat) -> tuple[SourceState, list[Output], tuple[str, ...]]:
    """Decide every file, config.json last: without it the directory is no checkpoint."""
    directory, index = resolve_directory(checkpoint.directory), checkpoint.index
    copies, left_out = plan_copies(directory)
    source = describe_source(directory, index, copies)
    raw = parse_json_object(directory / "config.json", (directory / "config.json").read_bytes(), "the config")
    weights = plan_weights(checkpoint, asked)
    scale = row_scale(checkpoint)
    groups = _split(weights)
    files = [_weight_file(f"model-{n:05}.safetensors", index, scale, group) for n, group in enumerate(groups, start=1)]
    places = [(name, file.name) for file in files for weight in file.weights for name, _, _ in weight.tensors()]
    total = {"total_size": sum(weight.nbytes for weight in weights)}
    outputs: list[Output] = [
        *files,
        *(copy for copy in copies if copy.name not in ("config.json", JOURNAL_NAME)),
        _TextFile(INDEX_NAME, _to_text({"metadata": total, "weight_map": dict(sorted(places))})),
        _TextFile("config.json", _to_text(mlx_config(raw, weights, asked))),
    ]
    return source, outputs, left_out


def _split(weights: Sequence[MlxWeight]) -> list[list[MlxWeight]]:
    """Cut weights into files, each weight whole. In a file the widest dtypes come first, so that all are aligned."""
    groups: list[list[MlxWeight]] = []
    room = 0
    for weight in weights:
        if not groups or weight.nbytes > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append(weight)
        room -= weight.nbytes
    return [sorted(group, key=lambda weight: -_itemsize(weight)) for group in groups]


def _itemsize(weight: MlxWeight) -> int:
    return DTYPE_BYTES[next(weight.tensors())[1]]


def _weight_file(name: str, index: TensorIndex, scale: float, weights: Sequence[MlxWeight]) -> "_WeightFile":
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for weight in weights:
        for tensor, dtype, shape in weight.tensors():
            begin, end = end, end + DTYPE_BYTES[dtype] * math.prod(shape)
            entries[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return _WeightFile(name, make_header(entries, "mlx"), index, scale, tuple(weights))


@dataclass(frozen=True)
class _WeightFile:
    """A safetensors file of converted weights. `row_scale` is what multiplies the codes of an FP8 n-gram table."""

    name: str
    header: bytes
    index: TensorIndex
    row_scale: float
    weights: tuple[MlxWeight, ...]

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(weight.nbytes for weight in self.weights)

    def blocks(self, start: int) -> Iterator[memoryview]:
        for weight in self.weights:
            if start >= weight.nbytes:
                start -= weight.nbytes
                continue
            # A weight that was written in part is converted again as a whole: that gives the same bytes.
            for block in self._convert(weight):
                skipped = min(start, len(block))
                start -= skipped
                yield block[skipped:]

    def _convert(self, weight: MlxWeight) -> Iterator[memoryview]:
        """Yield a weight's tensors, one after the other. The scales and biases wait until the codes are out."""
        waiting: list[list[mx.array]] = [[], []]
        num_items, *item = weight.shape
        step = max(1, _SLICE_VALUES // math.prod(item))
        for begin in range(0, num_items, step):
            values = self._read(weight, begin, min(step, num_items - begin))
            if weight.format.kind == "affine":
                values, *rest = mx.quantize(values, group_size=weight.format.group_size, bits=weight.format.bits)
                mx.eval(values, rest)
                for parts, part in zip(waiting, rest, strict=True):
                    parts.append(part)
            yield _bytes_of(values)
        for parts in waiting:
            yield from map(_bytes_of, parts)

    def _read(self, weight: MlxWeight, begin: int, count: int) -> mx.array:
        """Read and decode items of a weight: (count, ...) in the dtype that is written or quantised."""
        pieces = {
            role.name.removeprefix(f"{weight.owner}."): self._read_role(weight, number, begin, count)
            for number, role in enumerate(weight.records.roles)
            if role.name.startswith(f"{weight.owner}.")
        }
        values = pieces["weight"]
        if weight.stored.kind == "fp8":
            values = mx.from_fp8(values, dtype=mx.float32) * self.row_scale
        elif weight.stored.kind == "fp8_block":
            values = scale_blocks(values, pieces["scale_inv"])
        if weight.added:
            values = values.astype(mx.float32) + weight.added
        return values.astype(_DTYPES[weight.dtype]).reshape(count, *weight.shape[1:])

    def _read_role(self, weight: MlxWeight, number: int, begin: int, count: int) -> mx.array:
        """Read one piece of each of `count` neighbouring items, those that touch in the file in one read."""
        role = weight.records.roles[number]
        first = weight.first + begin
        files, offsets = (found[:, number] for found in weight.records.locate(np.arange(first, first + count)))
        data = np.empty((count, role.nbytes), np.uint8)
        apart = (np.diff(files) != 0) | (np.diff(offsets) != role.nbytes)
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), count]
        for start, end in itertools.pairwise(edges):
            self.index.read_into(int(files[start]), int(offsets[start]), data[start:end].data.cast("B"))
        return mx.array(data.reshape(-1)).view(_DTYPES[role.dtype]).reshape(count, *role.shape)


@dataclass(frozen=True)
class _TextFile:
    """A small file that is made here: all of it is its header."""

    name: str
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header)

    def blocks(self, start: int) -> Iterator[memoryview]:
        return iter(())


def _to_text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _bytes_of(array: mx.array) -> memoryview:
    # As bytes first: numpy has no bfloat16.
    return np.asarray(array.view(mx.uint8)).reshape(-1).data

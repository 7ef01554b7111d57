"""Which files a packed checkpoint consists of, and the bytes of each.

Owns the packed form: one container per few GiB of records, the resident tensors under their own names, the small files
as they are. Everything is decided before a byte is written, so that an interrupted pack can go on. Writes nothing
(writing.py does) and reads the source in blocks of bounded size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.checkpoint.index import Span, TensorIndex, resolve_directory
from slotpy.checkpoint.manifest import PackedRecords, RecordFile
from slotpy.checkpoint.outputs import DATA_ALIGNMENT, Output, SourceState, describe_source, make_header, plan_copies
from slotpy.checkpoint.records import DTYPE_BYTES, RecordSet

EXPERT_ALIGNMENT = DATA_ALIGNMENT
# A row is smaller than a page: aligning it to one would multiply the table. docs/checkpoints.md counts the cost.
ROW_ALIGNMENT = 32
# Small enough to move and to hash again after an interruption, large enough to stay few.
MAX_FILE_BYTES = 10 << 30
BLOCK_BYTES = 64 << 20
# Pieces from here on are read straight into their record; below, one read of many and a copy is faster.
_DIRECT_BYTES = 64 << 10
_WRITER = "slotpy-pack"


@dataclass(frozen=True)
class RecordOutput:
    """A container of the records `[first, first + num_records)`, each padded with zeros to `stride` bytes."""

    name: str
    header: bytes
    index: TensorIndex
    records: RecordSet
    stride: int
    first: int
    num_records: int

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.num_records * self.stride

    def blocks(self, start: int) -> Iterator[memoryview]:
        key, rest = divmod(start, self.stride)
        assert rest == 0, "a pack is interrupted between records only"
        step = max(1, BLOCK_BYTES // self.stride)
        block = np.zeros((min(step, self.num_records), self.stride), np.uint8)
        for begin in range(key, self.num_records, step):
            rows = block[: min(step, self.num_records - begin)]
            self._gather(self.first + begin, rows)
            yield rows.data.cast("B")

    def _gather(self, key: int, out: np.ndarray) -> None:
        """Fill the rows of `out` (n, stride) with the records from `key` on, shard by shard."""
        while len(out):
            shard, row = divmod(key, self.records.rows_per_shard)
            count = min(self.records.rows_per_shard - row, len(out))
            position = 0
            for piece, role in enumerate(self.records.roles):
                stride = int(self.records.strides[piece])
                self._read_rows(
                    int(self.records.files[shard, piece]),
                    int(self.records.bases[shard, piece]) + row * stride,
                    stride,
                    out[:count, position : position + role.nbytes],
                )
                position += role.nbytes
            key += count
            out = out[count:]

    def _read_rows(self, file: int, offset: int, stride: int, out: np.ndarray) -> None:
        count, nbytes = out.shape
        if stride == nbytes < _DIRECT_BYTES:
            packed = np.empty((count, nbytes), np.uint8)
            self.index.read_into(file, offset, packed.data.cast("B"))
            out[:] = packed
        else:
            for row in range(count):
                self.index.read_into(file, offset + row * stride, out[row].data)


@dataclass(frozen=True)
class ResidentOutput:
    """A safetensors file of tensors kept as they are: the source's byte ranges `segments`, one after the other."""

    name: str
    header: bytes
    index: TensorIndex
    segments: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(nbytes for _, _, nbytes in self.segments)

    def blocks(self, start: int) -> Iterator[memoryview]:
        block = memoryview(bytearray(min(BLOCK_BYTES, self.nbytes - len(self.header))))
        filled = 0
        for file, offset, nbytes in self.segments:
            skipped = min(start, nbytes)
            start -= skipped
            end = offset + nbytes
            offset += skipped
            while offset < end:
                count = min(end - offset, len(block) - filled)
                self.index.read_into(file, offset, block[filled : filled + count])
                offset += count
                filled += count
                if filled == len(block):
                    yield block
                    filled = 0
        if filled:
            yield block[:filled]


@dataclass(frozen=True)
class PackPlan:
    """Say what a pack of one source consists of. `outputs` are in the order of writing."""

    source: SourceState
    records: dict[str, PackedRecords]
    outputs: tuple[Output, ...]
    left_out: tuple[str, ...]


def plan_pack(checkpoint: Checkpoint) -> PackPlan:
    """Decide every file of the packed form of an unpacked checkpoint.

    Raises: CheckpointError when the source directory cannot be read.
    """
    directory = resolve_directory(checkpoint.directory)
    index = checkpoint.index
    kinds = [
        ("experts", checkpoint.experts, checkpoint.expert_format, EXPERT_ALIGNMENT),
        ("mtp_experts", checkpoint.mtp_experts, checkpoint.mtp_expert_format, EXPERT_ALIGNMENT),
        ("rows", checkpoint.rows, checkpoint.row_format, ROW_ALIGNMENT),
    ]
    records: dict[str, PackedRecords] = {}
    outputs: list[Output] = []
    streamed: list[RecordSet] = []
    for kind, record_set, weight_format, alignment in kinds:
        if record_set is None or weight_format is None:
            continue
        stride = _round_up(record_set.record_nbytes, alignment)
        containers = _plan_records(kind, index, record_set, stride)
        outputs += containers
        streamed.append(record_set)
        offsets = np.cumsum([0, *(role.nbytes for role in record_set.roles)])
        records[kind] = PackedRecords(
            format=weight_format,
            roles=record_set.roles,
            role_offsets=tuple(offsets[:-1].tolist()),
            rows_per_shard=record_set.rows_per_shard,
            stride=stride,
            files=tuple(RecordFile(file.name, file.num_records, len(file.header)) for file in containers),
        )
    outputs += _plan_residents(index, _fully_streamed(index, streamed))
    copies, left_out = plan_copies(directory)
    outputs += copies
    return PackPlan(describe_source(directory, index, copies), records, tuple(outputs), left_out)


def _plan_records(kind: str, index: TensorIndex, records: RecordSet, stride: int) -> list[RecordOutput]:
    """Cut the records into files of at most MAX_FILE_BYTES, or of one shard where a shard is larger."""
    shard_nbytes = records.rows_per_shard * stride
    step = max(1, (MAX_FILE_BYTES - DATA_ALIGNMENT) // shard_nbytes) * records.rows_per_shard
    files = []
    for number, first in enumerate(range(0, records.num_records, step), start=1):
        count = min(step, records.num_records - first)
        entry = {"dtype": "U8", "shape": [count, stride], "data_offsets": [0, count * stride]}
        header = make_header({f"slotpy.{kind}.{number}": entry}, _WRITER)
        files.append(RecordOutput(f"{kind}-{number:05}.safetensors", header, index, records, stride, first, count))
    return files


def _plan_residents(index: TensorIndex, streamed: set[str]) -> list[ResidentOutput]:
    """Lay out the other tensors, widest dtype first so that each is aligned, else in the order of the source."""
    kept = [(name, span) for name, span in index.spans.items() if name not in streamed]
    kept.sort(key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[1].file, item[1].offset))
    groups: list[list[tuple[str, Span]]] = []
    room = 0
    for name, span in kept:
        if not groups or span.nbytes > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append((name, span))
        room -= span.nbytes
    return [_resident_output(f"resident-{n:05}.safetensors", index, group) for n, group in enumerate(groups, start=1)]


def _resident_output(name: str, index: TensorIndex, tensors: list[tuple[str, Span]]) -> ResidentOutput:
    entries: dict[str, dict[str, Any]] = {}
    segments: list[tuple[int, int, int]] = []
    end = 0
    for tensor, span in tensors:
        offsets = [end, end + span.nbytes]
        end += span.nbytes
        entries[tensor] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": offsets}
        file, offset, nbytes = segments[-1] if segments else (-1, 0, 0)
        if (file, offset + nbytes) == (span.file, span.offset):
            segments[-1] = (file, offset, nbytes + span.nbytes)
        else:
            segments.append((span.file, span.offset, span.nbytes))
    return ResidentOutput(name, make_header(entries, _WRITER), index, tuple(segments))


def _fully_streamed(index: TensorIndex, record_sets: list[RecordSet]) -> set[str]:
    """Name the tensors of which every byte lies in a record; any other is kept whole."""
    tensors = sorted((span.file, span.offset, span.nbytes, name) for name, span in index.spans.items() if span.nbytes)
    # File number and offset as one number: files are below 2**47 bytes.
    starts = np.array([(file << 47) + offset for file, offset, _, _ in tensors], np.int64)
    covered = np.zeros(len(tensors), np.int64)
    for records in record_sets:
        pieces = np.array([records.rows_per_shard * role.nbytes for role in records.roles])
        where = np.searchsorted(starts, (records.files.astype(np.int64) << 47) + records.bases, side="right") - 1
        np.add.at(covered, where, np.broadcast_to(pieces, where.shape))
    return {name for (_, _, nbytes, name), count in zip(tensors, covered.tolist(), strict=True) if count == nbytes}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""A packed checkpoint holds the same bytes, one aligned read per record, whatever interrupts its writing."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from slotpy.checkpoint import pack_plan, writing
from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.checkpoint.formats import DENSE, FP8, FP8_BLOCKS, WeightFormat
from slotpy.checkpoint.index import INDEX_NAME, TensorIndex
from slotpy.checkpoint.manifest import JOURNAL_NAME, MANIFEST_NAME, is_pack, load_pack, verify_pack
from slotpy.checkpoint.pack import pack
from slotpy.checkpoint.records import DTYPE_BYTES, RecordSet, Role
from slotpy.errors import CapacityError, CheckpointError, ReadError, SlotpyError, UsageError
from tests import tiny
from tests.checkpoint.raw_files import write_raw, write_tensors

Pieces = list[tuple[str, str, np.ndarray]]
"""Of one role: its name, its dtype and its bytes, (num_records, nbytes) uint8."""

NUM_LAYERS, NUM_EXPERTS, NUM_SHARDS, ROWS_PER_SHARD = 3, 4, 3, 50


@dataclass
class Source:
    """Collect tensors while a checkpoint is made up, then write them; remember every record by itself."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    shards: dict[str, list[list[tuple[str, int]]]] = field(default_factory=dict)
    roles: dict[str, tuple[Role, ...]] = field(default_factory=dict)
    strides: dict[str, list[int]] = field(default_factory=dict)
    rows_per_shard: dict[str, int] = field(default_factory=dict)
    expected: dict[str, list[bytes]] = field(default_factory=dict)

    def add(self, file: str, name: str, dtype: str, shape: Sequence[int], data: bytes) -> None:
        self.files.setdefault(file, {})[name] = (dtype, tuple(shape), data)

    def record_set(self, kind: str, index: TensorIndex) -> RecordSet:
        spans = [[(index.spans[name], extra) for name, extra in shard] for shard in self.shards[kind]]
        return RecordSet(
            roles=self.roles[kind],
            rows_per_shard=self.rows_per_shard[kind],
            files=np.array([[span.file for span, _ in shard] for shard in spans], np.int32),
            bases=np.array([[span.offset + extra for span, extra in shard] for shard in spans], np.int64),
            strides=np.array(self.strides[kind], np.int64),
        )


def add_stacked(
    source: Source, kind: str, roles: Sequence[Role], num_shards: int, rows: int, rng: np.random.Generator
) -> None:
    """Add a tensor per shard and role, with a row per record; spread over two files."""
    pieces = {role: rng.integers(0, 256, (num_shards * rows, role.nbytes), np.uint8) for role in roles}
    for shard in range(num_shards):
        for role, data in pieces.items():
            part = data[shard * rows : (shard + 1) * rows]
            file = f"{kind}-{shard % 2}.safetensors"
            source.add(file, f"{kind}.{shard}.{role.name}", role.dtype, (rows, *role.shape), part.tobytes())
    source.roles[kind] = tuple(roles)
    source.rows_per_shard[kind] = rows
    source.shards[kind] = [[(f"{kind}.{shard}.{role.name}", 0) for role in roles] for shard in range(num_shards)]
    source.strides[kind] = [role.nbytes for role in roles]
    source.expected[kind] = [b"".join(pieces[role][n].tobytes() for role in roles) for n in range(num_shards * rows)]


def add_single(source: Source, kind: str, roles: Sequence[Role], num_records: int, rng: np.random.Generator) -> None:
    """Add a tensor per record and role, as the official FP8 files have them."""
    add_stacked(source, kind, roles, num_records, 1, rng)


def add_fused(source: Source, kind: str, num_layers: int, num_experts: int, rng: np.random.Generator) -> None:
    """Add BF16 experts with gate and up in one tensor, as the official BF16 files have them."""
    inner, size = 6, 10
    shape = {"gate.weight": (inner, size), "up.weight": (inner, size), "down.weight": (size, inner)}
    source.roles[kind] = tuple(Role(name, "BF16", dims) for name, dims in shape.items())
    half = inner * size * 2
    gate_up = rng.integers(0, 256, (num_layers, num_experts, 2 * half), np.uint8)
    down = rng.integers(0, 256, (num_layers, num_experts, half), np.uint8)
    for layer in range(num_layers):
        file = f"{kind}-{layer % 2}.safetensors"
        source.add(file, f"{kind}.{layer}.gate_up", "BF16", (num_experts, 2 * inner, size), gate_up[layer].tobytes())
        source.add(file, f"{kind}.{layer}.down", "BF16", (num_experts, size, inner), down[layer].tobytes())
    source.rows_per_shard[kind] = num_experts
    source.shards[kind] = [
        [(f"{kind}.{layer}.gate_up", 0), (f"{kind}.{layer}.gate_up", half), (f"{kind}.{layer}.down", 0)]
        for layer in range(num_layers)
    ]
    source.strides[kind] = [2 * half, 2 * half, half]
    source.expected[kind] = [
        gate_up[layer, expert].tobytes() + down[layer, expert].tobytes()
        for layer in range(num_layers)
        for expert in range(num_experts)
    ]


def affine_roles(owner: str, size: int) -> list[Role]:
    return [
        Role(f"{owner}.weight", "U32", (size,)),
        Role(f"{owner}.scales", "BF16", (size // 2,)),
        Role(f"{owner}.biases", "BF16", (size // 2,)),
    ]


def add_affine(source: Source, rng: np.random.Generator) -> None:
    roles = [role for owner in ("gate", "up", "down") for role in affine_roles(owner, 60)]
    add_stacked(source, "experts", roles, NUM_LAYERS, NUM_EXPERTS, rng)
    add_stacked(source, "rows", affine_roles("row", 10), NUM_SHARDS, ROWS_PER_SHARD, rng)


def add_bf16(source: Source, rng: np.random.Generator) -> None:
    add_fused(source, "experts", NUM_LAYERS, NUM_EXPERTS, rng)
    add_fused(source, "mtp_experts", 1, NUM_EXPERTS, rng)
    add_stacked(source, "rows", [Role("row.weight", "BF16", (80,))], NUM_SHARDS, ROWS_PER_SHARD, rng)


def add_fp8(source: Source, rng: np.random.Generator) -> None:
    roles = [
        role
        for owner in ("gate", "up", "down")
        for role in (Role(f"{owner}.weight", "F8_E4M3", (9, 7)), Role(f"{owner}.scale_inv", "F32", (1, 1)))
    ]
    add_single(source, "experts", roles, NUM_LAYERS * NUM_EXPERTS, rng)
    add_stacked(source, "rows", [Role("row.weight", "F8_E4M3", (160,))], NUM_SHARDS, ROWS_PER_SHARD, rng)
    source.add("rest.safetensors", "rows.weight_scale", "BF16", (), b"\x00\x3f")
    # Belongs to an expert and is in no record, like the activation scales of NVFP4 files.
    source.add("experts-0.safetensors", "experts.0.input_scale", "F32", (), b"abcd")


AFFINE = WeightFormat("affine", bits=4, group_size=32)
LAYOUTS: dict[str, tuple[Callable[[Source, np.random.Generator], None], WeightFormat, WeightFormat]] = {
    "mlx-affine": (add_affine, AFFINE, AFFINE),
    "bf16": (add_bf16, DENSE, DENSE),
    "fp8": (add_fp8, FP8_BLOCKS, FP8),
}


def make_source(directory: Path, layout: str) -> Source:
    """Write a checkpoint of the given layout, with tensors that stay resident and the files that come with one."""
    rng = np.random.default_rng(7)
    source = Source()
    LAYOUTS[layout][0](source, rng)
    for name, dtype, shape, nbytes in [
        ("embed.weight", "U32", (40, 8), 1280),
        ("visual.weight", "BF16", (33,), 66),
        ("norm.weight", "F32", (5,), 20),
        ("ids", "I64", (3,), 24),
        ("mask", "U8", (3,), 3),
        ("empty", "F32", (0, 4), 0),
        ("scalar", "F32", (), 4),
    ]:
        source.add("rest.safetensors", name, dtype, shape, rng.bytes(nbytes))
    directory.mkdir(parents=True)
    for file, tensors in source.files.items():
        write_tensors(directory / file, tensors)
    weight_map = {name: file for file, tensors in source.files.items() for name in tensors}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "made_up"}')
    (directory / "tokenizer.json").write_bytes(rng.bytes(5000))
    (directory / "chat_template.jinja").write_bytes(b"")
    (directory / ".gitattributes").write_text("hidden")
    (directory / "figures").mkdir()
    return source


def open_source(directory: Path, layout: str, source: Source) -> Checkpoint:
    index = TensorIndex.open(directory)
    _, expert_format, row_format = LAYOUTS[layout]
    with_mtp = "mtp_experts" in source.expected
    config: Any = None  # packing looks at records and tensors only
    return Checkpoint(
        directory=directory,
        config=config,
        index=index,
        files=index.files,
        packed=False,
        layout=layout,
        experts=source.record_set("experts", index),
        expert_format=expert_format,
        rows=source.record_set("rows", index),
        row_format=row_format,
        row_scale="rows.weight_scale" if layout == "fp8" else None,
        mtp_experts=source.record_set("mtp_experts", index) if with_mtp else None,
        mtp_expert_format=expert_format if with_mtp else None,
        resident={},
        notes=(),
    )


def make_checkpoint(directory: Path, layout: str = "mlx-affine") -> Checkpoint:
    return open_source(directory, layout, make_source(directory, layout))


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir() if path.is_file()}


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks, files and durable stretches so small that a tiny checkpoint has many of each."""
    monkeypatch.setattr(pack_plan, "BLOCK_BYTES", 3 * 16384)
    monkeypatch.setattr(pack_plan, "MAX_FILE_BYTES", 10 * 16384)
    monkeypatch.setattr(writing, "_SYNC_BYTES", 40_000)


# What is written


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_record_is_one_aligned_contiguous_read_of_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, small: bool
) -> None:
    if small:
        small_blocks(monkeypatch)
    source = make_source(tmp_path / "in", layout)
    manifest = pack(open_source(tmp_path / "in", layout, source), tmp_path / "out")
    assert list(manifest.records) == [kind for kind in ("experts", "mtp_experts", "rows") if kind in source.expected]
    index = TensorIndex.open(tmp_path / "out")
    files = index.files + manifest.record_files
    for kind, expected in source.expected.items():
        records = load_pack(tmp_path / "out").record_set(kind, len(index.files))
        assert records.roles == source.roles[kind]
        assert records.num_records == manifest.records[kind].num_records == len(expected)
        numbers, offsets = records.locate(np.arange(len(expected)))
        stride = manifest.records[kind].stride
        alignment = 32 if kind == "rows" else 16384
        assert stride % alignment == 0 and stride - records.record_nbytes < alignment
        for key, record in enumerate(expected):
            begin = int(offsets[key, 0])
            assert begin % alignment == 0
            assert len(set(numbers[key])) == 1
            sizes = [role.nbytes for role in records.roles]
            assert offsets[key].tolist() == [begin + sum(sizes[:piece]) for piece in range(len(sizes))]
            stored = files[numbers[key, 0]].read_bytes()[begin : begin + stride]
            assert stored == record + bytes(stride - len(record))
    if small:
        assert all(len(records.files) > 1 for kind, records in manifest.records.items() if kind == "experts")


@pytest.mark.parametrize("block_nbytes", [7, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_else_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, block_nbytes: int
) -> None:
    monkeypatch.setattr(pack_plan, "BLOCK_BYTES", block_nbytes)
    monkeypatch.setattr(pack_plan, "MAX_FILE_BYTES", 1300)
    source = make_source(tmp_path / "in", layout)
    checkpoint = open_source(tmp_path / "in", layout, source)
    manifest = pack(checkpoint, tmp_path / "out")
    before, after = checkpoint.index, TensorIndex.open(tmp_path / "out")
    streamed = {name for shards in source.shards.values() for shard in shards for name, _ in shard}
    containers = {name for name in after.spans if name.startswith("slotpy.")}
    assert after.spans.keys() - containers == before.spans.keys() - streamed
    for name in after.spans.keys() - containers:
        assert after.spans[name].dtype == before.spans[name].dtype
        assert after.spans[name].shape == before.spans[name].shape
        assert after.spans[name].offset % DTYPE_BYTES[after.spans[name].dtype] == 0
        assert after.read(name).tobytes() == before.read(name).tobytes()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert manifest.left_out == ("figures",)
    assert not (tmp_path / "out" / INDEX_NAME).exists()
    assert (manifest.layout, manifest.row_scale) == (layout, checkpoint.row_scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_library_reads_every_file(tmp_path: Path, layout: str) -> None:
    manifest = pack(make_checkpoint(tmp_path / "in", layout), tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert safetensors.deserialize(path.read_bytes())
    for path in manifest.record_files:
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + length) % 16384 == 0
        ((name, tensor),) = safetensors.deserialize(path.read_bytes())
        assert name.startswith("slotpy.") and tensor["dtype"] == "U8" and len(tensor["shape"]) == 2


def test_tensor_only_partly_in_records_is_kept_whole(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "in")
    fewer = replace(checkpoint.rows, rows_per_shard=ROWS_PER_SHARD - 1)
    pack(replace(checkpoint, rows=fewer), tmp_path / "out")
    index = TensorIndex.open(tmp_path / "out")
    kept = [name for name in index.spans if name.startswith("rows.")]
    assert len(kept) == 3 * NUM_SHARDS
    for name in kept:
        assert index.read(name).tobytes() == checkpoint.index.read(name).tobytes()


def test_neighbours_in_different_files_are_read_from_their_own(tmp_path: Path) -> None:
    """The second file's data begins at the offset where the first file's ends."""
    source = make_source(tmp_path / "in", "mlx-affine")
    entry = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
    write_raw(tmp_path / "in" / "y.safetensors", json.dumps({"a": entry}).encode().ljust(104), b"a" * 16)
    write_raw(tmp_path / "in" / "z.safetensors", json.dumps({"b": entry}).encode().ljust(120), b"b" * 16)
    pack(open_source(tmp_path / "in", "mlx-affine", source), tmp_path / "out")
    index = TensorIndex.open(tmp_path / "out")
    assert (index.read("a").tobytes(), index.read("b").tobytes()) == (b"a" * 16, b"b" * 16)


def test_manifest_names_every_file_with_size_and_hash(tmp_path: Path) -> None:
    manifest = pack(make_checkpoint(tmp_path / "in", "bf16"), tmp_path / "out")
    written = {path.name: path for path in (tmp_path / "out").iterdir() if path.name != MANIFEST_NAME}
    assert {file.name for file in manifest.files} == written.keys()
    for file in manifest.files:
        data = written[file.name].read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.nbytes, file.sha256)
    assert load_pack(tmp_path / "out") == manifest
    assert verify_pack(tmp_path / "out") == manifest
    sizes = {file.name: file.nbytes for file in manifest.source.files}
    assert sizes["config.json"] == (tmp_path / "in" / "config.json").stat().st_size
    assert {path.name for path in (tmp_path / "in").glob("*.safetensors")} < sizes.keys()


def test_source_is_left_as_it_was(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "in")
    before = digests(tmp_path / "in")
    times = {path.name: path.stat().st_mtime_ns for path in [tmp_path / "in", *(tmp_path / "in").iterdir()]}
    pack(checkpoint, tmp_path / "out")
    assert digests(tmp_path / "in") == before
    assert {path.name: path.stat().st_mtime_ns for path in [tmp_path / "in", *(tmp_path / "in").iterdir()]} == times


def test_memory_stays_within_a_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_plan, "BLOCK_BYTES", 128 << 10)
    checkpoint = make_checkpoint(tmp_path / "in")
    tracemalloc.start()
    try:
        pack(checkpoint, tmp_path / "small")
        small = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The expert container alone is larger than what is held at any time.
    assert small < 1 << 20


def test_progress_counts_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    seen: list[tuple[str, int, int]] = []
    manifest = pack(make_checkpoint(tmp_path / "in"), tmp_path / "out", progress=lambda *report: seen.append(report))
    total = sum(file.nbytes for file in manifest.files)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == total
    assert {report[2] for report in seen} == {total}
    assert {name for name, _, _ in seen} == {file.name for file in manifest.files}


# Going on after an interruption

KILLER = """
import json, os, random, shutil, signal, sys
from pathlib import Path
from slotpy.checkpoint import pack_plan, writing
from slotpy.checkpoint.manifest import JOURNAL_NAME, MANIFEST_NAME
from slotpy.checkpoint.pack import pack
from tests.checkpoint.test_pack import digests, make_source, open_source

pack_plan.BLOCK_BYTES, pack_plan.MAX_FILE_BYTES, writing._SYNC_BYTES = 3 * 16384, 10 * 16384, 40_000
work, layout, rng = Path(sys.argv[1]), sys.argv[2], random.Random(sys.argv[3])
out = work / "out"
source = make_source(work / "in", layout)
write_all = writing.write_all
steps = 0

def counted(action, deadline):
    # Every step that changes the disk counts; at the deadline the process dies, in a write after a part of it.
    def step(*arguments, **options):
        global steps
        steps += 1
        if steps == deadline:
            if action is write_all:
                descriptor, data = arguments
                os.write(descriptor, memoryview(data)[: rng.randrange(len(data) + 1)])
            os.kill(os.getpid(), signal.SIGKILL)
        return action(*arguments, **options)
    return step

def pack_in_child(deadline):
    rng.random()  # the child inherits the state, so that each dies after another part
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for owner, name in [
        (writing, "write_all"), (writing, "sync"), (writing, "sync_directory"),
        (Path, "rename"), (Path, "mkdir"), (writing.Journal, "remove"), (os, "ftruncate"),
    ]:
        setattr(owner, name, counted(getattr(owner, name), deadline))
    pack(open_source(work / "in", layout, source), out)
    (work / "steps").write_text(str(steps))
    os._exit(0)

def lose_unsynced_bytes():
    # What a power cut may do to bytes that were written and not synced: their loss or damage.
    journal = out / JOURNAL_NAME
    text = journal.read_bytes() if journal.exists() else b""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\\n")]
    durable = {line["name"]: line["nbytes"] for line in lines[1:]}
    for path in out.glob("*.safetensors"):
        size, kept = path.stat().st_size, durable.get(path.name, 0)
        with open(path, "r+b") as file:
            file.seek(kept)
            file.write(bytes(size - kept))
            if rng.random() < 0.5:
                file.truncate(rng.randint(kept, size))

def pack_killed(deadlines):
    # Die at each deadline, then finish.
    shutil.rmtree(out, ignore_errors=True)
    kills = 0
    for deadline in deadlines:
        status = pack_in_child(deadline)
        assert status in (0, -signal.SIGKILL), status
        kills += status != 0
        if out.exists() and not (out / MANIFEST_NAME).exists():
            lose_unsynced_bytes()
    assert pack_in_child(0) == 0
    print(json.dumps([kills, digests(out)]))

pack_killed([])
total = int((work / "steps").read_text())
for step in range(1, total + 1, 1 + total // 12):
    pack_killed([step])
for last in range(7):
    pack_killed([total - last])
for _ in range(2):
    pack_killed([rng.randint(1, total // 3) for _ in range(8)])
"""


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_pack_killed_anywhere_any_number_of_times_ends_in_the_same_bytes(tmp_path: Path, layout: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), layout, "seed"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (no_kills, expected), *killed = [json.loads(line) for line in run.stdout.splitlines()]
    assert no_kills == 0
    assert sum(kills for kills, _ in killed) > 25
    for _, found in killed:
        assert found == expected


class Stop(Exception):
    """End a pack from its progress callback, as Ctrl-C would."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, out: Path, name: str) -> None:
    """Pack until file `name` is begun, then stop."""
    small_blocks(monkeypatch)

    def stop(file: str, done: int, total: int) -> None:
        if file == name:
            raise Stop

    with pytest.raises(Stop):
        pack(checkpoint, out, progress=stop)


def test_finished_files_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    finished = sorted(out.glob("experts-*.safetensors"))
    assert len(finished) > 1
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in finished]
    pack(checkpoint, out)
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in finished] == before
    verify_pack(out)


@pytest.mark.parametrize("harm", ["damaged", "longer", "shorter", "gone"])
def test_bytes_of_an_earlier_call_are_hashed_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    path = out / "experts-00001.safetensors"
    data = path.read_bytes()
    match harm:
        case "damaged":
            path.write_bytes(data[:20_000] + b"damaged" + data[20_007:])
        case "longer":
            path.write_bytes(data + b"more")
        case "shorter":
            path.write_bytes(data[:-1])
        case "gone":
            path.unlink()
    pack(checkpoint, out)
    assert path.read_bytes() == data
    verify_pack(out)


def test_journal_line_is_written_only_after_its_bytes_were_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    unsynced: set[int] = set()
    write_all, sync, mark = writing.write_all, writing.sync, writing.Journal.mark

    def note_write(descriptor: int, data: memoryview) -> None:
        unsynced.add(descriptor)
        write_all(descriptor, data)

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        unsynced.discard(descriptor)

    def check_mark(journal: writing.Journal, name: str, nbytes: int, sha256: str) -> None:
        assert not unsynced
        mark(journal, name, nbytes, sha256)

    monkeypatch.setattr(writing, "write_all", note_write)
    monkeypatch.setattr(writing, "sync", note_sync)
    monkeypatch.setattr(writing.Journal, "mark", check_mark)
    pack(make_checkpoint(tmp_path / "in"), tmp_path / "out")
    assert not unsynced


@pytest.mark.parametrize("cut", [1, 20])
def test_torn_journal_line_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    journal = out / JOURNAL_NAME
    os.truncate(journal, journal.stat().st_size - cut)
    interrupt_at(monkeypatch, checkpoint, out, "resident-00001.safetensors")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["name"] for line in lines[1:]][-1] == "rows-00001.safetensors"
    pack(checkpoint, out)
    verify_pack(out)


def test_unfinished_pack_is_known_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    assert not is_pack(tmp_path / "in")
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    assert is_pack(out)
    with pytest.raises(CheckpointError, match=r"unfinished pack.*Run the same `slotpy pack` again"):
        load_pack(out)


def test_packing_again_checks_a_finished_pack(tmp_path: Path) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    manifest = pack(checkpoint, out)
    before = digests(out)
    assert pack(checkpoint, out) == manifest
    assert digests(out) == before
    with open(out / "rows-00001.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"bytes changed.*rows-00001\.safetensors"):
        pack(checkpoint, out)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("change", ["size", "time", "config", "more", "fewer"])
def test_source_that_changed_since_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, change: str
) -> None:
    source = make_source(tmp_path / "in", "mlx-affine")
    checkpoint, out = open_source(tmp_path / "in", "mlx-affine", source), tmp_path / "out"
    if finished:
        pack(checkpoint, out)
    else:
        interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    before = digests(out)
    file = tmp_path / "in" / ("config.json" if change == "config" else "tokenizer.json")
    status = file.stat()
    match change:
        case "size":
            file.write_bytes(b"smaller")
        case "time":
            os.utime(file, ns=(0, status.st_mtime_ns + 1))
        case "config":
            file.write_bytes(file.read_bytes().replace(b"made_up", b"another"))
            os.utime(file, ns=(0, status.st_mtime_ns))
        case "more":
            write_tensors(tmp_path / "in" / "new.safetensors", {"new": ("U8", (1,), b"x")})
        case "fewer":
            file.unlink()
    with pytest.raises(CheckpointError, match="the source is not the one") as caught:
        pack(open_source(tmp_path / "in", "mlx-affine", source), out)
    name = {"config": "config.json", "more": "new.safetensors"}.get(change, "tokenizer.json")
    assert caught.value.file == name
    assert "Remove the directory" in caught.value.hint
    assert digests(out) == before


def test_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "in")
    small_blocks(monkeypatch)

    def change(file: str, done: int, total: int) -> None:
        os.utime(tmp_path / "in" / "rows-1.safetensors", ns=(0, 1))

    with pytest.raises(ReadError, match=r"rows-1\.safetensors changed after it was opened"):
        pack(checkpoint, tmp_path / "out", progress=change)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_pack_begun_in_another_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    monkeypatch.setattr(pack_plan, "MAX_FILE_BYTES", 1 << 30)
    with pytest.raises(CheckpointError, match="in another form"):
        pack(checkpoint, out)


# Where it may be written


def test_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_free_bytes", lambda directory: 17 << 20)
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "deep" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(pack_plan, "EXPERT_ALIGNMENT", 1 << 20)
        with pytest.raises(CapacityError, match=r"deep/out needs 28.* MiB of disk, 17 MiB available"):
            pack(checkpoint, out)
    assert not out.parent.exists()
    pack(checkpoint, out)


def test_free_disk_counts_what_an_earlier_call_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    total = sum(output.nbytes for output in pack_plan.plan_pack(checkpoint).outputs)
    there = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    spare = writing._SPARE_BYTES
    monkeypatch.setattr(writing, "_free_bytes", lambda directory: total - there + spare - 1)
    with pytest.raises(CapacityError, match="Free 1 B"):
        pack(checkpoint, out)
    monkeypatch.setattr(writing, "_free_bytes", lambda directory: total - there + spare)
    pack(checkpoint, out)
    monkeypatch.setattr(writing, "_free_bytes", lambda directory: 0)
    pack(checkpoint, out)


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [(errno.ENOSPC, CapacityError, "No space left"), (errno.EIO, SlotpyError, "Could not write")],
)
def test_failing_write_says_what_to_do_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[SlotpyError], words: str
) -> None:
    small_blocks(monkeypatch)
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    calls = 0

    def fail(descriptor: int, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise OSError(number, os.strerror(number))
        os.write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_all", fail)
        with pytest.raises(error, match=words) as caught:
            pack(checkpoint, out)
    assert type(caught.value) is error
    assert "run the same command again" in caught.value.hint.lower()
    pack(checkpoint, out)
    verify_pack(out)


@pytest.mark.parametrize("where", ["in", "in/packed", ".", "link", "link/packed"])
def test_out_that_touches_the_source_is_refused(tmp_path: Path, where: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "in")
    (tmp_path / "link").symlink_to("in")
    before = digests(tmp_path / "in")
    with pytest.raises(UsageError, match="never touches its source"):
        pack(checkpoint, tmp_path / where)
    assert digests(tmp_path / "in") == before


def test_foreign_out_is_refused(tmp_path: Path) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds other files, such as thesis\.tex"):
        pack(checkpoint, out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        pack(checkpoint, out / "thesis.tex")


def test_empty_out_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    pack(make_checkpoint(tmp_path / "in"), tmp_path / "out")


def test_links_in_out_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "experts-00001.safetensors")
    (out / "experts-00001.safetensors").unlink()
    (out / "experts-00001.safetensors").symlink_to(tmp_path / "in" / "experts-0.safetensors")
    before = digests(tmp_path / "in")
    with pytest.raises(SlotpyError, match=r"Could not write .*experts-00001\.safetensors"):
        pack(checkpoint, out)
    assert digests(tmp_path / "in") == before


def test_packed_checkpoint_is_not_packed_again(tmp_path: Path) -> None:
    checkpoint = replace(make_checkpoint(tmp_path / "in"), packed=True)
    with pytest.raises(UsageError, match="packed already"):
        pack(checkpoint, tmp_path / "out")


def test_two_packs_do_not_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = make_checkpoint(tmp_path / "in"), tmp_path / "out"
    interrupt_at(monkeypatch, checkpoint, out, "rows-00001.safetensors")
    with open(out / JOURNAL_NAME) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another `slotpy pack` is writing"):
            pack(checkpoint, out)
    pack(checkpoint, out)


# Opening


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.update(format_version=2), "pack of another version; .*expected 1; found 2"),
        (lambda m: m.pop("layout"), "malformed manifest"),
        (lambda m: m.update(records=[]), "malformed manifest"),
        (lambda m: m["files"][0].pop("sha256"), "malformed manifest"),
        (lambda m: m["files"][0].update(mode="0644"), "malformed manifest"),
        (lambda m: m["records"]["experts"]["roles"][1].update(offset=3), "the roles of experts do not fill"),
        (lambda m: m["records"]["experts"]["roles"][0].update(dtype="U7"), "malformed manifest"),
        (lambda m: m["records"]["rows"].update(stride=32), "the roles of rows do not fill"),
        (lambda m: m["records"]["experts"].update(rows_per_shard=5), "holds a part of a shard"),
        (lambda m: m["records"]["experts"]["files"][0].update(num_records=8), "do not fill it"),
        (lambda m: m["records"]["experts"]["files"][0].update(name="x"), "malformed manifest"),
        (lambda m: m["files"][0].update(nbytes=1), "malformed manifest"),
        (lambda m: m["files"][-1].update(nbytes=1), "wrong size of a packed file"),
    ],
)
def test_damaged_manifest_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str) -> None:
    pack(make_checkpoint(tmp_path / "in"), tmp_path / "out")
    edit(tmp_path / "out" / MANIFEST_NAME, change)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load_pack(tmp_path / "out")
    assert "slotpy pack" in caught.value.hint


def test_manifest_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="the manifest is not JSON"):
        load_pack(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="not a packed checkpoint"):
        load_pack(tmp_path)


def test_missing_or_cut_file_is_found_at_opening_and_changed_bytes_by_verify(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(make_checkpoint(tmp_path / "in"), out)
    path = out / "resident-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    load_pack(out)
    with pytest.raises(CheckpointError, match=r"bytes changed.*resident-00001"):
        verify_pack(out)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"wrong size.*resident-00001") as caught:
        load_pack(out)
    assert (caught.value.expected, caught.value.found) == (f"{len(data)} bytes", f"{len(data) - 1} bytes")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"missing file of a pack.*resident-00001"):
        load_pack(out)


# From a published layout to the opened pack


@pytest.mark.parametrize("layout", tiny.LAYOUTS)
def test_opened_pack_has_the_records_and_tensors_of_its_source(tmp_path: Path, layout: str) -> None:
    before = open_checkpoint(tiny.write_tiny(tmp_path / "in", layout))
    pack(before, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out")
    assert after.packed and not before.packed
    for name in ("layout", "config", "expert_format", "row_format", "row_scale", "mtp_expert_format", "resident"):
        assert getattr(after, name) == getattr(before, name)
    for tensor in before.resident.values():
        for name in tensor.parts.values():
            assert after.index.spans[name].dtype == before.index.spans[name].dtype
            np.testing.assert_array_equal(after.index.read_array(name), before.index.read_array(name))
    assert read_records(after, after.experts) == read_records(before, before.experts)
    assert read_records(after, after.rows) == read_records(before, before.rows)
    assert (before.mtp_experts is None) == (after.mtp_experts is None)
    if before.mtp_experts is not None and after.mtp_experts is not None:
        assert read_records(after, after.mtp_experts) == read_records(before, before.mtp_experts)


def read_records(checkpoint: Checkpoint, records: RecordSet) -> list[list[tuple[Role, bytes]]]:
    """Read every record piece by piece, at the places that `locate` gives."""
    contents = [path.read_bytes() for path in checkpoint.files]
    files, offsets = records.locate(np.arange(records.num_records))
    return [
        [
            (role, contents[file][offset : offset + role.nbytes])
            for role, file, offset in zip(records.roles, files[key], offsets[key], strict=True)
        ]
        for key in range(records.num_records)
    ]

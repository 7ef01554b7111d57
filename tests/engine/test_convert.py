"""A converted checkpoint holds what MLX's own quantisation gives, whatever its source's layout and interruptions."""

import hashlib
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors

from slotpy.checkpoint import writing
from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.formats import WeightFormat
from slotpy.checkpoint.index import INDEX_NAME, TensorIndex
from slotpy.checkpoint.pack import pack
from slotpy.checkpoint.records import DTYPE_BYTES
from slotpy.engine import convert as module
from slotpy.engine.convert import JOURNAL_NAME, Conversion, convert
from slotpy.errors import CapacityError, CheckpointError, ReadError, UsageError
from tests import tiny
from tests.checkpoint.raw_files import write_raw
from tests.golden_model import largest
from tests.models.test_layouts_run import logits_of

SMALL = {"num_layers": 4, "num_experts": 4, "shards": 4, "vision": False}


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That bytes are synced before the journal says so is tested with `slotpy pack`, which writes the same way."""
    monkeypatch.setattr(writing, "sync", lambda descriptor: None)


def in_float(dtype: str) -> Callable[[Path], Path]:
    """Write values that BF16 cannot hold, in a dtype that can hold more of them."""

    def write(directory: Path) -> Path:
        config = tiny.tiny_config(vision=False)
        values = {name: value * np.float32(1.001) for name, value in tiny.tiny_values(config, 2).items()}
        return tiny.write_values(directory, values, config, dtype)

    return write


SOURCES: dict[str, Callable[[Path], Path]] = {
    "bf16": lambda directory: tiny.write_tiny(directory, "bf16", seed=2),
    "bf16-per-expert": lambda directory: tiny.write_tiny(directory, "bf16-per-expert", seed=2),
    "fp8": lambda directory: tiny.write_tiny(directory, "fp8", seed=2),
    "fp8-f32-scales": lambda directory: tiny.write_tiny(directory, "fp8", seed=2, scale_inv="F32"),
    # 160 and 192 are no multiples of 128: the last blocks of 128x128 scales are partial.
    "fp8-partial-blocks": lambda directory: tiny.write_tiny(
        directory, "fp8", seed=2, moe_intermediate_size=160, hidden=192
    ),
    "f32": in_float("F32"),
    "f16": in_float("F16"),
}
every_source = pytest.mark.parametrize("source", SOURCES)


def run(source: Path, out: Path, bits: int = 4, group_size: int = 64, **options: Callable) -> Conversion:
    return convert(open_checkpoint(source), out, bits=bits, group_size=group_size, **options)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir() if path.is_file()}


def without_journal(directory: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(directory).items() if name != JOURNAL_NAME}


def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices, files and durable stretches so small that a tiny checkpoint has many of each."""
    monkeypatch.setattr(module, "_SLICE_VALUES", 10_000)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 300_000)
    monkeypatch.setattr(writing, "_SYNC_BYTES", 50_000)


# The values


def expected_tensors(source: Path, bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch) -> tiny.Stored:
    """Arrange the source's values as MLX files have them, quantised by one call of mx.quantize a weight."""

    config = json.loads((source / "config.json").read_text())
    expert_widths = [config["text_config"][key] for key in ("hidden_size", "moe_intermediate_size")]

    def quantise(owner: str, value: np.ndarray, _: int) -> tiny.Stored:
        widths = expert_widths if "switch_mlp" in owner else value.shape[-1:]
        group = max(g for g in (32, 64, 128) if g <= group_size and not any(width % g for width in widths))
        parts = mx.quantize(mx.array(value).astype(mx.bfloat16), group_size=group, bits=bits)
        codes = [np.array(part.view(mx.uint16 if part.dtype == mx.bfloat16 else part.dtype)) for part in parts]
        return {
            f"{owner}.{part}": ("U32" if part == "weight" else "BF16", array)
            for part, array in zip(("weight", "scales", "biases"), codes, strict=True)
        }

    monkeypatch.setattr(tiny, "_affine", quantise)
    values = {name: value for name, value in tiny.dequantised(source).items() if not name.startswith(tiny.VISION)}
    return tiny._to_mlx(values, "shard_") | tiny._constants(config, "language_model.model.")


def assert_same_tensors(found: tiny.Stored, expected: tiny.Stored) -> None:
    assert found.keys() == expected.keys()
    for name, (dtype, codes) in expected.items():
        assert found[name][0] == dtype, name
        np.testing.assert_array_equal(found[name][1], codes, err_msg=name)


@every_source
def test_every_tensor_is_what_mlx_quantises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    directory = SOURCES[source](tmp_path / "in")
    if source != "f32":
        small_slices(monkeypatch)
    run(directory, tmp_path / "out")
    assert_same_tensors(tiny.read_stored(tmp_path / "out"), expected_tensors(directory, 4, 64, monkeypatch))


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 32), (8, 64), (8, 128)])
def test_every_tensor_is_what_mlx_quantises_with_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, group_size: int
) -> None:
    directory = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    conversion = run(directory, tmp_path / "out", bits, group_size)
    expected = expected_tensors(directory, bits, group_size, monkeypatch)
    assert_same_tensors(tiny.read_stored(tmp_path / "out"), expected)
    assert conversion.checkpoint.expert_format == WeightFormat("affine", bits, min(group_size, 64))


def test_neighbours_in_different_files_are_read_from_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert's matrix begins in its file where the one before it ends in another."""
    source = tiny.write_tiny(tmp_path / "in", "bf16-per-expert", **SMALL)
    stored = tiny.read_stored(source)
    for path in source.glob("model*"):
        path.unlink()
    first, second = (f"{tiny.TEXT}layers.0.mlp.experts.{expert}.gate_proj.weight" for expert in (0, 1))
    begin = 1 << 20  # room for any header
    end = begin + stored[first][1].nbytes
    rest = sorted(stored.keys() - {first}, key=lambda name: name != second)
    for file, names, start in (("a.safetensors", [first], begin), ("b.safetensors", rest, end)):
        header, data = {}, b""
        for name in names:
            dtype, codes = stored[name]
            offsets = [len(data), len(data) + codes.nbytes]
            header[name] = {"dtype": dtype, "shape": codes.shape, "data_offsets": offsets}
            data += codes.tobytes()
        write_raw(source / file, json.dumps(header).encode().ljust(start - 8), data)
    run(source, tmp_path / "out")
    assert_same_tensors(tiny.read_stored(tmp_path / "out"), expected_tensors(source, 4, 64, monkeypatch))


@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_the_result_runs_to_the_logits_of_its_values(tmp_path: Path, source: str) -> None:
    directory = SOURCES[source](tmp_path / "in")
    conversion = run(directory, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    plain = tiny.write_values(tmp_path / "plain", tiny.dequantised(tmp_path / "out"), config)
    expected = logits_of(plain, float32=True)
    assert conversion.checkpoint.layout == "mlx-affine"
    assert np.std(expected) > 0.1
    assert largest(logits_of(tmp_path / "out", float32=True) - expected) < 1e-4


def test_eight_bits_stay_close_to_the_source(tmp_path: Path) -> None:
    """Nothing is swapped or scaled: the only difference is that of quantisation, by the median over all logits."""
    directory = SOURCES["bf16"](tmp_path / "in")
    run(directory, tmp_path / "out", bits=8)
    expected = logits_of(directory, float32=True)
    difference = np.abs(logits_of(tmp_path / "out", float32=True) - expected)
    assert np.median(difference) < 0.02 * np.std(expected)


@pytest.mark.parametrize("folded", [False, True])
def test_the_one_is_added_to_norms_exactly_once(tmp_path: Path, folded: bool) -> None:
    config = tiny.tiny_config(**SMALL)
    values = tiny.tiny_values(config)
    norms = [name for name in values if "norm" in name and not name.endswith("linear_attn.norm.weight")]
    assert len(norms) > 20
    before = {name: values[name] + 1 for name in norms}
    if folded:
        values |= before
    run(tiny.write_values(tmp_path / "in", values, config), tmp_path / "out")
    stored = tiny.read_stored(tmp_path / "out")
    for name in norms:
        dtype, codes = stored[tiny.mlx_name(name, "shard_")]
        assert dtype == "BF16"
        np.testing.assert_array_equal(tiny._widen(codes), tiny.round_bf16(before[name]))


def test_the_draft_head_is_converted_and_its_experts_stacked(tmp_path: Path) -> None:
    conversion = run(tiny.write_tiny(tmp_path / "in", "bf16"), tmp_path / "out")
    after = conversion.checkpoint
    assert after.mtp_experts is not None and after.mtp_experts.num_records == 8
    assert after.mtp_expert_format == WeightFormat("affine", 4, 64)
    shape = after.index.spans["mtp.layers.0.mlp.switch_mlp.gate_proj.weight"].shape
    assert shape == (8, 64, 128 * 4 // 32)
    assert after.resident["mtp.fc_hidden"].format == WeightFormat("affine", 4, 64)


def test_a_source_without_draft_head_is_converted(tmp_path: Path) -> None:
    conversion = run(tiny.write_tiny(tmp_path / "in", "bf16", mtp=False), tmp_path / "out")
    assert conversion.checkpoint.mtp_experts is None
    assert not any(name.startswith("mtp.") for name in conversion.checkpoint.index.spans)


# The files


def test_small_files_are_copied_and_vision_is_noted(tmp_path: Path) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16")
    (source / "tokenizer.json").write_bytes(b"\x00words")
    (source / "chat_template.jinja").write_text("")
    (source / "figures").mkdir()
    conversion = run(source, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert conversion.left_out == ("figures",)
    assert conversion.notes == ("21 vision tensors (86.3 KiB) are left out: only text is run.",)
    assert conversion.checkpoint.notes == ()


def test_files_are_split_and_the_index_names_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slices(monkeypatch)
    conversion = run(tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out")
    index = TensorIndex.open(tmp_path / "out")
    assert [path.name for path in index.files] == [f"model-{n:05}.safetensors" for n in range(1, len(index.files) + 1)]
    assert len(index.files) > 2
    written = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert written["weight_map"] == {name: index.files[span.file].name for name, span in index.spans.items()}
    assert written["metadata"] == {"total_size": sum(span.nbytes for span in index.spans.values())}
    for name, span in index.spans.items():
        if name.endswith(".scales"):
            assert index.spans[name.replace(".scales", ".weight")].file == span.file
    assert {file.name for file in conversion.files} == without_journal(tmp_path / "out").keys()


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """Three heads in three layers: A_log and dt_bias take 36 bytes together, after which no I64 would be aligned."""
    odd = SMALL | {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
    conversion = run(tiny.write_tiny(tmp_path / "in", "bf16", **odd), tmp_path / "out")
    for span in conversion.checkpoint.index.spans.values():
        assert span.offset % DTYPE_BYTES[span.dtype] == 0


def test_other_readers_open_the_files(tmp_path: Path) -> None:
    run(tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert safetensors.deserialize(path.read_bytes())
    by_mlx = mx.load(str(path))
    for name, (_, codes) in tiny.read_stored(tmp_path / "out").items():
        found = by_mlx[name]
        found = found.view(mx.uint16) if found.dtype == mx.bfloat16 else found
        np.testing.assert_array_equal(np.array(found), codes)


def test_the_journal_of_a_finished_conversion_tells_size_and_hash_of_every_file(tmp_path: Path) -> None:
    conversion = run(tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out")
    first, *lines = [json.loads(line) for line in (tmp_path / "out" / JOURNAL_NAME).read_text().splitlines()]
    assert lines == [vars(file) for file in conversion.files]
    assert {line["name"]: line["sha256"] for line in lines} == without_journal(tmp_path / "out")
    assert first["form"] | {"bits": 4, "group_size": 64} == first["form"]


def test_converting_twice_gives_the_same_bytes_and_leaves_the_source_as_it_was(tmp_path: Path) -> None:
    source = tiny.write_tiny(tmp_path / "in", "fp8", **SMALL)
    before = digests(source)
    times = {path.name: path.stat().st_mtime_ns for path in [source, *source.iterdir()]}
    run(source, tmp_path / "first")
    run(source, tmp_path / "second")
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    assert digests(source) == before
    assert {path.name: path.stat().st_mtime_ns for path in [source, *source.iterdir()]} == times


def test_memory_holds_a_few_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_tiny(tmp_path / "in", "fp8", num_layers=4, num_experts=64, vision=False)
    monkeypatch.setattr(module, "_SLICE_VALUES", 100_000)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    try:
        run(source, tmp_path / "out")
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One stack of experts holds 524,288 values, 2.1 MB in float32; there are 15 of them.
    assert mx.get_peak_memory() - before < 1_500_000
    assert traced < 4_000_000


# Interruptions


class Stop(Exception):
    """End a conversion from its progress callback, as Ctrl-C would."""


def interrupt(source: Path, out: Path, share: float) -> None:
    """Convert until this share of the bytes is done, then stop."""

    def stop(file: str, done: int, total: int) -> None:
        if done >= share * total:
            raise Stop

    with pytest.raises(Stop):
        run(source, out, progress=stop)


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_interrupted_conversion_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    small_slices(monkeypatch)
    source = tiny.write_tiny(tmp_path / "in", layout, **SMALL)
    run(source, tmp_path / "whole")
    expected = without_journal(tmp_path / "whole")
    for n, shares in enumerate([[0], [0.31], [0.99], [0.1, 0.45, 0.7]]):
        out = tmp_path / f"out-{n}"
        for share in shares:
            interrupt(source, out, share)
            assert not (out / "config.json").exists()
        run(source, out)
        assert without_journal(out) == expected


def test_resuming_begins_inside_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes known to be on the disk are not written again, even in the middle of a stack of experts."""
    monkeypatch.setattr(module, "_SLICE_VALUES", 10_000)
    monkeypatch.setattr(writing, "_SYNC_BYTES", 1)
    source, out = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out"
    whole = run(source, tmp_path / "whole")
    stacks = [span for name, span in whole.checkpoint.index.spans.items() if "switch_mlp" in name]

    def stop(file: str, done: int, total: int) -> None:
        if any(span.offset < done < span.offset + span.nbytes for span in stacks):
            raise Stop

    with pytest.raises(Stop):
        run(source, out, progress=stop)
    durable = (out / "model-00001.safetensors").stat().st_size
    sizes = []

    def note_size(descriptor: int, data: bytes | memoryview) -> None:
        if isinstance(data, memoryview):  # the journal writes bytes
            sizes.append(len(data))
        os.write(descriptor, data)

    monkeypatch.setattr(writing, "write_all", note_size)
    run(source, out)
    assert sum(sizes) == sum(file.nbytes for file in whole.files) - durable
    assert without_journal(out) == without_journal(tmp_path / "whole")


@pytest.mark.parametrize("harm", ["damaged", "shorter", "gone"])
def test_a_finished_conversion_is_checked_and_mended(tmp_path: Path, harm: str) -> None:
    source, out = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out"
    run(source, out)
    before = without_journal(out)
    path = out / "model-00001.safetensors"
    states = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    run(source, out)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()} == states
    match harm:
        case "damaged":
            with open(path, "r+b") as file:
                file.seek(50_000)
                file.write(b"damaged")
        case "shorter":
            os.truncate(path, 50_000)
        case "gone":
            path.unlink()
    run(source, out)
    assert without_journal(out) == before


@pytest.mark.parametrize("options", [{"bits": 8}, {"group_size": 32}])
def test_going_on_with_other_options_is_refused(tmp_path: Path, options: dict[str, int]) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    interrupt(source, tmp_path / "out", 0.5)
    with pytest.raises(CheckpointError, match="in another form") as caught:
        run(source, tmp_path / "out", **options)
    assert "run `slotpy convert` again" in caught.value.hint


def test_going_on_with_another_mlx_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    interrupt(source, tmp_path / "out", 0.5)
    monkeypatch.setattr(module, "version", lambda package: "0.99")
    with pytest.raises(CheckpointError, match="in another form"):
        run(source, tmp_path / "out")


def test_a_source_that_changed_is_refused(tmp_path: Path) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    interrupt(source, tmp_path / "out", 0.5)
    os.utime(source / "model-00001-of-00002.safetensors", ns=(0, 1))
    with pytest.raises(CheckpointError, match=r"the source is not the one.*model-00001-of-00002") as caught:
        run(source, tmp_path / "out")
    assert "run `slotpy convert` again" in caught.value.hint


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)

    def change(file: str, done: int, total: int) -> None:
        for path in source.glob("*.safetensors"):
            os.utime(path, ns=(0, 1))

    with pytest.raises(ReadError, match="changed after it was opened"):
        run(source, tmp_path / "out", progress=change)
    assert not (tmp_path / "out" / "config.json").exists()


# Refusals


@pytest.mark.parametrize("layout", ["mlx", "nvfp4-radixark"])
def test_a_quantised_source_is_refused(tmp_path: Path, layout: str) -> None:
    source = tiny.write_tiny(tmp_path / "in", layout)
    with pytest.raises(UsageError, match="is quantised already") as caught:
        run(source, tmp_path / "out")
    assert re.search("Run it as it is, or convert the official BF16 or FP8", caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_its_own_result_is_refused(tmp_path: Path) -> None:
    run(tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out")
    with pytest.raises(UsageError, match=r"is quantised already \(mlx-affine\)"):
        run(tmp_path / "out", tmp_path / "again")


def test_a_packed_source_is_refused(tmp_path: Path) -> None:
    pack(open_checkpoint(tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)), tmp_path / "packed")
    with pytest.raises(UsageError, match="is packed"):
        run(tmp_path / "packed", tmp_path / "out")


def test_the_result_can_be_packed(tmp_path: Path) -> None:
    conversion = run(tiny.write_tiny(tmp_path / "in", "bf16", **SMALL), tmp_path / "out")
    pack(conversion.checkpoint, tmp_path / "packed")
    assert open_checkpoint(tmp_path / "packed").layout == "mlx-affine"


@pytest.mark.parametrize("where", ["in", "in/out", "."])
def test_out_that_touches_the_source_is_refused(tmp_path: Path, where: str) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    before = digests(source)
    with pytest.raises(UsageError, match="never touches its source"):
        run(source, tmp_path / where)
    assert digests(source) == before


def test_foreign_out_is_refused(tmp_path: Path) -> None:
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds other files, such as thesis\.tex"):
        run(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_free_bytes", lambda directory: 17 << 20)
    source = tiny.write_tiny(tmp_path / "in", "bf16", **SMALL)
    with pytest.raises(CapacityError, match=r"out needs 17.* MiB of disk, 17 MiB available"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()

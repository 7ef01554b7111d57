import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.checkpoint.formats import DENSE, FP8, FP8_BLOCKS, NVFP4, WeightFormat
from slotpy.checkpoint.pack import pack
from slotpy.checkpoint.qwen4_exp.config import parse_config
from slotpy.checkpoint.qwen4_exp.hashing import hash_constants
from slotpy.checkpoint.records import DTYPE_BYTES, RecordSet
from slotpy.errors import CheckpointError
from tests import tiny
from tests.checkpoint.raw_files import write_tensors

AFFINE, AFFINE_ROWS = WeightFormat("affine", 4, 64), WeightFormat("affine", 4, 32)
# layout of tiny.py -> name, format of experts, of rows and of the draft head's experts
DESCRIBED = {
    "bf16": ("bf16", DENSE, DENSE, DENSE),
    "bf16-per-expert": ("bf16", DENSE, DENSE, DENSE),
    "fp8": ("fp8", FP8_BLOCKS, FP8, FP8_BLOCKS),
    "mlx": ("mlx-affine", AFFINE, AFFINE_ROWS, AFFINE),
    "mlx-shards": ("mlx-affine", AFFINE, AFFINE_ROWS, AFFINE),
    "nvfp4-radixark": ("nvfp4", NVFP4, FP8, DENSE),
    "nvfp4-nvidia": ("nvfp4", NVFP4, FP8, FP8_BLOCKS),
}
UP = "language_model.model.hyper_connection_mixer.input_mix_weight_up"
TABLE = tiny.TEXT + "layers.1.ple.ple_embedding.ngram_embedding."
EXPERT = tiny.TEXT + "layers.2.mlp.experts."
every_layout = pytest.mark.parametrize("layout", tiny.LAYOUTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a checkpoint of each layout, written once and never changed."""
    root = tmp_path_factory.mktemp("layouts")

    def get(layout: str) -> Path:
        directory = root / layout
        return directory if directory.exists() else tiny.write_tiny(directory, layout)

    return get


def read_record(checkpoint: Checkpoint, records: RecordSet, key: int) -> dict[str, bytes]:
    files, offsets = records.locate(np.array([key]))
    pieces = {}
    for role, file, offset in zip(records.roles, files[0], offsets[0], strict=True):
        with open(checkpoint.files[file], "rb") as opened:
            opened.seek(offset)
            pieces[role.name] = opened.read(role.nbytes)
    return pieces


def stored_expert(stored: tiny.Stored, layer: str, expert: int) -> dict[str, bytes]:
    """Give an expert's pieces as the tensors hold them, looked up by name."""
    parts = {
        ".weight": "weight", ".scales": "scales", ".biases": "biases", ".weight_scale_inv": "scale_inv",
        ".weight_scale": "scales", ".weight_scale_2": "scale_2",
    }  # fmt: skip
    pieces = {}
    for name, (_, codes) in stored.items():
        if name.endswith(f"{layer}.mlp.experts.gate_up_proj"):
            gate, up = np.split(codes[expert], 2)
            pieces["gate.weight"], pieces["up.weight"] = gate.tobytes(), up.tobytes()
        elif name.endswith(f"{layer}.mlp.experts.down_proj"):
            pieces["down.weight"] = codes[expert].tobytes()
        elif match := re.search(rf"\b{layer}\.mlp\.switch_mlp\.(\w+)_proj(\.\w+)$", name):
            pieces[f"{match[1]}.{parts[match[2]]}"] = codes[expert].tobytes()
        elif match := re.search(rf"\b{layer}\.mlp\.experts\.{expert}\.(\w+)_proj(\.(?!input_scale)\w+)$", name):
            pieces[f"{match[1]}.{parts[match[2]]}"] = codes.tobytes()
    return pieces


@every_layout
def test_a_published_layout_is_recognised(written: Callable, layout: str):
    checkpoint = open_checkpoint(written(layout))
    name, experts, rows, drafts = DESCRIBED[layout]
    assert (checkpoint.layout, checkpoint.expert_format, checkpoint.row_format) == (name, experts, rows)
    assert checkpoint.mtp_expert_format == drafts
    assert checkpoint.experts.num_records == 5 * 8
    assert checkpoint.mtp_experts is not None and checkpoint.mtp_experts.num_records == 8
    assert checkpoint.rows.num_records == hash_constants(checkpoint.config).num_rows
    assert checkpoint.row_scale == (TABLE + "weight_scale" if rows == FP8 else None)
    assert checkpoint.notes == ("21 vision tensors (86.3 KiB) are left out: only text is run.",)
    assert not checkpoint.packed and checkpoint.files == checkpoint.index.files


@every_layout
def test_experts_are_found_byte_for_byte(written: Callable, layout: str):
    checkpoint, stored = open_checkpoint(written(layout)), tiny.read_stored(written(layout))
    for layer, expert in ((0, 0), (2, 5), (3, 7), (4, 1)):
        piece = read_record(checkpoint, checkpoint.experts, layer * 8 + expert)
        assert piece == stored_expert({n: s for n, s in stored.items() if "mtp" not in n}, f"layers.{layer}", expert)
    for expert in (0, 3, 7):
        piece = read_record(checkpoint, checkpoint.mtp_experts, expert)
        assert piece == stored_expert(stored, r"mtp.layers.0", expert)


@every_layout
def test_rows_are_found_byte_for_byte_in_numeric_order_of_shards(written: Callable, layout: str):
    checkpoint, stored = open_checkpoint(written(layout)), tiny.read_stored(written(layout))
    endings = [role.name.removeprefix("row.") for role in checkpoint.rows.roles]
    spelling = "shards." if layout == "mlx-shards" else "shard_"
    table = next(name.split(spelling)[0] for name in stored if spelling + "10." in name) + spelling
    rows_per_shard = checkpoint.rows.rows_per_shard
    assert checkpoint.rows.num_records == 16 * rows_per_shard
    for row in (0, 2 * rows_per_shard - 1, 2 * rows_per_shard, 10 * rows_per_shard + 3, 16 * rows_per_shard - 1):
        shard, local = divmod(row, rows_per_shard)
        expected = {f"row.{end}": stored[f"{table}{shard}.{end}"][1][local].tobytes() for end in endings}
        assert read_record(checkpoint, checkpoint.rows, row) == expected


@every_layout
def test_resident_names_are_the_same_in_every_layout(written: Callable, layout: str):
    checkpoint = open_checkpoint(written(layout))
    assert checkpoint.resident.keys() == open_checkpoint(written("bf16")).resident.keys()
    streamed = ("mlp.experts.", "switch_mlp.", "ngram_embedding.")
    used = {name for tensor in checkpoint.resident.values() for name in tensor.parts.values()}
    visual = ("model.visual.", "vision_tower.")
    left = {name for name in checkpoint.index.spans if not any(part in name for part in streamed)} - used
    assert left == {name for name in checkpoint.index.spans if name.startswith(visual)}
    assert checkpoint.read_bytes("lm_head.weight" if "mlx" not in layout else "language_model.lm_head.scales").size


def test_canonical_names(written: Callable):
    resident = open_checkpoint(written("mlx")).resident
    for name in ("embed_tokens", "lm_head", "layers.0.linear_attn.A_log", "layers.1.ple.key_proj", "mtp.fc_embedding"):
        assert name in resident
    head = "language_model.lm_head"
    assert resident["lm_head"].format == AFFINE
    assert resident["lm_head"].parts == {part: f"{head}.{part}" for part in ("weight", "scales", "biases")}
    assert resident["layers.0.mlp.gate"].format == DENSE
    assert resident["layers.0.mlp.gate"].parts == {"weight": "language_model.model.layers.0.mlp.gate.weight"}


def test_scales_of_partial_blocks_are_rounded_up(tmp_path: Path):
    checkpoint = open_checkpoint(tiny.write_tiny(tmp_path, "fp8", hidden=192, scale_inv="F32"))
    roles = {role.name: role for role in checkpoint.experts.roles}
    assert roles["gate.weight"].shape == (64, 192) and roles["gate.scale_inv"].shape == (1, 2)
    assert roles["down.scale_inv"].shape == (2, 1) and roles["down.scale_inv"].dtype == "F32"


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_official_layout_may_hold_any_float_dtype(tmp_path: Path, dtype: str):
    config = tiny.tiny_config(mtp=False, vision=False)
    values = tiny.tiny_values(config)
    checkpoint = open_checkpoint(tiny.write_values(tmp_path, values, config, dtype))
    assert {role.dtype for role in (*checkpoint.experts.roles, *checkpoint.rows.roles)} == {dtype}
    assert checkpoint.index.spans["lm_head.weight"].dtype == dtype
    if dtype != "F16":
        assert all(np.array_equal(value, values[name]) for name, value in tiny.dequantised(tmp_path).items())


@pytest.mark.parametrize("layout", ["bf16", "mlx", "nvfp4-nvidia"])
def test_a_draft_head_may_be_left_out(written: Callable, tmp_path: Path, layout: str):
    checkpoint = open_checkpoint(change(written(layout), tmp_path, lambda stored: drop(stored, r"mtp\.")))
    assert checkpoint.mtp_experts is None and checkpoint.mtp_expert_format is None
    assert not any(name.startswith("mtp") for name in checkpoint.resident)
    assert "The draft head (mtp.*) is not in these files." in checkpoint.notes


@every_layout
def test_a_pack_holds_the_same_records(written: Callable, tmp_path: Path, layout: str):
    plain = open_checkpoint(written(layout))
    pack(plain, tmp_path / "packed")
    packed = open_checkpoint(tmp_path / "packed")
    assert packed.packed and packed.notes == plain.notes
    assert (packed.layout, packed.resident, packed.row_scale) == (plain.layout, plain.resident, plain.row_scale)
    for kind in ("experts", "mtp_experts", "rows"):
        records, others = getattr(plain, kind), getattr(packed, kind)
        assert others.roles == records.roles
        for key in (0, 7, records.num_records - 1):
            assert read_record(packed, others, key) == read_record(plain, records, key)


def test_a_pack_of_another_model_is_refused(written: Callable, tmp_path: Path):
    pack(open_checkpoint(written("bf16")), tmp_path / "packed")
    config = tmp_path / "packed" / "config.json"
    config.write_text(config.read_text().replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 32'))
    message = refusal(tmp_path / "packed")
    assert "the pack's experts" in message and "(32, 128)" in message and "(64, 128)" in message


# Decoding: tests/tiny.py against MLX ----------------------------------------------------------------------------------


def test_tiny_decodes_affine_as_mlx_does(written: Callable):
    stored, values = tiny.read_stored(written("mlx")), tiny.dequantised(written("mlx"))
    name = "language_model.model.layers.0.mlp.switch_mlp.down_proj"
    codes = mx.array(stored[f"{name}.weight"][1])
    scales, biases = (mx.array(stored[f"{name}.{part}"][1]).view(mx.bfloat16) for part in ("scales", "biases"))
    expected = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=64, bits=4)
    assert np.allclose(values[tiny.TEXT + "layers.0.mlp.experts.down_proj"], np.array(expected), rtol=1e-6, atol=1e-7)


def test_tiny_encodes_affine_as_mlx_does(written: Callable):
    value = mx.array(tiny.tiny_values(tiny.tiny_config())["lm_head.weight"])
    codes, scales, biases = mx.quantize(value, group_size=64, bits=4)
    ours = tiny.dequantised(written("mlx"))["lm_head.weight"]
    theirs = np.array(mx.dequantize(codes, scales, biases, group_size=64, bits=4))
    # Ours rounds to BF16 scales first, so a value near the middle of two steps may take the other one.
    assert np.abs(ours - theirs).max() < 1.02 * np.abs(np.array(scales)).max()
    assert np.abs(ours - theirs).mean() < 0.02 * np.abs(np.array(scales)).mean()


def test_tiny_decodes_nvfp4_as_mlx_does(written: Callable):
    stored, values = tiny.read_stored(written("nvfp4-nvidia")), tiny.dequantised(written("nvfp4-nvidia"))
    down = EXPERT + "3.down_proj."
    words = mx.array(stored[down + "weight"][1].view(np.uint32))
    decoded = mx.dequantize(words, mx.array(stored[down + "weight_scale"][1]), group_size=16, bits=4, mode="nvfp4")
    expected = np.array(decoded.astype(mx.float32)) * stored[down + "weight_scale_2"][1]
    assert np.allclose(values[EXPERT + "down_proj"][3], expected, rtol=1e-6, atol=0)


def test_tiny_decodes_e4m3_as_mlx_does():
    codes = np.delete(np.arange(256, dtype=np.uint8), [127, 255])
    assert np.array_equal(tiny.E4M3[codes], np.array(mx.from_fp8(mx.array(codes), mx.float32)))


@every_layout
def test_tiny_layouts_stand_for_the_same_values(written: Callable, layout: str):
    values, true = tiny.dequantised(written(layout)), tiny.tiny_values(tiny.tiny_config())
    assert values.keys() == true.keys()
    for name, value in values.items():
        assert value.shape == true[name].shape
        # Half a step: 1/12 of the range in E2M1, 1/15 in 4 bits and up to one whole step where MLX clips.
        assert np.abs(value - true[name]).max() <= 0.17 * np.abs(true[name]).max() + 0.004


@every_layout
def test_decoded_values_make_an_official_checkpoint(written: Callable, tmp_path: Path, layout: str):
    values = tiny.dequantised(written(layout))
    config = json.loads((written(layout) / "config.json").read_text())
    checkpoint = open_checkpoint(tiny.write_values(tmp_path, values, config))
    assert checkpoint.layout == "bf16" and checkpoint.experts.roles[0].dtype == "F32"
    again = tiny.dequantised(tmp_path)
    assert again.keys() == values.keys() and all(np.array_equal(again[name], values[name]) for name in values)


# Bad checkpoints ------------------------------------------------------------------------------------------------------


def change(source: Path, directory: Path, edit: Callable[[tiny.Stored], object]) -> Path:
    """Write the tensors of `source`, edited, as one file without an index into `directory`."""
    stored = tiny.read_stored(source)
    edit(stored)
    tensors = {name: (dtype, codes.shape, codes.tobytes()) for name, (dtype, codes) in stored.items()}
    write_tensors(directory / "model.safetensors", tensors)
    shutil.copy(source / "config.json", directory)
    return directory


def change_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((directory / "config.json").read_text())
    edit(raw)
    (directory / "config.json").write_text(json.dumps(raw))


def drop(stored: tiny.Stored, pattern: str) -> None:
    for name in [name for name in stored if re.match(pattern, name)]:
        del stored[name]


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory)
    assert str(directory) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("layout", "pattern", "first", "missing"),
    [
        ("bf16", r"lm_head\.weight", "lm_head.weight", 1),
        ("bf16", re.escape(EXPERT + "down_proj"), EXPERT + "down_proj", 1),
        ("bf16", re.escape(tiny.TEXT) + r"layers\.[23]\.mlp\.gate\.", tiny.TEXT + "layers.2.mlp.gate.weight", 2),
        ("bf16", r"mtp\.layers\.0\.mlp\.experts\.gate_up", "mtp.layers.0.mlp.experts.gate_up_proj", 1),
        ("bf16-per-expert", re.escape(EXPERT + "6."), EXPERT + "6.gate_proj.weight", 3),
        ("fp8", re.escape(EXPERT) + r"0\.up_proj\.weight_scale_inv", EXPERT + "0.up_proj.weight_scale_inv", 1),
        ("fp8", re.escape(TABLE + "weight_scale"), TABLE + "weight_scale", 1),
        ("fp8", re.escape(TABLE + "shard_11."), TABLE + "shard_11.weight", 1),
        ("mlx", r".*\.shard_10\.", TABLE.replace(tiny.TEXT, "language_model.model.") + "shard_10.weight", 3),
        ("mlx", r".*switch_mlp\.up_proj\.biases", "language_model.model.layers.0.mlp.switch_mlp.up_proj.biases", 6),
        ("mlx-shards", r".*\.shards\.0\.", TABLE.replace(tiny.TEXT, "language_model.model.") + "shards.0.weight", 3),
        ("nvfp4-radixark", re.escape(EXPERT + "7."), EXPERT + "7.gate_proj.weight", 9),
        ("nvfp4-nvidia", r"mtp\.layers\.0\.mlp\.experts\.5", "mtp.layers.0.mlp.experts.5.gate_proj.weight", 6),
    ],
)
def test_missing_tensors_are_counted_and_the_first_is_named(
    written: Callable, tmp_path: Path, layout: str, pattern: str, first: str, missing: int
):
    whole = sum(not re.search(r"visual|vision|input_scale", name) for name in tiny.read_stored(written(layout)))
    message = refusal(change(written(layout), tmp_path, lambda stored: drop(stored, pattern)))
    assert f"tensor {first};" in message
    assert f"expected {whole} tensors; found {whole - missing} of them" in message


@every_layout
def test_a_checkpoint_without_experts_is_refused(written: Callable, tmp_path: Path, layout: str):
    message = refusal(change(written(layout), tmp_path, lambda stored: drop(stored, r".*(mlp\.experts|switch_mlp)")))
    assert "no routed experts" in message and "layers.0.mlp.experts.gate_up_proj" in message


def set_tensor(name: str, dtype: str, codes: np.ndarray) -> Callable[[tiny.Stored], None]:
    return lambda stored: stored.update({name: (dtype, codes)})


@pytest.mark.parametrize(
    ("layout", "name", "dtype", "shape", "expected"),
    [
        ("bf16", "lm_head.weight", "BF16", (512, 64), "[512, 128]"),
        ("bf16", EXPERT + "gate_up_proj", "BF16", (7, 128, 128), "[8, 128, 128]"),
        ("bf16", EXPERT + "down_proj", "BF16", (8, 64, 128), "[8, 128, 64]"),
        ("bf16", TABLE + "shard_3.weight", "BF16", (55, 32), "[56, 32]"),
        ("bf16", tiny.TEXT + "layers.0.linear_attn.conv1d.weight", "BF16", (4, 1, 256), "[256, 1, 4] or [256, 4, 1]"),
        ("bf16", TABLE.replace("ngram_embedding.", "layer_multipliers"), "I64", (4,), "[3]"),
        ("bf16-per-expert", EXPERT + "6.up_proj.weight", "BF16", (128, 64), "[64, 128]"),
        ("fp8", EXPERT + "6.up_proj.weight_scale_inv", "BF16", (2, 1), "[1, 1]"),
        ("fp8", TABLE + "weight_scale", "BF16", (16,), "[]"),
        ("mlx", "language_model.lm_head.scales", "BF16", (512, 4), "[512, 2]"),
        ("nvfp4-radixark", EXPERT + "6.up_proj.weight_scale", "F8_E4M3", (64, 4), "[64, 8]"),
        ("nvfp4-nvidia", EXPERT + "6.up_proj.weight", "U8", (64, 128), "[64, 64]"),
        ("nvfp4-nvidia", "mtp.pre_fc_norm_hidden.weight", "BF16", (128,), "[512]"),
    ],
)
def test_a_wrong_shape_is_refused(
    written: Callable, tmp_path: Path, layout: str, name: str, dtype: str, shape: tuple[int, ...], expected: str
):
    zeros = np.zeros(shape, np.dtype(f"V{DTYPE_BYTES[dtype]}"))
    message = refusal(change(written(layout), tmp_path, set_tensor(name, dtype, zeros)))
    assert f"model.safetensors; tensor {name}; expected {expected}; found {list(shape)}" in message


@pytest.mark.parametrize(
    ("layout", "name", "dtype", "expected"),
    [
        ("bf16", tiny.TEXT + "layers.0.mlp.gate.weight", "I32", "BF16 or F16 or F32"),
        ("bf16", EXPERT + "down_proj", "F64", "BF16 or F16 or F32"),
        ("bf16", TABLE.replace("ngram_embedding.", "layer_multipliers"), "I32", "I64"),
        ("fp8", EXPERT + "6.up_proj.weight", "F8_E5M2", "F8_E4M3"),
        ("fp8", EXPERT + "6.up_proj.weight_scale_inv", "F16", "F32 or BF16"),
        ("mlx", "language_model.lm_head.biases", "U16", "BF16 or F16 or F32"),
        ("nvfp4-radixark", EXPERT + "6.up_proj.weight_scale", "U8", "F8_E4M3"),
        ("nvfp4-radixark", EXPERT + "6.up_proj.weight_scale_2", "BF16", "F32"),
    ],
)
def test_a_wrong_dtype_is_refused(written: Callable, tmp_path: Path, layout: str, name: str, dtype: str, expected: str):
    def edit(stored: tiny.Stored) -> None:
        stored[name] = (dtype, np.zeros(stored[name][1].shape, np.dtype(f"V{DTYPE_BYTES[dtype]}")))

    assert f"tensor {name}; expected {expected}; found {dtype}" in refusal(change(written(layout), tmp_path, edit))


def test_experts_of_two_dtypes_are_refused(written: Callable, tmp_path: Path):
    name = EXPERT + "down_proj"
    message = refusal(change(written("bf16"), tmp_path, set_tensor(name, "F32", np.zeros((8, 128, 64), np.float32))))
    assert f"tensor {name}; expected BF16, as in the first; found F32" in message


@pytest.mark.parametrize(
    "name",
    [
        tiny.TEXT + "norm.weight",
        tiny.TEXT + "layers.0.mlp.gate.bias",
        tiny.TEXT + "layers.5.mlp.gate.weight",
        EXPERT + "8.gate_proj.weight",
        "mtp.norm.weight",
        "score.weight",
        TABLE + "shard_16.weight",
    ],
)
def test_an_unknown_tensor_is_refused(written: Callable, tmp_path: Path, name: str):
    message = refusal(change(written("bf16"), tmp_path, set_tensor(name, "BF16", np.zeros(3, np.uint16))))
    assert f"1 unknown tensor in the checkpoint; file {tmp_path}/model.safetensors; tensor {name};" in message
    assert "found BF16 [3]" in message


def test_misnamed_tensors_are_mentioned_beside_the_missing_ones(written: Callable, tmp_path: Path):
    def edit(stored: tiny.Stored) -> None:
        stored["head.weight"] = stored.pop("lm_head.weight")

    message = refusal(change(written("bf16"), tmp_path, edit))
    assert "tensor lm_head.weight" in message and "1 other tensors have no place, such as head.weight" in message


def test_known_extras_are_left_out(written: Callable, tmp_path: Path):
    def edit(stored: tiny.Stored) -> None:
        stored[tiny.TEXT + "rotary_emb.inv_freq"] = ("F32", np.zeros(8, np.float32))
        stored[tiny.TEXT + "layers.3.self_attn.k_proj.k_scale"] = ("F32", np.zeros((), np.float32))
        stored[EXPERT + "0.up_proj.weight_scale_2"] = ("F32", np.ones(1, np.float32))  # a scalar written as [1]

    directory = change(written("nvfp4-radixark"), tmp_path, edit)
    assert open_checkpoint(directory).experts.num_records == 40


def test_two_names_of_one_weight_are_refused(written: Callable, tmp_path: Path):
    name = "language_model.model.layers.0.linear_attn.A_log"
    message = refusal(change(written("bf16"), tmp_path, set_tensor(name, "BF16", np.zeros(4, np.uint16))))
    assert name in message and tiny.TEXT + "layers.0.linear_attn.A_log" in message


def test_both_spellings_of_a_shard_are_refused(written: Callable, tmp_path: Path):
    message = refusal(
        change(written("bf16"), tmp_path, set_tensor(TABLE + "shards.3.weight", "BF16", np.zeros((56, 32), np.uint16)))
    )
    assert TABLE + "shards.3.weight" in message


@pytest.mark.parametrize("which", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_other_hash_constants_are_refused(written: Callable, tmp_path: Path, which: str):
    name = TABLE.replace("ngram_embedding.", which)

    def edit(stored: tiny.Stored) -> None:
        stored[name] = ("I64", stored[name][1] + 2)

    message = refusal(change(written("bf16"), tmp_path, edit))
    assert f"tensor {name}; expected [" in message and "hash constants" in message


def test_a_file_of_other_things_is_noted_and_left_out(written: Callable, tmp_path: Path):
    directory = shutil.copytree(written("bf16"), tmp_path / "copy")
    write_tensors(directory / "reference.safetensors", {"mtp.logits": ("F32", (2,), bytes(8))})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.notes[0] == "reference.safetensors holds no tensor of qwen4_exp and is left out."
    assert "mtp.logits" not in checkpoint.index.spans
    write_tensors(directory / "extra.safetensors", {"model.norm.weight": ("F32", (2,), bytes(8))})
    assert f"{directory}/extra.safetensors; tensor model.norm.weight" in refusal(directory)


# Config against tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "edit", "names"),
    [
        ("mlx", lambda raw: [raw.pop("quantization"), raw.pop("quantization_config")], ["U32", "affine quantization"]),
        ("fp8", lambda raw: raw.pop("quantization_config"), ["F8_E4M3", "fp8_block in its quantization block"]),
        ("nvfp4-radixark", lambda raw: raw.pop("quantization_config"), ["U8", "nvfp4 in its quantization block"]),
        (
            "nvfp4-nvidia",
            lambda raw: raw["quantization_config"]["quantized_layers"].pop("mtp.layers.0.mlp.experts"),
            ["mtp.layers.0.mlp.experts.0.gate_proj.weight", "fp8_block"],
        ),
        (
            "bf16",
            lambda raw: raw.update(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
            ["fp8 quantization", "plain floats"],
        ),
        ("bf16", lambda raw: raw["text_config"].update(num_experts=9), ["[9, 128]", "[8, 128]"]),
        ("bf16", lambda raw: raw["text_config"].update(split_ngram_parts=15), ["split_ngram_parts", "896", "15"]),
        ("bf16", lambda raw: raw["text_config"].update(split_ngram_parts=8), ["[112, 32]", "[56, 32]"]),
        ("bf16", lambda raw: raw["text_config"].update(mtp_num_hidden_layers=0), ["unknown tensors", "mtp."]),
        ("bf16", lambda raw: raw["text_config"].update(seed=1), ["layer_multipliers"]),
        ("bf16", lambda raw: raw["text_config"].update(moe_intermediate_size=63), ["[8, 126, 128]", "[8, 128, 128]"]),
        (
            "mlx",
            lambda raw: [raw[key].update({UP: {"group_size": 128}}) for key in ("quantization", "quantization_config")],
            [f"{UP}.weight", "expected [512, 64]", "64 is not a multiple of 128"],
        ),
    ],
)
def test_a_config_that_says_otherwise_is_refused(
    written: Callable, tmp_path: Path, layout: str, edit: Callable[[dict[str, Any]], object], names: list[str]
):
    directory = shutil.copytree(written(layout), tmp_path / "copy")
    change_config(directory, edit)
    message = refusal(directory)
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"), [(8, 64, "[512, 32]"), (4, 32, "[512, 4]"), (4, 128, "[512, 1]")]
)
def test_an_affine_geometry_other_than_the_declared_one_is_refused(
    written: Callable, tmp_path: Path, bits: int, group_size: int, expected: str
):
    directory = shutil.copytree(written("mlx"), tmp_path / "copy")
    block = {"bits": bits, "group_size": group_size}
    change_config(directory, lambda raw: raw.update(quantization=block, quantization_config=block))
    assert f"expected {expected}" in refusal(directory)


# Opening --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, ["cannot read the config", "expected a JSON file"]),
        ("{", ["not JSON"]),
        ("[]", ["no JSON object", "list"]),
        ('{"model_type": "llama"}', ["unsupported model_type", "qwen4_exp", "'llama'"]),
        ("{}", ["unsupported model_type", "qwen4_exp", "None"]),
    ],
)
def test_a_bad_config_file_is_refused_before_the_tensors(tmp_path: Path, text: str | None, names: list[str]):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    message = refusal(tmp_path)
    assert "config.json" in message and all(name in message for name in names), message


def test_an_absent_directory_is_refused(tmp_path: Path):
    refusal(tmp_path / "absent")


def test_a_linked_directory_opens(written: Callable, tmp_path: Path):
    (tmp_path / "link").symlink_to(written("bf16"))
    assert open_checkpoint(tmp_path / "link").layout == "bf16"


def test_the_golden_checkpoint_opens():
    checkpoint = open_checkpoint(Path(__file__).parents[1] / "golden" / "qwen4_tiny")
    assert checkpoint.layout == "bf16" and "logits_fp32" not in checkpoint.index.spans


# The published sizes, as headers of sparse files ----------------------------------------------------------------------

PUBLISHED = {
    "vocab_size": 248320, "hidden_size": 2560, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640, "hc_lowrank": 320,
    "shared_expert_intermediate_size": 640, "indexer_head_dim": 128, "indexer_budget": 2048, "ple_embed_dim": 2560,
    "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128, "eos_token_id": 248044, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
PUBLISHED_VISION = {
    "model_type": "qwen4_exp", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
}  # fmt: skip


def published_config() -> dict[str, Any]:
    return tiny.tiny_config(num_layers=48, **PUBLISHED) | {"vision_config": PUBLISHED_VISION}


def write_headers(directory: Path, raw: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    """Write one sparse file of these dtypes and shapes that takes no room but its header; give the tensor bytes."""
    constants = hash_constants(parse_config(raw, Path("config.json")))
    values = {
        "layer_multipliers": constants.multipliers,
        "ngram_heads_vocab_sizes": constants.head_sizes,
        "ngram_heads_offsets": constants.head_offsets,
    }
    prefix = next(name for name in tensors if ".ple.key_proj." in name).split("key_proj")[0] + "ple_embedding."
    header, end, written = {}, 0, []
    for name, (dtype, shape) in ({prefix + n: ("I64", (len(v),)) for n, v in values.items()} | tensors).items():
        nbytes = DTYPE_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        if dtype == "I64":
            written.append(np.array(values[name.removeprefix(prefix)]).tobytes())
        end += nbytes
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(written))
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(raw))
    return end


def test_the_published_bf16_checkpoint_is_accounted_for(tmp_path: Path):
    raw = published_config()
    tensors = {name: ("BF16", shape) for name, shape in tiny.official_shapes(raw).items()}
    assert len(tensors) + 3 == 1658
    assert write_headers(tmp_path, raw, tensors) == 359_999_963_128
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "bf16"
    assert checkpoint.experts.num_records == 24576 and checkpoint.experts.record_nbytes == 6_553_600 + 3_276_800
    assert checkpoint.rows.num_records == 320_001_536 and checkpoint.rows.record_nbytes == 320
    assert checkpoint.mtp_experts is not None and checkpoint.mtp_experts.num_records == 512
    assert checkpoint.notes == ("333 vision tensors (856 MiB) are left out: only text is run.",)
    resident = [tensor for name, tensor in checkpoint.resident.items() if name.startswith("mtp.")]
    assert len(resident) == 31 - 2


def test_the_published_mlx_checkpoint_is_accounted_for(tmp_path: Path):
    raw = published_config()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    overrides = {}
    for official, shape in tiny.official_shapes(raw).items():
        if official.startswith(tiny.MTP):
            continue
        name = tiny.mlx_name(official, "shard_")
        group = 32 if "ngram" in name else 64
        if "experts." in name and "shared" not in name:
            block = name.split("experts.")[0] + "switch_mlp."
            *outer, inner, size = shape
            split = {"gate_proj": inner // 2, "up_proj": inner // 2} if "gate_up" in name else {"down_proj": inner}
            modules = {block + which: (*outer, rows, size) for which, rows in split.items()}
        elif tiny.MLX_QUANTISED.search(official):
            modules = {name.removesuffix(".weight"): shape}
        else:
            tensors[name] = ("BF16", (shape[0], shape[2], 1) if "conv1d" in name else shape)
            continue
        for module, (*outer, size) in modules.items():
            tensors[f"{module}.weight"] = ("U32", (*outer, size // 8))
            tensors[f"{module}.scales"] = tensors[f"{module}.biases"] = ("BF16", (*outer, size // group))
            if group == 32:
                overrides[module.removeprefix("language_model.")] = {"group_size": 32, "bits": 4}
    raw["quantization"] = raw["quantization_config"] = {"group_size": 64, "bits": 4, **overrides}
    assert write_headers(tmp_path, raw, tensors) == 103_769_745_912
    assert len(tensors) + 3 == 3215
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.layout == "mlx-affine"
    assert checkpoint.experts.num_records == 24576 and checkpoint.experts.record_nbytes == 2_764_800
    assert len(checkpoint.experts.roles) == 9
    assert checkpoint.rows.num_records == 320_001_536 and checkpoint.rows.record_nbytes == 100
    assert checkpoint.notes[1] == "The draft head (mtp.*) is not in these files."

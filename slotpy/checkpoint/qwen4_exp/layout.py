"""Where the weights of a `qwen4_exp` checkpoint lie, in any of its published layouts.

Owns the tensor names of the layouts: official BF16 (fused experts), official FP8 and both NVFP4 variants (one tensor
per expert), MLX affine (stacked experts). Tells them apart by the tensors and holds the config against them. Every
tensor is accounted for. docs/layouts.md describes the layouts.
"""

from dataclasses import dataclass, replace

import numpy as np

from slotpy.checkpoint.formats import DENSE, FLOATS, FP8, ResidentTensor, WeightFormat, parts_of
from slotpy.checkpoint.header import Span
from slotpy.checkpoint.index import TensorIndex
from slotpy.checkpoint.manifest import PackManifest
from slotpy.checkpoint.qwen4_exp.claims import Claims
from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig
from slotpy.checkpoint.qwen4_exp.hashing import hash_constants
from slotpy.checkpoint.qwen4_exp.tensors import Expected, mtp_tensors, text_tensors
from slotpy.checkpoint.records import RecordSet, Role
from slotpy.errors import CheckpointError

_LAYOUT_NAMES = {"dense": "bf16", "fp8_block": "fp8", "affine": "mlx-affine", "nvfp4": "nvfp4"}


@dataclass(frozen=True)
class Layout:
    """Describe what a checkpoint holds; the fields are those of `Checkpoint`.

    `index` is without the files of the directory that belong to something else.
    """

    index: TensorIndex
    layout: str
    experts: RecordSet
    expert_format: WeightFormat
    rows: RecordSet
    row_format: WeightFormat
    row_scale: str | None
    mtp_experts: RecordSet | None
    mtp_expert_format: WeightFormat | None
    resident: dict[str, ResidentTensor]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Pieces:
    """Collect the spans of all records: `spans[shard][role]`, each span `rows_per_shard` records of one role."""

    format: WeightFormat
    roles: dict[str, tuple[int, ...]]
    spans: list[list[Span]]
    rows_per_shard: int


def read_layout(index: TensorIndex, config: Qwen4ExpConfig) -> Layout:
    """Account for every tensor of an unpacked checkpoint.

    Raises CheckpointError for the first tensor that is missing, unknown, or of a shape, dtype or value that the config
    does not lead to.
    """
    claims = Claims(index, config.quantization)
    draft = claims.first("mtp.", r"layers\.|hyper_connection_mixer\.|fc_|pre_fc_")
    with_mtp = config.mtp_num_hidden_layers > 0 and draft is not None
    resident = _claim_resident(claims, config, with_mtp)
    experts = _claim_experts(claims, config, "layers", config.num_hidden_layers)
    if experts.format == DENSE and config.quantization.method != "none":
        problem, declared = "the config declares quantised experts", f"{config.quantization.method} quantization"
        raise CheckpointError(problem, file=index.files[0].parent, expected=declared, found="experts in plain floats")
    mtp_experts = _claim_experts(claims, config, "mtp.layers", config.mtp_num_hidden_layers) if with_mtp else None
    rows, row_scale = _claim_rows(claims, config)
    index, notes = _finish(claims, config, with_mtp)
    return Layout(
        index=index,
        layout=_LAYOUT_NAMES[experts.format.kind],
        experts=_record_set(claims, experts),
        expert_format=experts.format,
        rows=_record_set(claims, rows),
        row_format=rows.format,
        row_scale=row_scale,
        mtp_experts=_record_set(claims, mtp_experts) if mtp_experts else None,
        mtp_expert_format=mtp_experts.format if mtp_experts else None,
        resident=resident,
        notes=notes,
    )


def read_packed_layout(index: TensorIndex, config: Qwen4ExpConfig, pack: PackManifest) -> Layout:
    """Account for every tensor and record of a packed checkpoint, whose record files follow those of the index.

    Raises CheckpointError as `read_layout`, and when the pack holds other records than the config leads to.
    """
    containers = set(pack.record_files)
    spans = {name: span for name, span in index.spans.items() if index.files[span.file] not in containers}
    claims = Claims(replace(index, spans=spans), config.quantization)
    with_mtp = "mtp_experts" in pack.records
    resident = _claim_resident(claims, config, with_mtp)
    if pack.row_scale is not None:
        _claim_row_scale(claims, config)
    index, notes = _finish(claims, config, with_mtp)
    _check_pack(pack, config)
    first = len(index.files)
    return Layout(
        index=index,
        layout=pack.layout,
        experts=pack.record_set("experts", first),
        expert_format=pack.records["experts"].format,
        rows=pack.record_set("rows", first),
        row_format=pack.records["rows"].format,
        row_scale=pack.row_scale,
        mtp_experts=pack.record_set("mtp_experts", first) if with_mtp else None,
        mtp_expert_format=pack.records["mtp_experts"].format if with_mtp else None,
        resident=resident,
        notes=notes,
    )


def _claim_resident(claims: Claims, config: Qwen4ExpConfig, with_mtp: bool) -> dict[str, ResidentTensor]:
    expected = text_tensors(config) | (mtp_tensors(config) if with_mtp else {})
    return {module: _claim_one(claims, module, tensor) for module, tensor in expected.items()}


def _claim_one(claims: Claims, module: str, tensor: Expected) -> ResidentTensor:
    key = module + tensor.ending
    stored = DENSE
    match tensor.kind:
        case "linear":
            stored = claims.format_of([module])
            claims.weight(module, stored, tensor.shape)
            return ResidentTensor(stored, claims.names(module, stored, tensor.shape))
        case "conv":
            channels, one, taps = tensor.shape
            claims.tensor(key, FLOATS, (channels, one, taps), (channels, taps, one))  # PyTorch's order, or MLX's
        case "plain":
            claims.tensor(key, FLOATS, tensor.shape)
        case "int":
            claims.tensor(key, ("I64",), tensor.shape)
    return ResidentTensor(stored, {"weight": claims.name_of(key)})


def _claim_experts(claims: Claims, config: Qwen4ExpConfig, layers: str, num_layers: int) -> _Pieces:
    """Claim the routed experts under `layers`, spelled in one of three ways."""
    found = claims.first(f"{layers}.", r"\d+\.mlp\.(?:(experts\.(?:gate_up|down)_proj$)|(switch_mlp\.)|experts\.\d+\.)")
    blocks = [f"{layers}.{layer}.mlp" for layer in range(num_layers)]
    if found is None:
        name = claims.name_of(f"{layers}.0.mlp.experts.gate_up_proj")
        raise claims.error("no routed experts", name, "it, or switch_mlp, or experts.0 in its place", "none of them")
    if found[1]:
        return _claim_fused_experts(claims, config, blocks)
    if found[2]:
        return _claim_expert_weights(claims, config, [f"{block}.switch_mlp" for block in blocks], config.num_experts)
    owners = [f"{block}.experts.{expert}" for block in blocks for expert in range(config.num_experts)]
    return _claim_expert_weights(claims, config, owners)


def _claim_fused_experts(claims: Claims, config: Qwen4ExpConfig, blocks: list[str]) -> _Pieces:
    inner, size, num_experts = config.moe_intermediate_size, config.hidden_size, config.num_experts
    spans = []
    for block in blocks:
        gate_up = claims.tensor(f"{block}.experts.gate_up_proj", FLOATS, (num_experts, 2 * inner, size))
        down = claims.tensor(f"{block}.experts.down_proj", FLOATS, (num_experts, size, inner))
        # Rows 0 to inner - 1 of an expert are its gate projection, the others its up projection.
        up = replace(gate_up, offset=gate_up.offset + gate_up.nbytes // num_experts // 2)
        spans.append([gate_up, up, down])
    return _Pieces(DENSE, _expert_roles(DENSE, config), spans, num_experts)


def _claim_expert_weights(claims: Claims, config: Qwen4ExpConfig, owners: list[str], *outer: int) -> _Pieces:
    """Claim a gate, an up and a down projection of each owner: an expert, or `outer` experts stacked."""
    shapes = _projections(config)
    stored = claims.format_of(f"{owner}.{name}_proj" for owner in owners for name in shapes)
    spans = [
        [
            span
            for name, shape in shapes.items()
            for span in claims.weight(f"{owner}.{name}_proj", stored, shape, *outer).values()
        ]
        for owner in owners
    ]
    return _Pieces(stored, _expert_roles(stored, config), spans, *(outer or (1,)))


def _claim_rows(claims: Claims, config: Qwen4ExpConfig) -> tuple[_Pieces, str | None]:
    """Claim the n-gram table, its shards in numeric order, and the scale that all rows share where there is one."""
    table, num_shards = _table(config), config.split_ngram_parts
    num_rows = hash_constants(config).num_rows
    rows_per_shard, rest = divmod(num_rows, num_shards)
    if rest:
        problem = "the n-gram table does not divide into its shards"
        raise claims.error(problem, claims.name_of(table), f"a split_ngram_parts that divides {num_rows}", num_shards)
    found = claims.first(f"{table}.", r"(shard_|shards\.)\d+\.")
    spelling = found[1] if found else "shard_"
    shards = [f"{table}.{spelling}{shard}" for shard in range(num_shards)]
    stored = claims.format_of(shards, eight_bit=FP8)
    shape = (config.ngram_head_dim,)
    spans = [list(claims.weight(shard, stored, shape, rows_per_shard).values()) for shard in shards]
    scale = _claim_row_scale(claims, config) if stored == FP8 else None
    return _Pieces(stored, _row_roles(stored, config), spans, rows_per_shard), scale


def _claim_row_scale(claims: Claims, config: Qwen4ExpConfig) -> str:
    key = f"{_table(config)}.weight_scale"
    claims.tensor(key, FLOATS, ())
    return claims.name_of(key)


def _finish(claims: Claims, config: Qwen4ExpConfig, with_mtp: bool) -> tuple[TensorIndex, tuple[str, ...]]:
    index, notes = claims.finish()
    constants, prefix = hash_constants(config), f"layers.{config.ple_layer}.ple.ple_embedding"
    claims.check_values(f"{prefix}.layer_multipliers", constants.multipliers)
    claims.check_values(f"{prefix}.ngram_heads_vocab_sizes", constants.head_sizes)
    claims.check_values(f"{prefix}.ngram_heads_offsets", constants.head_offsets)
    if config.mtp_num_hidden_layers and not with_mtp:
        notes += ("The draft head (mtp.*) is not in these files.",)
    return index, notes


def _check_pack(pack: PackManifest, config: Qwen4ExpConfig) -> None:
    """Hold the records of a pack against the config."""
    experts = config.num_experts
    counts = {"experts": config.num_hidden_layers * experts, "rows": hash_constants(config).num_rows}
    if "mtp_experts" in pack.records:
        counts["mtp_experts"] = config.mtp_num_hidden_layers * experts
    for kind, count in counts.items():
        if kind not in pack.records:
            raise CheckpointError(f"the pack has no {kind}", file=pack.directory, expected=f"{count} records")
        records = pack.records[kind]
        roles = (_row_roles if kind == "rows" else _expert_roles)(records.format, config)
        expected, found = (count, roles), (records.num_records, {role.name: role.shape for role in records.roles})
        if found != expected:
            raise CheckpointError(
                f"the pack's {kind} are not those of the config", file=pack.directory, expected=expected, found=found
            )


def _record_set(claims: Claims, pieces: _Pieces) -> RecordSet:
    """Turn claimed spans into offsets. Raises CheckpointError when one role has two dtypes."""
    dtypes = [span.dtype for span in pieces.spans[0]]
    for shard in pieces.spans:
        for span, dtype in zip(shard, dtypes, strict=True):
            if span.dtype != dtype:
                raise claims.uneven(span, f"{dtype}, as in the first")
    roles = zip(pieces.roles.items(), dtypes, strict=True)
    return RecordSet(
        roles=tuple(Role(name, dtype, shape) for (name, shape), dtype in roles),
        rows_per_shard=pieces.rows_per_shard,
        files=np.array([[span.file for span in shard] for shard in pieces.spans], np.int32),
        bases=np.array([[span.offset for span in shard] for shard in pieces.spans], np.int64),
        strides=np.array([span.nbytes // pieces.rows_per_shard for span in pieces.spans[0]], np.int64),
    )


def _expert_roles(stored: WeightFormat, config: Qwen4ExpConfig) -> dict[str, tuple[int, ...]]:
    shapes = _projections(config).items()
    return {f"{name}.{part.name}": part.shape for name, shape in shapes for part in parts_of(stored, shape)}


def _row_roles(stored: WeightFormat, config: Qwen4ExpConfig) -> dict[str, tuple[int, ...]]:
    return {f"row.{part.name}": part.shape for part in parts_of(stored, (config.ngram_head_dim,))}


def _projections(config: Qwen4ExpConfig) -> dict[str, tuple[int, int]]:
    inner, size = config.moe_intermediate_size, config.hidden_size
    return {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}


def _table(config: Qwen4ExpConfig) -> str:
    return f"layers.{config.ple_layer}.ple.ple_embedding.ngram_embedding"

"""What a `qwen4_exp` checkpoint becomes in the MLX affine layout: its weights, their formats, its config.json.

Owns the choices of the published conversion: names, which weights are quantised and in which groups, which norms take
in the 1 they are applied with. Computes and writes no weight (engine/convert.py does). docs/converting.md explains.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.checkpoint.formats import DENSE, ResidentTensor, WeightFormat, parts_of
from slotpy.checkpoint.index import TensorIndex
from slotpy.checkpoint.qwen4_exp.norms import norm_offset
from slotpy.checkpoint.qwen4_exp.tensors import Expected, mtp_tensors, text_tensors
from slotpy.checkpoint.records import DTYPE_BYTES, RecordSet, Role
from slotpy.errors import CheckpointError

_GROUP_SIZES = (128, 64, 32)
# Small, and the choice of experts, heads or blocks hangs on them: the published conversion leaves them in BF16.
_KEPT = ("mlp.gate", "mlp.shared_expert_gate", "in_proj_a", "in_proj_b", "block_inject_weight", "index_qk_proj")
_REPLACED = ("quantization", "quantization_config", "ple_embedding_dtype")


@dataclass(frozen=True, eq=False)
class MlxWeight:
    """Describe one weight of `shape` (n, ..., in) as it is written, and where its values come from.

    Item i along the first axis is the pieces `owner.*` of record `first + i`, in the format `stored`. What is written
    is `format`: affine, or floats of `dtype`, after `added` was added to every value.
    """

    module: str
    shape: tuple[int, ...]
    records: RecordSet
    owner: str
    first: int = 0
    stored: WeightFormat = DENSE
    format: WeightFormat = DENSE
    dtype: str = "BF16"
    ending: str = ".weight"
    added: float = 0.0

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield the name, dtype and shape of every tensor that stores the weight."""
        if self.format == DENSE:
            yield self.module + self.ending, self.dtype, self.shape
        else:
            for part in parts_of(self.format, self.shape):
                yield self.module + part.ending, part.dtypes[0], part.shape

    @cached_property
    def nbytes(self) -> int:
        return sum(DTYPE_BYTES[dtype] * math.prod(shape) for _, dtype, shape in self.tensors())


def plan_weights(checkpoint: Checkpoint, asked: WeightFormat) -> list[MlxWeight]:
    """List every weight of the converted checkpoint. A width that `asked` does not divide gets a smaller group.

    Raises: CheckpointError when no group size divides the experts' widths, when the norms follow neither convention,
    and for a quantised weight that is neither an expert nor an n-gram row.
    """
    config = checkpoint.config
    expected = text_tensors(config) | mtp_tensors(config)
    added = norm_offset(checkpoint)
    weights = [
        _plan_resident(checkpoint.index, module, tensor, expected[module], asked, added)
        for module, tensor in checkpoint.resident.items()
    ]
    weights += _plan_experts(checkpoint, "layers", checkpoint.experts, checkpoint.expert_format, asked)
    weights += _plan_rows(checkpoint, asked)
    if checkpoint.mtp_experts is not None and checkpoint.mtp_expert_format is not None:
        weights += _plan_experts(checkpoint, "mtp.layers", checkpoint.mtp_experts, checkpoint.mtp_expert_format, asked)
    return weights


def mlx_config(raw: dict[str, Any], weights: Sequence[MlxWeight], asked: WeightFormat) -> dict[str, Any]:
    """Give the source's config.json as the converted checkpoint needs it: the formats replaced, vision left out."""
    config = _without_formats(raw)
    if "text_config" in config:
        config["text_config"] = _without_formats(config["text_config"])
    if config.pop("vision_config", None) is not None:
        config["language_model_only"] = True
    overrides = {
        weight.module.removeprefix("language_model."): _describe(weight.format)
        for weight in weights
        if weight.format not in (asked, DENSE)
    }
    return config | {"quantization": _describe(asked) | overrides}


def _without_formats(section: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in section.items() if key not in _REPLACED}
    return kept | {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in kept}


def _describe(stored: WeightFormat) -> dict[str, Any]:
    return {"group_size": stored.group_size, "bits": stored.bits}


def _plan_resident(
    index: TensorIndex, module: str, tensor: ResidentTensor, expected: Expected, asked: WeightFormat, added: float
) -> MlxWeight:
    span = index.spans[tensor.parts["weight"]]
    if tensor.format != DENSE:
        raise CheckpointError(
            "only experts and n-gram rows are converted from a quantised format",
            file=index.files[span.file],
            tensor=tensor.parts["weight"],
            expected="plain floats",
            found=tensor.format.kind,
        )
    num_items, *item = span.shape
    role = Role("tensor.weight", span.dtype, tuple(item))
    records = RecordSet(
        roles=(role,),
        rows_per_shard=num_items,
        files=np.array([[span.file]], np.int32),
        bases=np.array([[span.offset]], np.int64),
        strides=np.array([role.nbytes], np.int64),
    )
    quantised = expected.kind == "linear" and not module.endswith(_KEPT)
    zero_centred = expected.kind == "plain" and expected.ending and not module.endswith("linear_attn.norm")
    return MlxWeight(
        module=_mlx_name(module),
        # MLX's convolutions are channels-last, (C, taps, 1): for depthwise ones the same bytes.
        shape=(num_items, max(item), 1) if expected.kind == "conv" else span.shape,
        records=records,
        owner="tensor",
        format=_affine(asked, span.shape[-1]) if quantised else DENSE,
        dtype="I64" if expected.kind == "int" else "BF16",
        ending=expected.ending,
        added=added if zero_centred else 0.0,
    )


def _plan_experts(
    checkpoint: Checkpoint, layers: str, records: RecordSet, stored: WeightFormat, asked: WeightFormat
) -> Iterator[MlxWeight]:
    num_experts = checkpoint.config.num_experts
    shapes = {role.name.removesuffix(".weight"): role.shape for role in records.roles if role.name.endswith(".weight")}
    # One format for all three: a record's roles are read together.
    written = _affine(asked, *(shape[-1] for shape in shapes.values()))
    if written == DENSE:
        raise CheckpointError(
            "the experts cannot be quantised in groups",
            file=checkpoint.directory,
            expected=f"hidden_size and moe_intermediate_size multiples of {_GROUP_SIZES[-1]}",
            found=f"{checkpoint.config.hidden_size} and {checkpoint.config.moe_intermediate_size}",
        )
    for first in range(0, records.num_records, num_experts):
        block = _mlx_name(f"{layers}.{first // num_experts}.mlp.switch_mlp")
        for owner, shape in shapes.items():
            module = f"{block}.{owner}_proj"
            yield MlxWeight(module, (num_experts, *shape), records, owner, first, stored, written)


def _plan_rows(checkpoint: Checkpoint, asked: WeightFormat) -> Iterator[MlxWeight]:
    config, rows = checkpoint.config, checkpoint.rows
    num_rows = rows.num_records // config.split_ngram_parts
    shape, stored = (num_rows, config.ngram_head_dim), checkpoint.row_format
    written = _affine(asked, config.ngram_head_dim)
    table = _mlx_name(f"layers.{config.ple_layer}.ple.ple_embedding.ngram_embedding")
    for shard in range(config.split_ngram_parts):
        yield MlxWeight(f"{table}.shard_{shard}", shape, rows, "row", shard * num_rows, stored, written)


def _affine(asked: WeightFormat, *widths: int) -> WeightFormat:
    """Give the largest group up to the asked one that divides all widths, or no quantisation where none does."""
    for group in _GROUP_SIZES:
        if group <= asked.group_size and not any(width % group for width in widths):
            return WeightFormat("affine", asked.bits, group)
    return DENSE


def _mlx_name(module: str) -> str:
    if module.startswith("mtp."):
        return module
    return f"language_model.{module}" if module == "lm_head" else f"language_model.model.{module}"

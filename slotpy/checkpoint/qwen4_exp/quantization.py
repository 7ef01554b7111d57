"""What a `qwen4_exp` config.json says about stored formats: MLX `quantization`, fp8 and ModelOpt blocks.

Owns the parsing and refuses what slotpy cannot compute. Whether the tensors agree is checked in layout.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slotpy.checkpoint.formats import DENSE, FP8, FP8_BLOCK, FP8_BLOCKS, NVFP4, NVFP4_GROUP, WeightFormat
from slotpy.checkpoint.qwen4_exp.names import canonical
from slotpy.errors import CheckpointError

_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)

# Keys that change nothing here: the tensor headers say which modules are converted, activations and the KV cache
# stay in the model's dtype, and the rest is bookkeeping.
_FP8_IGNORED = {"activation_scheme", "modules_to_not_convert", "ignored_layers"}
_MODELOPT_IGNORED = {"ignore", "exclude_modules", "producer", "kv_cache_scheme", "kv_cache_quant_algo"}
# Two names of one layout: E4M3 with a float scale per 128x128 block.
_BLOCK_ALGOS = {"FP8_BLOCK_SCALES", "FP8_PB_WO"}


@dataclass(frozen=True)
class Quantization:
    """Say how modules are stored: `default`, unless `overrides` names the module (canonical names)."""

    method: Literal["none", "mlx", "fp8", "modelopt"] = "none"
    default: WeightFormat = DENSE
    overrides: Mapping[str, WeightFormat] = field(default_factory=dict)

    def format_of(self, module: str) -> WeightFormat:
        return self.overrides.get(module, self.default)

    def declares(self, stored: WeightFormat) -> bool:
        """Say whether any module may be stored in this format."""
        return stored == self.default or stored in self.overrides.values()


def parse_quantization(raw: Mapping[str, Any], file: Path) -> Quantization:
    """Read the `quantization` and `quantization_config` blocks of a config object.

    Raises CheckpointError for a method, an option or a contradiction that slotpy cannot compute.
    """
    mlx, hub = raw.get("quantization"), raw.get("quantization_config")
    for key, block in (("quantization", mlx), ("quantization_config", hub)):
        if block is not None and not isinstance(block, dict):
            raise CheckpointError(f"{key} is not an object", file=file, expected="an object", found=repr(block))
    if mlx is not None and hub is not None and mlx != hub:  # mlx-lm writes the same block under both names
        raise CheckpointError(
            "quantization and quantization_config disagree", file=file, expected=_brief(mlx), found=_brief(hub)
        )
    block = mlx if mlx is not None else hub
    if not block:
        return Quantization()
    match block.get("quant_method"):
        case None:
            return _parse_mlx(block, file)
        case "fp8":
            return _parse_fp8(block, file)
        case "modelopt":
            return _parse_modelopt(block, file)
        case other:
            raise _refuse("quant_method", "fp8, modelopt or the MLX form without quant_method", other, file)


def _parse_mlx(block: Mapping[str, Any], file: Path) -> Quantization:
    common = {key: block[key] for key in ("group_size", "bits", "mode") if key in block}
    default = _affine(common, "quantization", file)
    overrides: dict[str, WeightFormat] = {}
    for key, value in block.items():
        if key in common:
            continue
        if isinstance(value, bool):
            overrides[canonical(key)] = default if value else DENSE
        elif isinstance(value, dict):
            overrides[canonical(key)] = _affine({**common, **value}, f"quantization.{key}", file)
        else:
            raise _refuse(f"quantization.{key}", "group_size, bits, mode or a module name", value, file)
    return Quantization("mlx", default, overrides)


def _affine(block: Mapping[str, Any], where: str, file: Path) -> WeightFormat:
    for key in block.keys() - {"group_size", "bits", "mode"}:
        raise _refuse(f"{where}.{key}", "group_size, bits and mode only", block[key], file)
    if (mode := block.get("mode", "affine")) != "affine":
        raise _refuse(f"{where}.mode", "affine", mode, file)
    bits, group_size = block.get("bits"), block.get("group_size")
    if type(bits) is not int or bits not in _AFFINE_BITS:
        raise _refuse(f"{where}.bits", f"one of {_AFFINE_BITS}", bits, file)
    if type(group_size) is not int or group_size not in _AFFINE_GROUPS:
        raise _refuse(f"{where}.group_size", f"one of {_AFFINE_GROUPS}", group_size, file)
    return WeightFormat("affine", bits=bits, group_size=group_size)


def _parse_fp8(block: Mapping[str, Any], file: Path) -> Quantization:
    supported = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", "float8_e4m3fn"),
        "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
        "scale_fmt": (None, "float"),
    }
    for key, value in block.items():
        if key not in _FP8_IGNORED and value not in supported.get(key, ()):
            raise _refuse(f"quantization_config.{key}", _one_of(supported.get(key, ())), value, file)
    if "weight_block_size" not in block:
        raise _refuse("quantization_config.weight_block_size", [FP8_BLOCK, FP8_BLOCK], None, file)
    return Quantization("fp8", FP8_BLOCKS)


def _parse_modelopt(block: Mapping[str, Any], file: Path) -> Quantization:
    known = _MODELOPT_IGNORED | {"quant_method", "quant_algo", "group_size", "config_groups", "quantized_layers"}
    for key in block.keys() - known:
        raise _refuse(f"quantization_config.{key}", "a key slotpy knows", block[key], file)
    match block.get("quant_algo"):
        case "NVFP4":
            groups = [block["group_size"]] if "group_size" in block else []
            groups += [group.get("weights", {}).get("group_size") for group in _objects(block, "config_groups", file)]
            for size in groups:
                if size != NVFP4_GROUP:
                    raise _refuse("quantization_config group_size", NVFP4_GROUP, size, file)
            return Quantization("modelopt", NVFP4)
        case "MIXED_PRECISION":
            _objects(block, "quantized_layers", file)
            layers = block.get("quantized_layers") or {}
            overrides = {canonical(name): _modelopt_layer(name, layer, file) for name, layer in layers.items()}
            return Quantization("modelopt", DENSE, overrides)
        case other:
            raise _refuse("quantization_config.quant_algo", "NVFP4 or MIXED_PRECISION", other, file)


def _modelopt_layer(name: str, layer: Mapping[str, Any], file: Path) -> WeightFormat:
    algo, group_size = layer.get("quant_algo"), layer.get("group_size")
    where = f"quantization_config.quantized_layers.{name}"
    if algo == "NVFP4" and group_size in (None, NVFP4_GROUP):
        return NVFP4
    if algo in _BLOCK_ALGOS and group_size in (None, FP8_BLOCK):
        return FP8_BLOCKS
    if algo == "FP8":
        return FP8
    expected = f"NVFP4 of group {NVFP4_GROUP}, {' or '.join(sorted(_BLOCK_ALGOS))} of group {FP8_BLOCK}, or FP8"
    raise _refuse(where, expected, dict(layer), file)


def _objects(block: Mapping[str, Any], key: str, file: Path) -> list[Mapping[str, Any]]:
    """Give the members of an object of objects; an absent one has none."""
    members = block.get(key) or {}
    if not isinstance(members, dict) or not all(isinstance(member, dict) for member in members.values()):
        raise _refuse(f"quantization_config.{key}", "an object of objects", members, file)
    return list(members.values())


def _one_of(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values) or "a key slotpy knows"


def _brief(block: object) -> str:
    text = repr(block)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _refuse(key: str, expected: object, found: object, file: Path) -> CheckpointError:
    return CheckpointError(f"{key} is not supported", file=file, expected=expected, found=_brief(found))

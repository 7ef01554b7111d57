"""How one weight is stored: which tensors make it up, and their dtypes and shapes.

Owns the geometry of the stored formats. Knows no family's tensor names and decodes nothing (the layers do).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FLOATS = ("BF16", "F16", "F32")
FP8_BLOCK = 128
NVFP4_GROUP = 16


@dataclass(frozen=True)
class WeightFormat:
    """Name a stored format.

    `dense` is plain floats; `affine` is `bits`-wide integers with a scale and a bias per `group_size` inputs;
    `fp8_block` is E4M3 with a scale per 128x128 block; `fp8` is E4M3 whose single scale is a tensor of its own;
    `nvfp4` is E2M1 with an E4M3 scale per 16 inputs and one float scale.
    """

    kind: Literal["dense", "affine", "fp8_block", "fp8", "nvfp4"]
    bits: int = 0
    group_size: int = 0


DENSE = WeightFormat("dense")
FP8 = WeightFormat("fp8", bits=8)
FP8_BLOCKS = WeightFormat("fp8_block", bits=8, group_size=FP8_BLOCK)
NVFP4 = WeightFormat("nvfp4", bits=4, group_size=NVFP4_GROUP)


@dataclass(frozen=True)
class ResidentTensor:
    """Name the tensors of one weight that stays in memory: `parts` maps `weight`, `scales`, ... to tensor names."""

    format: WeightFormat
    parts: dict[str, str]


@dataclass(frozen=True)
class Part:
    """Describe one tensor of a stored weight: its part name, name ending, permitted dtypes and shape."""

    name: str
    ending: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


def parts_of(stored: WeightFormat, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """List the tensors that store a weight of `shape` (..., in).

    Raises ValueError when the format cannot hold that shape.
    """
    return tuple(_parts(stored, shape))


def _parts(stored: WeightFormat, shape: tuple[int, ...]) -> Iterator[Part]:
    *outer, inputs = shape
    match stored.kind:
        case "dense":
            yield Part("weight", ".weight", FLOATS, shape)
        case "affine":
            groups = (*outer, _divide(inputs, stored.group_size))
            yield Part("weight", ".weight", ("U32",), (*outer, _divide(inputs * stored.bits, 32)))
            yield Part("scales", ".scales", FLOATS, groups)
            yield Part("biases", ".biases", FLOATS, groups)
        case "fp8_block":
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            yield Part("weight", ".weight", ("F8_E4M3",), shape)
            yield Part("scale_inv", ".weight_scale_inv", ("F32", "BF16"), blocks)
        case "fp8":
            yield Part("weight", ".weight", ("F8_E4M3",), shape)
        case "nvfp4":
            yield Part("weight", ".weight", ("U8",), (*outer, _divide(inputs, 2)))
            yield Part("scales", ".weight_scale", ("F8_E4M3",), (*outer, _divide(inputs, NVFP4_GROUP)))
            yield Part("scale_2", ".weight_scale_2", ("F32",), ())


def _divide(size: int, by: int) -> int:
    quotient, rest = divmod(size, by)
    if rest:
        raise ValueError(f"{size} is not a multiple of {by}")
    return quotient

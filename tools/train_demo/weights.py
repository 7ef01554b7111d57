"""Masters, the model's own copies of them, and the checkpoint in the official BF16 layout.

Owns which tensor the published 4-bit layout stores how, the rounding that training imitates, and the files. A BF16
checkpoint of the masters, quantised by MLX, gives the values that the model was last trained with.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

MAX_FILE_BYTES = 15_500_000
"""Of a checkpoint's file, so that each is under 16 MB."""

_BITS = 4
# How the published 4-bit layout stores a parameter, by the first pattern its name has. Matrices: affine, in groups of
# 64; n-gram rows, of 32 values, as one group. Zero-centred norms are stored with the one added.
_KINDS = (
    (r"ngram_embedding", "rows"),
    (r"linear_attn\.norm", "plain"),
    (r"norm", "norm"),
    (r"mlp\.gate\.|shared_expert_gate|in_proj_[ab]\.|block_inject_weight|indexer|conv1d|A_log|dt_bias", "plain"),
    (r"", "matrix"),
)
KINDS = ("matrix", "rows", "norm", "plain")
_GROUPS = {"matrix": 64, "rows": 32}


def kind_of(name: str) -> str:
    """Tell how the 4-bit layout stores the parameter of that name: `matrix`, `rows`, `norm` or `plain`."""
    return next(kind for pattern, kind in _KINDS if re.search(pattern, name))


def quantised_bytes(model: nn.Module) -> int:
    """Give the size of the model's tensors in the published 4-bit layout, headers and int64 constants left out."""
    total = 0
    for name, value in model.named_parameters():
        group = _GROUPS.get(kind_of(name))
        # A scale and a bias of two bytes for each group.
        total += value.numel() * 2 if group is None else value.numel() * _BITS // 8 + value.numel() // group * 4
    return total


def round_affine(values: Tensor, group: int) -> Tensor:
    """Quantise to 4 bits and back, as MLX does: (groups * group,) in float32, of values that BF16 holds.

    Source: mlx 0.32, `affine_quantize` in mlx/backend/cpu/quantized.cpp.
    """
    values = values.unflatten(0, (-1, group))
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / (2**_BITS - 1)).clamp_min(1e-7)
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps == 0, scale, edge / steps)
    bias = torch.where(steps == 0, 0.0, edge)
    codes = ((values - bias) / scale).round().clamp(0, 2**_BITS - 1)
    return (codes * _bfloat16(scale) + _bfloat16(bias)).flatten()


def as_stored(kind: str, values: Tensor) -> Tensor:
    """Round flat float32 masters of a kind as BF16 checkpoint and 4-bit layout do, one after the other."""
    values = _bfloat16(values)
    if kind in _GROUPS:
        return round_affine(values, _GROUPS[kind])
    return _bfloat16(1 + values) - 1 if kind == "norm" else values


class Weights:
    """Keep float32 masters of a model's parameters; the parameters become copies in `dtype`.

    `masters[kind]` is flat and a Parameter, for the optimizer. The model's parameters and their gradients are views of
    one buffer for each kind, so that copying and rounding are a few kernels however many parameters there are.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.masters: dict[str, nn.Parameter] = {}
        self._copies: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._views: dict[str, tuple[str, int, torch.Size]] = {}
        named = dict(model.named_parameters())
        for kind in KINDS:
            members = {name: value for name, value in named.items() if kind_of(name) == kind}
            flat = torch.cat([value.detach().float().flatten() for value in members.values()]).to(device)
            self.masters[kind] = nn.Parameter(flat)
            self.masters[kind].grad = torch.zeros_like(flat)
            self._copies[kind] = flat.to(dtype)
            self._gradients[kind] = torch.zeros_like(self._copies[kind])
            start = 0
            for name, value in members.items():
                self._views[name] = (kind, start, value.shape)
                value.data = self._view(self._copies, name)
                value.grad = self._view(self._gradients, name)
                start += value.numel()
        model.to(device)  # what is left: constants

    @torch.no_grad()
    def publish(self, quantised: bool) -> None:
        """Give the model the masters, rounded as the 4-bit layout stores them if `quantised`, and clear gradients."""
        for kind, master in self.masters.items():
            self._copies[kind].copy_(as_stored(kind, master) if quantised else master)
            self._gradients[kind].zero_()

    @torch.no_grad()
    def collect(self, max_norm: float) -> Tensor:
        """Move the model's gradients to the masters, scaled down to `max_norm`; gives the norm they had."""
        for kind, master in self.masters.items():
            master.grad.copy_(self._gradients[kind])
        norm = torch.stack([master.grad.norm() for master in self.masters.values()]).norm()
        for master in self.masters.values():
            master.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Give the float32 values under the model's parameter names; they are views."""
        buffers = {kind: master.detach() for kind, master in self.masters.items()}
        for name in self._views:
            yield name, self._view(buffers, name)

    def _view(self, buffers: dict[str, Tensor], name: str) -> Tensor:
        kind, start, shape = self._views[name]
        return buffers[kind][start : start + shape.numel()].view(shape)


def official_tensors(weights: Weights, model: nn.Module, num_shards: int) -> dict[str, Tensor]:
    """Give the masters in BF16, and the hash constants, under their published names; the table in its shards."""
    constants = {name: value for name, value in model.state_dict().items() if not value.is_floating_point()}
    tensors: dict[str, Tensor] = {}
    for name, value in (*weights.named_masters(), *constants.items()):
        name = _published(name)
        if name.endswith("ngram_embedding.weight"):
            for number, shard in enumerate(value.chunk(num_shards)):
                tensors[f"{name.removesuffix('weight')}shard_{number}.weight"] = shard
        else:
            tensors[name] = value
    return {n: (t.bfloat16() if t.is_floating_point() else t).cpu().contiguous() for n, t in tensors.items()}


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], metadata: dict[str, Any]
) -> None:
    """Write config.json, the index, which takes `metadata` in, and as many files as `MAX_FILE_BYTES` asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in sorted(tensors.items()):
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        # Shared memory is refused, and shards of the table share theirs.
        save_file({name: tensor.clone() for name, tensor in part.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)


@torch.no_grad()
def read_masters(folder: Path, weights: Weights) -> dict[str, Any]:
    """Set the masters from a checkpoint that `write_checkpoint` wrote for the same model; gives its metadata."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, master in weights.named_masters():
        name = _published(name)
        if name.endswith("ngram_embedding.weight"):
            prefix = f"{name.removesuffix('weight')}shard_"
            shards = sum(other.startswith(prefix) for other in tensors)
            master.copy_(torch.cat([tensors[f"{prefix}{number}.weight"] for number in range(shards)]))
        else:
            master.copy_(tensors[name])
    return json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["metadata"]


def _published(name: str) -> str:
    """Turn the name of a `DemoModel` parameter into the published one."""
    return re.sub(r"^main\.model\.", "model.language_model.", name).removeprefix("main.")


def _bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

"""Write a checkpoint with random weights in the published MLX 4-bit layout, of any size.

    python bench/synthetic.py OUT --published --layers 4         # published widths, four layers: 6 GB
    python bench/synthetic.py OUT --experts 256 --layers 8       # small widths, 0.9 GB of experts

Weights are scaled so that activations stay finite; the text they make is noise. Data is written in blocks, so that the
checkpoint may be far bigger than memory.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slotpy.checkpoint.qwen4_exp.config import parse_config
from slotpy.checkpoint.qwen4_exp.hashing import HashConstants, hash_constants

PUBLISHED = {
    "hidden_size": 2560, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "hc_lowrank": 320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "indexer_head_dim": 128, "indexer_budget": 2048, "ple_embed_dim": 2560, "heads_per_ngram": 8, "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
}  # fmt: skip
SMALL = {
    "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 256,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 128, "hc_lowrank": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "indexer_head_dim": 32, "indexer_budget": 256, "ple_embed_dim": 512, "heads_per_ngram": 4, "vocab_size": 4096,
    "max_position_embeddings": 32_768,
}  # fmt: skip
BLOCK_BYTES = 64 << 20
FILE_BYTES = 8 << 30
GROUP, ROW_GROUP = 64, 32


@dataclass
class Writer:
    """Collect tensors as (dtype, shape, maker of bytes), then write them as safetensors files."""

    rng: np.random.Generator
    tensors: dict[str, tuple[str, tuple[int, ...], Callable[[int], Iterator[bytes]]]] = field(default_factory=dict)

    def floats(self, name: str, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> None:
        def make(nbytes: int) -> Iterator[bytes]:
            for size in _blocks(nbytes):
                yield _bf16(mean + scale * self.rng.standard_normal(size // 2, dtype=np.float32))

        self.tensors[name] = ("BF16", shape, make)

    def constants(self, name: str, values: tuple[int, ...]) -> None:
        self.tensors[name] = ("I64", (len(values),), lambda nbytes: iter([np.array(values, "<i8").tobytes()]))

    def quantised(self, name: str, shape: tuple[int, ...], group: int = GROUP) -> None:
        *outer, inputs = shape
        step = 1 / (4.6 * inputs**0.5)  # uniform 4-bit codes: standard deviation 4.6 steps
        groups = (*outer, inputs // group)
        self.tensors[f"{name}.weight"] = ("U32", (*outer, inputs // 8), self._codes)
        self.tensors[f"{name}.scales"] = ("BF16", groups, lambda nbytes: _repeated(_bf16(np.float32([step])), nbytes))
        self.tensors[f"{name}.biases"] = (
            "BF16", groups, lambda nbytes: _repeated(_bf16(np.float32([-7.5 * step])), nbytes),
        )  # fmt: skip

    def _codes(self, nbytes: int) -> Iterator[bytes]:
        for size in _blocks(nbytes):
            yield self.rng.bytes(size)

    def write(self, out: Path) -> int:
        """Write files of about 8 GiB each; returns the bytes of all tensors."""
        pending, size, files = [], 0, []
        for name, (dtype, shape, _) in self.tensors.items():
            nbytes = _nbytes(dtype, shape)
            if pending and size + nbytes > FILE_BYTES:
                files.append(pending)
                pending, size = [], 0
            pending.append(name)
            size += nbytes
        files.append(pending)
        weight_map = {}
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}.safetensors"
            self._write_file(out / file, names)
            weight_map |= dict.fromkeys(names, file)
        total = sum(_nbytes(dtype, shape) for dtype, shape, _ in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
        return total

    def _write_file(self, path: Path, names: list[str]) -> None:
        header, offset = {}, 0
        for name in names:
            dtype, shape, _ = self.tensors[name]
            end = offset + _nbytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                dtype, shape, make = self.tensors[name]
                for block in make(_nbytes(dtype, shape)):
                    file.write(block)


def _blocks(nbytes: int) -> Iterator[int]:
    for start in range(0, nbytes, BLOCK_BYTES):
        yield min(BLOCK_BYTES, nbytes - start)


def _repeated(value: bytes, nbytes: int) -> Iterator[bytes]:
    for size in _blocks(nbytes):
        yield value * (size // len(value))


def _bf16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return {"U32": 4, "BF16": 2, "I64": 8}[dtype] * int(np.prod(shape))


def make_config(sizes: dict[str, int], num_layers: int, ngram_base: int) -> dict[str, object]:
    rotary = sizes["head_dim"] // 4
    sections = [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6]
    return {
        "model_type": "qwen4_exp_text", "num_hidden_layers": num_layers, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "layer_types": [("linear_attention", "full_attention")[i % 4 == 3] for i in range(num_layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": sections},
        "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid", "hc_count": 4, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_conv_kernel_size": 4,
        "ngram_size": 3, "ngram_vocab_size_base": ngram_base, "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, **sizes,
    }  # fmt: skip


def add_tensors(writer: Writer, c: dict[str, int], kinds: list[str], constants: HashConstants) -> None:
    """Add every tensor of the text model, named and shaped as in the published conversion; norms have 1 added."""
    root, hidden = "language_model.model.", c["hidden_size"]
    streams = 4 * hidden
    writer.quantised(f"{root}embed_tokens", (c["vocab_size"], hidden))
    writer.quantised("language_model.lm_head", (c["vocab_size"], hidden))

    def connection(name: str, inject: bool = True) -> None:
        writer.floats(f"{name}.hc_norm.weight", (streams,), 0.05, mean=1.0)
        writer.quantised(f"{name}.input_mix_weight_down", (c["hc_lowrank"], streams))
        writer.quantised(f"{name}.input_mix_weight_up", (streams, c["hc_lowrank"]))
        if inject:
            writer.floats(f"{name}.block_inject_weight.weight", (4, streams), streams**-0.5)

    connection(f"{root}hyper_connection_mixer", inject=False)
    for i, kind in enumerate(kinds):
        layer = f"{root}layers.{i}"
        connection(f"{layer}.attn_hyper_connection")
        connection(f"{layer}.mlp_hyper_connection")
        writer.floats(f"{layer}.mlp.gate.weight", (c["num_experts"], hidden), 2 * hidden**-0.5)
        writer.floats(f"{layer}.mlp.shared_expert_gate.weight", (1, hidden), hidden**-0.5)
        for owner, width, outer in (
            ("shared_expert", c["shared_expert_intermediate_size"], ()),
            ("switch_mlp", c["moe_intermediate_size"], (c["num_experts"],)),
        ):
            for part in ("gate_proj", "up_proj"):
                writer.quantised(f"{layer}.mlp.{owner}.{part}", (*outer, width, hidden))
            writer.quantised(f"{layer}.mlp.{owner}.down_proj", (*outer, hidden, width))
        (_add_linear if kind == "linear_attention" else _add_attention)(writer, c, layer)
    ple = f"{root}layers.1.ple"
    writer.quantised(f"{ple}.key_proj", (streams, c["ple_embed_dim"]))
    writer.quantised(f"{ple}.value_proj", (hidden, c["ple_embed_dim"]))
    writer.floats(f"{ple}.conv1d.weight", (streams, 4, 1), 0.3)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        writer.floats(f"{ple}.{norm}.weight", (streams,), 0.05, mean=1.0)
    writer.constants(f"{ple}.ple_embedding.layer_multipliers", constants.multipliers)
    writer.constants(f"{ple}.ple_embedding.ngram_heads_vocab_sizes", constants.head_sizes)
    writer.constants(f"{ple}.ple_embedding.ngram_heads_offsets", constants.head_offsets)
    width = c["ple_embed_dim"] // (2 * c["heads_per_ngram"])
    for shard in range(128):
        name = f"{ple}.ple_embedding.ngram_embedding.shard_{shard}"
        writer.quantised(name, (constants.num_rows // 128, width), ROW_GROUP)


def _add_linear(writer: Writer, c: dict[str, int], layer: str) -> None:
    name, hidden, heads = f"{layer}.linear_attn", c["hidden_size"], c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    writer.quantised(f"{name}.in_proj_qkv", (channels, hidden))
    writer.quantised(f"{name}.in_proj_z", (values, hidden))
    writer.quantised(f"{name}.out_proj", (hidden, values))
    writer.floats(f"{name}.in_proj_a.weight", (heads, hidden), hidden**-0.5)
    writer.floats(f"{name}.in_proj_b.weight", (heads, hidden), hidden**-0.5)
    writer.floats(f"{name}.conv1d.weight", (channels, 4, 1), 0.4)
    writer.floats(f"{name}.A_log", (heads,), 0.5, mean=0.5)
    writer.floats(f"{name}.dt_bias", (heads,), 0.5, mean=-1.0)
    writer.floats(f"{name}.norm.weight", (c["linear_value_head_dim"],), 0.05, mean=1.0)


def _add_attention(writer: Writer, c: dict[str, int], layer: str) -> None:
    name, hidden, head = f"{layer}.self_attn", c["hidden_size"], c["head_dim"]
    writer.quantised(f"{name}.q_proj", (2 * c["num_attention_heads"] * head, hidden))
    writer.quantised(f"{name}.k_proj", (c["num_key_value_heads"] * head, hidden))
    writer.quantised(f"{name}.v_proj", (c["num_key_value_heads"] * head, hidden))
    writer.quantised(f"{name}.o_proj", (hidden, c["num_attention_heads"] * head))
    writer.floats(f"{name}.q_norm.weight", (head,), 0.05, mean=1.0)
    writer.floats(f"{name}.k_norm.weight", (head,), 0.05, mean=1.0)
    writer.floats(f"{name}.indexer.index_qk_proj.weight", (5 * c["indexer_head_dim"], hidden), hidden**-0.5)
    writer.floats(f"{name}.indexer.q_layernorm.weight", (c["indexer_head_dim"],), 0.05, mean=1.0)
    writer.floats(f"{name}.indexer.k_layernorm.weight", (c["indexer_head_dim"],), 0.05, mean=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--published", action="store_true", help="the published widths")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--ngram-base", type=int, default=20_000, help="rows per n-gram head; published: 20000000")
    args = parser.parse_args()
    sizes = dict(PUBLISHED if args.published else SMALL)
    if args.experts:
        sizes["num_experts"] = args.experts
    text = make_config(sizes, args.layers, args.ngram_base)
    args.out.mkdir(parents=True)
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": text,
        "tie_word_embeddings": False, "quantization": {"group_size": GROUP, "bits": 4, "mode": "affine"},
    }  # fmt: skip
    table = "language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shard_"
    config["quantization"] |= {f"{table}{i}": {"group_size": ROW_GROUP, "bits": 4} for i in range(128)}
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    writer = Writer(np.random.default_rng(0))
    constants = hash_constants(parse_config(config, args.out / "config.json"))
    add_tensors(writer, sizes, text["layer_types"], constants)
    total = writer.write(args.out)
    print(f"{args.out}: {len(writer.tensors)} tensors, {total} bytes")


if __name__ == "__main__":
    main()

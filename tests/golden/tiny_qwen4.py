"""A tiny random Qwen4-Exp: its config, its weights by name, and its checkpoint in the official BF16 layout.

Knows nothing of prompts or references; `make_qwen4_golden.py` runs it. transformers does not run the MTP head, so that
is put together here from the modules of its layers.

Source: transformers 5.24.0, models/qwen4_exp; MTP wiring: vLLM's Qwen4Exp multi-token predictor.
"""

import copy
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4

EOS, VISION_START, VISION_END, IMAGE, VIDEO = 5, 249, 250, 251, 252

# Widths differ wherever the architecture lets them, so that a swapped size fails. rope_theta is small because with
# only four frequencies the published 1e7 would leave three of them almost constant over these few positions.
TEXT = {
    "model_type": "qwen4_exp_text", "dtype": "bfloat16", "vocab_size": 256, "hidden_size": 64,
    "num_hidden_layers": 5, "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": False,
    "attention_dropout": 0.0, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True,
    "pad_token_id": None, "bos_token_id": EOS, "eos_token_id": EOS, "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 100, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [2, 1, 1],
    },
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "output_gate_type": "sigmoid",
    "mamba_ssm_dtype": "float32",
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "hc_count": 4, "hc_lowrank": 32,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    # Heads of 307, 311, 313 and 317 rows, padded from 1248 to 1260 rows: 12 shards of 105, in numeric order.
    "ple_layer_ids": [2], "ple_embed_dim": 128, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 300, "make_ngram_vocab_size_divisible_by": 60, "split_ngram_parts": 12,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "mtp": {
        "hybrid": True, "layer_types": ["full_attention"], "mtp_use_hidden_state_from_layer": None,
        "num_hidden_layers": 1, "rope_theta": 100,
    },
}  # fmt: skip
VISION = {
    "model_type": "qwen4_exp", "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
    "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    "num_position_embeddings": 36, "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02,
    "deepstack_visual_indexes": [],
}  # fmt: skip
CONFIG = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
    "text_config": TEXT, "vision_config": VISION, "image_token_id": IMAGE, "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END, "tie_word_embeddings": False,
    "language_model_only": False, "transformers_version": transformers.__version__,
}  # fmt: skip

# How weights are drawn: first matching pattern, centre, spread; the spread of a matrix is divided by sqrt(fan-in).
# Spreads above 1 are where the architecture damps a signal (the /hc_count, gates) that a test must still notice.
TABLES = re.compile(r"embed_tokens|pos_embed|ngram_embedding")
DRAWS = (
    (r"A_log$", -1.5, 1.0),  # decays from nearly none to a few tokens
    (r"dt_bias$", 0.0, 0.5),
    (r"linear_attn\.norm|visual.*norm.*weight$", 1.0, 0.2),  # ordinary norms: stored around one
    (r"norm.*weight$", 0.0, 0.3),  # zero-centred norms: applied as 1 + w
    (r"bias$", 0.0, 0.1),
    (TABLES.pattern, 0.0, 1.0),
    (r"in_proj_qkv", 0.0, 0.05),  # small, so that the epsilons of the l2 norm and of the output norm count
    (r"input_mix_weight_down|block_inject_weight", 0.0, 4.0),
    (r"input_mix_weight_up|mlp\.gate\.weight|index_qk_proj|ple\.key_proj", 0.0, 2.0),
    (r"", 0.0, 1.2),
)


def draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Returns the weight of that name: float32 values that BF16 holds exactly, the same for a seed on any machine."""
    centre, spread = next((centre, spread) for pattern, centre, spread in DRAWS if re.search(pattern, name))
    if len(shape) > 1 and not TABLES.search(name):
        spread /= math.sqrt(shape[-1] if ".experts." in name else math.prod(shape[1:]))
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(tuple(shape))
    return torch.from_numpy(centre + spread * noise).bfloat16().float()


class MtpHead(nn.Module):
    """The multi-token prediction head: fuses a token embedding with the streams below it and runs one layer."""

    def __init__(self, config: transformers.PreTrainedConfig) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types, config.ple_layer_ids, config.num_hidden_layers = ["indexed_attention"], [], 1
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.streams = (config.hc_count, hidden)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = qwen4.Qwen4ExpTextRMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = qwen4.Qwen4ExpTextRMSNorm(math.prod(self.streams), eps=eps)  # one group for all
        self.layers = nn.ModuleList([qwen4.Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = qwen4.Qwen4ExpTextGatedResidual(config, use_combine=False)

    def forward(self, embeddings: Tensor, streams: Tensor, rotary: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns what goes into lm_head, (1, T, D), and the head's own streams, (1, T, S * D)."""
        below = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, self.streams))
        hidden = (self.fc_embedding(self.pre_fc_norm_embedding(embeddings)).unsqueeze(-2) + below).flatten(-2)
        length = hidden.shape[1]
        causal = torch.full((1, 1, length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
        positions = torch.arange(length).expand(3, 1, -1)
        hidden = self.layers[0](hidden, position_embeddings=rotary(hidden, positions), attention_mask=causal)
        return self.hyper_connection_mixer(hidden), hidden


def build(seed: int) -> tuple[Qwen4ExpForConditionalGeneration, MtpHead]:
    """Builds model and MTP head in float32 with the weights of a seed."""
    config = Qwen4ExpConfig(**copy.deepcopy(CONFIG))
    model = Qwen4ExpForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    mtp = MtpHead(model.config.text_config)
    for prefix, module in (("", model), ("mtp.", mtp)):
        for name, value in module.state_dict().items():
            if value.is_floating_point():  # the int64 hash constants stay as the reference derived them
                value.copy_(draw(prefix + name, value.shape, seed))
    return model.eval(), mtp.eval()


def load(folder: Path, dtype: torch.dtype) -> Qwen4ExpForConditionalGeneration:
    """Loads the written checkpoint. Not `build(...).to(dtype)`: that would round the rotary frequencies as well."""
    return Qwen4ExpForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def official_tensors(model: nn.Module, mtp: nn.Module) -> dict[str, Tensor]:
    """Returns the weights under their published names, the n-gram table split into its shards."""
    tensors = dict(model.state_dict()) | {f"mtp.{name}": value for name, value in mtp.state_dict().items()}
    (table,) = [name for name in tensors if name.endswith("ngram_embedding.weight")]
    for number, shard in enumerate(tensors.pop(table).chunk(TEXT["split_ngram_parts"])):
        tensors[table.removesuffix("weight") + f"shard_{number}.weight"] = shard
    return {name: (t.bfloat16() if t.is_floating_point() else t).clone() for name, t in tensors.items()}


def write_checkpoint(folder: Path, model: nn.Module, mtp: MtpHead) -> None:
    """Writes config, index and two files; neighbours in name order often lie in different files, as in the release."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = official_tensors(model, mtp)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: files[zlib.crc32(name.encode()) % 2] for name in sorted(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")

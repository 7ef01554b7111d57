"""What a checkpoint needs in memory, from its headers and config: the input of the planner.

Serves the loader and `doctor`, so that both plan from the same numbers. Allocates nothing.
"""

import numpy as np

from slotpy import config
from slotpy.budget import Sizes
from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.checkpoint.formats import ResidentTensor, WeightFormat
from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig
from slotpy.layers.switch import DENSE_WINDOW_BYTES


def measure(checkpoint: Checkpoint, *, on_cpu: bool, float32: bool = False) -> Sizes:
    """Size a checkpoint for the CPU backend or a GPU; `float32` computes in float32 throughout."""
    c = checkpoint.config
    value_bytes = 4 if float32 else 2
    widened = 4 if float32 or is_wide(checkpoint, on_cpu) else None
    rows, experts = checkpoint.rows, checkpoint.experts
    largest = max(_tensor_bytes(checkpoint, tensor, None) for tensor in checkpoint.resident.values())
    fixed = pass_bytes(c, checkpoint.expert_format)
    product_bytes = attention_bytes(c, 4 if on_cpu else value_bytes)
    return Sizes(
        resident_bytes=resident_bytes(checkpoint, widened),
        record_bytes=experts.record_nbytes,
        num_records=experts.num_records,
        num_layers=c.num_hidden_layers,
        experts_per_token=c.num_experts_per_tok,
        row_cache_bytes=num_row_slots(checkpoint) * rows.record_nbytes,
        table_bytes=rows.num_records * rows.record_nbytes,
        state_bytes=fixed_state_bytes(c, value_bytes),
        state_token_bytes=state_token_bytes(c, value_bytes),
        workspace_bytes=fixed,
        workspace_token_bytes=product_bytes * config.PREFILL_CHUNK_TOKENS,
        workspace_limit_bytes=fixed + product_bytes * config.PREFILL_PRODUCT,
        loading_bytes=2 * largest,  # read, copied into MLX's memory, and perhaps widened from there
        allocator_cache_bytes=config.ALLOCATOR_CACHE_BYTES,
        max_context_tokens=c.max_position_embeddings,
        prefix_cache_bytes=config.SESSION_MARKS * fixed_state_bytes(c, value_bytes),
    )


def is_wide(checkpoint: Checkpoint, on_cpu: bool) -> bool:
    """Tell whether the resident weights are kept in float32, because MLX's quantised matmul is slow on CPUs."""
    return on_cpu and resident_bytes(checkpoint, 4) <= config.CPU_FLOAT32_LIMIT_BYTES


def num_row_slots(checkpoint: Checkpoint) -> int:
    return min(config.ROW_CACHE_BYTES // checkpoint.rows.record_nbytes, checkpoint.rows.num_records)


def resident_bytes(checkpoint: Checkpoint, bytes_per_value: int | None) -> int:
    """Add up the resident weights of the text model, as stored or widened to `bytes_per_value`."""
    return sum(
        _tensor_bytes(checkpoint, tensor, bytes_per_value)
        for name, tensor in checkpoint.resident.items()
        if not name.startswith("mtp.")
    )


def _tensor_bytes(checkpoint: Checkpoint, tensor: ResidentTensor, bytes_per_value: int | None) -> int:
    spans = {part: checkpoint.index.spans[full] for part, full in tensor.parts.items()}
    if bytes_per_value is None:
        return sum(span.nbytes for span in spans.values())
    values = int(np.prod(spans["weight"].shape))
    return bytes_per_value * (values * 32 // tensor.format.bits if tensor.format.kind == "affine" else values)


def fixed_state_bytes(c: Qwen4ExpConfig, value_bytes: int) -> int:
    """Size what one sequence carries at any length: recurrent matrices in float32, and convolution histories."""
    num_linear = sum(kind == "linear_attention" for kind in c.layer_types)
    recurrent = 4 * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    channels = 2 * c.linear_num_key_heads * c.linear_key_head_dim + c.linear_num_value_heads * c.linear_value_head_dim
    conv = value_bytes * channels * (c.linear_conv_kernel_dim - 1)
    ngram = value_bytes * c.hc_count * c.hidden_size * (c.ple_conv_kernel_size - 1) * c.ngram_size
    return num_linear * (recurrent + conv) + ngram


def state_token_bytes(c: Qwen4ExpConfig, value_bytes: int) -> int:
    """Size what each token of context adds: keys, values and pooled index keys of the attention layers.

    One layer counts twice: its arrays are copied when they grow.
    """
    num_attention = sum(kind == "full_attention" for kind in c.layer_types)
    index_keys = -(-c.indexer_head_dim // c.indexer_compress_ratio)
    return (num_attention + 1) * value_bytes * (2 * c.num_key_value_heads * c.head_dim + index_keys)


def pass_bytes(c: Qwen4ExpConfig, expert_format: WeightFormat) -> int:
    """Bound what one prefill pass holds but for attention: streams in flight, expert pairs, decoded experts, logits."""
    tokens = config.PREFILL_CHUNK_TOKENS
    streams = 8 * 4 * tokens * c.hc_count * c.hidden_size
    pairs = 4 * 4 * tokens * c.num_experts_per_tok * (c.hidden_size + 2 * c.moe_intermediate_size)
    window = 2 * DENSE_WINDOW_BYTES if expert_format.kind in ("dense", "fp8_block") else 0
    return streams + pairs + window + 2 * 4 * c.vocab_size


def attention_bytes(c: Qwen4ExpConfig, value_bytes: int) -> int:
    """Bound what attention and its indexer hold for each pair of a pass's token and a context token.

    Scores and their softmax for every head; the indexer's dots, scores and sorted scores per block; masks.
    """
    indexer = 4 * (c.indexer_n_heads + 3) // c.indexer_compress_ratio
    return 2 * value_bytes * c.num_attention_heads + indexer + 2

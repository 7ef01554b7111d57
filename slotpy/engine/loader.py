"""Composition root: wires checkpoint, store, slot caches and model. The only place that does."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from slotpy import budget, config, hardware
from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.checkpoint.formats import WeightFormat
from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig
from slotpy.layers.ngram import StreamedRows
from slotpy.layers.switch import StreamedExperts
from slotpy.models.qwen4_exp import Qwen4Exp
from slotpy.models.weights import Weights
from slotpy.slots.cache import SlotCache
from slotpy.store.base import Store
from slotpy.store.open import open_store


@dataclass(frozen=True)
class EngineOptions:
    """What a user may choose about loading. `slots` wins over `cache_bytes`; neither: what fits the memory.

    `native` picks the reader: True demands the C library, False the pure-Python one, None takes C where it is built.
    `float32` computes in float32 throughout, to compare with references.
    """

    slots: int | None = None
    cache_bytes: int | None = None
    direct_io: bool = False
    native: bool | None = None
    context_tokens: int | None = None
    float32: bool = False


@dataclass
class LoadedModel:
    """A model ready to run, with the parts whose counters and limits the engine shows."""

    checkpoint: Checkpoint
    model: Qwen4Exp
    store: Store
    experts: SlotCache
    rows: SlotCache
    plan: budget.Plan
    context_tokens: int
    notes: tuple[str, ...]

    def retire(self) -> None:
        """End all slot leases; only after the step's outputs and states were evaluated."""
        self.experts.retire()
        self.rows.retire()

    def abandon(self) -> None:
        """End all slot leases after a step that failed; its graphs must not be evaluated any more."""
        self.experts.abandon()
        self.rows.abandon()

    def close(self) -> None:
        self.store.close()


def load(directory: Path, options: EngineOptions) -> LoadedModel:
    """Open a checkpoint directory and build its model, within a memory plan made first.

    Raises CheckpointError for files that are not what the config says, CapacityError for a plan that does not fit.
    """
    config.prepare_mlx_environment()
    mx.set_cache_limit(config.ALLOCATOR_CACHE_BYTES)
    checkpoint = open_checkpoint(directory)
    model_config = checkpoint.config
    context_tokens = options.context_tokens or min(config.CONTEXT_TOKENS, model_config.max_position_embeddings)
    dtype = mx.float32 if options.float32 else mx.bfloat16
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    wide = on_cpu and resident_bytes(checkpoint, 4) <= config.CPU_FLOAT32_LIMIT_BYTES
    num_rows = min(config.ROW_CACHE_BYTES // checkpoint.rows.record_nbytes, checkpoint.rows.num_records)
    plan = budget.plan(
        budget.Sizes(
            resident_bytes=resident_bytes(checkpoint, 4 if wide or options.float32 else None),
            record_bytes=checkpoint.experts.record_nbytes,
            num_records=checkpoint.experts.num_records,
            row_cache_bytes=num_rows * checkpoint.rows.record_nbytes,
            state_bytes=state_bytes(model_config, context_tokens, dtype.size),
            workspace_bytes=workspace_bytes(model_config, context_tokens, checkpoint.expert_format),
            allocator_cache_bytes=config.ALLOCATOR_CACHE_BYTES,
        ),
        hardware.available_memory_bytes(),
        num_slots=options.slots,
        cache_bytes=options.cache_bytes,
    )
    store = open_store(
        checkpoint.files, num_threads=config.READ_THREADS, direct=options.direct_io, native=options.native
    )
    num_layers = model_config.num_hidden_layers
    experts = SlotCache(checkpoint.experts, store, num_slots=plan.num_slots, num_layers=num_layers)
    rows = SlotCache(checkpoint.rows, store, num_slots=num_rows, num_layers=1)
    model = Qwen4Exp(
        model_config,
        Weights(checkpoint, dtype, wide),
        # MLX's CPU kernels are several times faster in float32, and its gather_mm knows nothing else there.
        StreamedExperts(experts, checkpoint.expert_format, mx.float32 if on_cpu else dtype),
        StreamedRows(rows, checkpoint.row_format, row_scale(checkpoint), dtype),
    )
    return LoadedModel(checkpoint, model, store, experts, rows, plan, context_tokens, checkpoint.notes + kernel_notes())


def kernel_notes() -> tuple[str, ...]:
    """Say what to expect where MLX has no compiled kernels yet."""
    directory = config.kernel_cache_dir()
    if not mx.cuda.is_available() or (directory.is_dir() and any(directory.iterdir())):
        return ()
    return (f"MLX compiles its CUDA kernels at first use, which takes minutes; they are kept in {directory}",)


def row_scale(checkpoint: Checkpoint) -> float:
    """Read the global scale of an FP8 n-gram table; 1 where there is none."""
    if checkpoint.row_scale is None:
        return 1.0
    return float(checkpoint.index.read_array(checkpoint.row_scale).reshape(-1)[0])


def resident_bytes(checkpoint: Checkpoint, bytes_per_value: int | None) -> int:
    """Add up the resident weights of the text model, as stored or widened to `bytes_per_value`."""
    total = 0
    for name, tensor in checkpoint.resident.items():
        if name.startswith("mtp."):
            continue
        spans = {part: checkpoint.index.spans[full] for part, full in tensor.parts.items()}
        if bytes_per_value is None:
            total += sum(span.nbytes for span in spans.values())
            continue
        values = int(np.prod(spans["weight"].shape))
        total += bytes_per_value * (values * 32 // tensor.format.bits if tensor.format.kind == "affine" else values)
    return total


def state_bytes(c: Qwen4ExpConfig, context_tokens: int, value_bytes: int) -> int:
    """Size one sequence's state: recurrent matrices in float32, histories, and KV and block keys for the context."""
    num_linear = sum(kind == "linear_attention" for kind in c.layer_types)
    num_attention = len(c.layer_types) - num_linear
    recurrent = 4 * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    channels = 2 * c.linear_num_key_heads * c.linear_key_head_dim + c.linear_num_value_heads * c.linear_value_head_dim
    conv = value_bytes * channels * (c.linear_conv_kernel_dim - 1)
    ngram = value_bytes * c.hc_count * c.hidden_size * (c.ple_conv_kernel_size - 1) * c.ngram_size
    per_token = 2 * c.num_key_value_heads * c.head_dim + c.indexer_head_dim // c.indexer_compress_ratio
    return num_linear * (recurrent + conv) + ngram + num_attention * context_tokens * per_token * value_bytes


def workspace_bytes(c: Qwen4ExpConfig, context_tokens: int, expert_format: WeightFormat) -> int:
    """Bound one prefill pass: the streams in flight, the expert pairs, attention over the context, and the logits."""
    tokens = min(config.PREFILL_CHUNK_TOKENS, context_tokens)
    streams = 8 * tokens * c.hc_count * c.hidden_size
    pairs = 4 * tokens * c.num_experts_per_tok * (c.hidden_size + 2 * c.moe_intermediate_size)
    attention = 2 * tokens * context_tokens * c.num_attention_heads
    return 4 * (streams + pairs + attention + 2 * c.vocab_size)

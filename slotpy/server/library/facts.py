"""What a model's directory says about the model: sizes, formats, templates, from headers and small files alone.

Owns the facts that clients are shown. Loads no weights; knows no names (library.py does).
"""

import hashlib
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.checkpoint.formats import WeightFormat
from slotpy.checkpoint.records import RecordSet
from slotpy.engine.chat import ChatTemplate
from slotpy.engine.text import Tokenizer, read_json
from slotpy.engine.tools import ToolGrammar

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size and time of change (ns) of each file of a directory: equal ones mean an unchanged model."""

_LICENSES = ("license", "licence", "copying")
_PER_VALUE = {"U8": 2}  # NVFP4 packs two values in a byte


class ModelText:
    """The text side of a model, loaded at first use: that takes up to a second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._directory)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        return ChatTemplate.load(self._directory)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Describe one model directory.

    `digest` is 64 hex digits, another for every change of a file; `size` is in bytes. `details` and `info`, under
    GGUF's names, are what clients are shown.
    """

    directory: Path
    digest: str
    size: int
    modified_at: datetime
    details: Mapping[str, Any]
    info: Mapping[str, Any]
    capabilities: frozenset[str]
    context_length: int
    embedding_length: int
    parameter_count: int
    architecture: str
    template: str
    license: str
    text: ModelText


def fingerprint(directory: Path) -> Fingerprint:
    """Take the state of a directory's files, links followed. Raises: OSError."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:  # a link to nothing, or gone by now: reading the facts says so if it matters
                continue
            if stat.S_ISREG(status.st_mode):
                found.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def read_facts(directory: Path, state: Fingerprint) -> Facts:
    """Read the facts of a directory in `state`.

    Raises: CheckpointError for a model that slotpy does not run; SlotpyError for a template that does not parse.
    """
    checkpoint = open_checkpoint(directory)
    text = ModelText(directory)
    chat = text.chat
    count = parameter_count(checkpoint)
    architecture = str(read_json(directory / "config.json")["model_type"])
    config = checkpoint.config
    return Facts(
        directory=directory,
        digest=hashlib.sha256(repr(state).encode()).hexdigest(),
        size=sum(size for name, size, _ in state if not name.startswith("slotpy-")),
        modified_at=datetime.fromtimestamp(max(mtime_ns for _, _, mtime_ns in state) / 1e9, UTC),
        details={
            "parent_model": "",
            "format": "safetensors",
            "family": architecture,
            "families": [architecture],
            "parameter_size": format_count(count),
            "quantization_level": quantization_level(checkpoint),
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
        },
        info=_info(checkpoint, architecture, count),
        capabilities=_capabilities(directory, chat),
        context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size,
        parameter_count=count,
        architecture=architecture,
        template=chat.source if chat else "",
        license=_license(directory),
        text=text,
    )


def parameter_count(checkpoint: Checkpoint) -> int:
    """Count the weights of the text model, its n-gram table and its draft layer, from headers.

    A packed weight counts the values it stands for: eight 4-bit ones in each 32-bit word. Scales, biases of groups and
    the vision tower do not count.
    """
    spans = checkpoint.index.spans
    total = 0
    for tensor in checkpoint.resident.values():
        span = spans[tensor.parts["weight"]]
        if span.dtype != "I64":  # constants of the n-gram hash
            total += _values(span.dtype, span.shape, tensor.format)
    total += _record_values(checkpoint.experts, checkpoint.expert_format)
    total += _record_values(checkpoint.rows, checkpoint.row_format)
    if checkpoint.mtp_experts is not None and checkpoint.mtp_expert_format is not None:
        total += _record_values(checkpoint.mtp_experts, checkpoint.mtp_expert_format)
    return total


def quantization_level(checkpoint: Checkpoint) -> str:
    """Name the format of the experts, which are most of a model: `4-bit`, `BF16`, `FP8`, `NVFP4`."""
    stored = checkpoint.expert_format
    if stored.kind == "dense":
        return checkpoint.experts.roles[0].dtype
    return {"affine": f"{stored.bits}-bit", "nvfp4": "NVFP4"}.get(stored.kind, "FP8")


def format_count(count: int) -> str:
    """Format a number of parameters: 27M, 8.2B, 176B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}" if count < 9.95 * size else f"{count / size:.0f}{unit}"
    return str(count)


def tensors(directory: Path) -> list[dict[str, Any]]:
    """List every tensor of a directory, by name. Raises: CheckpointError."""
    spans = sorted(open_checkpoint(directory).index.spans.items())
    return [{"name": name, "type": span.dtype, "shape": list(span.shape)} for name, span in spans]


def _record_values(records: RecordSet, stored: WeightFormat) -> int:
    roles = (role for role in records.roles if role.name.endswith(".weight"))
    return records.num_records * sum(_values(role.dtype, role.shape, stored) for role in roles)


def _values(dtype: str, shape: tuple[int, ...], stored: WeightFormat) -> int:
    if stored.kind == "affine":
        return math.prod(shape) * 32 // stored.bits
    return math.prod(shape) * (_PER_VALUE.get(dtype, 1) if stored.kind == "nvfp4" else 1)


def _info(checkpoint: Checkpoint, architecture: str, count: int) -> dict[str, Any]:
    config = checkpoint.config
    numbers = {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_used_count": config.num_experts_per_tok,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    general = {"general.architecture": architecture, "general.parameter_count": count}
    return general | {f"{architecture}.{name}": value for name, value in numbers.items()}


def _capabilities(directory: Path, chat: ChatTemplate | None) -> frozenset[str]:
    found = {"completion"}
    if chat is not None and chat.supports_tools and ToolGrammar.of(directory, chat.source) is not None:
        found.add("tools")
    if chat is not None and chat.supports_thinking:
        found.add("thinking")
    return frozenset(found)


def _license(directory: Path) -> str:
    for path in sorted(directory.iterdir()):
        if path.is_file() and any(word in path.name.lower() for word in _LICENSES):
            return path.read_text(encoding="utf-8", errors="replace")
    return ""

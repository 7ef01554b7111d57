"""Every default and every environment variable, once. The only module that reads or sets the environment."""

import os
from importlib.metadata import version
from pathlib import Path

PREFILL_CHUNK_TOKENS = 512
"""Tokens of one prefill pass. Bounds the workspace; each pass reads the experts it routes to."""

ROW_CACHE_BYTES = 64 << 20
"""Slot memory for n-gram rows. Row ids are hashes, so only repeated n-grams hit: a small cache does as well."""

CONTEXT_TOKENS = 32_768
"""Context planned for when none is asked for, unless the model's own limit is lower."""

READ_THREADS = 16
"""Reader threads. The knee lies at 4 to 16 readers on the drives measured by us and by others."""

CPU_FLOAT32_LIMIT_BYTES = 1 << 30
"""On the CPU backend resident weights up to this size are kept in float32: MLX's quantised matmul is slow there."""

ALLOCATOR_CACHE_BYTES = 512 << 20
"""How much freed memory MLX may keep. Unbounded, its cache grows past any plan."""


def home() -> Path:
    """Give the directory for slotpy's own files: `$SLOTPY_HOME`, else `~/.slotpy`."""
    configured = os.environ.get("SLOTPY_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".slotpy"


def prepare_mlx_environment() -> None:
    """Set what MLX reads from the environment at its first use, unless set; call before any array is evaluated.

    MLX lets CUDA run float32 matmuls in TF32 (10-bit mantissa) unless told otherwise. The delta rule, the indexer
    scores and `slotpy check reference` need real float32.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    os.environ.setdefault("MLX_PTX_CACHE_DIR", str(kernel_cache_dir()))


def kernel_cache_dir() -> Path:
    """Give where MLX keeps its compiled CUDA kernels; its own default is lost at every restart of the machine."""
    return home() / "kernels" / f"mlx-{version('mlx')}"

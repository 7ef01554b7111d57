"""Every default and every environment variable, once. The only module that reads or sets the environment."""

import os
from importlib.metadata import version
from pathlib import Path

PREFILL_CHUNK_TOKENS = 512
"""Tokens of one prefill pass. Bounds the workspace; each pass reads the experts it routes to."""

PREFILL_PRODUCT = 1 << 23
"""Bound on pass tokens x context tokens, so on attention's memory: passes of 512 up to 16,384 tokens, then shorter."""

SESSION_MARKS = 3
"""Places that a session can go back to. Each costs the fixed part of its state: 116 MB for Flash-Next."""

ROW_CACHE_BYTES = 64 << 20
"""Slot memory for n-gram rows. Row ids are hashes, so only repeated n-grams hit: a small cache does as well."""

CONTEXT_TOKENS = 32_768
"""Context planned for when none is asked for, unless the model's own limit is lower or memory is left for more."""

READ_THREADS = 16
"""Reader threads. The knee lies at 4 to 16 readers on the drives measured by us and by others."""

CPU_FLOAT32_LIMIT_BYTES = 1 << 30
"""On the CPU backend resident weights up to this size are kept in float32: MLX's quantised matmul is slow there."""

ALLOCATOR_CACHE_BYTES = 512 << 20
"""How much freed memory MLX may keep. Unbounded, its cache grows past any plan."""

PULL_CHUNK_BYTES = 32 << 20
"""Bytes of one request, and the unit in which a damaged file is repaired. 104 GB are 3,100 requests."""

PULL_CONNECTIONS = (1, 16)
"""Connections of a pull: at first, and at most if every step up makes it faster. One fills a fast line best."""

PULL_LEAD_BYTES = 512 << 20
"""How far a file's received bytes may run ahead of its hash, which reads them back from the page cache."""

PULL_STALL_S = 30.0
"""A connection that brings nothing for this long is given up; one that drips is, after as long."""

PULL_PATIENCE_S = (60.0, 1800.0)
"""How long a pull tries without getting a byte: before the first one (a wrong name or proxy), and later (an outage)."""

PULL_SYNC_S = 2.0
"""How often received bytes are made durable and journalled: what a power cut or SIGKILL may cost."""

PULL_SPARE_BYTES = 1 << 30
"""Disk space that a pull leaves free."""

KEEP_ALIVE_S = 300.0
"""How long a served model stays loaded after its last request, unless told otherwise: Ollama's default."""

MAX_QUEUE = 512
"""Requests that may wait for the engine; beyond them the server answers 503. Ollama's default."""

MAX_BODY_BYTES = 256 << 20
"""The longest request body that is read. Clients send images inline, of up to 100 MB each."""

DRAIN_S = 3.0
"""How long the running reply may go on once the server was told to end, before it is cut short."""

SERVER_VARIABLES = {
    "OLLAMA_HOST": "address to listen on: HOST, HOST:PORT, :PORT or a URL; default 127.0.0.1:11434",
    "OLLAMA_ORIGINS": "web origins that may call, beside local ones; with commas, * matches anything",
    "OLLAMA_KEEP_ALIVE": "how long a model stays loaded: 5m, 1h30m, or seconds; negative: for ever",
    "OLLAMA_CONTEXT_LENGTH": "tokens to have room for, as --context",
    "OLLAMA_MAX_QUEUE": "requests that may wait, default 512; more get status 503",
    "OLLAMA_MODELS": "directory of pulled models, unless SLOTPY_MODELS is set",
    "OLLAMA_DEBUG": "1: log what each reply cost, too",
    "OLLAMA_NUM_PARALLEL": "known, not used: one reply is generated at a time",
    "OLLAMA_MAX_LOADED_MODELS": "known, not used: one model is loaded at a time",
    "OLLAMA_LOAD_TIMEOUT": "known, not used: loading is not given up",
    "OLLAMA_NO_CLOUD": "known, not used: nothing is ever sent to a cloud",
    "SLOTPY_API_KEY": "key that clients must give, as --api-key",
}
"""What `slotpy serve` takes from the environment; an option of the same meaning wins."""


def home() -> Path:
    """Give the directory for slotpy's own files: `$SLOTPY_HOME`, else `~/.slotpy`."""
    configured = os.environ.get("SLOTPY_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".slotpy"


def models_dir() -> Path:
    """Give the directory of pulled models: `$SLOTPY_MODELS`, else `$OLLAMA_MODELS`, else `models` under the home."""
    configured = os.environ.get("SLOTPY_MODELS") or os.environ.get("OLLAMA_MODELS")
    return Path(configured).expanduser() if configured else home() / "models"


def server_variables() -> dict[str, str]:
    """Give those of SERVER_VARIABLES that are set, without the blanks and quotes around a value, as Ollama does."""
    values = {name: os.environ.get(name, "").strip().strip("\"'") for name in SERVER_VARIABLES}
    return {name: value for name, value in values.items() if value}


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

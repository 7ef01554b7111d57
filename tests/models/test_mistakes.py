"""Each known way to get this architecture wrong is caught: its source is changed and the golden comparison must fail.

A row of MISTAKES names a module, a fragment of its source that occurs exactly once, and what a wrong implementation
would have there. The model is then built from the changed source and compared with the reference.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

LAYERS, MODEL = "slotpy.layers", "slotpy.models.qwen4_exp"
CHECKPOINT = "slotpy.checkpoint.qwen4_exp"
HASHING = f"{CHECKPOINT}.hashing"
REBUILT = ("slotpy.layers.", "slotpy.models.", "slotpy.engine.loader", "slotpy.checkpoint.", "tests.golden_model")

MISTAKES = [
    ("norms scaled by w, not 1 + w", f"{CHECKPOINT}.norms", "else 1.0", "else 0.0", "text"),
    (
        "hyper-connection norm over all streams",
        f"{LAYERS}.hyper_connection",
        "normed = scaled_rms_norm(streams, self.norm_scale, self.eps)",
        "normed = scaled_rms_norm(streams.reshape(num_tokens, -1), self.norm_scale.reshape(-1), self.eps)\n"
        "        normed = normed.reshape(streams.shape)",
        "text",
    ),
    ("sum of streams, not mean", f"{LAYERS}.hyper_connection", ".mean(axis=1)", ".sum(axis=1)", "text"),
    ("mix of raw streams", f"{LAYERS}.hyper_connection", "(mix * normed)", "(mix * streams)", "text"),
    (
        "no division before silu",
        f"{LAYERS}.hyper_connection",
        "self.down(flat) / num_streams",
        "self.down(flat)",
        "text",
    ),
    ("write gates without factor 2", f"{LAYERS}.hyper_connection", "gates = 2 *", "gates = 1 *", "text"),
    (
        "silu as GDN output gate",
        f"{LAYERS}.gated_delta",
        "* mx.sigmoid(z.astype(mx.float32))",
        "* z * mx.sigmoid(z.astype(mx.float32))",
        "text",
    ),
    (
        "GDN heads tiled, not repeated",
        f"{LAYERS}.gated_delta",
        "        v = v.reshape(num_tokens, s.num_value",
        "        q, k = (mx.tile(a[:, ::repeat], (1, repeat, 1)) for a in (q, k))\n"
        "        v = v.reshape(num_tokens, s.num_value",
        "text",
    ),
    ("GDN query not scaled", f"{LAYERS}.gated_delta", " * s.key_dim**-0.5", "", "text"),
    (
        "GDN decay applied after the update",
        f"{LAYERS}.gated_delta",
        "beta[..., None])\n    decayed_keys",
        "beta[..., None])\n    total = total - log_decay\n    decayed_keys",
        "text",
    ),
    (
        "GDN decay after the update, one step",
        f"{LAYERS}.gated_delta",
        "    delta = beta[0][:, None, None] * (v - (state",
        "    delta = beta[0][:, None, None] * (v - (state / mx.exp(log_decay[0])[:, None, None]",
        "decode",
    ),
    (
        "l2 epsilon on the mean",
        f"{LAYERS}.gated_delta",
        "keepdims=True) + L2_EPS",
        "keepdims=True) + 16 * L2_EPS",
        "text",
    ),
    (
        "queries first, then gates",
        f"{LAYERS}.sparse_attention",
        "q, gate = mx.split(self.q_proj(x).reshape(num_tokens, self.num_heads, 2 * self.head_dim), 2, axis=-1)",
        "q, gate = mx.split(self.q_proj(x).reshape(num_tokens, 2 * self.num_heads, self.head_dim), 2, axis=1)",
        "text",
    ),
    (
        "rotation of the last dimensions",
        f"{LAYERS}.rotary",
        "a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]",
        "rest, a, b = mx.split(x, [x.shape[-1] - 2 * half, x.shape[-1] - half], axis=-1)",
        "text",
    ),
    (
        "block rotation at its last token",
        MODEL,
        "known[:, : whole : self.ratio]",
        "known[:, self.ratio - 1 : whole : self.ratio]",
        "text",
    ),
    (
        "index keys normed before pooling",
        f"{LAYERS}.sparse_attention",
        "        pooled = grouped.astype(mx.float32).mean(axis=1).astype(keys.dtype)\n"
        "        pooled = scaled_rms_norm(pooled, self.k_scale, self.eps)\n",
        "        pooled = scaled_rms_norm(grouped, self.k_scale, self.eps).mean(axis=1)\n",
        "text",
    ),
    ("index scores without relu", f"{LAYERS}.sparse_attention", "mx.maximum(dots, 0)", "dots", "text"),
    (
        "incomplete block not attended",
        f"{LAYERS}.sparse_attention",
        "(token >= complete * self.ratio) & (token <= query)",
        "token == query",
        "text",
    ),
    ("dense attention", f"{LAYERS}.sparse_attention", "num_blocks <= wanted", "True", "text"),
    (
        "own block always attended",
        f"{LAYERS}.sparse_attention",
        "(token >= complete * self.ratio)",
        "(token >= query // self.ratio * self.ratio)",
        "text",
    ),
    (
        "router weights not renormalised",
        f"{LAYERS}.switch",
        "(weights / weights.sum(axis=-1, keepdims=True))",
        "weights",
        "text",
    ),
    (
        "gate and up swapped",
        f"{LAYERS}.switch",
        "gate * mx.sigmoid(gate) * up, slots",
        "up * mx.sigmoid(up) * gate, slots",
        "text",
    ),
    (
        "shared expert not gated",
        f"{LAYERS}.switch",
        "mx.sigmoid(self.gate(x)) * self.down_proj",
        "self.down_proj",
        "text",
    ),
    ("n-grams across an end of text", HASHING, "hidden |= before == config.eos_token_id", "pass", "text"),
    (
        "n-gram shards in the order of their names",
        f"{CHECKPOINT}.layout",
        '{shard}" for shard in range(num_shards)]',
        '{shard}" for shard in sorted(range(num_shards), key=str)]',
        "text",
    ),
    (
        "n-gram history starts as token 0",
        HASHING,
        "config.ngram_size - 1, config.eos_token_id, np.int64",
        "config.ngram_size - 1, 0, np.int64",
        "text",
    ),
    ("n-gram convolution not dilated", MODEL, "dilation=c.ngram_size", "dilation=1", "text"),
    (
        "n-gram skip of the normed value",
        f"{LAYERS}.ngram",
        "(gated + conv.reshape",
        "(normed.reshape(gated.shape) + conv.reshape",
        "text",
    ),
    (
        "n-gram gate without signed root",
        f"{LAYERS}.ngram",
        "score = mx.sign(dots) * mx.sqrt(mx.maximum(mx.abs(dots), 1e-6))",
        "score = dots",
        "text",
    ),
    ("n-gram block left out", MODEL, "if i == self.ngram_layer:", "if pending.take() is None:", "text"),
    (
        "contiguous M-RoPE sections",
        f"{LAYERS}.rotary",
        "self.axis[axis : 3 * sections[axis] : 3] = axis",
        "self.axis[sum(sections[:axis]) : sum(sections[: axis + 1])] = axis",
        "image",
    ),
    (
        "draft norm per stream",
        MODEL,
        "flat = scaled_rms_norm(streams.reshape(len(tokens), -1), self.hidden_scale, eps)",
        "flat = scaled_rms_norm(streams, self.hidden_scale.reshape(streams.shape[1:]), eps)",
        "draft",
    ),
]


@contextmanager
def changed_source(name: str, old: str, new: str) -> Iterator[ModuleType]:
    """Import slotpy afresh with one module's source changed; yields the golden model's module, built on it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(old) == 1, f"{name}: the fragment occurs {source.count(old)} times"
    code = compile(source.replace(old, new), spec.origin, "exec")

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> object:
            return code

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path, target=None):
            if fullname == name:
                return importlib.util.spec_from_file_location(name, spec.origin, loader=Loader(name, spec.origin))
            return None

    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if key.startswith(REBUILT)}
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("tests.golden_model")
    finally:
        sys.meta_path.remove(finder)
        for key in [key for key in sys.modules if key.startswith(REBUILT)]:
            del sys.modules[key]
        sys.modules.update(kept)
        for key, module in kept.items():
            parent, _, leaf = key.rpartition(".")
            setattr(sys.modules[parent], leaf, module)


def error_of(golden: ModuleType, kind: str) -> float:
    loaded = golden.load_golden()
    try:
        if kind == "decode":
            logits, _ = golden.run(loaded, [golden.TOKENS[:60], *golden.TOKENS[60:, None]])
            return golden.largest(logits - golden.REF["logits_fp32"])
        return getattr(golden, f"{kind}_error")(loaded)
    finally:
        loaded.close()


@pytest.mark.parametrize(
    ("module", "old", "new", "kind"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_mistake_is_caught(module, old, new, kind):
    with changed_source(module, old, new) as golden:
        assert error_of(golden, kind) > 1e-3


@pytest.mark.parametrize("kind", ["text", "decode", "image", "draft"])
def test_unchanged_source_passes_the_same_way(kind):
    """The method itself: a change that means nothing leaves the error far below what a mistake shows."""
    with changed_source(f"{LAYERS}.norm", "import mlx.core as mx", "import mlx.core as mx  # same") as golden:
        assert error_of(golden, kind) < 1e-4

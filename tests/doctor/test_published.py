"""Published constants follow from the published widths: so does the synthetic checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from bench import synthetic
from slotpy import config
from slotpy.checkpoint.formats import WeightFormat
from slotpy.checkpoint.qwen4_exp.config import parse_config
from slotpy.checkpoint.qwen4_exp.hashing import hash_constants
from slotpy.doctor import published
from slotpy.engine import sizes

MODEL = published.find("qwen3.8-flash-next:4bit")


@pytest.fixture(scope="module")
def text():
    return synthetic.make_config(synthetic.PUBLISHED, 48, 20_000_000)


@pytest.fixture(scope="module")
def parsed(text):
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    return parse_config({"model_type": "qwen4_exp", "text_config": text, "quantization": quantization}, Path("config"))


@pytest.fixture(scope="module")
def nbytes(text, parsed):
    writer = synthetic.Writer(np.random.default_rng(0))
    synthetic.add_tensors(writer, synthetic.PUBLISHED, text["layer_types"], hash_constants(parsed))
    return {name: synthetic._nbytes(dtype, shape) for name, (dtype, shape, _) in writer.tensors.items()}


def test_weights_are_those_of_the_published_widths(nbytes):
    experts = sum(size for name, size in nbytes.items() if "switch_mlp" in name)
    table = sum(size for name, size in nbytes.items() if "ngram_embedding.shard" in name)
    assert MODEL.sizes.record_bytes * MODEL.sizes.num_records == experts
    assert MODEL.sizes.table_bytes == table
    assert MODEL.sizes.resident_bytes == sum(nbytes.values()) - experts - table


def test_the_download_holds_weights_and_what_is_not_loaded_yet(nbytes):
    rest = MODEL.download_bytes - sum(nbytes.values())
    vision, draft_head = 898_000_000, 1_470_955_171
    assert rest == pytest.approx(vision + draft_head, rel=0.02)


def test_state_and_workspace_follow_from_the_config(parsed, nbytes):
    made = MODEL.sizes
    assert made.state_bytes == sizes.fixed_state_bytes(parsed, 2)
    assert made.state_token_bytes == sizes.state_token_bytes(parsed, 2)
    assert made.workspace_bytes == sizes.pass_bytes(parsed, WeightFormat("affine", 4, 64))
    each = sizes.attention_bytes(parsed, 2)
    assert made.workspace_token_bytes == each * config.PREFILL_CHUNK_TOKENS
    assert made.workspace_limit_bytes == made.workspace_bytes + each * config.PREFILL_PRODUCT
    assert made.max_context_tokens == parsed.max_position_embeddings
    largest = sum(nbytes[f"language_model.lm_head.{part}"] for part in ("weight", "scales", "biases"))
    assert made.loading_bytes == 2 * largest
    assert (made.num_layers, made.experts_per_token) == (parsed.num_hidden_layers, parsed.num_experts_per_tok)

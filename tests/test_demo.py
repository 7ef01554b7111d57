"""The demo model: the same bytes everywhere, whole or not there, and a checkpoint like any other."""

import hashlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from slotpy import demo
from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.demo import ensure_demo, write_demo
from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.loader import EngineOptions, load
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.engine.text import Tokenizer
from slotpy.errors import SlotpyError

# Other bytes are another model: raise demo.VERSION, so that nobody keeps the old one, and put the new digest here.
VERSION_AND_DIGEST = (1, "34657e1ab25f8616442a8eb0944e6a6bd98b556d0bfa9ac0e9df63ace687d397")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_demo(tmp_path_factory.mktemp("home"))


def test_the_bytes_are_those_of_this_version(directory):
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    assert (demo.VERSION, digest.hexdigest()) == VERSION_AND_DIGEST
    assert directory.name == f"demo-v{demo.VERSION}"


def test_it_is_written_once(directory, monkeypatch):
    monkeypatch.setattr(demo, "write_demo", None)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert ensure_demo(directory.parent) == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert list(directory.parent.iterdir()) == [directory]


def test_the_home_directory_is_made(tmp_path):
    assert ensure_demo(tmp_path / "not" / "there").is_dir()


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "_write_json", fail)
    with pytest.raises(SlotpyError, match=r"No space left.*SLOTPY_HOME"):
        ensure_demo(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_writers_wins(tmp_path, monkeypatch):
    winner = tmp_path / f"demo-v{demo.VERSION}"

    def slow(directory):
        write_demo(directory)
        if not winner.exists():
            write_demo(winner)
            (winner / "first").touch()

    monkeypatch.setattr(demo, "write_demo", slow)
    assert ensure_demo(tmp_path) == winner
    assert (winner / "first").exists()
    assert list(tmp_path.iterdir()) == [winner]


def test_it_is_a_checkpoint_of_the_published_4_bit_layout(directory):
    checkpoint = open_checkpoint(directory)
    assert checkpoint.layout == "mlx-affine"
    assert checkpoint.notes == ()
    assert (checkpoint.expert_format.bits, checkpoint.expert_format.group_size) == (4, 64)
    assert (checkpoint.row_format.bits, checkpoint.row_format.group_size) == (4, 32)
    c = checkpoint.config
    assert checkpoint.experts.num_records == c.num_hidden_layers * c.num_experts
    per_token = c.num_hidden_layers * c.num_experts_per_tok
    assert checkpoint.experts.num_records // 4 >= 4 * per_token  # a quarter is a cache, not one token's working set
    assert sum(path.stat().st_size for path in directory.iterdir()) < 16 << 20


def test_its_ids_are_those_of_its_tokenizer(directory):
    tokenizer = Tokenizer.load(directory)
    config = json.loads((directory / "config.json").read_text())["text_config"]
    assert config["eos_token_id"] == tokenizer.token_id("<|endoftext|>")
    assert load_stop_ids(directory, tokenizer) == {tokenizer.token_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    assert tokenizer.num_ids < config["vocab_size"]  # some rows are padding, as in the published model
    assert ChatTemplate.load(directory).supports_thinking


def test_the_index_lists_every_tensor_and_byte(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for path in directory.glob("*.safetensors"):
        arrays = mx.load(str(path))
        found |= dict.fromkeys(arrays, path.name)
        total += sum(array.nbytes for array in arrays.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": found}


@pytest.mark.parametrize(("shape", "group"), [((8, 128), 64), ((3, 4, 64), 32)])
def test_affine_weights_have_the_spread_asked_for(shape, group):
    weights = demo._Weights(np.random.PCG64(0))
    weights.affine("w", (64, *shape), 0.5, group=group)
    codes = weights.tensors["w.weight"][2]
    nibbles = (codes[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    scales, biases = (demo._widen(weights.tensors[f"w.{part}"][2]) for part in ("scales", "biases"))
    values = nibbles.reshape(-1, group) * scales.reshape(-1, 1) + biases.reshape(-1, 1)
    assert values.size == 64 * np.prod(shape)
    assert values.std() == pytest.approx(0.5, rel=0.05)
    assert abs(values.mean()) < 0.02
    assert len(np.unique(scales)) > 8


def test_bfloat16_rounds_to_nearest_with_ties_to_even():
    ties = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, -1 - 2**-9], np.float64)
    assert demo._widen(demo._bfloat16(ties)).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_a_quarter_of_its_experts_is_enough_to_talk_without_repeating(directory):
    tokenizer = Tokenizer.load(directory)
    prompt = ChatTemplate.load(directory).render([{"role": "user", "content": "Hello"}])
    loaded = load(directory, EngineOptions(slots=128))
    try:
        session = Session(loaded, num_valid_ids=tokenizer.num_ids)
        tokens = tokenizer.encode(prompt)
        reply = list(session.generate(tokens, SamplingParams(temperature=0), 16, frozenset()))
    finally:
        loaded.close()
    assert len(set(reply)) > 8
    assert max(reply) < tokenizer.num_ids
    assert session.stats.hits > session.stats.misses / 3

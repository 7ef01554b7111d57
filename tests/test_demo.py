"""The demo model answers like a dictionary: golden greedy replies, streamed with a quarter of its experts.

The replies were recorded on the CPU backend. Other backends round elsewhere, so a reply may differ there at a near tie.
"""

import json
from pathlib import Path

import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.demo import demo_directory
from slotpy.engine.engine import Engine
from slotpy.engine.loader import EngineOptions
from slotpy.engine.sampler import SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "golden" / "demo_replies.json").read_text())


@pytest.fixture(scope="module")
def engine():
    with Engine.open(demo_directory(), EngineOptions(slots=64)) as engine:
        yield engine


@pytest.mark.parametrize("case", GOLDEN, ids=[case["prompt"][-60:] for case in GOLDEN])
def test_greedy_reply(engine, case):
    tokens = engine.tokenizer.encode(case["prompt"])
    ids = engine.new_session().generate(tokens, SamplingParams(temperature=0), 120, engine.stop_ids)
    assert engine.tokenizer.decode(token for token, _ in ids) == case["reply"]


def test_a_lighthouse_is_defined(engine):
    prompt = engine.chat.render([{"role": "user", "content": "What is a lighthouse?"}])
    ids = engine.new_session().generate(
        engine.tokenizer.encode(prompt), SamplingParams(temperature=0), 60, engine.stop_ids
    )
    assert "tower with a light" in engine.tokenizer.decode(token for token, _ in ids)


def test_blanks_around_a_question_do_not_matter(engine):
    """The Ollama command line puts one before the prompt when its standard input is no terminal."""
    asked, padded = ([{"role": "user", "content": text}] for text in ("What is a tree?", " What is a tree?\n"))
    assert engine.chat.render(padded) == engine.chat.render(asked)


def test_it_fits_its_promise():
    """16 MB in the package, 32 routed experts a layer, a draft head."""
    assert sum(path.stat().st_size for path in demo_directory().iterdir()) < 16_000_000
    checkpoint = open_checkpoint(demo_directory())
    assert checkpoint.layout == "mlx-affine"
    assert checkpoint.config.num_experts >= 32
    assert checkpoint.mtp_experts is not None


def test_the_licence_of_its_definitions_ships_with_it():
    assert "WordNet" in (demo_directory() / "WORDNET_LICENSE").read_text()

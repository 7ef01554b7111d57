from typing import Any

import numpy as np
import pytest

from slotpy.engine.generation import EmbedRequest, Failed, Loaded, LoadRequest
from slotpy.errors import PromptTooLongError
from slotpy.server.ollama.embed import ROUTES, normalised, shortest
from tests.server.fakes import MODELS, FakeServer, embedded

VECTOR = (0.1, 0.2, 0.3, 0.4)


def embed(*scripts: Any, path: str = "/api/embed", models=MODELS, **body: Any):
    server = FakeServer(ROUTES, *scripts, models=models)
    answer = server.post(path, {"model": "tinychat", **body})
    return server.worker, answer


def test_embeds_one_text_at_length_one():
    worker, answer = embed((embedded(VECTOR),), input="x", truncate=False, options={"num_ctx": 99}, keep_alive=0)
    assert worker.request == EmbedRequest(("x",), truncate=False, context_tokens=99)
    assert worker.submissions[0].keep_alive_s == 0
    assert list(answer.json) == ["model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"]
    assert answer.json["embeddings"] == [[0.18257418, 0.36514837, 0.5477226, 0.73029673]]
    counts = [answer.json[name] for name in ("total_duration", "load_duration", "prompt_eval_count")]
    assert counts == [3_509_202, 1_567_675, 3]


def test_cuts_to_dimensions_before_normalising():
    _, answer = embed((embedded((3.0, 4.0, 12.0), (0.0, 0.0, 1.0)),), input=["a", "b"], dimensions=2)
    assert answer.json["embeddings"] == [[0.6, 0.8], [0.0, 0.0]]


@pytest.mark.parametrize("dimensions", [0, -1, 3, 99])
def test_dimensions_that_cut_nothing(dimensions):
    assert normalised(np.array([3.0, 4.0, 0.0], dtype=np.float32), dimensions).tolist() == [
        pytest.approx(0.6),
        pytest.approx(0.8),
        0,
    ]


def test_shortest_loses_nothing():
    vector = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    assert np.array_equal(np.array(shortest(vector), dtype=np.float32), vector)


@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": ""}, {"input": []}])
def test_no_text_loads_the_model_and_gives_no_embedding(given):
    worker, answer = embed((Loaded(5),), **given)
    assert worker.request == LoadRequest()
    counts = {"total_duration": 5, "load_duration": 5, "prompt_eval_count": 0}
    assert answer.json == {"model": "tinychat", "embeddings": [], **counts}


@pytest.mark.parametrize("given", [5, ["a", 1], {"a": 1}, True])
def test_what_is_no_text_is_refused(given):
    worker, answer = embed((embedded(VECTOR),), input=given)
    assert (answer.status, answer.json, worker.submissions) == (400, {"error": "invalid input type"}, [])


def test_errors_have_their_status():
    _, answer = embed((Failed(PromptTooLongError("too long")),), input="x")
    assert (answer.status, answer.json) == (400, {"error": "too long"})


def test_unknown_models():
    _, answer = embed(model="nosuch", input="x")
    assert (answer.status, answer.json) == (404, {"error": 'model "nosuch" not found, try pulling it first'})
    _, answer = embed(model="", input="x")
    assert (answer.status, answer.json) == (404, {"error": "model '' not found"})
    _, answer = embed(path="/api/embeddings", model="", prompt="x")
    assert (answer.status, answer.json) == (400, {"error": "model is required"})
    _, answer = embed(path="/api/embeddings", model="nosuch", prompt="x")
    assert (answer.status, answer.json) == (404, {"error": 'model "nosuch" not found, try pulling it first'})


def test_the_older_endpoint_gives_the_vector_as_it_is():
    worker, answer = embed((embedded(VECTOR),), path="/api/embeddings", prompt="x")
    assert worker.request == EmbedRequest(("x",))
    assert answer.json == {"embedding": np.array(VECTOR, dtype=np.float32).tolist()}
    _, answer = embed((Loaded(0),), path="/api/embeddings", prompt="")
    assert answer.json == {"embedding": []}

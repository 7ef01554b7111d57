"""POST /v1/embeddings."""

import base64
from typing import Any

import numpy as np
import pytest

from slotpy.server.openai.embeddings import ROUTES
from tests.server.fakes import FakeServer, embedded


def embed(*vectors: list[float], **body: Any) -> tuple[FakeServer, Any]:
    server = FakeServer(ROUTES, (embedded(*vectors, prompt_tokens=6),))
    return server, server.post("/v1/embeddings", {"model": "tiny", **body})


def test_vectors_have_length_1():
    server, answer = embed([3.0, 4.0], [0.0, 0.0], input=["a", "b"])
    assert server.worker.request.texts == ("a", "b") and server.worker.request.truncate
    assert answer.json == {
        "object": "list",
        "data": [
            {"object": "embedding", "embedding": [0.6, 0.8], "index": 0},
            {"object": "embedding", "embedding": [0.0, 0.0], "index": 1},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }


def test_base64_is_of_little_endian_float32():
    _, answer = embed([1.0, 2.0, 3.0, 4.0], input="a", encoding_format="base64")
    raw = base64.b64decode(answer.json["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4") == pytest.approx([0.18257418, 0.36514837, 0.5477226, 0.73029673])
    assert answer.json["data"][0]["embedding"] == "uvQ6Prr0uj6MNww/uvQ6Pw=="


def test_fewer_dimensions_have_length_1_again():
    _, answer = embed([3.0, 4.0, 12.0], input="a", dimensions=2)
    assert answer.json["data"][0]["embedding"] == [0.6, 0.8]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "invalid input"),
        ({"input": []}, "invalid input"),
        ({"input": None}, "invalid input"),
        ({"input": [1, 2]}, "invalid input type"),
        ({"input": ["a", 1]}, "invalid input type"),
        ({"input": 5}, "invalid input type"),
        ({"input": "a", "encoding_format": "hex"}, 'encoding_format must be "float" or "base64", not "hex"'),
        ({"input": "a", "dimensions": -1}, "dimensions must be positive, got -1"),
    ],
)
def test_what_cannot_be_done_is_said(body, message):
    server, answer = embed([1.0], **body)
    assert answer.status == 400 and not server.worker.submissions
    assert answer.json["error"]["message"] == message


@pytest.mark.parametrize("name", ["nosuch", ""])
def test_an_unknown_model_is_404_with_the_recorded_text(name):
    _, answer = embed([1.0], input="a", model=name)
    assert answer.status == 404
    assert answer.json["error"]["message"] == f'model "{name}" not found, try pulling it first'

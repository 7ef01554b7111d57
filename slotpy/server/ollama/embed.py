"""Ollama's /api/embed, and the older /api/embeddings."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from aiohttp import web

from slotpy.engine.generation import Embedded, EmbedRequest, Loaded, LoadRequest
from slotpy.server.durations import read_keep_alive
from slotpy.server.errors import ApiError
from slotpy.server.gojson import ANY, BOOL, INT, OBJECT, STRING, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Library, Model, UnknownModel
from slotpy.server.options import context_tokens, read_options
from slotpy.server.service import Service
from slotpy.server.stream import json_response

EMBED = Struct(
    "api.EmbedRequest",
    {
        "model": STRING,
        "input": ANY,
        "truncate": BOOL,
        "dimensions": INT,
        "keep_alive": ANY,
        "options": OBJECT,
    },
)
EMBEDDINGS = Struct("api.EmbeddingRequest", {"model": STRING, "prompt": STRING, "keep_alive": ANY, "options": OBJECT})


async def embed(request: web.Request) -> web.Response:
    """Answer with the embedding of each text, of length 1."""
    service = request.app[SERVICE]
    body = EMBED.read(await request.read())
    texts = _texts(body.get("input"))
    name = body.get("model", "")
    if not name:
        raise UnknownModel(name)
    vectors, counts = await _run(service, find_to_embed(service.library, name), body, texts)

    def write() -> web.Response:
        embeddings = [shortest(normalised(vector, body.get("dimensions", 0))) for vector in vectors]
        return json_response({"model": name, "embeddings": embeddings, **counts})

    return await asyncio.to_thread(write)  # the numbers of a hundred texts take a good part of a second


async def embeddings(request: web.Request) -> web.Response:
    """Answer with the embedding of one text, as the model gives it."""
    service = request.app[SERVICE]
    body = EMBEDDINGS.read(await request.read())
    name = body.get("model", "")
    if not name:
        raise ApiError(400, "model is required")
    vectors, _ = await _run(service, find_to_embed(service.library, name), body, _texts(body.get("prompt")))
    return json_response({"embedding": vectors[0].tolist() if vectors else []})


def find_to_embed(library: Library, name: str) -> Model:
    """Find a model to embed with: for these endpoints alone Ollama puts what is unknown in other words."""
    try:
        if not name:
            raise UnknownModel(name)
        return library.find(name)
    except UnknownModel as error:
        raise ApiError(404, f'model "{name}" not found, {error.why or "try pulling it first"}') from error


def normalised(vector: np.ndarray, dimensions: int = 0) -> np.ndarray:
    """Cut a vector to its first `dimensions`, 0 for all, and give it the length 1. One of zeros stays so."""
    values = vector[: dimensions if dimensions > 0 else None].astype(np.float64)
    norm = np.linalg.norm(values)
    return (values / norm if norm > 0 else values).astype(np.float32)


def shortest(vector: np.ndarray) -> list[float]:
    """Give float32 numbers that print with the fewest digits that tell them apart: 0.1, not 0.10000000149011612."""
    return [float(str(value)) for value in vector]


def _texts(given: Any) -> tuple[str, ...]:
    """Read one text or several; no text, or one empty, are none."""
    if given is None or given == "":
        return ()
    texts = given if isinstance(given, list) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "invalid input type")
    return tuple(texts)


async def _run(
    service: Service, model: Model, body: Mapping[str, Any], texts: tuple[str, ...]
) -> tuple[tuple[np.ndarray, ...], dict[str, int]]:
    """Give the vectors, and the counts that go with them. Without texts the model is still loaded."""
    keep_alive_s = read_keep_alive(body.get("keep_alive"))
    num_ctx = context_tokens(read_options(body.get("options", {}), model.parameters).num_ctx, model)
    asked = EmbedRequest(texts, body.get("truncate", True), num_ctx) if texts else LoadRequest(num_ctx)
    event = await service.run_to_end(model, asked, keep_alive_s)
    if isinstance(event, Embedded):
        return event.vectors, _counts(event.total_ns, event.load_ns, event.prompt_tokens)
    assert isinstance(event, Loaded)
    return (), _counts(event.load_ns, event.load_ns, 0)


def _counts(total_ns: int, load_ns: int, prompt_tokens: int) -> dict[str, int]:
    return {"total_duration": total_ns, "load_duration": load_ns, "prompt_eval_count": prompt_tokens}


ROUTES = [web.post("/api/embed", embed), web.post("/api/embeddings", embeddings)]

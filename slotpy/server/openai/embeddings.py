"""POST /v1/embeddings."""

import base64
from typing import Any

import numpy as np
from aiohttp import web

from slotpy.engine.generation import Embedded, EmbedRequest
from slotpy.server.errors import ApiError
from slotpy.server.gojson import ANY, INT, STRING, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.ollama.embed import find_to_embed, normalised, shortest
from slotpy.server.stream import json_response

EMBED = Struct("openai.EmbedRequest", {"model": STRING, "input": ANY, "dimensions": INT, "encoding_format": STRING})


async def embeddings(request: web.Request) -> web.Response:
    """Embed one text or several; the vectors have length 1."""
    service = request.app[SERVICE]
    body = EMBED.read(await request.read(), empty="EOF")
    texts = _texts(body.get("input"))
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise ApiError(400, f'encoding_format must be "float" or "base64", not "{encoding}"')
    name, dimensions = body.get("model", ""), body.get("dimensions", 0)
    if dimensions < 0:
        raise ApiError(400, f"dimensions must be positive, got {dimensions}")
    done = await service.run_to_end(find_to_embed(service.library, name), EmbedRequest(texts))
    assert isinstance(done, Embedded)
    data = [
        {"object": "embedding", "embedding": _encoded(normalised(vector, dimensions), encoding), "index": i}
        for i, vector in enumerate(done.vectors)
    ]
    usage = {"prompt_tokens": done.prompt_tokens, "total_tokens": done.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": name, "usage": usage}, charset=False)


def _texts(given: Any) -> tuple[str, ...]:
    if given is None or given == []:
        raise ApiError(400, "invalid input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "invalid input type")
    return tuple(texts)


def _encoded(vector: np.ndarray, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return shortest(vector)


ROUTES = [web.post("/v1/embeddings", embeddings)]

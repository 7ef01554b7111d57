"""GET /v1/models and /v1/models/{id}, where an id may have slashes."""

from typing import Any

from aiohttp import web

from slotpy.server.errors import ApiError
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import Model, UnknownModel
from slotpy.server.library.names import parse_served
from slotpy.server.stream import json_response


async def models(request: web.Request) -> web.Response:
    """List the models there are, newest first."""
    found = request.app[SERVICE].library.list()
    return json_response({"object": "list", "data": [_entry(model, model.name) for model in found]}, charset=False)


async def model(request: web.Request) -> web.Response:
    """Describe one model, under the name that was asked for."""
    name = request.match_info["id"]
    try:
        found = request.app[SERVICE].library.find(name)
    except UnknownModel as error:
        if error.why:
            raise
        raise ApiError(404, f"model '{parse_served(name)}' not found") from error
    return json_response(_entry(found, name), charset=False)


def _entry(found: Model, name: str) -> dict[str, Any]:
    owner = found.name.rpartition("/")[0] or "library"
    return {"id": name, "object": "model", "created": int(found.modified_at.timestamp()), "owned_by": owner}


ROUTES = [web.get("/v1/models", models), web.get("/v1/models/{id:.+}", model)]

"""`/api/tags`, `/api/show` and `/api/ps`: which models there are, what each is, and which one is loaded.

Beside what Ollama answers, `slotpy` says how a loaded model was planned and what its slots do. The routes of
everything that manages models are collected here.
"""

import asyncio
import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from slotpy.engine import device
from slotpy.engine.worker import LoadedStatus
from slotpy.server.errors import ApiError
from slotpy.server.gojson import BOOL, OBJECT, STRING, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.facts import tensors
from slotpy.server.library.library import Model
from slotpy.server.library.modelfile import modelfile_text, parameters_text
from slotpy.server.ollama import blobs, create, pull
from slotpy.server.stream import json_response

_SHOW = Struct(
    "api.ShowRequest",
    {"model": STRING, "name": STRING, "system": STRING, "template": STRING, "verbose": BOOL, "options": OBJECT},
)
# Clients show an end more than 20 years ahead as "forever", and one in the past as "stopping".
_FOREVER = datetime(2318, 1, 1, tzinfo=UTC)
_WHILE_RUNNING = timedelta(minutes=5)
_COPILOT = "GitHubCopilotChat/"


async def tags(request: web.Request) -> web.Response:
    """List the models, the newest first."""
    models = await asyncio.to_thread(request.app[SERVICE].library.list)
    return json_response({"models": [_listed(model) for model in models]})


async def show(request: web.Request) -> web.Response:
    """Tell all about one model."""
    fields = _SHOW.read(await request.read())
    name = fields.get("model") or fields.get("name", "")
    if not name:
        raise ApiError(400, "model is required")
    service = request.app[SERVICE]
    model = await asyncio.to_thread(service.library.find, name)
    model = replace(
        model,
        system=fields.get("system") or model.system,
        parameters={**model.parameters, **fields.get("options", {})},
    )
    answer = _shown(model)
    if request.headers.get("User-Agent", "").startswith(_COPILOT):
        answer["model_info"]["general.basename"] = name
    if fields.get("verbose"):
        answer["tensors"] = await asyncio.to_thread(tensors, model.directory)
    loaded = service.worker.status().loaded
    if loaded is not None and loaded.directory == model.directory:
        answer["slotpy"] = _insight(loaded)
    return json_response(answer)


async def ps(request: web.Request) -> web.Response:
    """Tell which model is loaded, until when, and where its memory goes."""
    service = request.app[SERVICE]
    loaded = service.worker.status().loaded
    if loaded is None:
        return json_response({"models": []})
    models = await asyncio.to_thread(service.library.list)
    return json_response({"models": [_running(loaded, models)]})


def rfc3339(time: datetime) -> str:
    """Write an aware time in UTC with a Z: clients refuse times without a zone."""
    return time.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def _listed(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": rfc3339(model.modified_at),
        "size": model.size,
        "digest": model.digest,
        "details": dict(model.details),
        "capabilities": sorted(model.capabilities),
    }


def _shown(model: Model) -> dict[str, Any]:
    optional = {
        "license": model.license,
        "parameters": parameters_text(model.parameters),
        "system": model.system,
        "messages": list(model.messages),
    }
    return {key: value for key, value in optional.items() if value} | {
        "modelfile": modelfile_text(model),
        "template": model.template,
        "details": dict(model.details),
        "model_info": dict(model.info),
        "capabilities": sorted(model.capabilities),
        "modified_at": rfc3339(model.modified_at),
    }


def _running(loaded: LoadedStatus, models: list[Model]) -> dict[str, Any]:
    same = [model for model in models if model.directory == loaded.directory]
    # Found under the name it was loaded by, else under any: a second name may be gone by now.
    model = next((model for model in same if model.name == loaded.name), same[0] if same else None)
    peak_bytes = loaded.plan.expected_peak_bytes
    # There is no end while a request runs: its time counts from there.
    expires_at = _FOREVER if loaded.forever else loaded.expires_at or datetime.now(UTC) + _WHILE_RUNNING
    return {
        "name": loaded.name,
        "model": loaded.name,
        "size": peak_bytes,
        "digest": model.digest if model else hashlib.sha256(loaded.name.encode()).hexdigest(),
        "details": dict(model.details) if model else {},
        "expires_at": rfc3339(expires_at),
        "size_vram": 0 if device.backend() == "cpu" else peak_bytes,
        "context_length": loaded.context_tokens,
        "slotpy": _insight(loaded),
    }


def _insight(loaded: LoadedStatus) -> dict[str, Any]:
    return {"plan": loaded.plan.as_dict(), "governor": loaded.governor, "slots": loaded.slots}


ROUTES = [
    web.get("/api/tags", tags),
    web.get("/api/ps", ps, allow_head=False),
    web.post("/api/show", show),
    web.post("/api/create", create.create),
    web.post("/api/copy", create.copy),
    web.delete("/api/delete", create.delete),
    web.post("/api/pull", pull.pull),
    web.post("/api/push", pull.push),
    web.head("/api/blobs/{digest}", blobs.head),
    web.post("/api/blobs/{digest}", blobs.post),
]

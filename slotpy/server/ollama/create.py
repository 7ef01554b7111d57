"""`/api/create`, `/api/copy`, `/api/delete`: models made of others or of sent files, second names, and removal."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from json import dumps
from typing import Any

from aiohttp import web

from slotpy.engine.generation import UnloadRequest
from slotpy.server.errors import ApiError
from slotpy.server.gojson import ANY, BOOL, OBJECT, STRING, ListOf, Struct
from slotpy.server.keys import SERVICE
from slotpy.server.library.library import InvalidName, Library, UnknownModel
from slotpy.server.library.names import ServedName, parse_served
from slotpy.server.library.records import Record
from slotpy.server.ollama import fields
from slotpy.server.ollama.progress import answer
from slotpy.server.ollama.pull import pull_lines
from slotpy.server.options import read_options
from slotpy.server.service import Service

_CREATE = Struct(
    "api.CreateRequest",
    {
        "model": STRING,
        "name": STRING,
        "from": STRING,
        "files": OBJECT,
        "adapters": OBJECT,
        "template": STRING,
        "system": STRING,
        "parameters": OBJECT,
        "messages": ListOf(fields.MESSAGE),
        "license": ANY,
        "quantize": STRING,
        "quantization": STRING,
        "renderer": STRING,
        "parser": STRING,
        "stream": BOOL,
    },
)
_COPY = Struct("api.CopyRequest", {"source": STRING, "destination": STRING})
_DELETE = Struct("api.DeleteRequest", {"model": STRING, "name": STRING})
_REFUSED = {
    "adapters": "slotpy has no adapters: merge them into a safetensors checkpoint first",
    "quantize": "slotpy does not quantize here: create from a checkpoint that is stored as wanted",
    "quantization": "slotpy does not quantize here: create from a checkpoint that is stored as wanted",
    "renderer": "renderers are built into Ollama: slotpy renders with the checkpoint's own chat template",
    "parser": "parsers are built into Ollama: slotpy reads replies as the checkpoint's chat template writes them",
}
_NO_TEMPLATE = (
    "note: no chat template was sent, so the model only continues raw prompts; "
    "to chat with it, put the template into tokenizer_config.json as chat_template and create it again"
)


async def create(request: web.Request) -> web.StreamResponse:
    """Make a model of another one, or of files sent before."""
    fields = _CREATE.read(await request.read())
    name = parse_served(fields.get("model") or fields.get("name", ""))
    if not fields.get("from") and not fields.get("files"):
        raise ApiError(400, "neither 'from' or 'files' was specified")
    for field, reason in _REFUSED.items():
        if fields.get(field):
            raise ApiError(400, reason)
    read_options(fields.get("parameters", {}))  # what it refuses would be refused of every request for the model
    return await answer(
        request, _create_lines(request.app[SERVICE].library, name, fields), stream=fields.get("stream", True)
    )


async def copy(request: web.Request) -> web.Response:
    """Give a model a second name."""
    fields = _COPY.read(await request.read())
    source, destination = fields.get("source", ""), fields.get("destination", "")
    for which, name in (("source", source), ("destination", destination)):
        try:
            parse_served(name)
        except InvalidName as error:
            raise ApiError(400, f'{which} "{name}" is invalid') from error
    try:
        await asyncio.to_thread(request.app[SERVICE].library.copy, source, destination)
    except UnknownModel as error:
        raise ApiError(404, f'model "{source}" not found') from error
    return web.Response()


async def delete(request: web.Request) -> web.Response:
    """Remove a model from the disk, after unloading it."""
    fields = _DELETE.read(await request.read())
    name = fields.get("model") or fields.get("name", "")
    try:
        parse_served(name)
    except InvalidName as error:
        raise ApiError(400, f'name "{name}" is invalid') from error
    service = request.app[SERVICE]
    located = service.library.locate(name)
    service.library.refuse_removal(located)
    if located.takes_weights:
        await _unload(service, name)
    await asyncio.to_thread(service.library.remove, located)
    return web.Response()


async def _unload(service: Service, name: str) -> None:
    loaded = service.worker.status().loaded
    if loaded is None or loaded.directory != service.library.locate(name).directory:
        return
    await service.run_to_end(service.library.find(name), UnloadRequest())


async def _create_lines(
    library: Library, name: ServedName, fields: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    if fields.get("files"):
        created, has_template = await asyncio.to_thread(_from_files, library, fields["files"])
        base, template = Record(name, created=created), ""
        steps = [f"using existing layer {digest.replace('-', ':')}" for digest in fields["files"].values()]
        if not has_template:  # Ollama's command line leaves chat_template.jinja out
            steps.append(_NO_TEMPLATE)
    else:
        async for line in _pulled_first(library, fields["from"]):
            yield line
        model = library.find(fields["from"])
        base, template = library.record_from(fields["from"]), model.template
        steps = [f"using existing layer sha256:{model.digest}"]
    if fields.get("template") not in (None, "", template):
        raise ApiError(400, "templates in Go's language cannot be run: leave TEMPLATE out, the checkpoint has its own")
    record, layers = _changed(replace(base, name=name), fields)
    steps += [f"creating new layer sha256:{sha256(dumps(layer).encode()).hexdigest()}" for layer in layers]
    for step in [*steps, "writing manifest"]:
        yield {"status": step}
    await asyncio.to_thread(library.save, record)
    yield {"status": "success"}


async def _pulled_first(library: Library, name: str) -> AsyncGenerator[dict[str, Any]]:
    """Pull the model to build on if it is not here, and give the lines of that."""
    try:
        library.find(name)
    except UnknownModel:
        async with contextlib.aclosing(pull_lines(library, name)) as lines:
            async for line in lines:
                if line["status"] != "success":
                    yield line


def _from_files(library: Library, files: Mapping[str, Any]) -> tuple[str, bool]:
    """Make the model's directory; give its name, and whether the files hold a chat template."""
    for digest in files.values():
        if not isinstance(digest, str):
            raise ApiError(400, "json: cannot unmarshal number into Go struct field CreateRequest.files of type string")
    created, text = library.create(files)
    return created, text.chat is not None


def _changed(base: Record, fields: Mapping[str, Any]) -> tuple[Record, list[Any]]:
    """Give a record with what the request adds, and the values that were added."""
    given = {key: fields[key] for key in ("system", "parameters", "messages") if fields.get(key)}
    text = _license(fields.get("license"))
    if text:
        given["license"] = text
    changes = dict(given)
    if "parameters" in given:
        changes["parameters"] = {**base.parameters, **given["parameters"]}
    if "messages" in given:
        changes["messages"] = _first_messages(given["messages"], changes.get("system", base.system))
    return replace(base, **changes), list(given.values())


def _first_messages(messages: Sequence[Mapping[str, Any]], system: str) -> tuple[Mapping[str, Any], ...]:
    """Leave out the system message if it begins them: the command line's `/save` sends it in both places."""
    first = messages[0]
    again = first.get("role", "").lower() == "system" and first.get("content") == system
    return tuple(messages[1:] if again else messages)


def _license(value: Any) -> str:
    parts = value if isinstance(value, list) else [value or ""]
    if not all(isinstance(part, str) for part in parts):
        raise ApiError(400, "license must be a string or a list of strings")
    return "\n".join(parts)

"""The web application: who may call, what a path leads to, and how every error becomes an answer.

Owns nothing about models: handlers do, each dialect in its own module.
"""

import asyncio
import hmac
import html
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Iterable

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from slotpy.server.bodies import read_in_time
from slotpy.server.errors import ApiError, dialect_of, error_body, is_bug, status_of
from slotpy.server.keys import SERVICE
from slotpy.server.metrics import CONTENT_TYPE
from slotpy.server.routes import ROUTES
from slotpy.server.service import Service
from slotpy.server.settings import Settings
from slotpy.server.stream import is_gone, json_response

CLIENT_GONE = 499  # nginx's number for a client that left before its answer

LOCAL_ORIGINS = (
    *(f"{scheme}://{host}{port}" for host in ("localhost", "127.0.0.1", "0.0.0.0") for scheme in ("http", "https")
      for port in ("", ":*")),
    "app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*",
)  # fmt: skip
_ALLOWED_HEADERS = (
    "Authorization,Content-Type,User-Agent,Accept,X-Requested-With,X-Api-Key,Anthropic-Version,Anthropic-Beta,"
    "Openai-Beta,"
    + ",".join(
        f"X-Stainless-{name}"
        for name in (
            *("Arch", "Async", "Custom-Poll-Interval", "Helper-Method", "Lang", "Os", "Package-Version"),
            *("Poll-Helper", "Retry-Count", "Runtime", "Runtime-Version", "Timeout"),
        )
    )
)
CORS_HEADERS = web.RequestKey("cors_headers", dict[str, str])
_LOCAL_DOMAINS = (".localhost", ".local", ".internal")

log = logging.getLogger(__name__)


def make_app(service: Service, settings: Settings, routes: Iterable[web.AbstractRouteDef] = ROUTES) -> web.Application:
    """Build the application: `routes` behind every check, and `/metrics`."""
    app = web.Application(
        client_max_size=settings.max_body_bytes,
        middlewares=[
            answered,
            origins_allowed(settings.origins),
            *([hosts_allowed()] if settings.is_loopback else []),
            *([key_given(settings.api_key)] if settings.api_key else []),
            body_read(settings.max_body_bytes),
        ],
    )
    app[SERVICE] = service
    app.on_response_prepare.append(_set_headers)
    app.add_routes([*routes, web.get("/metrics", metrics)])
    return app


async def metrics(request: web.Request) -> web.Response:
    """Answer `GET /metrics`."""
    return web.Response(body=request.app[SERVICE].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever is raised into an answer, then log and count the request."""
    began_s, status = time.monotonic(), CLIENT_GONE
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:  # also when the client has gone, which is a CancelledError or a ConnectionError
        resource = request.match_info.route.resource
        route = "unmatched" if resource is None else resource.canonical
        request.app[SERVICE].metrics.answered(request.method, route, status)
        what, took_s = "client gone" if status == CLIENT_GONE else status, time.monotonic() - began_s
        log.info("%s %s %s: %s in %.3f s", request.remote, request.method, request.rel_url.raw_path, what, took_s)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return await _moved(request) or _plain(404, "404 page not found")
    except web.HTTPMethodNotAllowed as error:
        return _plain(405, "405 method not allowed", Allow=error.headers["Allow"])
    except Exception as error:
        if is_gone(request):
            # aiohttp logs what a handler raises as its failure, save for this, which mostly comes first.
            raise asyncio.CancelledError from error
        if is_bug(error):
            log.exception("%s %s failed", request.method, request.rel_url.raw_path)
        return _refusal(request.path, error)


def _refusal(path: str, error: Exception) -> web.Response:
    body = error_body(dialect_of(path), error, secrets.token_hex(12))
    response = json_response(body, status=status_of(error))
    if response.status == 401:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response


async def _moved(request: web.Request) -> web.Response | None:
    """Redirect a path with doubled or trailing slashes to the one that exists."""
    path = re.sub("/+", "/", request.path)
    target = path.rstrip("/")
    if not target or target == request.path:
        return None
    clean = request.clone(rel_url=request.rel_url.with_path(target, keep_query=True))
    if (await request.app.router.resolve(clean)).http_exception is not None:
        return None
    status, text = 307, "Temporary Redirect"
    if path == request.path and request.method in ("GET", "HEAD"):  # a trailing slash, as Go's router has it
        status, text = 301, "Moved Permanently"
    location = str(clean.rel_url)
    body = f'<a href="{html.escape(location)}">{text}</a>.\n\n'
    headers = {"Location": location, "Content-Type": "text/html; charset=utf-8"}
    return web.Response(status=status, body=body.encode(), headers=headers)


def _plain(status: int, text: str, **headers: str) -> web.Response:
    return web.Response(status=status, body=text.encode(), headers={"Content-Type": "text/plain"} | headers)


def origins_allowed(origins: Iterable[str]) -> Middleware:
    """Let web pages of LOCAL_ORIGINS and of `origins` call, and answer their preflights; refuse other pages."""
    patterns = [*LOCAL_ORIGINS, *origins]
    everyone = "*" in patterns
    allowed = re.compile("|".join(re.escape(p.lower()).replace(r"\*", ".*") for p in patterns), re.DOTALL)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get(hdrs.ORIGIN, "")
        if origin in ("", f"http://{request.host}", f"https://{request.host}"):
            return await handler(request)
        if not (everyone or allowed.fullmatch(origin.lower())):
            return web.Response(status=403)
        headers = {"Access-Control-Allow-Origin": "*" if everyone else origin}
        if not everyone:
            headers["Vary"] = "Origin"
        if request.method == hdrs.METH_OPTIONS:
            headers["Access-Control-Allow-Methods"] = "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS"
            headers["Access-Control-Allow-Headers"] = _ALLOWED_HEADERS
            headers["Access-Control-Max-Age"] = "43200"
            return web.Response(status=204, headers=headers)
        request[CORS_HEADERS] = headers
        return await handler(request)

    return check


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.popall(hdrs.SERVER, None)  # which versions run here is nobody's business
    response.headers.update(request.get(CORS_HEADERS, {}))


def hosts_allowed() -> Middleware:
    """Refuse names that are not this machine's: a page elsewhere could point its own name here (DNS rebinding)."""
    own_name = socket.gethostname().lower()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_local_name(request.headers.get("Host", ""), own_name):
            return web.Response(status=403)
        return await handler(request)

    return check


def is_local_name(host: str, own_name: str) -> bool:
    """Tell whether a Host header names this machine or an address of a private network."""
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost", own_name) or name.endswith(_LOCAL_DOMAINS)
    return address.is_loopback or address.is_private or address.is_unspecified


def key_given(api_key: str) -> Middleware:
    """Demand `Authorization: Bearer KEY` or `x-api-key: KEY`, save for `/`, which tells only that a server is here."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if request.path == "/" or hmac.compare_digest(given.encode(errors="replace"), api_key.encode()):
            return await handler(request)
        # Ollama's clients take every 401 for "sign in to ollama.com" and hide the text.
        status = 401 if request.path.startswith("/v1/") else 403
        what = "wrong API key" if given else "this server needs an API key"
        raise ApiError(status, f"{what}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")

    return check


def body_read(max_bytes: int) -> Middleware:
    """Read bodies before their handlers run, so that slow and large ones are dealt with in one place."""

    @web.middleware
    async def read(request: web.Request, handler: Handler) -> web.StreamResponse:
        streamed = request.path.startswith("/api/blobs/")  # of any size, and written as it comes
        if request.can_read_body and not streamed and request.match_info.http_exception is None:
            await read_in_time(request, max_bytes)
        return await handler(request)

    return read

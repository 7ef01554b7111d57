"""Ollama's small endpoints: is anyone there, which version, and what ollama.com would answer for.

slotpy has no accounts and no hosted models, and says so in the words that Ollama's clients understand.
"""

from aiohttp import web

from slotpy.server.errors import ApiError
from slotpy.server.stream import json_response

OLLAMA_VERSION = "0.33.0"
"""The release whose answers these are. Clients compare it, some by three bare numbers: nothing may be added to it."""


async def root(request: web.Request) -> web.Response:
    """Tell that a server is here, in the words that clients look for."""
    return web.Response(text="Ollama is running")


async def version(request: web.Request) -> web.Response:
    """Tell which Ollama this behaves like."""
    return json_response({"version": OLLAMA_VERSION})


async def status(request: web.Request) -> web.Response:
    """Tell that there are no hosted models."""
    return json_response({"cloud": {"disabled": True, "source": "env"}})


async def unauthorized(request: web.Request) -> web.Response:
    """Tell that nobody is signed in; without an address, as there is nowhere to sign in."""
    return json_response({"error": "unauthorized", "signin_url": ""}, status=401)


async def recommendations(request: web.Request) -> web.Response:
    """Recommend no models: Ollama's own are not for slotpy."""
    return json_response({"recommendations": []})


async def web_search(request: web.Request) -> web.Response:
    """Refuse: it is ollama.com that searches."""
    raise ApiError(403, "ollama cloud is disabled: web search is unavailable")


async def web_fetch(request: web.Request) -> web.Response:
    """Refuse: it is ollama.com that fetches."""
    raise ApiError(403, "ollama cloud is disabled: web fetch is unavailable")


ROUTES = [
    web.get("/", root),
    web.get("/api/version", version),
    web.get("/api/status", status),
    web.post("/api/me", unauthorized),
    web.post("/api/signout", unauthorized),
    web.get("/api/experimental/model-recommendations", recommendations),
    web.post("/api/experimental/web_search", web_search),
    web.post("/api/experimental/web_fetch", web_fetch),
]

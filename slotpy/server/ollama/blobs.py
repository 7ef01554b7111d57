"""`/api/blobs/DIGEST`: take the files that a model is to be made of, straight to the disk."""

import asyncio

from aiohttp import web

from slotpy.server.errors import ApiError
from slotpy.server.keys import SERVICE

_BLOCK_BYTES = 4 << 20
_STALL_S = 60.0


async def head(request: web.Request) -> web.Response:
    """Tell whether a blob is here."""
    digest = request.match_info["digest"]
    if request.app[SERVICE].library.blobs.find(digest) is None:
        raise ApiError(404, f'blob "{digest}" not found')
    return web.Response()


async def post(request: web.Request) -> web.Response:
    """Receive a blob: a block in memory at a time, written and hashed on another thread."""
    digest, blobs = request.match_info["digest"], request.app[SERVICE].library.blobs
    if blobs.find(digest) is not None:
        return web.Response()
    upload = await asyncio.to_thread(blobs.begin, digest)
    try:
        block = bytearray()
        while data := await _next(request):
            block += data
            if len(block) >= _BLOCK_BYTES:
                await asyncio.to_thread(upload.write, bytes(block))
                block.clear()
        await asyncio.to_thread(upload.write, bytes(block))
        await asyncio.to_thread(upload.finish)
    finally:
        await asyncio.to_thread(upload.close)
    return web.Response(status=201)


async def _next(request: web.Request) -> bytes:
    """Give the bytes that came, none at the end."""
    try:
        return await asyncio.wait_for(request.content.readany(), _STALL_S)
    except TimeoutError as error:
        raise ApiError(408, f"no byte of the blob came for {_STALL_S:.0f} s: send it again") from error

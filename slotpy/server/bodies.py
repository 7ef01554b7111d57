"""How request bodies arrive: whole, in time, within a size; and unpacked where a dialect's clients pack them."""

import asyncio
import sys
import zlib
from typing import Any

from aiohttp import web

from slotpy.server.errors import ApiError
from slotpy.units import format_bytes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PATIENCE_S = 30.0
BYTES_PER_S = 128 << 10
"""A body may take PATIENCE_S and what its length takes at this rate, a slow uplink's; slower clients are let go."""

UNPACKED_BYTES = 20 << 20
"""What a packed body may grow to: a few kilobytes could otherwise fill the memory."""


async def read_in_time(request: web.Request, max_bytes: int) -> None:
    """Have a request's body read, for `request.read()` to give.

    Raises: ApiError 413 beyond `max_bytes`, 408 for one that comes too slowly.
    """
    length = request.content_length or 0
    if length > max_bytes:
        raise _too_large(max_bytes)
    limit_s = PATIENCE_S + (length or max_bytes) / BYTES_PER_S
    try:
        async with asyncio.timeout(limit_s):
            await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the request body did not come within {limit_s:.0f} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(max_bytes) from error


def unpacked(body: bytes, encoding: str) -> bytes:
    """Undo a Content-Encoding. Raises ApiError 400 for one that is unknown or broken, 413 beyond UNPACKED_BYTES."""
    for name in reversed([part.strip().lower() for part in encoding.split(",") if part.strip()]):
        body = _unpack(body, name)
    return body


def _unpack(body: bytes, name: str) -> bytes:
    try:
        if name == "identity":
            return body
        if name == "gzip":
            unpacker: Any = zlib.decompressobj(wbits=31)  # 31: gzip's header and trailer, checked
        elif name == "zstd":
            unpacker = zstd.ZstdDecompressor()
        else:
            raise ApiError(400, f"Content-Encoding {name} is not known: send gzip, zstd or none")
        plain = unpacker.decompress(body, UNPACKED_BYTES + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise ApiError(400, f"the body is not {name}: {error}") from error
    if len(plain) > UNPACKED_BYTES:
        raise _too_large(UNPACKED_BYTES)
    if not unpacker.eof:
        raise ApiError(400, f"the body is {name} cut short")
    return plain


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {format_bytes(max_bytes)}")

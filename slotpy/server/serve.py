"""A server's life: bind, load what was asked for, serve, and end within seconds when told to."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import threading
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from slotpy import config
from slotpy.engine.generation import LoadRequest
from slotpy.errors import SlotpyError
from slotpy.server.app import make_app
from slotpy.server.library.library import Model
from slotpy.server.service import Service
from slotpy.server.settings import Settings

IDLE_S = 75.0
"""A connection is closed after so long without a whole request: idle ones, and headers that drip."""

HANDLERS_S = 0.5
"""What handlers get to end by themselves once the engine has ended, and once more when cancelled."""

_HEADER_BYTES = 32 << 10  # of one header: browsers send every cookie that any program on localhost has set
_OPEN_FILES = 8192  # connections each take one; macOS starts programs with room for 256

log = logging.getLogger(__name__)


def serve(
    service: Service,
    settings: Settings,
    preload: Model | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends the process at once. Starts the worker, and ends it.

    Main thread only.

    Raises: UsageError for an address that may not be used, SlotpyError for one that cannot be, and what preloading
    raises.
    """
    settings.check_exposure()
    _allow_connections()
    asyncio.run(_serve(service, settings, preload))


async def _serve(service: Service, settings: Settings, preload: Model | None) -> None:
    told = _told_to_end()
    runner = make_runner(make_app(service, settings))
    await runner.setup()
    try:
        url = await bind(runner, settings)
        for note in settings.notes:
            log.warning("%s", note)
        log.info("listening on %s", url)
        service.worker.start()
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(told.wait())]
        if preload is not None:
            waits.append(asyncio.create_task(service.run_to_end(preload, LoadRequest())))
        ended = await _first_end(waits)
        await _end(runner, service)
        if ended is not None:
            raise ended
    finally:
        await runner.cleanup()


def make_runner(app: web.Application) -> web.AppRunner:
    """Give the runner for an application, with every knob of aiohttp that is not left alone."""
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its reply
        auto_decompress=False,  # Go reads bodies as they come, whatever their Content-Encoding
        access_log=None,  # app.py writes a line for each request, also for those that get no answer
        logger=_quiet_logger(),
        keepalive_timeout=IDLE_S,
        shutdown_timeout=HANDLERS_S,
        max_field_size=_HEADER_BYTES,
    )


async def bind(runner: web.AppRunner, settings: Settings) -> str:
    """Take connections, and give the address. Raises SlotpyError where that is not possible."""
    # Go's listeners take IPv4 for this name; two sockets would need two ports where port 0 asks for any.
    host = "127.0.0.1" if settings.host.lower() == "localhost" else settings.host
    try:
        await web.TCPSite(runner, host or None, settings.port, backlog=1024).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what, hint = "is taken by another program, perhaps Ollama or another slotpy.", "End that, or give --port N."
        elif error.errno == errno.EACCES:
            what, hint = "may not be used by this user.", "Give --port N above 1023."
        else:
            why = (error.strerror or str(error)).rpartition(": ")[2]  # asyncio says first what was tried
            what, hint = f"is no address of this machine: {why}.", "Give --host 127.0.0.1."
        raise SlotpyError(f"{settings.url} {what}", hint=hint) from error
    return settings.at(runner.addresses[0][1]).url


async def _first_end(waits: list[asyncio.Task[Any]]) -> BaseException | None:
    """Wait until told to end, or until something failed; gives that."""
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task.exception() for task in done if task.exception()), None)
            if failed is not None or waits[0] in done:
                return failed
            waits = [task for task in waits if task not in done]
        return None
    finally:
        for task in waits:
            task.cancel()


def _told_to_end() -> asyncio.Event:
    """Listen to the signals that end a server."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def receive(number: signal.Signals) -> None:
        if told.is_set():
            log.warning("%s again: ending at once", number.name)
            os._exit(128 + number)  # the engine's thread may be in the middle of a long read
        log.info("%s: ending; the running reply has %.0f s", number.name, config.DRAIN_S)
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, number)
    return told


async def _end(runner: web.AppRunner, service: Service) -> None:
    """Take no more connections, and end the engine's thread; a thread that does not end is left behind."""
    for site in list(runner.sites):
        await site.stop()
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        service.worker.close(config.DRAIN_S)
        with contextlib.suppress(RuntimeError):  # the loop did not wait
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=close, name="closing", daemon=True).start()
    try:
        async with asyncio.timeout(config.DRAIN_S + 0.5):
            await closed.wait()
    except TimeoutError:
        log.warning("the engine did not end in time; leaving it behind")
        await runner.cleanup()
        os._exit(0)
    log.info("ended")


def _allow_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the limit is then what it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _quiet_logger() -> logging.Logger:
    """Give a logger for aiohttp that says in a line what was wrong with bytes that were no HTTP."""

    def shorten(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "bad request: %s", (error.message.split("\n", 1)[0],)
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        return True

    logger = logging.getLogger("slotpy.server.http")
    if not logger.filters:
        logger.addFilter(shorten)
    return logger

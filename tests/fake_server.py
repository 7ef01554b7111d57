"""The whole server on the scripted engine: `python -m tests.fake_server --port 11434`, or `running()` in a test.

Library, worker, dialects and framing are the product's own; tests/scripted.py says what the three models answer. No
network: the names that can be pulled are those of the hub, and no test asks for one.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from slotpy.engine.loader import EngineOptions
from slotpy.engine.worker import Worker
from slotpy.server.app import make_app
from slotpy.server.library.library import Library
from slotpy.server.serve import bind, make_runner, serve
from slotpy.server.service import Service
from slotpy.server.settings import Settings
from tests.scripted import ScriptedEngine, write_models


def scripted_service(home: Path, settings: Settings) -> Service:
    """Make a service over the scripted models, which are written under `home`. Its worker is not started."""
    write_models(home / "models")
    worker = Worker(
        ScriptedEngine.open, EngineOptions(), max_queue=settings.max_queue, keep_alive_s=settings.keep_alive_s
    )
    return Service(Library(home / "models", home), worker)


@contextlib.contextmanager
def running(home: Path, settings: Settings | None = None) -> Iterator[int]:
    """Serve on a thread, at a free port unless `settings` has one; gives the port."""
    settings = settings or Settings(port=0)
    service = scripted_service(home, settings)
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    bound = threading.Event()
    ports: list[int] = []

    async def live() -> None:
        runner = make_runner(make_app(service, settings))
        await runner.setup()
        try:
            ports.append(int((await bind(runner, settings)).rpartition(":")[2]))
            bound.set()
            await stop.wait()
        finally:
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), daemon=True)
    service.worker.start()
    thread.start()
    try:
        while not bound.wait(0.05):
            assert thread.is_alive(), "the server did not start"
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        service.worker.close(drain_s=2.0)
        loop.close()


def main() -> None:
    """Serve until interrupted, as `slotpy serve` does."""
    parser = argparse.ArgumentParser(description="Serve scripted models, as slotpy serves real ones.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: a free one, logged first")
    parser.add_argument("--max-queue", type=int, default=512)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    settings = Settings(host=arguments.host, port=arguments.port, max_queue=arguments.max_queue)
    with tempfile.TemporaryDirectory() as home:
        serve(scripted_service(Path(home), settings), settings)


if __name__ == "__main__":
    main()

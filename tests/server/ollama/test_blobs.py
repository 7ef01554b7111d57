"""Files that clients send: written as they come, kept only when right, cleared when nobody wants them."""

import asyncio
import hashlib
import io
import os
import time
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slotpy.errors import SlotpyError
from slotpy.server.app import make_app
from slotpy.server.errors import ApiError
from slotpy.server.library.blobs import Blobs
from slotpy.server.library.library import Library
from slotpy.server.ollama import blobs as blobs_module
from slotpy.server.ollama.models import ROUTES
from slotpy.server.settings import Settings
from tests.server.fakes import FakeServer

NOTHING = "sha256:" + 64 * "0"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


HELLO = digest_of(b"hello")


def keep(blobs: Blobs, data: bytes) -> str:
    """Put a blob there; give its digest."""
    digest = digest_of(data)
    upload = blobs.begin(digest)
    try:
        upload.write(data)
        upload.finish()
    finally:
        upload.close()
    return digest


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    server = FakeServer(ROUTES)
    server.service.library = Library(tmp_path / "models", tmp_path / "home")
    return server


def ask(server: FakeServer, act) -> None:
    async def run() -> None:
        async with TestClient(
            TestServer(make_app(server.service, Settings(), ROUTES), handler_cancellation=True)
        ) as client:
            await act(client)

    asyncio.run(run())


def kept(server: FakeServer) -> list[str]:
    directory = server.service.library.home / "blobs"
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def test_a_blob_is_made_once_and_is_there_then(server):
    assert server.ask("HEAD", f"/api/blobs/{HELLO}").status == 404
    made = server.post(f"/api/blobs/{HELLO}", b"hello")
    assert (made.status, made.raw) == (201, b"")
    assert server.post(f"/api/blobs/{HELLO}", b"hello").status == 200
    assert server.ask("HEAD", f"/api/blobs/{HELLO.replace(':', '-')}").status == 200
    assert kept(server) == [HELLO.replace(":", "-")]


def test_other_bytes_than_the_digests_are_refused_and_not_kept(server):
    answer = server.post(f"/api/blobs/{NOTHING}", b"hello")
    assert answer.status == 400
    assert answer.json == {"error": f'digest mismatch, expected "{NOTHING}", got "{HELLO}"'}
    assert kept(server) == []


@pytest.mark.parametrize(
    "digest", ["zzz", "sha256:", "sha256:" + 63 * "0", "sha512:" + 64 * "0", "..%2F..%2Fx", NOTHING + "0"]
)
@pytest.mark.parametrize("method", ["HEAD", "POST"])
def test_what_is_no_digest_is_refused(server, method, digest):
    assert server.ask(method, f"/api/blobs/{digest}").status == 400


def test_a_large_blob_is_never_whole_in_memory(server, monkeypatch):
    monkeypatch.setattr(blobs_module, "_BLOCK_BYTES", 1000)
    written = []
    original = Blobs.begin

    def begin(self, digest):
        upload = original(self, digest)
        write = upload.write
        upload.write = lambda data: (written.append(len(data)), write(data))
        return upload

    monkeypatch.setattr(Blobs, "begin", begin)
    data = os.urandom(3 << 20)

    async def act(client):
        response = await client.post(f"/api/blobs/{digest_of(data)}", data=io.BytesIO(data))
        assert response.status == 201

    ask(server, act)
    assert sum(written) == len(data) and max(written) <= 1 << 20  # what is in flight, and no more
    assert server.service.library.blobs.find(digest_of(data)).read_bytes() == data


def test_a_broken_upload_leaves_nothing(server):
    async def half():
        yield b"hel"
        await asyncio.sleep(60)

    async def act(client):
        upload = asyncio.create_task(client.post(f"/api/blobs/{HELLO}", data=half()))
        while not kept(server):
            await asyncio.sleep(0.01)
        upload.cancel()
        for _ in range(100):
            if not kept(server):
                break
            await asyncio.sleep(0.01)

    ask(server, act)
    assert kept(server) == []


def test_an_upload_that_stalls_is_ended(server, monkeypatch):
    monkeypatch.setattr(blobs_module, "_STALL_S", 0.05)

    async def drip():
        yield b"hel"
        await asyncio.sleep(0.5)
        yield b"lo"

    async def act(client):
        response = await client.post(f"/api/blobs/{HELLO}", data=drip())
        assert response.status == 408

    ask(server, act)
    assert kept(server) == []


def test_only_what_is_old_and_belongs_to_no_model_is_cleared(tmp_path):
    blobs = Blobs(tmp_path / "blobs")
    for data in (b"old", b"linked", b"new"):
        keep(blobs, data)
    os.link(blobs.find(digest_of(b"linked")), tmp_path / "model")
    past = time.time() - 2 * 24 * 3600
    for data in (b"old", b"linked"):
        os.utime(blobs.find(digest_of(data)), (past, past))
    blobs.begin(HELLO).close()
    found = [data for data in (b"old", b"linked", b"new") if blobs.find(digest_of(data))]
    assert found == [b"linked", b"new"]


def test_forgetting_keeps_what_another_model_has(tmp_path):
    blobs = Blobs(tmp_path / "blobs")
    inodes = [blobs.find(keep(blobs, data)).stat().st_ino for data in (b"one", b"two", b"other")]
    os.link(blobs.find(digest_of(b"two")), tmp_path / "model")
    blobs.forget(inodes[:2])
    assert [data for data in (b"one", b"two", b"other") if blobs.find(digest_of(data))] == [b"two", b"other"]


def test_a_disk_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "blobs").write_text("in the way")
    with pytest.raises(SlotpyError, match="Could not write"):
        Blobs(tmp_path / "blobs").begin(HELLO)
    with pytest.raises(ApiError):
        Blobs(tmp_path / "blobs").begin("zzz")

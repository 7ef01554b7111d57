"""Everything that a line, a server or a disk can do to a pull: it ends with the right bytes, or says what to do."""

import errno
import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace

import pytest

from slotpy.errors import CapacityError, SlotpyError
from slotpy.hub import part, transfer
from slotpy.hub.events import Waiting
from slotpy.hub.listing import list_repository
from slotpy.hub.manifest import FileEntry, Source
from slotpy.hub.names import ModelName
from slotpy.hub.pull import pull
from tests.hub.conftest import CHUNK, LIMITS, make_files, use_endpoint
from tests.hub.fault_hub import REVISION, Fault, FaultHub, Proxy

BIG = "model-00001.safetensors"
# What each fault is, the most that it may cost in bytes sent again, and what the pull says about it, if it has to wait.
SURVIVED = {
    "drop at byte N": ([Fault("drop", at=20_000, path=BIG)], CHUNK, ""),
    "drop at once": ([Fault("close", path=BIG, times=2)], 0, "disconnected"),
    "connection reset": ([Fault("reset", at=30_000, path=BIG)], CHUNK, ""),
    "stall before the headers": ([Fault("stall before headers", seconds=30, path=BIG)], 0, "stalled"),
    "stall in the body": ([Fault("stall", at=10_000, seconds=30, path=BIG)], CHUNK, "stalled"),
    "slow drip": ([Fault("drip", path=BIG)], CHUNK, "drips at"),
    "Content-Length too long": ([Fault("longer content length", path=BIG)], CHUNK, ""),
    "Content-Length too short": ([Fault("shorter content length", path=BIG)], CHUNK, ""),
    "no Content-Length": ([Fault("no content length", path=BIG)], CHUNK, ""),
    "wrong Content-Range": ([Fault("wrong content range", path=BIG)], CHUNK, "sends other bytes than asked for"),
    "another size in Content-Range": ([Fault("other size", path=BIG)], CHUNK, "bytes, not"),
    "ETag changed midway": ([Fault("", path=BIG, times=2), Fault("other etag", path=BIG)], CHUNK, "another ETag"),
    "Range ignored once": ([Fault("ignore range", path=BIG)], 12 * CHUNK, ""),
    "Range ignored always": ([Fault("ignore range", path=BIG, times=99)], 5 * 12 * CHUNK, ""),
    "bytes corrupted once": ([Fault("corrupt", at=777, path=BIG)], 11 * CHUNK, ""),
    "403": ([Fault("status", status=403, path=BIG)], 0, "answers 403"),
    "404": ([Fault("status", status=404, path=BIG)], 0, "answers 404"),
    "416": ([Fault("status", status=416, path=BIG)], 0, "answers 416"),
    "429": ([Fault("status", status=429, path=BIG)], 0, "answers 429"),
    "429 with Retry-After": ([Fault("status", status=429, headers={"Retry-After": "1"}, path=BIG)], 0, "answers 429"),
    "429 with RateLimit": ([Fault("status", status=429, headers={"RateLimit": '"api";r=0;t=1'}, path=BIG)], 0, "429"),
    "500": ([Fault("status", status=500, path=BIG, times=3)], 0, "answers 500"),
    "503": ([Fault("status", status=503, path=BIG, times=3)], 0, "answers 503"),
    "503 with Retry-After": ([Fault("status", status=503, headers={"Retry-After": "1"}, path=BIG)], 0, "answers 503"),
    "redirect loop": ([Fault("redirect loop", path=BIG)], 0, "redirects in a circle"),
    "gzip of a small file": ([Fault("gzip", path="tokenizer.json")], 3100, ""),
    "truncated gzip": ([Fault("truncated gzip", path="tokenizer.json")], 3100, "too early"),
    "gzip instead of a range": ([Fault("gzip", path=BIG)], 12 * CHUNK, ""),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_pull_survives(name, puller, hub):
    faults, cost, reason = SURVIVED[name]
    hub.faults = [replace(fault) for fault in faults]
    puller()
    puller.assert_right()
    assert hub.bytes_sent <= sum(map(len, hub.files.values())) + LIMITS.connections * cost
    assert not hub.faults or hub.faults[0].times > 50, "the fault never happened"
    waits = [event for event in puller.events if isinstance(event, Waiting)]
    assert any(reason in wait.reason for wait in waits) or not reason, waits
    assert ("Retry-After" in name or "RateLimit" in name) == (1.0 in {wait.seconds for wait in waits})


def test_pull_refuses_a_source_that_always_sends_wrong_bytes(puller, hub):
    hub.faults = [Fault("corrupt", at=5, path=BIG, times=9999)]
    with pytest.raises(SlotpyError, match=f"{BIG} cannot be had: org/model sends wrong bytes.*same command"):
        puller()
    assert not (puller.directory / BIG).exists()
    assert hub.sent[BIG] <= 2 * len(hub.files[BIG]) + CHUNK, "two tries, then no more"
    hub.faults = []
    puller()
    puller.assert_right()


@pytest.mark.parametrize("status", [401, 403, 404, 416])
def test_pull_ends_when_the_only_source_refuses(status, puller, hub):
    hub.faults = [Fault("status", status=status, path=BIG, times=9999)]
    with pytest.raises(SlotpyError, match=f"{BIG} cannot be had: org/model answers {status}"):
        puller()


def test_pull_honours_retry_after(puller, hub):
    times = []
    hub.on_request = lambda path: times.append(time.monotonic()) if path == BIG else None
    hub.faults = [Fault("status", status=429, headers={"Retry-After": "1"}, path=BIG)]
    puller(replace(LIMITS, connections=1))
    assert times[1] - times[0] >= 0.99
    assert [event.seconds for event in puller.events if isinstance(event, Waiting)] == [1.0]


def test_pull_reads_a_date_in_retry_after_by_the_servers_clock(puller, hub):
    """Our own clock says another year; only the distance of the two dates counts."""
    headers = {"Retry-After": "Sat, 01 Jan 2000 00:00:01 GMT", "Date": "Sat, 01 Jan 2000 00:00:00 GMT"}
    hub.faults = [Fault("status", status=503, headers=headers, path=BIG)]
    puller(replace(LIMITS, connections=1))
    assert max(event.seconds for event in puller.events if isinstance(event, Waiting)) == 1.0


def test_pull_asks_for_a_new_address_when_a_signed_one_expires(puller, hub):
    seen = []

    def expire_twice(path):
        seen.append(path)
        if len(seen) in (6, 12):
            hub.expire()

    hub.on_request = expire_twice
    puller()
    puller.assert_right()
    resolved = [request for request in hub.requests if "/resolve/" in request.path and BIG in request.path]
    signed = [request for request in hub.requests if request.path == f"/signed/{BIG}"]
    assert len(resolved) < len(signed), "an address is used more than once"
    assert all("authorization" not in request.headers for request in signed), "the token stays with the hub"
    assert all(request.headers["authorization"] == "Bearer hf_test" for request in resolved)


@pytest.mark.parametrize("first", ["org/gone", "org/bad"])
def test_pull_takes_another_source_when_one_fails(first, hub, tmp_path):
    """The first source does not exist, or always sends wrong bytes; the manifest pins what they must be."""
    listed = list_repository("both", hub.repo, "")
    pinned = replace(listed, sources=(Source(first, REVISION), Source(hub.repo, REVISION)))
    hub.requests.clear()
    pull(ModelName("both", pinned=pinned), tmp_path, LIMITS, lambda event: None)
    for path, content in hub.files.items():
        assert (tmp_path / "both" / path).read_bytes() == content
    assert any(f"/{first}/" in request.path for request in hub.requests)
    assert hub.sent[f"bad/{BIG}"] <= len(hub.files[BIG]), "wrong bytes once, then the other source"


def test_pull_leaves_out_an_optional_file_that_no_source_has(hub, tmp_path):
    listed = list_repository("some", hub.repo, "")
    extra = FileEntry("mtp.safetensors", 5, sha256="0" * 64, optional=True)
    pulled = pull(
        ModelName("some", pinned=replace(listed, files=(*listed.files, extra))), tmp_path, LIMITS, lambda event: None
    )
    assert len(pulled.left_out) == 1 and "mtp.safetensors" in pulled.left_out[0]


def test_pull_gives_up_on_a_name_that_does_not_resolve(puller, hub, monkeypatch):
    real = socket.getaddrinfo

    def fail(host, *arguments, **options):
        if host == "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(SlotpyError, match=r"No byte came for 1 s: org/model .*Name or service not known"):
        puller(replace(LIMITS, patience_s=(1.0, 1.0)))
    monkeypatch.undo()
    use_endpoint(monkeypatch, hub.url)
    puller()
    puller.assert_right()


def test_pull_waits_out_a_name_server_that_fails_for_a_moment(puller, hub, monkeypatch):
    real, failures = socket.getaddrinfo, []

    def fail(host, *arguments, **options):
        if host == "localhost" and len(failures) < 3:
            failures.append(host)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    puller()
    puller.assert_right()
    assert len(failures) == 3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("has no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


def test_pull_refuses_a_certificate_that_is_not_trusted_and_takes_one_that_is(puller, hub, certificate, monkeypatch):
    files = make_files(size=3 * CHUNK)
    with FaultHub(files) as secure:
        secure.use_tls(*certificate)
        puller.hub = secure
        secure.sign = lambda path, sign=secure.sign: sign(path).replace("http:", "https:")
        # The listing comes over the plain endpoint, so that the transfer's own check is what is seen.
        hub.files = files
        hub._digests.clear()
        listed = list_repository(hub.repo, hub.repo, "")
        use_endpoint(monkeypatch, f"https://127.0.0.1:{secure.port}")
        name = ModelName(hub.repo, pinned=listed)
        with pytest.raises(SlotpyError, match="certificate that is not trusted"):
            pull(name, puller.models, LIMITS, puller.events.append)
        assert secure.bytes_sent == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        pull(name, puller.models, LIMITS, puller.events.append)
        puller.assert_right()


def test_pull_goes_through_a_proxy(puller, hub, monkeypatch):
    with Proxy(hub) as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url)
        hub.sign = lambda path, sign=hub.sign: sign(path).replace("localhost", "files.invalid")
        use_endpoint(monkeypatch, "http://hub.invalid")
        proxy.sign = hub.sign
        puller()
        puller.assert_right()
        assert proxy.bytes_sent == sum(map(len, hub.files.values()))
        assert hub.bytes_sent == 0


def test_pull_survives_jumps_of_the_clock(puller, hub, monkeypatch):
    real, jumps = time.time, iter([0, 10**9, -(10**9)] * 10_000)
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    hub.faults = [Fault("drop", at=20_000, path=BIG), Fault("status", status=503, headers={"Retry-After": "1"})]
    puller()
    puller.assert_right()


def test_pull_stops_when_the_disk_fills_and_goes_on_afterwards(puller, hub, monkeypatch):
    real, budget = os.pwrite, [4 * CHUNK]

    def full(descriptor, data, offset):
        if budget[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        budget[0] -= len(data)
        return real(descriptor, data, offset)

    monkeypatch.setattr(part.os, "pwrite", full)
    with pytest.raises(CapacityError, match=r"No space left.*goes on"):
        puller()
    monkeypatch.undo()
    use_endpoint(monkeypatch, hub.url)
    before = hub.bytes_sent
    puller()
    puller.assert_right()
    assert hub.bytes_sent - before <= sum(map(len, hub.files.values())) - 3 * CHUNK


def test_pull_stops_before_it_takes_the_last_of_the_disk(puller, hub, monkeypatch):
    usage = transfer.shutil.disk_usage("/")
    free = iter([10**12] + [10] * 10_000)
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: usage._replace(free=next(free)))
    with pytest.raises(CapacityError, match="10 B left"):
        puller(replace(LIMITS, spare_bytes=1000))


def test_pull_refuses_before_the_first_byte_what_does_not_fit(puller, hub, monkeypatch):
    usage = transfer.shutil.disk_usage("/")
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(CapacityError, match=r"needs 9\d\d KiB of disk.*Free 8\d\d KiB"):
        puller()
    assert hub.bytes_sent == 0


def test_pull_says_what_to_do_on_a_disk_that_cannot_be_written(puller, hub, monkeypatch):
    real = os.open

    def read_only(path, flags, *rest, **options):
        if flags & os.O_CREAT and str(path).startswith(str(puller.directory)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(SlotpyError, match=r"Could not write .*Read-only file system"):
        puller()
    assert hub.bytes_sent == 0

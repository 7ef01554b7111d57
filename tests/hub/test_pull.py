"""A pull from a hub that behaves: stopped and taken up again, damaged and repaired, beside other files."""

import json
import os
import re
import threading
from dataclasses import replace

import pytest

from slotpy.errors import CheckpointError, SlotpyError, UsageError
from slotpy.hub.events import FileProgress, Status, to_ollama
from slotpy.hub.library import check_verified, list_models, lock_directory, remove_model
from slotpy.hub.manifest import load_manifest
from slotpy.hub.names import parse_name
from slotpy.hub.pull import pull, verify
from tests.hub.conftest import CHUNK, LIMITS
from tests.hub.fault_hub import LFS_BYTES, REVISION, Fault
from tests.hub.kills import kill_at_random

BIG = "model-00001.safetensors"


def size_of(hub):
    return sum(map(len, hub.files.values()))


def interrupt_after(hub, num_bytes):
    """Make a report that raises KeyboardInterrupt once the hub has sent so much."""

    def report(event):
        if isinstance(event, FileProgress) and hub.bytes_sent >= num_bytes:
            raise KeyboardInterrupt

    return report


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_pull_fetches_every_byte_once(puller, hub):
    pulled = puller()
    puller.assert_right()
    assert hub.bytes_sent == size_of(hub)
    assert {file.sha256 for file in pulled.manifest.files} == {hub.facts(path)[1] for path in hub.files}
    assert pulled.manifest.sources[0].revision == REVISION


def test_a_second_pull_asks_for_nothing(puller, hub):
    puller()
    hub.requests.clear()
    puller()
    assert hub.requests == []


def test_a_stopped_pull_goes_on_at_the_exact_byte(puller, hub):
    hub.bytes_per_s = 2_000_000
    with pytest.raises(KeyboardInterrupt):
        limits = replace(LIMITS, sync_s=60)
        pull(parse_name(hub.repo), puller.models, limits, interrupt_after(hub, 6 * CHUNK + 20_000))
    here = bytes_here(puller)
    hub.bytes_per_s = 0
    hub.requests.clear()
    puller()
    puller.assert_right()
    assert sum(here) % CHUNK and here[1] > 10_000, "partial files and partial chunks are kept"
    assert bytes_asked_for(hub) == size_of(hub) - sum(here)


def bytes_here(puller):
    """Add up the finished files, and what the journal says of the others."""
    finished = {path.name: path.stat().st_size for path in puller.directory.iterdir() if path.name in puller.hub.files}
    lines = map(json.loads, (puller.directory / "slotpy-pull.journal").read_text().splitlines())
    parts = {line["path"]: sum(end - start for start, end in line["have"]) for line in lines}
    return sum(finished.values()), sum(size for path, size in parts.items() if path not in finished)


def bytes_asked_for(hub):
    total = 0
    for request in hub.requests:
        name = request.path.rpartition("/")[2]
        if "/resolve/" in request.path and len(hub.files[name]) >= LFS_BYTES:
            continue  # answered with another address
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        total += int(wanted[2]) + 1 - int(wanted[1]) if wanted else len(hub.files[name])
    return total


def test_pull_survives_being_killed_at_random_points(tmp_path):
    outcome = kill_at_random(6, tmp_path / "models", seed=1)
    assert outcome.kills >= 6 and outcome.wrong_files == 0
    assert outcome.sent_bytes < 3 * outcome.needed_bytes


def test_two_pulls_at_once_are_refused_before_the_second_asks_for_files(puller, hub):
    hub.bytes_per_s = 1_000_000
    first = threading.Thread(target=puller)
    hub.on_request = lambda path: started.set()
    started = threading.Event()
    first.start()
    assert started.wait(10)
    with pytest.raises(UsageError, match="Another slotpy works on"):
        puller()
    hub.bytes_per_s = 0
    first.join()
    puller.assert_right()


def test_the_revision_is_pinned_at_the_first_pull(puller, hub, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        pull(parse_name(hub.repo), puller.models, LIMITS, interrupt_after(hub, 1))
    monkeypatch.setattr(hub, "listing", lambda: pytest.fail("asked again"))
    puller()
    puller.assert_right()
    assert all(f"/resolve/{REVISION}/" in r.path for r in hub.requests if "/resolve/" in r.path)


def test_verify_names_what_is_wrong_and_pull_fetches_only_that_chunk(puller, hub):
    puller()
    assert verify("m", puller.directory, puller.events.append) == []
    flip(puller.directory / BIG, 3 * CHUNK + 5)
    wrong = verify("m", puller.directory, puller.events.append)
    assert [result.entry.path for result in wrong] == [BIG]
    assert f"first in the {CHUNK} bytes from {3 * CHUNK} on" in wrong[0].problem
    with pytest.raises(CheckpointError, match=f"not verified.*{BIG}.*slotpy pull org/model"):
        check_verified(puller.directory)
    before = hub.bytes_sent
    puller()
    puller.assert_right()
    assert hub.bytes_sent - before == CHUNK
    check_verified(puller.directory)


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "three places", "touched"])
def test_pull_repairs(damage, puller, hub):
    puller()
    path = puller.directory / BIG
    cost = {"missing": len(hub.files[BIG]), "shorter": CHUNK, "longer": 0, "three places": 3 * CHUNK, "touched": 0}
    if damage == "missing":
        path.unlink()
    elif damage == "shorter":
        os.truncate(path, len(hub.files[BIG]) - 4321 - 10)
    elif damage == "longer":
        with open(path, "ab") as file:
            file.write(b"more")
    elif damage == "three places":
        for chunk in (0, 4, 5):
            flip(path, chunk * CHUNK + 1)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="not verified"):
        check_verified(puller.directory)
    before = hub.bytes_sent
    puller()
    puller.assert_right()
    assert hub.bytes_sent - before <= cost[damage] + (4321 + 10 if damage == "shorter" else 0)


def test_pull_does_not_believe_a_partial_file_that_changed(puller, hub):
    hub.bytes_per_s = 2_000_000
    with pytest.raises(KeyboardInterrupt):
        pull(parse_name(hub.repo), puller.models, replace(LIMITS, connections=1), interrupt_after(hub, 9 * CHUNK))
    hub.bytes_per_s = 0
    part = next(puller.directory.glob("model*.part"))
    flip(part, 5)
    puller()
    puller.assert_right()


def test_pull_does_not_believe_holes(puller, hub):
    """A partial file restored by a tool that makes holes has its size, not its bytes."""
    hub.bytes_per_s = 2_000_000
    with pytest.raises(KeyboardInterrupt):
        pull(parse_name(hub.repo), puller.models, LIMITS, interrupt_after(hub, 9 * CHUNK))
    hub.bytes_per_s = 0
    holed = [part.name.removesuffix(".part") for part in puller.directory.glob("*.part")]
    for part in puller.directory.glob("*.part"):
        size = part.stat().st_size
        os.truncate(part, 0)
        os.truncate(part, size)
    puller()
    puller.assert_right()
    resumed = {event.path: event.resumed_bytes for event in puller.events if isinstance(event, FileProgress)}
    assert holed and all(resumed[path] == 0 for path in holed)


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "folder", "foreign file"])
def test_pull_refuses_what_it_did_not_begin(kind, puller, hub, tmp_path):
    puller.directory.mkdir(parents=True)
    part = puller.directory / f"{BIG}.part"
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    with pytest.raises(KeyboardInterrupt):
        pull(parse_name(hub.repo), puller.models, LIMITS, interrupt_after(hub, 0))
    part.unlink(missing_ok=True)
    if kind == "foreign file":
        (puller.directory / "slotpy-pull.journal").unlink()
    if kind == "symbolic link":
        part.symlink_to(mine)
    elif kind == "hard link":
        part.hardlink_to(mine)
    elif kind == "folder":
        part.mkdir()
    else:
        part.write_bytes(b"theirs")
    with pytest.raises(CheckpointError, match=f"{BIG}.part.*Move it away"):
        puller()
    assert mine.read_bytes() == b"mine"


def test_pull_takes_a_right_file_that_lies_there_and_refuses_a_wrong_one(puller, hub):
    puller()
    (puller.directory / "slotpy-model.json").unlink()
    with pytest.raises(UsageError, match="was not made by slotpy"):
        puller()
    for path in puller.directory.iterdir():
        path.rename(puller.models / path.name)
    with pytest.raises(KeyboardInterrupt):
        pull(parse_name(hub.repo), puller.models, LIMITS, interrupt_after(hub, 0))
    (puller.models / BIG).rename(puller.directory / BIG)
    (puller.directory / "config.json").write_bytes(b"theirs")
    with pytest.raises(CheckpointError, match=r"in the way has 6 bytes.*config\.json.*move it away"):
        puller()
    assert (puller.directory / "config.json").read_bytes() == b"theirs"
    (puller.directory / "config.json").unlink()
    hub.sent.clear()
    puller()
    puller.assert_right()
    assert hub.sent[BIG] == 0


def test_progress_counts_no_byte_twice(puller, hub):
    hub.faults = [Fault("drop", at=20_000, path=BIG, times=5), Fault("corrupt", at=9, path=BIG)]
    puller()
    seen = [event for event in puller.events if isinstance(event, FileProgress)]
    assert all(0 <= event.completed_bytes <= event.total_bytes for event in seen)
    last = {event.path: event for event in seen}
    assert sum(event.completed_bytes for event in last.values()) == size_of(hub)
    assert puller.events[-1] == Status("success")


def test_events_have_the_shape_of_ollamas_pull():
    event = FileProgress("model.safetensors", "sha256:206c2e6ee138c902", 100, 40, 10)
    assert to_ollama(event) == {
        "status": "pulling 206c2e6ee138",
        "digest": "sha256:206c2e6ee138c902",
        "total": 100,
        "completed": 40,
    }
    assert to_ollama(Status("success")) == {"status": "success"}


def test_remove_leaves_what_slotpy_did_not_write(puller, hub):
    puller()
    (puller.directory / "notes.txt").write_text("mine")
    assert [stored.manifest.model for stored in list_models(puller.models)] == [hub.repo]
    with lock_directory(puller.directory), pytest.raises(UsageError, match="Another slotpy"):
        remove_model(puller.directory)
    assert remove_model(puller.directory) == ["notes.txt"]
    assert [path.name for path in puller.directory.iterdir()] == ["notes.txt"]
    assert list_models(puller.models) == []


def test_pull_needs_no_network_for_what_is_here(puller, hub, monkeypatch):
    puller()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    puller()
    (puller.directory / BIG).unlink()
    with pytest.raises(SlotpyError, match="HF_HUB_OFFLINE is set"):
        puller()


@pytest.mark.parametrize(
    "name", ["../x/y", "a", "a/b/c", "org/model@../x", "https://elsewhere.example/a/b", "", "a/.b"]
)
def test_names_that_are_none(name):
    with pytest.raises(UsageError, match="There is no model"):
        parse_name(name)


def test_names(tmp_path):
    assert parse_name("qwen3.8-flash-next").text == parse_name("qwen3.8-flash-next:4bit").text
    pinned = parse_name("qwen3.8-flash-next").pinned
    assert pinned.nbytes == 105_264_463_248 and len(pinned.files) == 25
    assert parse_name("hf.co/org/model@v1").directory(tmp_path) == tmp_path / "org" / "model@v1"
    assert parse_name("https://huggingface.co/org/model").repo == "org/model"


def test_a_hub_that_does_not_know_the_repository_or_the_revision(puller, hub):
    with pytest.raises(UsageError, match="The hub knows no org/other"):
        puller(name="org/other")
    with pytest.raises(UsageError, match="no revision 'v9'"):
        puller(name="org/model@v9")
    hub.api_faults = [Fault("", status=503, times=2)]
    puller(name="org/model@v1")
    assert load_manifest(puller.models / "org" / "model@v1").sources[0].revision == REVISION

"""Kill pulls with SIGKILL at random points, and go on, until a given number have died; for the test and the bench."""

import multiprocessing
import random
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.hub.conftest import CHUNK, LIMITS, make_files
from tests.hub.fault_hub import FaultHub

_RATE_BYTES_PER_S = 3_000_000


@dataclass
class Outcome:
    """Count what happened. `sent_bytes` are all that the server sent, `needed_bytes` what the models have."""

    kills: int = 0
    pulls: int = 0
    wrong_files: int = 0
    sent_bytes: int = 0
    needed_bytes: int = 0


def pull_once(url: str, models: str) -> None:
    """Pull in a process of its own, which the caller may kill."""
    import huggingface_hub.constants

    from slotpy.hub.names import parse_name
    from slotpy.hub.pull import pull

    huggingface_hub.constants.ENDPOINT = url
    huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    pull(parse_name("org/model"), Path(models), LIMITS, lambda event: None)


def kill_at_random(kills: int, folder: Path, seed: int) -> Outcome:
    """Start pulls and kill them, going on with each until it is whole, until `kills` have died."""
    draw = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["slotpy.hub.pull", "tests.hub.conftest"])
    outcome = Outcome()
    while outcome.kills < kills:
        files = make_files(seed=draw.getrandbits(32), size=20 * CHUNK + 99)
        shutil.rmtree(folder, ignore_errors=True)
        with FaultHub(files) as hub:
            hub.bytes_per_s = _RATE_BYTES_PER_S
            while True:
                process = context.Process(target=pull_once, args=(hub.url, str(folder)), daemon=True)
                process.start()
                _wait_for_request(hub, process)
                process.join(draw.uniform(0, 0.5) if outcome.kills < kills else 60)
                if process.is_alive():
                    process.kill()
                    outcome.kills += 1
                process.join()
                if process.exitcode == 0:
                    break
            outcome.pulls += 1
            outcome.sent_bytes += hub.bytes_sent
        outcome.needed_bytes += sum(map(len, files.values()))
        found = folder / "org" / "model"
        outcome.wrong_files += sum((found / name).read_bytes() != content for name, content in files.items())
    return outcome


def _wait_for_request(hub: FaultHub, process: multiprocessing.process.BaseProcess) -> None:
    """Wait until the process has got somewhere: killing it while Python starts shows nothing."""
    before = len(hub.requests)
    deadline = time.monotonic() + 20
    while len(hub.requests) == before and process.is_alive() and time.monotonic() < deadline:
        threading.Event().wait(0.002)

"""Pulling over loopback: speed beside curl and sha256sum, random kills, and how often each fault was survived.

    python bench/pull.py speed [--gb 20] [--rounds 1] [--folder DIR]
    python bench/pull.py kills [--kills 200]
    python bench/pull.py faults [--runs 20]

Everything stays on this machine. `speed` needs twice the size on the disk of DIR, and removes it afterwards. It serves
one file of 1 GB under many names, so that the server reads from memory and only the client writes.
"""

import argparse
import contextlib
import csv
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import huggingface_hub.constants  # noqa: E402

from slotpy.hub.names import parse_name  # noqa: E402
from slotpy.hub.pull import pull  # noqa: E402
from tests.hub.conftest import LIMITS, make_files  # noqa: E402
from tests.hub.fault_hub import FaultHub  # noqa: E402
from tests.hub.kills import kill_at_random  # noqa: E402
from tests.hub.test_faults import SURVIVED  # noqa: E402

FILE_BYTES = 10**9
COMMAND = [sys.executable, "-c", "from slotpy.cli.main import main; main()"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "kills", "faults"])
    parser.add_argument("--gb", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--connections", type=int)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory(prefix="slotpy-bench-", dir=options.folder) as folder:
        result = {"speed": speed, "kills": kills, "faults": faults}[options.what](options, Path(folder))
    print(json.dumps(result))


# Speed


def serve(path: Path, names: list[str], pipe: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with FaultHub({"config.json": b"{}", **dict.fromkeys(names, path)}, repo="org/bench") as hub:
        hub.listing()  # hashes the file, which no client should wait for
        pipe.send(hub.url)
        pipe.recv()


@contextlib.contextmanager
def serving(path: Path, names: list[str]) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(path, names, theirs), daemon=True)
    server.start()
    try:
        yield ours.recv()
    finally:
        ours.send("stop")
        server.join()


def measure(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command; give its wall time, CPU time and peak memory."""
    begin = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed: {process.returncode}")
    scale = 1 if sys.platform == "darwin" else 1024
    wall_s, cpu_s = time.monotonic() - begin, usage.ru_utime + usage.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": usage.ru_maxrss * scale}


def speed(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    names = [f"model-{number:05}.safetensors" for number in range(1, options.gb + 1)]
    source = folder / "source"
    with open(source, "wb") as file:
        for _ in range(FILE_BYTES // 10**7):
            file.write(os.urandom(10**7))
    total = FILE_BYTES * len(names)
    ceiling = write_ceiling(folder)
    print(f"Ceiling: {ceiling / 1e6:.0f} MB/s written and synced to this disk (1 GB); load {os.getloadavg()[0]:.1f}.")
    rows = []
    extra = ["--connections", str(options.connections)] if options.connections else []
    with serving(source, names) as url:
        ours = {"HF_ENDPOINT": url, "SLOTPY_MODELS": str(folder / "models"), "PYTHONPATH": str(ROOT)}
        curl_folder = folder / "curl"
        fetch = "; ".join(f"curl -sSL -o {curl_folder / n} {url}/org/bench/resolve/main/{n}" for n in names)
        sums = f"ls {folder}/models/org/bench/*.safetensors | xargs -P {os.cpu_count()} -n 1 sha256sum"
        for number in range(options.rounds):
            runs = {}
            for kind in ("pull", "curl", "curl+sync") if number % 2 == 0 else ("curl+sync", "curl", "pull"):
                shutil.rmtree(curl_folder, ignore_errors=True)
                subprocess.run(["sync"], check=True)
                if kind == "pull":
                    shutil.rmtree(folder / "models", ignore_errors=True)
                    runs[kind] = measure([*COMMAND, "pull", "org/bench", *extra], ours)
                    runs["verify"] = measure([*COMMAND, "pull", "--verify", "org/bench"], ours)
                    runs["sha256sum"] = measure(["sh", "-c", sums], {})
                    shutil.rmtree(folder / "models")
                else:
                    curl_folder.mkdir()
                    end = f"; sync -f {curl_folder}" if kind == "curl+sync" else ""
                    runs[kind] = measure(["sh", "-c", f"set -e; {fetch}{end}"], {})
            for kind, run in runs.items():
                row = {"what": kind, "bytes": total, "MB_per_s": round(total / run["wall_s"] / 1e6, 1)}
                row |= {"cpu_s": round(run["cpu_s"], 1), "peak_MiB": run["peak_bytes"] >> 20}
                row["load"] = round(os.getloadavg()[0], 1)
                print(row, flush=True)
                rows.append(row)
    append(rows)
    rates = {kind: statistics.median(r["MB_per_s"] for r in rows if r["what"] == kind) for kind in runs}
    return {
        "ceiling_MB_per_s": round(ceiling / 1e6),
        "MB_per_s": rates,
        "pull / curl": round(rates["pull"] / rates["curl"], 3),
        "pull / (curl, synced)": round(rates["pull"] / rates["curl+sync"], 3),
        "verify / sha256sum": round(rates["verify"] / rates["sha256sum"], 3),
    }


def write_ceiling(folder: Path) -> float:
    block = os.urandom(1 << 22)
    begin = time.monotonic()
    with open(folder / "ceiling", "wb") as file:
        for _ in range(FILE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - begin
    (folder / "ceiling").unlink()
    return FILE_BYTES / seconds


def append(rows: list[dict[str, object]]) -> None:
    path = ROOT / "bench" / "results" / "pull.csv"
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)


# Kills and faults


def kills(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    outcome = kill_at_random(options.kills, folder / "models", seed=time.time_ns())
    print("Each pull was killed, taken up again and killed, until it was whole; then all files were compared.")
    return vars(outcome) | {"sent / needed": round(outcome.sent_bytes / outcome.needed_bytes, 3)}


def faults(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Let each fault happen at random places, over models of random bytes."""
    draw = random.Random(time.time_ns())
    wrong = 0
    print("| fault | runs | right | sent again, median KiB |\n|---|---|---|---|")
    for name, (planned, _, _) in SURVIVED.items():
        right, again = 0, []
        for _run in range(options.runs):
            files = make_files(seed=draw.getrandbits(32))
            with FaultHub(files) as hub:
                huggingface_hub.constants.ENDPOINT = hub.url
                huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = (
                    hub.url + "/{repo_id}/resolve/{revision}/{filename}"
                )
                hub.faults = [replace(fault, at=draw.randrange(60_000) if fault.at else 0) for fault in planned]
                models = folder / f"{len(again)}"
                pulled = pull(parse_name(hub.repo), models, LIMITS, lambda event: None)
                right += all((pulled.directory / path).read_bytes() == content for path, content in files.items())
                again.append(hub.bytes_sent - sum(map(len, files.values())))
                shutil.rmtree(models)
        wrong += options.runs - right
        print(f"| {name} | {options.runs} | {right} | {statistics.median(again) / 1024:.0f} |", flush=True)
    return {"faults": len(SURVIVED), "runs of each": options.runs, "wrong": wrong}


if __name__ == "__main__":
    main()

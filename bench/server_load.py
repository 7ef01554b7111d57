"""Load a server with a mix of requests, kill a share of the clients at any byte, and see that nothing is lost or leaks.

    python bench/server_load.py [MODEL] [--minutes 10] [--clients 24] [--slots N]

Starts `slotpy serve MODEL`. Every request of a client that lives must end as its dialect ends one. Samples the server's
memory, file descriptors and threads, prints them every half minute, and compares the first and the last third. Exits
1 if a surviving request was cut, or descriptors or threads are left over. Prints one JSON object last.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

import psutil
import serving

QUESTIONS = ["What is a lighthouse?", "What is a river?", "Define harbor.", "What does tower mean?"]


@dataclass
class Tally:
    """What happened so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    cut: list[str] = field(default_factory=list)
    slow: list[float] = field(default_factory=list)


def make_request(model: str) -> tuple[str, str, dict[str, object] | None, bytes, float]:
    """Draw a request: method, path, body, what its answer must end with, and how likely its client dies."""
    message = {"role": "user", "content": random.choice(QUESTIONS)}
    chat = {"model": model, "messages": [message]}
    return random.choice(
        [
            ("POST", "/api/chat", chat, b"}\n\r\n0\r\n\r\n", 0.4),
            ("POST", "/api/chat", chat | {"stream": False}, b"}", 0.2),
            ("POST", "/api/generate", {"model": model, "prompt": message["content"]}, b"}\n\r\n0\r\n\r\n", 0.4),
            ("POST", "/v1/chat/completions", chat | {"stream": True}, b"data: [DONE]\n\n\r\n0\r\n\r\n", 0.4),
            ("POST", "/v1/chat/completions", chat | {"response_format": {"type": "json_object"}, "max_tokens": 30},
             b"}", 0.2),
            ("POST", "/v1/messages", chat | {"max_tokens": 40, "stream": True}, b"}\n\n\r\n0\r\n\r\n", 0.4),
            ("POST", "/v1/responses", {"model": model, "input": message["content"], "stream": True},
             b"}\n\n\r\n0\r\n\r\n", 0.4),
            ("POST", "/api/embed", {"model": model, "input": ["a", "b"]}, b"}", 0.1),
            ("GET", "/api/tags", None, b"}", 0.0),
            ("GET", "/api/ps", None, b"}", 0.0),
            ("GET", "/metrics", None, b"\n", 0.0),
            ("POST", "/api/show", {"model": model}, b"}", 0.0),
        ]
    )  # fmt: skip


async def be_client(port: int, model: str, end: float, tally: Tally) -> None:
    """Send requests until `end`, one connection each, dying in some."""
    while time.monotonic() < end:
        method, path, body, ending, mortality = make_request(model)
        payload = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        sent = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
        lifetime = random.expovariate(2) if random.random() < mortality else None
        started = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            tally.cut.append(f"{path}: {error}")
            continue
        try:
            if lifetime is not None and random.random() < 0.2:  # dies while it still writes
                sent, lifetime = sent[: random.randrange(len(sent))], 0.0
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(-1), lifetime)
        except TimeoutError:
            tally.outcomes["killed"] += 1
        except OSError as error:
            tally.cut.append(f"{path}: {error}")
        else:
            judge(path, answer, ending, tally)
            if body is None:
                tally.slow.append(time.monotonic() - started)
        finally:
            writer.transport.abort()


def ask(port: int, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "Hi", "stream": False}).encode()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/api/generate", body, timeout=600).read()


def judge(path: str, answer: bytes, ending: bytes, tally: Tally) -> None:
    """Count a complete answer, or note how it was cut."""
    status = answer[9:12].decode()
    if status in ("200", "503") and (status == "503" or answer.endswith(ending)):
        tally.outcomes[status] += 1
    else:
        tally.cut.append(f"{path}: {answer[:80]!r} ... {answer[-120:]!r}")


async def watch(process: psutil.Process, end: float, samples: list[dict[str, float]], tally: Tally) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(5)
        samples.append({"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()})
        if len(samples) % 6 == 0:
            done = dict(tally.outcomes)
            print(f"{len(samples) * 5:4} s  {samples[-1]['rss'] / 2**20:.0f} MiB  {samples[-1]}  {done}", flush=True)


async def load(port: int, args: argparse.Namespace, process: psutil.Process) -> tuple[Tally, list[dict[str, float]]]:
    tally, samples = Tally(), []
    end = time.monotonic() + args.minutes * 60
    clients = [be_client(port, args.model, end, tally) for _ in range(args.clients)]
    await asyncio.gather(watch(process, end, samples, tally), *clients)
    return tally, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--slots", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile("w+") as log:
        server, port = serving.start(args.model, home, serving.slots_option(args.slots), log)
        ask(port, args.model)  # loads
        process = psutil.Process(server.pid)
        before = (process.num_fds(), process.num_threads())
        tally, samples = asyncio.run(load(port, args, process))
        time.sleep(3)
        after = (process.num_fds(), process.num_threads())
        server.terminate()
        code = server.wait(20)
        log.seek(0)
        tracebacks = log.read().count("Traceback")
    report(tally, samples, before, after, code, tracebacks)


def report(
    tally: Tally, samples: list[dict[str, float]], before: tuple[int, int], after: tuple[int, int], code: int, bugs: int
) -> None:
    third = max(1, len(samples) // 3)
    early, late = (statistics.median(s["rss"] for s in part) for part in (samples[:third], samples[-third:]))
    for line in tally.cut[:20]:
        print("cut:", line)
    row = {
        "outcomes": dict(tally.outcomes),
        "cut": len(tally.cut),
        "tracebacks": bugs,
        "exit_code": code,
        "rss_first_third_mib": round(early / 2**20, 1),
        "rss_last_third_mib": round(late / 2**20, 1),
        "fds_before_after": [before[0], after[0]],
        "threads_before_after": [before[1], after[1]],
        "metadata_median_ms": round(statistics.median(tally.slow) * 1e3, 1),
        "metadata_max_ms": round(max(tally.slow) * 1e3, 1),
    }
    print(json.dumps(row))
    if tally.cut or bugs or code or after[0] > before[0] + 4 or after[1] > before[1] + 8:
        sys.exit(1)


if __name__ == "__main__":
    main()

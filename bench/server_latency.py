"""Measure what the server adds to the bare engine: to the first token and to each token after it.

    python bench/server_latency.py [MODEL] [--tokens 100] [--rounds 12] [--slots N]

Starts `slotpy serve MODEL` and a second process with the engine alone, and lets them answer the same greedy prompt in
turns, so that both meet the same machine. The client reads the stream from a plain socket. The ceiling, printed first,
is the bare engine. Appends to bench/results/server_latency.csv and prints one JSON object last.
"""

import argparse
import csv
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import serving
from serving import slots_option

RESULTS = Path(__file__).parent / "results" / "server_latency.csv"
PROMPT = "<|im_start|>user\nWhat is a lighthouse?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def answer_lines(model: str, slots: int | None, tokens: int) -> None:
    """Be the bare engine: for each line of standard input, generate once and print the times of its tokens."""
    from slotpy.engine.engine import Engine
    from slotpy.engine.loader import EngineOptions
    from slotpy.engine.sampler import SamplingParams

    with Engine.open(model, EngineOptions(slots=slots)) as engine:
        print("ready", flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            ids = engine.tokenizer.encode(PROMPT)
            session = engine.new_session()
            times = []
            for _ in session.generate(ids, SamplingParams(temperature=0), tokens, engine.stop_ids):
                times.append(time.perf_counter() - started)
            print(json.dumps(times), flush=True)


class Bare:
    """The process with the engine alone."""

    def __init__(self, args: argparse.Namespace, home: str) -> None:
        options = ["--bare", "--tokens", str(args.tokens), *slots_option(args.slots)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, args.model, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"SLOTPY_HOME": home},
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def run(self) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        times: list[float] = json.loads(self._process.stdout.readline())
        return times

    def close(self) -> None:
        self._process.communicate("")


class Server:
    """`slotpy serve`, and a client of it."""

    def __init__(self, args: argparse.Namespace, home: str) -> None:
        self._args = args
        self._process, self._port = serving.start(args.model, home, slots_option(args.slots), subprocess.DEVNULL)

    def run(self) -> list[float]:
        """Give when each record with text arrived, from before the connection was opened."""
        body = json.dumps(
            {"model": self._args.model, "prompt": PROMPT, "raw": True,
             "options": {"temperature": 0, "num_predict": self._args.tokens}}
        ).encode()  # fmt: skip
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            head = f"POST /api/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            seen, times = b"", []
            while not seen.endswith(b"0\r\n\r\n"):
                seen += connection.recv(1 << 16)
                times += [time.perf_counter() - started] * (seen.count(b'"done":') - len(times))
        return times[:-1]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def summary(times: list[float]) -> tuple[float, float]:
    """Give the time of the first token and the mean of the others, which no buffering can beautify."""
    return times[0], (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--host", default=platform.machine(), help="name of this machine in the results")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        answer_lines(args.model, args.slots, args.tokens)
        return
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        bare, server = Bare(args, one), Server(args, other)
        bare.run(), server.run()  # loads, and warms kernels up
        first, each = summary(bare.run())
        print(f"{args.host}, {platform.platform()}, model {args.model}, {os.cpu_count()} cores")
        print(f"ceiling: the bare engine, {first * 1e3:.1f} ms to the first token, then {1 / each:.1f} tok/s")
        pairs = []
        for number in range(args.rounds):
            runs = (bare, server) if number % 2 else (server, bare)
            results = {run: summary(run.run()) for run in runs}
            pairs.append((*results[bare], *results[server]))
        server.close()
        bare.close()
    report(args, pairs)


def report(args: argparse.Namespace, pairs: list[tuple[float, float, float, float]]) -> None:
    extra_first = [(served - bare) * 1e3 for bare, _, served, _ in pairs]
    ratios = [served / bare for _, bare, _, served in pairs]
    row: dict[str, Any] = {
        "host": args.host,
        "model": args.model,
        "tokens": args.tokens,
        "rounds": len(pairs),
        "bare_first_ms": round(statistics.median(p[0] for p in pairs) * 1e3, 2),
        "first_overhead_ms": round(statistics.median(extra_first), 2),
        "first_overhead_p90_ms": round(statistics.quantiles(extra_first, n=10)[-1], 2),
        "bare_token_ms": round(statistics.median(p[1] for p in pairs) * 1e3, 3),
        "token_ratio": round(statistics.median(ratios), 4),
        "token_ratio_p90": round(statistics.quantiles(ratios, n=10)[-1], 4),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(json.dumps(row))


if __name__ == "__main__":
    main()

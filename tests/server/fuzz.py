"""Fuzz every endpoint of a server on real sockets: `python -m tests.server.fuzz --minutes 10`.

Never may there be a 500 that no script asked for, a traceback to the client or in the log, a silence, an answer that
is not well-formed in its dialect, or anything left behind: tasks, connections, threads, files, half-received blobs.
Every failure is printed with the command that sends its case again.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.server import wire
from tests.server.fuzz_cases import Case, Sent, make_case
from tests.server.process import Held, ServerProcess, started, wait_for
from tests.server.wellformed import Wrong, check
from tests.server.wire import Client, Gone, Malformed

TIMEOUT_S = 30.0
_SILENCE_S = 0.25
_NORMAL = {"model": "tinychat", "messages": [{"role": "user", "content": "hi"}], "stream": False}
_LASTING = ("model", "message", "done", "done_reason", "prompt_eval_count", "eval_count")
_TROUBLE = re.compile(r"Traceback|never (?:retrieved|awaited)|Warning: |Unclosed|Unhandled|Exception ")
_POOL_THREADS = 8  # asyncio's threads for small work come with the first of it, and stay


class Runner:
    """Send cases to a server on `port`, from some clients at once, and keep what went wrong."""

    def __init__(self, port: int, seed: int, report: Callable[[str], object] = print) -> None:
        self._port, self._seed, self._report = port, seed, report
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.num_cases = 0
        self.slowest: tuple[float, int] = (0.0, 0)

    def run(self, num_cases: int | None, seconds: float, num_clients: int = 4) -> None:
        """Send cases until there were so many, or the time is over."""
        numbers, until_s = itertools.count(), time.monotonic() + seconds

        def work() -> None:
            while time.monotonic() < until_s:
                with self._lock:
                    number = next(numbers)
                if num_cases is not None and number >= num_cases:
                    return
                self.send(make_case(self._seed, number))

        threads = [threading.Thread(target=work) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def send(self, case: Case) -> None:
        """Send one case and judge what comes back."""
        began_s = time.monotonic()
        try:
            with Client(self._port, TIMEOUT_S) as client:
                talk = self._leave if case.kind == "gone" else self._talk if case.framed else self._mumble
                talk(client, case)
        except (Wrong, Malformed, Gone, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
            self._fail(case, f"{type(error).__name__}: {error}")
        with self._lock:
            self.num_cases += 1
            self.slowest = max(self.slowest, (time.monotonic() - began_s, case.number))

    def _talk(self, client: Client, case: Case) -> None:
        """Send requests that are right by HTTP's rules, each of which is answered until one answer closes."""
        if case.together:
            client.send(b"".join(sent.data for sent in case.requests))
        for sent in case.requests:
            if not case.together:
                client.send(sent.data)
            answer = client.read(sent.method)
            self._judge(sent, answer, framed=True)
            if answer.closes:
                break
        client.socket.shutdown(socket.SHUT_WR)
        if rest := client.rest():
            raise Malformed(f"more than was asked for: {rest[:200]!r}")

    def _mumble(self, client: Client, case: Case) -> None:
        """Send what may be no HTTP. Whatever is answered must be; at the latest when nothing more comes it ends."""
        [sent] = case.requests
        with contextlib.suppress(ConnectionError):
            client.send(sent.data)
        quiet = threading.Timer(_SILENCE_S, _end_sending, [client])
        quiet.start()
        try:
            while True:
                self._judge(sent, client.read(sent.method), framed=False)
        except Gone as gone:
            if gone.received and not gone.received.startswith(b"HTTP/1."):
                raise
        finally:
            quiet.cancel()

    def _leave(self, client: Client, case: Case) -> None:
        [sent] = case.requests
        client.send(sent.data[: case.sends])
        if case.leaves_after is not None:
            client.socket.settimeout(_SILENCE_S)
            with contextlib.suppress(TimeoutError):  # a short answer
                received = 0
                while received < case.leaves_after and (data := client.socket.recv(case.leaves_after - received)):
                    received += len(data)
        if case.number % 2:
            client.abort()

    def _judge(self, sent: Sent, answer: wire.Answer, framed: bool) -> None:
        with self._lock:
            self.answers[f"{answer.status} {answer.headers.get('content-type', '-')}"] += 1
        check(sent.method, sent.path, answer, framed=framed)

    def _fail(self, case: Case, what: str) -> None:
        sent = b" | ".join(request.data[:600] for request in case.requests)
        text = f"case {case.number} ({case.kind}): {what[:500]}\n  sent {sent!r}\n"
        text += f"  again: python -m tests.server.fuzz --seed {self._seed} --case {case.number}"
        with self._lock:
            self.failures.append(text)
        self._report(text)


class Watch:
    """Look at a server before and after, and tell what has changed."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._normal = self._asked()
        self._before = server.settled()
        self.rss_bytes = server.rss_bytes()

    def problems(self) -> list[str]:
        """Give what is not as it was."""
        found = []
        try:
            wait_for(self._is_idle, 15.0, "requests still run or wait")
            if (now := self._asked()) != self._normal:
                found.append(f"normal requests are answered otherwise: {now} and not {self._normal}")
            held = self._server.settled()
            if _is_more(held, self._before):
                found.append(f"left behind: {held}, before {self._before}")
        except (AssertionError, OSError, Gone, Malformed, TimeoutError) as error:
            found.append(f"{type(error).__name__}: {error}")
        if self._server.process.poll() is not None:
            found.append(f"the process ended with {self._server.process.returncode}")
        found += [f"left in the directory: {path}" for path in self._server.left_files("part-*")]
        log = self._server.log
        found += [f"in the log: {log[trouble.start() :][:2000]}" for trouble in _TROUBLE.finditer(log)][:3]
        return found

    def _is_idle(self) -> bool:
        text = wire.ask(self._server.port, "GET", "/metrics").body.decode()
        return all(f"\nslotpy_{what}_requests 0.0\n" in text for what in ("queued", "running"))

    def _asked(self) -> Any:
        """Ask what always has the same answer."""
        port = self._server.port
        whole = wire.ask(port, "POST", "/api/chat", _NORMAL, TIMEOUT_S).json
        stream = wire.ask(port, "POST", "/api/chat", {**_NORMAL, "stream": True}, TIMEOUT_S).records
        kept = [{name: each.get(name) for name in _LASTING} for each in [whole, *stream]]
        names = {model["name"] for model in wire.ask(port, "GET", "/api/tags").json["models"]}
        return kept, {"tinychat:latest", "tiny:latest", "tinythink:latest"} <= names


def _is_more(held: Held, before: Held) -> bool:
    more_threads = held.threads > before.threads + _POOL_THREADS
    return held.tasks > before.tasks or held.connections > 0 or held.files > before.files or more_threads


def _end_sending(client: Client) -> None:
    with contextlib.suppress(OSError):
        client.socket.shutdown(socket.SHUT_WR)


def main() -> int:
    """Fuzz for some minutes, or send one case again. Gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--port", type=int, help="of a running server; by default one is started, and watched too")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", type=int, help="send this one alone, and show its answer")
    options = parser.parse_args()
    if options.port is not None:
        return _fuzz(options, options.port, None)
    with started() as server:
        return _fuzz(options, server.port, server)


def _fuzz(options: argparse.Namespace, port: int, server: ServerProcess | None) -> int:
    print(f"seed {options.seed}", flush=True)
    runner = Runner(port, options.seed, lambda text: print(text, flush=True))
    if options.case is not None:
        case = make_case(options.seed, options.case)
        print(dataclasses.replace(case, requests=()), *(sent.data for sent in case.requests), sep="\n")
        runner.send(case)
        print(dict(runner.answers), server.log if server else "")
        return 1 if runner.failures else 0
    watch = Watch(server) if server is not None else None
    runner.run(None, options.minutes * 60)
    problems = watch.problems() if watch is not None else []
    for problem in problems:
        print(problem)
    print(json.dumps(dict(runner.answers.most_common()), indent=1))
    slowest_s, number = runner.slowest
    num_failures = len(runner.failures) + len(problems)
    print(f"{runner.num_cases} cases, {num_failures} failures; the slowest took {slowest_s:.1f} s ({number})")
    if server is not None and watch is not None:
        print(f"memory {watch.rss_bytes >> 20} MiB before, {server.rss_bytes() >> 20} MiB after; {server.held()}")
    return 1 if runner.failures or problems else 0


if __name__ == "__main__":
    sys.exit(main())

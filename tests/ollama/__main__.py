"""Send the battery to a server and print how its answers differ from Ollama's: `python -m tests.ollama HOST:PORT`."""

import sys

from tests.ollama.battery import battery
from tests.ollama.compare import broken_rules, differences, expected, findings, send, unexplained


def main(address: str) -> int:
    """Print unexplained differences, broken rules, and entries of the list without use; give how many."""
    host, _, port = address.rpartition(":")
    answers, listed = expected(), differences()
    equal = explained = problems = 0
    for call in battery(int(port)):
        got = send(call, host or "127.0.0.1", int(port))
        found = findings(answers[call.name], got)
        lines = unexplained(call.name, found, listed) + broken_rules(call, got)
        equal += not found and not lines
        explained += bool(found) and not lines
        problems += bool(lines)
        for line in lines:
            print(f"{call.name}: {line}")
        if lines:
            print(f"    {got.text[:300]!r}")
    for entry in listed:
        for pattern in entry.unused:
            print(f"the list explains {pattern!r}, which is not so: {entry.reason}")
            problems += 1
    print(f"{equal} equal, {explained} differ as listed, {problems} to mend")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)

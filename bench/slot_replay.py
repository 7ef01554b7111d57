"""Replay recorded router traces through eviction policies: hit rate beside Belady's bound.

    python bench/slot_replay.py [--trace qwen ...] [--sizes 0.1 ...] [--tune] [--csv FILE]

Prints the ceiling first (Belady: knowing the future, no policy does better), then the policies that did not ship, the
shipped one simulated, and the shipped `SlotTable` itself, which must agree with the simulation miss for miss (exit 1
otherwise). The last line of stdout is one JSON object.

A trace is replayed token by token, its prompt too, from an empty table; warm misses are those from token 48 on.
`qwen-switch` is the qwen trace, the same with its experts renamed (a new topic, as far as popularity goes), and the
first again. `demo` is the demo model answering questions, `random` a model with random weights reading random
tokens: for contrast, never to judge a policy by. `--tune` chooses the constants of the shipped policy on two traces and
tests them on the third.
"""

import argparse
import csv
import gzip
import itertools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a clone, installed or not

from bench import policies
from bench.policies import Policy, Trace
from slotpy.slots.table import SlotTable

TRACES_DIR = Path(__file__).parent / "traces"
RECORDED = ("qwen", "gemma", "gptoss")
DEFAULT = (*RECORDED, "qwen-switch")
TRACES = (*DEFAULT, "demo", "random")
SIZES = (0.023, 0.037, 0.0625, 0.10, 0.15, 0.20, 0.25, 0.35, 0.50)
TUNE_SIZES = (0.0625, 0.10, 0.20)
WARM_TOKEN = 48
SIMULATED = "next-use (simulated)"
SHIPPED = "SlotTable (shipped)"


class ShippedTable:
    """The shipped table as a policy: plan, commit and release every step."""

    def __init__(self, trace: Trace, num_slots: int) -> None:
        self._table = SlotTable(num_slots, trace.num_layers, trace.keys_per_layer)

    def access(self, token: int, layer: int, keys: np.ndarray) -> int:
        plan = self._table.plan(keys)
        self._table.commit(plan)
        self._table.release(plan)
        return int(plan.miss.sum())


MakePolicy = Callable[[Trace, int], Policy]
POLICIES: dict[str, MakePolicy] = {
    "LRU": policies.Lru,
    "LRU in tokens": policies.TokenLru,
    "CLOCK": policies.Clock,
    "LFU": partial(policies.Lfu, ageing=False),
    "LFUDA": partial(policies.Lfu, ageing=True),
    "S3-FIFO": policies.S3Fifo,
    "EWMA 8": partial(policies.Ewma, half_lives=(8.0,)),
    "EWMA 3+64": partial(policies.Ewma, half_lives=(3.0, 64.0)),
    "frequency/age": policies.FrequencyOverAge,
    SIMULATED: policies.NextUse,
    SHIPPED: ShippedTable,
}


def load_trace(name: str) -> Trace:
    """Read one recorded trace, or make `<name>-switch` of it."""
    if name.endswith("-switch"):
        return switch_topic(load_trace(name.removesuffix("-switch")))
    steps: dict[tuple[int, int], list[int]] = {}
    with gzip.open(TRACES_DIR / f"{name}.route.csv.gz", "rt", encoding="ascii") as lines:
        header = "".join(itertools.takewhile(lambda line: not line.startswith("turn,"), lines))
        for row in csv.reader(lines):
            token, layer, expert = int(row[2]), int(row[3]), int(row[5])
            steps.setdefault((token, layer), []).append(expert)
    sizes = re.search(r"n_layer=(\d+) n_expert=(\d+)", header)
    if sizes is None:
        raise ValueError(f"trace {name}: no n_layer and n_expert in its header")
    num_layers, keys_per_layer = int(sizes[1]), int(sizes[2])
    # The prompt was recorded layer by layer; sorted, it reads token by token like the reply.
    ordered = tuple(
        (token, layer, np.array(experts, dtype=np.int64) + layer * keys_per_layer)
        for (token, layer), experts in sorted(steps.items())
    )
    return Trace(name, num_layers, keys_per_layer, ordered)


def switch_topic(trace: Trace) -> Trace:
    """Play a trace, the same with the experts of every layer renamed one to one, and the first again."""
    num_tokens = trace.steps[-1][0] + 1
    width = trace.keys_per_layer
    steps = [
        (token + topic * num_tokens, layer, keys // width * width + (keys % width + topic % 2 * (width // 2)) % width)
        for topic in range(3)
        for token, layer, keys in trace.steps
    ]
    return Trace(f"{trace.name}-switch", trace.num_layers, width, tuple(steps))


def replay(trace: Trace, policy: Policy) -> list[int]:
    """Give the number of misses of every step."""
    return [policy.access(*step) for step in trace.steps]


def hit_rate(trace: Trace, misses: Sequence[int]) -> float:
    return 1.0 - sum(misses) / trace.num_uses


def warm_misses_per_token(trace: Trace, misses: Sequence[int]) -> float:
    warm = sum(count for (token, _, _), count in zip(trace.steps, misses, strict=True) if token >= WARM_TOKEN)
    return warm / (trace.steps[-1][0] + 1 - WARM_TOKEN)


def compare(trace: Trace, sizes: Sequence[float]) -> list[dict[str, object]]:
    """Replay one trace at every size through every policy, print the two tables, and give a row for each run."""
    slots = [int(size * trace.num_keys) for size in sizes]
    least = max(len(keys) for _, _, keys in trace.steps)
    if min(slots) < least:
        raise SystemExit(f"{trace.name}: a layer asks for {least} experts at once, and {min(slots)} slots are fewer.")
    runs = {"Belady (ceiling)": [policies.belady_misses(trace, num_slots) for num_slots in slots]}
    for name, make in POLICIES.items():
        runs[name] = [replay(trace, make(trace, num_slots)) for num_slots in slots]
    if runs[SIMULATED] != runs[SHIPPED]:
        raise SystemExit(f"{trace.name}: SlotTable and the simulation of its policy disagree")
    uses_per_token = trace.num_uses / (trace.steps[-1][0] + 1)
    print(f"\n{trace.name}: {trace.num_layers} layers x {trace.keys_per_layer}, {uses_per_token:.0f} uses/token")
    for title, measure, width in (("hit rate", hit_rate, 3), ("warm misses/token", warm_misses_per_token, 1)):
        print(f"{title:22}" + "".join(f"{size:8.1%}" for size in sizes))
        for name, misses in runs.items():
            print(f"  {name:20}" + "".join(f"{measure(trace, run):8.{width}f}" for run in misses))
    return [
        {
            "trace": trace.name,
            "size": size,
            "slots": num_slots,
            "policy": name,
            "hit_rate": round(hit_rate(trace, run), 4),
            "warm_misses_per_token": round(warm_misses_per_token(trace, run), 2),
        }
        for name, misses in runs.items()
        for size, num_slots, run in zip(sizes, slots, misses, strict=True)
    ]


def tune() -> None:
    """Choose the constants of the shipped policy on two traces and print what they are worth on the third."""
    traces = [load_trace(name) for name in RECORDED]
    grid = list(itertools.product((16.0, 32.0, 64.0), (4.0, 6.0, 8.0), (1 / 3, 1 / 2, 2 / 3)))

    def score(trace: Trace, constants: tuple[float, float, float]) -> float:
        sizes = [int(size * trace.num_keys) for size in TUNE_SIZES]
        runs = [replay(trace, policies.NextUse(trace, num_slots, *constants)) for num_slots in sizes]
        return statistics.mean(hit_rate(trace, run) for run in runs)

    scores = [{constants: score(trace, constants) for constants in grid} for trace in traces]
    print(f"\nmean hit rate at {', '.join(f'{size:.1%}' for size in TUNE_SIZES)}; grid of {len(grid)}")
    shipped = (32.0, 6.0, 1 / 2)
    for held_out, trace in enumerate(traces):
        others = [scores[index] for index in range(len(traces)) if index != held_out]
        chosen = max(grid, key=lambda constants, others=others: sum(other[constants] for other in others))
        own = scores[held_out]
        print(
            f"  {trace.name:8} chosen on the others {own[chosen]:.4f} (frequency half-life {chosen[0]:.0f}, chance "
            f"half-life {chosen[1]:.0f}, exponent {chosen[2]:.2f}); shipped {own[shipped]:.4f}; "
            f"worst of grid {min(own.values()):.4f}, best {max(own.values()):.4f}"
        )


def plan_cost_us() -> dict[str, float]:
    """Time `plan` of 10 keys on 24,576 full slots: medians in microseconds, for hits only and for 3 and 10 misses."""
    num_layers, keys_per_layer = 48, 1024
    table = SlotTable(24_576, num_layers, keys_per_layer)
    for layer in range(num_layers):
        full = table.plan(layer * keys_per_layer + np.arange(table.num_slots // num_layers))
        table.commit(full)
        table.release(full)
    medians = {}
    for num_misses in (0, 3, 10):
        times_ns = []
        for token, layer in itertools.product(range(20), range(num_layers)):
            hot = np.arange(10 - num_misses)
            cold = keys_per_layer - 1 - token * num_misses - np.arange(num_misses)
            keys = layer * keys_per_layer + np.concatenate((hot, cold))
            start_ns = time.perf_counter_ns()
            plan = table.plan(keys)
            times_ns.append(time.perf_counter_ns() - start_ns)
            table.commit(plan)
            table.release(plan)
        medians[f"{num_misses} misses"] = round(statistics.median(times_ns) / 1e3, 1)
    return medians


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", choices=TRACES, default=DEFAULT)
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES, help="fractions of all experts")
    parser.add_argument("--tune", action="store_true", help="also choose constants on two traces, test on the third")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "slot_replay.csv")
    options = parser.parse_args(arguments)
    machine = (
        f"{os.cpu_count()}-core {platform.machine()} {platform.system()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}"
    )
    given = sys.argv[1:] if arguments is None else arguments
    print(f"{machine}\n{' '.join(('python bench/slot_replay.py', *given))}")

    rows = [row for name in options.trace for row in compare(load_trace(name), options.sizes)]
    if options.tune:
        tune()
    cost = plan_cost_us()
    print("\nplan() of 10 keys on 24,576 slots, median us: " + ", ".join(f"{k}: {v:.0f}" for k, v in cost.items()))

    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    hit_rates: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        if row["policy"] in ("Belady (ceiling)", "LRU", SHIPPED):
            by_policy = hit_rates.setdefault(str(row["trace"]), {})
            by_policy.setdefault(str(row["policy"]), {})[str(row["size"])] = row["hit_rate"]
    print(json.dumps({"bench": "slot_replay", "machine": machine, "hit_rate": hit_rates, "plan_us": cost}))


if __name__ == "__main__":
    main()

"""Hold a model to its memory plan, and press it: the plan's peak as a kernel limit, then a hog in the same group.

    python bench/memory_plan.py MODEL peak --budgets-gb 1.75,2.5,3.5
    python bench/memory_plan.py MODEL hog --limit-gb 6 --hog-gb 3.2

`peak` runs each budget in a process and memory cgroup of its own (v1 or v2; needs the right to make one). Once loaded,
the group's limit becomes the plan's expected peak: a prompt of more than one pass, decoding, and resizes up and down
must live within it, or the kernel kills the process. Reads pass by the page cache, so that the group's own maximum
counts the process alone.

`hog` gives an automatic plan a group with a limit, talks without end, lets another process of the group take memory and
go again, and waits until the governor has shrunk and recovered. Every reply must equal that of an undisturbed run.

Prints one JSON object last, fails when a peak is beyond its plan or a byte differs.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from memory_limit import enter_cgroup

from slotpy.budget import gib_to_bytes
from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.governor import Governor
from slotpy.machine import hardware
from slotpy.machine.pressure import probe
from slotpy.units import format_bytes

GREEDY = SamplingParams(temperature=0)
HOG = """
import sys, time
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def group_file(group: Path, v1: str, v2: str) -> Path:
    return group / (v1 if (group / v1).exists() else v2)


def talk(loaded: LoadedModel, session: Session, seed: int, prompt_tokens: int, tokens: int) -> list[int]:
    vocab = loaded.model.config.vocab_size
    prompt = np.random.default_rng(seed).integers(0, vocab, prompt_tokens).tolist()
    return [token for token, _ in session.generate(prompt, GREEDY, tokens, frozenset())]


def run_budget(model: Path, budget_bytes: int, prompt_tokens: int, tokens: int, results: multiprocessing.Queue) -> None:
    """Load, set the limit to the plan's peak, and go through everything that takes memory."""
    group = Path(enter_cgroup(1 << 40))
    options = EngineOptions(memory_bytes=budget_bytes, direct_io=True)
    loaded = load(model, options)
    plan = loaded.plan
    limit = group_file(group, "memory.limit_in_bytes", "memory.max")
    limit.write_text(str(plan.expected_peak_bytes))
    vocab = loaded.model.config.vocab_size
    replies = [talk(loaded, Session(loaded, vocab), 1, prompt_tokens, tokens)]
    after_prefill = hardware.peak_memory_bytes()
    sizes = [plan.num_slots // 3, plan.num_slots, plan.num_slots // 2, plan.num_slots * 3 // 4, plan.num_slots]
    steps = iter(sizes * tokens)
    session = Session(loaded, vocab, check=lambda between_requests: between_requests or loaded.resize(next(steps)))
    replies.append(talk(loaded, session, 1, prompt_tokens, tokens))
    maximum = group_file(group, "memory.max_usage_in_bytes", "memory.peak")
    results.put(
        {
            "budget_bytes": budget_bytes,
            "slots": plan.num_slots,
            "records": plan.num_records,
            "total_bytes": plan.total_bytes,
            "expected_peak_bytes": plan.expected_peak_bytes,
            "peak_bytes_before_resizes": after_prefill,
            "peak_bytes": hardware.peak_memory_bytes(),
            "group_peak_bytes": int(maximum.read_text()),
            "same_reply": replies[0] == replies[1],
            "resizes": tokens - 1,
        }
    )
    loaded.close()


def measure_peaks(args: argparse.Namespace) -> dict[str, object]:
    rows = []
    for gib in args.budgets_gb.split(","):
        results: multiprocessing.Queue = multiprocessing.Queue()
        parameters = (args.model, gib_to_bytes(float(gib), "--budgets-gb"), args.prompt, args.tokens, results)
        child = multiprocessing.Process(target=run_budget, args=parameters)
        child.start()
        while child.is_alive() and results.empty():
            time.sleep(0.2)
        row = results.get(timeout=5) if not results.empty() else {"budget_gb": gib, "killed": child.exitcode}
        child.join()
        print({k: format_bytes(v) if k.endswith("_bytes") else v for k, v in row.items()}, flush=True)
        rows.append(row)
    good = all("killed" not in r and r["same_reply"] and r["peak_bytes"] <= r["expected_peak_bytes"] for r in rows)
    return {"bench": "memory_plan peak", "rows": rows, "good": good}


def press(args: argparse.Namespace) -> dict[str, object]:
    enter_cgroup(gib_to_bytes(args.limit_gb, "--limit-gb"))
    loaded = load(args.model, EngineOptions(context_tokens=2048, direct_io=True))
    vocab = loaded.model.config.vocab_size
    undisturbed = [talk(loaded, Session(loaded, vocab), seed, 20, args.tokens) for seed in range(4)]
    governor = Governor(loaded, floor_slots=loaded.sizes.floor_slots, probe=probe())
    started = time.monotonic()
    before = loaded.plan.num_slots
    print(f"plan {format_bytes(loaded.plan.total_bytes)}, {before} slots of {loaded.plan.num_records}", flush=True)
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(gib_to_bytes(args.hog_gb, "--hog-gb")), "40"], stdout=subprocess.PIPE
    )
    turns, same, lowest = 0, True, before
    while time.monotonic() - started < args.seconds:
        seed = turns % 4
        reply = talk(loaded, Session(loaded, vocab, check=governor.check), seed, 20, args.tokens)
        same, turns = same and reply == undisturbed[seed], turns + 1
        lowest = min(lowest, loaded.plan.num_slots)
        if hog.poll() is not None and loaded.plan.num_slots == before and lowest < before:
            break
    hog.kill()
    for resize in governor.resizes:
        print(f"{resize.at_s - started:6.1f} s  {resize}")
    recovered = lowest < before == loaded.plan.num_slots
    print(f"{turns} turns, all as undisturbed: {same}; peak {format_bytes(hardware.peak_memory_bytes())}")
    return {
        "bench": "memory_plan hog",
        "slots": before,
        "lowest_slots": lowest,
        "slots_at_end": loaded.plan.num_slots,
        "turns": turns,
        "resizes": [f"{r.at_s - started:.1f} s: {r}" for r in governor.resizes],
        "expected_peak_bytes": loaded.plan.expected_peak_bytes,
        "peak_bytes": hardware.peak_memory_bytes(),
        "same_replies": same,
        "good": same and recovered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=["peak", "hog"])
    parser.add_argument("--budgets-gb", default="1.75,2.5,3.5")
    parser.add_argument("--prompt", type=int, default=520, help="tokens: more than one pass")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--limit-gb", type=float, default=6.0)
    parser.add_argument("--hog-gb", type=float, default=3.2)
    parser.add_argument("--seconds", type=float, default=240)
    args = parser.parse_args()
    result = measure_peaks(args) if args.what == "peak" else press(args)
    print(json.dumps(result))
    sys.exit(0 if result["good"] else 1)


if __name__ == "__main__":
    main()

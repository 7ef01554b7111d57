"""Answer many prompts with far less memory than the checkpoint, and compare the peak with the plan.

    python bench/memory_limit.py MODEL --limit-mib 1200 --slots 400 --prompts 200 --tokens 8

The process moves into a memory cgroup of its own (v1 or v2; needs the right to make one) before it loads the model,
so that the kernel enforces the limit on everything, page cache included; with --address-space it limits its address
space instead (`ulimit -v`). Prompts are random ids of 5 to 40 tokens. Prints one JSON object last; fails when the peak
is beyond the plan.
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from slotpy.engine.loader import EngineOptions, load
from slotpy.engine.sampler import SamplingParams
from slotpy.engine.session import Session
from slotpy.machine import hardware
from slotpy.units import format_bytes


def enter_cgroup(limit_bytes: int) -> str:
    """Make a memory cgroup with this limit and move into it; returns its directory."""
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory").is_dir()
    group = root / ("memory" if version_1 else "") / f"slotpy-bench-{os.getpid()}"
    group.mkdir()
    limit_file = "memory.limit_in_bytes" if version_1 else "memory.max"
    (group / limit_file).write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return str(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit-mib", type=int, required=True)
    parser.add_argument("--address-space", action="store_true", help="limit the address space, not a cgroup")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    limit_bytes = args.limit_mib << 20
    if args.address_space:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        where = "address space"
    else:
        where = enter_cgroup(limit_bytes)
    checkpoint_bytes = sum(f.stat().st_size for f in args.model.glob("*.safetensors"))
    print(f"checkpoint {format_bytes(checkpoint_bytes)}, limit {format_bytes(limit_bytes)} ({where})")
    loaded = load(args.model, EngineOptions(slots=args.slots, context_tokens=1024))
    planned = loaded.plan.total_bytes
    print(f"plan {format_bytes(planned)}: {loaded.plan}")
    rng, vocab = np.random.default_rng(3), loaded.model.config.vocab_size
    started, num_tokens = time.perf_counter(), 0
    for number in range(args.prompts):
        session = Session(loaded, num_valid_ids=vocab)
        prompt = rng.integers(0, vocab, rng.integers(5, 41)).tolist()
        reply = session.generate(prompt, SamplingParams(seed=number), args.tokens, frozenset())
        num_tokens += len(prompt) + sum(1 for _ in reply)
    elapsed, peak = time.perf_counter() - started, hardware.peak_memory_bytes()
    counters = loaded.experts.table.counters
    loaded.close()
    print(f"{args.prompts} prompts, {num_tokens} tokens in {elapsed:.0f} s; peak {format_bytes(peak)}")
    result = {
        "checkpoint_bytes": checkpoint_bytes, "limit_bytes": limit_bytes, "planned_bytes": planned, "peak_bytes": peak,
        "prompts": args.prompts, "tokens": num_tokens, "seconds": round(elapsed, 1), "slots": loaded.experts.num_slots,
        "records": loaded.experts.records.num_records, "evictions": counters.evictions, "within_plan": peak <= planned,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if peak <= planned else 1)


if __name__ == "__main__":
    main()

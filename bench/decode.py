"""Measure decode and prefill speed of a model, at several cache sizes, beside what memory bandwidth would allow.

    python bench/decode.py MODEL [--slots all,25%] [--tokens 64] [--prompts 128,512]

Prints the ceiling first: the bytes one token must move, over the bandwidth measured here. Prompts are random ids, so
hit rates are those of random routing: speed is measured, never a cache policy. Appends to bench/results/decode.csv and
prints one JSON object last.
"""

import argparse
import csv
import json
import platform
import statistics
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from slotpy.engine.loader import EngineOptions, LoadedModel, load
from slotpy.engine.session import Session
from slotpy.engine.sizes import resident_bytes

RESULTS = Path(__file__).parent / "results" / "decode.csv"
WARM_UP_TOKENS = 8


def memory_bandwidth(num_bytes: int) -> float:
    """Measure bytes read and written per second by an element-wise kernel over an array of `num_bytes`."""
    a = mx.zeros((num_bytes // 4,), dtype=mx.float32)
    mx.eval(a + 1)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        mx.eval(a + 1)
        times.append(time.perf_counter() - started)
    return 2 * num_bytes / statistics.median(times)


def bytes_per_token(loaded: LoadedModel) -> int:
    """Add up what decoding one token reads when every expert is in a slot; the embedding gives one row only."""
    config, experts = loaded.model.config, loaded.checkpoint.experts
    routed = config.num_hidden_layers * config.num_experts_per_tok * experts.record_nbytes
    embedding = config.vocab_size * config.hidden_size // 2
    return resident_bytes(loaded.checkpoint, None) - embedding + routed


def percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent))


def measure(loaded: LoadedModel, prompts: list[int], num_tokens: int) -> dict[str, float]:
    """Prefill each prompt length into a new session, then decode after the last; times are per step."""
    rng = np.random.default_rng(0)
    vocab = loaded.model.config.vocab_size
    row: dict[str, float] = {}
    for length in [prompts[0], *prompts]:  # the first one warms kernels up
        session = Session(loaded, num_valid_ids=vocab)
        started = time.perf_counter()
        session.prefill(rng.integers(0, vocab, length).tolist())
        row[f"prefill_{length}_tokens_per_s"] = length / (time.perf_counter() - started)
    before = loaded.experts.table.counters
    hits, misses, store = before.hits, before.misses, loaded.store.counters()
    times = []
    for token in rng.integers(0, vocab, num_tokens + WARM_UP_TOKENS).tolist():
        started = time.perf_counter()
        session.step([token])
        times.append(time.perf_counter() - started)
    times = times[WARM_UP_TOKENS:]
    after, read = loaded.experts.table.counters, loaded.store.counters() - store
    asked = after.hits + after.misses - hits - misses
    return row | {
        "decode_ms_median": statistics.median(times) * 1e3,
        "decode_ms_p90": percentile(times, 90) * 1e3,
        "decode_tokens_per_s": 1 / statistics.median(times),
        "hit_rate": (after.hits - hits) / asked,
        "read_bytes_per_token": read.read_bytes / (num_tokens + WARM_UP_TOKENS),
        "read_gb_per_s": read.bytes_per_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", default="all,25%", help="slot counts, shares of all records, or `all`")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--host", default=platform.machine(), help="name of this machine in the results")
    args = parser.parse_args()
    prompts = [int(n) for n in args.prompts.split(",")]
    print(f"{args.host}, {platform.platform()}, mlx {mx.__version__} on {mx.default_device()}, model {args.model.name}")
    bandwidth = memory_bandwidth(1 << 30)
    rows = []
    for size in args.slots.split(","):
        every = rows[0]["records"] if rows else None
        loaded = load(args.model, EngineOptions(slots=_slots(size, every or 1 << 40)))
        if not rows:
            moved = bytes_per_token(loaded)
            print(f"ceiling: {moved / 1e6:.0f} MB a token at {bandwidth / 1e9:.0f} GB/s: {bandwidth / moved:.1f} tok/s")
        row = {"host": args.host, "device": str(mx.default_device()), "model": args.model.name, "mlx": mx.__version__,
               "records": loaded.experts.records.num_records, "slots": loaded.experts.num_slots,
               "ceiling_tokens_per_s": bandwidth / moved, **measure(loaded, prompts, args.tokens)}  # fmt: skip
        loaded.close()
        rows.append(row)
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
        del loaded
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    print(json.dumps(rows))


def _slots(text: str, every: int) -> int:
    if text == "all":
        return every
    return every * int(text[:-1]) // 100 if text.endswith("%") else int(text)


if __name__ == "__main__":
    main()

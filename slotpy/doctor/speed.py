"""What a plan will read and how fast that can be: arithmetic on measurements, never beyond them.

Owns the recorded hit rates and layer times. A number that nothing measured is None, and the text says so.
"""

from bisect import bisect_left
from dataclasses import dataclass

from slotpy.budget import Plan, Sizes, pass_tokens

SHARES = (0.023, 0.037, 0.0625, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5)
"""Shares of all experts that have a slot, at which the shipped table was replayed (bench/results/slot_replay.csv)."""

HIT_RATES = {
    "qwen": (0.2378, 0.3174, 0.4304, 0.5574, 0.6685, 0.7387, 0.8004, 0.872, 0.9132),
    "gemma": (0.2407, 0.3383, 0.4583, 0.5785, 0.6774, 0.7391, 0.7884, 0.8638, 0.913),
    "gptoss": (0.3054, 0.3911, 0.4893, 0.58, 0.655, 0.7033, 0.7378, 0.7694, 0.7853),
}

LAYER_S = {"H200": 0.021272766500032958 / 8}
"""Seconds a layer takes when all its experts have slots, by GPU: published widths (bench/results/decode.csv)."""

_HITS_FROM = "hit rates of three recorded traces of other models (docs/slots.md), cold start included"


@dataclass(frozen=True)
class Estimate:
    """Estimate decoding. Ranges are (low, high) over the recorded traces; None where nothing was measured."""

    hit_rate: tuple[float, float] | None
    read_bytes_per_token: tuple[int, int] | None
    read_s_per_token: tuple[float, float] | None
    tokens_per_s: tuple[float, float] | None
    basis: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """Bound the reading for one prompt. `read_s` is None without a measured disk; computing comes on top."""

    prompt_tokens: int
    num_passes: int
    read_bytes: int
    read_s: float | None


def hit_rate(share: float) -> tuple[float, float] | None:
    """Give the lowest and highest recorded hit rate at a share of the experts; None outside the recorded shares."""
    if not SHARES[0] <= share <= SHARES[-1]:
        return None
    at = max(1, bisect_left(SHARES, share))
    weight = (share - SHARES[at - 1]) / (SHARES[at] - SHARES[at - 1])
    found = [rates[at - 1] + weight * (rates[at] - rates[at - 1]) for rates in HIT_RATES.values()]
    return min(found), max(found)


def estimate(made: Plan, sizes: Sizes, ssd_bytes_per_s: int, device: str) -> Estimate:
    """Estimate decoding under a plan: bytes missed over the disk's rate, plus the layers' own time where measured."""
    basis = []
    token_bytes = sizes.num_layers * sizes.experts_per_token * sizes.record_bytes
    if made.is_fully_resident:
        hits: tuple[float, float] | None = (1.0, 1.0)
        basis.append("every expert has a slot: once warm, nothing is read but n-gram rows")
    else:
        hits = hit_rate(made.num_slots / made.num_records)
        basis.append(_HITS_FROM if hits else "no hit rate was measured at this share of the experts")
    read = (round(token_bytes * (1 - hits[1])), round(token_bytes * (1 - hits[0]))) if hits else None
    read_s = None
    if read and read[1] == 0:
        read_s = (0.0, 0.0)
    elif read and ssd_bytes_per_s:
        read_s = (read[0] / ssd_bytes_per_s, read[1] / ssd_bytes_per_s)
        basis.append(f"{ssd_bytes_per_s / 1e9:.2f} GB/s of random record reads")
    elif read:
        basis.append("the disk was not measured")
    layer_s = next((seconds for name, seconds in LAYER_S.items() if name.lower() in device.lower()), None)
    if layer_s is None:
        basis.append("computing was not measured on this device")
    else:
        basis.append(f"{layer_s * 1e3:.2f} ms a layer, measured with 8 layers of the published widths")
    tokens_per_s = None
    if layer_s and read_s:
        compute_s = sizes.num_layers * layer_s
        tokens_per_s = (1 / (compute_s + read_s[1]), 1 / (compute_s + read_s[0]))
    return Estimate(hits, read, read_s, tokens_per_s, tuple(basis))


def wait(made: Plan, sizes: Sizes, prompt_tokens: int, chunk_tokens: int, product: int, ssd_bytes_per_s: int) -> Wait:
    """Bound what a cold prompt reads: in each pass at most all experts, or what its tokens can ask for.

    With every expert in a slot each is read once at most, whatever the prompt.
    """
    start = num_passes = num_reads = 0
    while start < prompt_tokens:
        tokens = min(pass_tokens(start, chunk_tokens, product), prompt_tokens - start)
        num_reads += min(sizes.num_layers * tokens * sizes.experts_per_token, sizes.num_records)
        num_passes += 1
        start += tokens
    if made.is_fully_resident:
        num_reads = min(num_reads, sizes.num_records)
    read_bytes = num_reads * sizes.record_bytes
    return Wait(prompt_tokens, num_passes, read_bytes, read_bytes / ssd_bytes_per_s if ssd_bytes_per_s else None)

"""What a machine would get from a model: the plan that a run would use, other sizes, and what reading would cost.

Composes the planner, the estimates and the models there are. Loads and locks nothing; `doctor` shows it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotpy import budget, config
from slotpy.budget import Plan, Request, Sizes
from slotpy.checkpoint.checkpoint import Checkpoint, open_checkpoint
from slotpy.demo import demo_directory
from slotpy.doctor import published, speed
from slotpy.engine import sizes
from slotpy.errors import CapacityError, UsageError
from slotpy.hub.library import list_models
from slotpy.hub.names import parse_name
from slotpy.machine.machines import GIB, Machine

TIERS_GIB = (8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 80, 96)
PROMPT_TOKENS = (128, 1024, 4096, 16_384, 32_768, 131_072)


@dataclass(frozen=True)
class Subject:
    """A model to judge: one that is here, or a published one by its constants.

    `directory` is where it is or would be; `missing_bytes` is what a pull would still fetch.
    """

    name: str
    sizes: Sizes
    directory: Path
    checkpoint: Checkpoint | None = None
    download_bytes: int = 0
    missing_bytes: int = 0


@dataclass(frozen=True)
class Tier:
    """What one size would give, or why it would not."""

    memory_bytes: int
    plan: Plan | None
    estimate: speed.Estimate | None
    refusal: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a machine gets from a model. Either `plan` and what follows from it, or `refusal`."""

    machine: Machine
    model: str
    plan: Plan | None
    estimate: speed.Estimate | None
    waits: tuple[speed.Wait, ...]
    tiers: tuple[Tier, ...]
    refusal: str = ""

    def as_dict(self) -> dict[str, object]:
        """Give all of it as JSON values."""
        return dataclasses.asdict(self) | {
            "plan": self.plan.as_dict() if self.plan else None,
            "tiers": [
                {
                    "memory_bytes": tier.memory_bytes,
                    "plan": tier.plan.as_dict() if tier.plan else None,
                    "estimate": dataclasses.asdict(tier.estimate) if tier.estimate else None,
                    "refusal": tier.refusal,
                }
                for tier in self.tiers
            ],
        }


def find_subject(model: str, *, on_cpu: bool) -> Subject:
    """Find a model to judge: a directory, `demo`, or a name, pulled or published. Raises as `open_checkpoint`."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _open(model, path, on_cpu)
    if model == "demo":
        return _open(model, demo_directory(), on_cpu)
    name = parse_name(model)
    directory = name.directory(config.models_dir())
    stored = next((m for m in list_models(config.models_dir()) if m.directory == directory), None)
    if stored and stored.is_complete:
        return _open(name.text, directory, on_cpu)
    known = published.find(model)
    if known is None:
        raise UsageError(
            f"{name.text} is not here, and only published models are known before.",
            hint=f"Run `slotpy pull {name.text}`, or ask for {', '.join(published.PUBLISHED)}.",
        )
    present = stored.present_bytes if stored else 0
    return Subject(known.name, known.sizes, directory, None, known.download_bytes, known.download_bytes - present)


def simulate(
    base: Machine,
    *,
    ram_bytes: int | None = None,
    gpu_bytes: int | None = None,
    working_set_bytes: int | None = None,
    available_bytes: int | None = None,
    ssd_bytes_per_s: int | None = None,
) -> Machine:
    """Make a machine to plan for out of another one, with some facts replaced.

    What follows from a replaced fact follows it: without a number of its own 4 GiB of RAM are in use, a GPU is empty,
    and a Mac's working set is 75 % of its RAM. A working set makes it a Mac, GPU memory a CUDA machine.
    """
    changes: dict[str, int | str] = {}
    if ram_bytes is not None:
        changes |= {"ram_bytes": ram_bytes, "available_bytes": ram_bytes - min(4 * GIB, ram_bytes // 4)}
        if base.backend == "metal":
            changes["working_set_bytes"] = ram_bytes * 3 // 4
    if working_set_bytes is not None:
        changes |= {"working_set_bytes": working_set_bytes, "backend": "metal", "gpu_bytes": 0, "page_cache_bytes": 0}
    if gpu_bytes is not None:
        changes |= {"gpu_bytes": gpu_bytes, "gpu_available_bytes": gpu_bytes, "backend": "cuda", "working_set_bytes": 0}
    if available_bytes is not None:
        changes["available_bytes"] = available_bytes
    if ssd_bytes_per_s is not None:
        changes["ssd_bytes_per_s"] = ssd_bytes_per_s
    if changes:
        changes["about"] = f"{base.about}, with numbers of yours".removeprefix(", ")
    return dataclasses.replace(base, simulated=True, **changes)  # type: ignore[arg-type]


def judge(subject: Subject, machine: Machine, request: Request) -> Verdict:
    """Plan a model for a machine, with everything that `doctor` shows about the plan."""
    tiers = tuple(_tiers(subject, machine, request))
    try:
        made = budget.plan(machine, subject.sizes, request)
    except CapacityError as error:
        return Verdict(machine, subject.name, None, None, (), tiers, str(error))
    ssd = machine.ssd_bytes_per_s
    chunk, product = config.PREFILL_CHUNK_TOKENS, config.PREFILL_PRODUCT
    waits = tuple(
        speed.wait(made, subject.sizes, tokens, chunk, product, ssd)
        for tokens in PROMPT_TOKENS
        if tokens <= made.context_tokens
    )
    return Verdict(machine, subject.name, made, _estimate(made, subject, machine), waits, tiers)


def _tiers(subject: Subject, machine: Machine, request: Request) -> Iterator[Tier]:
    memory = machine.gpu_bytes or machine.ram_bytes
    for gib in TIERS_GIB:
        if gib * GIB > memory:
            break
        try:
            made = budget.plan(
                machine,
                subject.sizes,
                Request(memory_bytes=gib * GIB, context_tokens=request.context_tokens or config.CONTEXT_TOKENS),
            )
        except CapacityError as error:
            yield Tier(gib * GIB, None, None, str(error))
        else:
            yield Tier(gib * GIB, made, _estimate(made, subject, machine))


def _estimate(made: Plan, subject: Subject, machine: Machine) -> speed.Estimate:
    return speed.estimate(made, subject.sizes, machine.ssd_bytes_per_s, f"{machine.name} {machine.about}")


def _open(name: str, directory: Path, on_cpu: bool) -> Subject:
    checkpoint = open_checkpoint(directory)
    return Subject(name, sizes.measure(checkpoint, on_cpu=on_cpu), directory, checkpoint)

"""`slotpy doctor`: print what `slotpy.doctor` finds and what `slotpy.doctor.sizing` makes of it.

Rich tables on a terminal, plain text when piped, everything as JSON.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slotpy.budget import Plan, Request, gib_to_bytes
from slotpy.doctor.checks import Check, measure_disk, run_checks
from slotpy.doctor.published import PUBLISHED
from slotpy.doctor.sizing import Verdict, find_subject, judge, simulate
from slotpy.doctor.speed import Estimate
from slotpy.engine import device
from slotpy.errors import UsageError
from slotpy.machine.machines import NAMED
from slotpy.units import format_bytes

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}


@click.command()
@click.argument("model", default=next(iter(PUBLISHED)))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--machine", type=click.Choice(sorted(NAMED)), help="Plan for this machine instead; nothing is measured.")
@click.option("--ram", type=float, help="Plan as if there were this much RAM, in GiB.")
@click.option("--vram", type=float, help="... this much memory on a GPU of its own, in GiB.")
@click.option("--working-set", type=float, help="... this much recommended by Metal, in GiB.")
@click.option("--available", type=float, help="... this much RAM available now, in GiB.")
@click.option("--ssd-gbps", type=float, help="... random record reads this fast, in GB/s.")
@click.option("--memory-gb", type=float, help="Plan for a process of this many GiB.")
@click.option("--memory-limit-gb", type=float, help="Plan under this ceiling, in GiB.")
@click.option("--context", type=click.IntRange(min=1), help="Plan for this many tokens; default: by memory.")
def doctor(
    model: str,
    as_json: bool,
    machine: str | None,
    ram: float | None,
    vram: float | None,
    working_set: float | None,
    available: float | None,
    ssd_gbps: float | None,
    memory_gb: float | None,
    memory_limit_gb: float | None,
    context: int | None,
) -> None:
    """Check this machine, and say what MODEL would get from it; before a download, too.

    MODEL is a directory, `demo`, or a name. Exits with 1 when something must be mended or the model does not fit. A
    machine that is not this one can be planned for, never run on.
    """
    facts = {
        "ram_bytes": _bytes(ram, "--ram"),
        "gpu_bytes": _bytes(vram, "--vram"),
        "working_set_bytes": _bytes(working_set, "--working-set"),
        "available_bytes": _bytes(available, "--available"),
    }
    request = Request(
        memory_bytes=_bytes(memory_gb, "--memory-gb"),
        memory_limit_bytes=_bytes(memory_limit_gb, "--memory-limit-gb"),
        context_tokens=context,
    )
    ssd = None if ssd_gbps is None else _rate(ssd_gbps)
    simulated = machine is not None or any(value is not None for value in facts.values())
    checks: list[Check] = []
    if simulated:
        planned = simulate(NAMED[machine] if machine else device.this_machine(), ssd_bytes_per_s=ssd, **facts)
        subject = find_subject(model, on_cpu=planned.backend == "cpu")
    else:
        planned = device.this_machine()
        subject = find_subject(model, on_cpu=planned.backend == "cpu")
        speed, problem = measure_disk(subject)
        checks = run_checks(planned, subject, speed, problem)
        planned = dataclasses.replace(planned, ssd_bytes_per_s=ssd or (speed.bytes_per_s if speed else 0))
    verdict = judge(subject, planned, request)
    if as_json:
        click.echo(json.dumps({"checks": [dataclasses.asdict(c) for c in checks]} | verdict.as_dict(), indent=2))
    else:
        _print(checks, verdict)
    failed = any(check.status == "fail" for check in checks) or verdict.plan is None
    sys.exit(1 if failed else 0)


def _bytes(gib: float | None, knob: str) -> int | None:
    return None if gib is None else gib_to_bytes(gib, knob)


def _rate(gbps: float) -> int:
    if not 0 < gbps < 1e6:
        raise UsageError(f"--ssd-gbps {gbps} is no rate.", hint="Give GB/s, as in --ssd-gbps 5.5.")
    return int(gbps * 1e9)


def _print(checks: list[Check], verdict: Verdict) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        _report(console, checks, verdict)
        return
    # A pipe gets lines as long as they are, whatever COLUMNS says, and no padding.
    console = Console(highlight=False, width=200, no_color=True)
    with console.capture() as capture:
        _report(console, checks, verdict)
    click.echo("\n".join(line.rstrip() for line in capture.get().strip("\n").split("\n")))


def _report(console: Console, checks: list[Check], verdict: Verdict) -> None:
    if checks:
        console.print(_table(("", "check", "found"), [(MARKS[c.status], c.name, _found(c)) for c in checks]))
    machine = verdict.machine
    about = f" ({machine.about})" if machine.about else ""
    console.print(f"\n[bold]{escape(verdict.model)}[/] on [bold]{machine.name}[/]{about}")
    if verdict.plan is None:
        console.print(f"[red]Does not fit.[/] {escape(verdict.refusal)}")
    else:
        _print_plan(console, verdict.plan, verdict)
    tiers = [
        (format_bytes(tier.memory_bytes), *_columns(tier.plan, tier.estimate, tier.refusal)) for tier in verdict.tiers
    ]
    if tiers:
        console.print("\nOther sizes (--memory-gb), at the same context")
        console.print(_table(("whole process", "slots", "a layer", "hit rate", "read a token", "or why not"), tiers))


def _print_plan(console: Console, plan: Plan, verdict: Verdict) -> None:
    ledger = dataclasses.asdict(plan.ledger)
    rows = [(name.removesuffix("_bytes").replace("_", " "), format_bytes(n)) for name, n in ledger.items() if n]
    console.print(
        f"Plan: {format_bytes(plan.expected_peak_bytes)} expected peak, {format_bytes(plan.total_bytes)} with margin;"
        f" context {plan.context_tokens} tokens; {plan.num_slots} of {plan.num_records} experts have a slot"
        f" ({plan.experts_per_layer:.1f} a layer)"
    )
    console.print(_table(("in " + ("GPU memory" if verdict.machine.is_discrete else "memory"), "bytes"), rows))
    if plan.placements:
        places = [(p.what, p.where, format_bytes(p.nbytes)) for p in plan.placements]
        console.print(_table(("elsewhere", "where", "bytes"), places))
    limits = [
        ("[bold]decides[/]" if limit.binding else "", limit.name, format_bytes(max(0, limit.limit_bytes)), limit.why)
        for limit in plan.limits
    ]
    console.print(_table(("", "limit", "bytes", "why"), limits))
    for note in (*plan.unused_knobs, *plan.notes):
        console.print(f"note: {note}")
    if verdict.estimate:
        _print_estimate(console, verdict.estimate)
    if verdict.waits:
        waits = [
            (f"{w.prompt_tokens}", f"{w.num_passes}", format_bytes(w.read_bytes), _seconds(w.read_s))
            for w in verdict.waits
        ]
        console.print("\nWait for a cold prompt: reading takes at most this; computing was not measured and adds to it")
        console.print(_table(("prompt tokens", "passes", "read at most", "reading"), waits))


def _print_estimate(console: Console, estimate: Estimate) -> None:
    speed = "not measured"
    if estimate.tokens_per_s:
        speed = f"estimate {_span(*estimate.tokens_per_s, '{:.1f}')} tokens/s"
    elif estimate.read_s_per_token and estimate.read_s_per_token[1]:
        low, high = (1 / seconds for seconds in reversed(estimate.read_s_per_token))
        speed = f"estimate: reading alone allows {_span(low, high, '{:.1f}')} tokens/s; computing adds to it"
    console.print(f"\nDecoding: {speed}")
    for basis in estimate.basis:
        console.print(f"  from: {basis}")


def _columns(plan: Plan | None, estimate: Estimate | None, refusal: str) -> tuple[str, ...]:
    if plan is None or estimate is None:
        return ("-", "-", "-", "-", refusal)
    hits = read = "not measured"
    if estimate.hit_rate:
        low_rate, high_rate = estimate.hit_rate
        hits = _span(100 * low_rate, 100 * high_rate, "{:.0f}") + " %"
    if estimate.read_bytes_per_token:
        low, high = estimate.read_bytes_per_token
        read = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    return (f"{plan.num_slots}", f"{plan.experts_per_layer:.1f}", hits, read, "")


def _span(low: float, high: float, form: str) -> str:
    first, last = form.format(low), form.format(high)
    return first if first == last else f"{first} to {last}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "disk not measured"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _found(check: Check) -> str:
    return escape("\n".join(filter(None, (check.what, check.why, check.fix))))


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, header_style="bold", pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*row)
    return table

"""`slotpy doctor`: print what `slotpy.doctor` finds."""

import json
import sys
from dataclasses import asdict

import click

from slotpy.doctor import run_checks

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(as_json: bool) -> None:
    """Check this machine and installation."""
    checks = run_checks()
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            click.echo(f"{MARKS[check.status]}  {check.name:<14} {check.what}")
            for line in filter(None, (check.why, check.fix)):
                click.echo(f"{'':<21}{line}")
    sys.exit(1 if any(check.status == "fail" for check in checks) else 0)

"""Run the checks of one client: `@check` functions, each given the server's address, in their order."""

import sys
import traceback
from collections.abc import Callable

_checks: list[Callable[[str], None]] = []


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    """Have a function run; its name and docstring say what must hold."""
    _checks.append(function)
    return function


def main() -> None:
    """Run all checks against the server given as the first argument, and exit with 1 if one failed."""
    failed = 0
    for function in _checks:
        try:
            function(sys.argv[1])
            print(f"ok {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED {function.__name__}\n{traceback.format_exc()}")
    sys.exit(failed > 0)


def raises(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """Give the error that a call must end with."""
    try:
        value = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {value!r}")

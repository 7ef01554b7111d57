"""Write the generated parts of the documents: the help text of each command.

    python tools/update_docs.py

A part stands between `<!-- help: COMMAND -->` and `<!-- end -->`. `tests/test_docs.py` fails while one is out of date.
"""

import copy
import re
from pathlib import Path

import click

from slotpy.cli.main import cli

ROOT = Path(__file__).parent.parent
PART = re.compile(r"(<!-- help: (?P<command>[a-z -]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def help_text(command: str) -> str:
    """Render `slotpy COMMAND --help` at a fixed width."""
    found: click.Command = cli
    context = click.Context(cli, info_name="slotpy", terminal_width=110, max_content_width=110, **cli.context_settings)
    for name in command.split():
        assert isinstance(found, click.Group)
        found = found.commands[name]
        context = click.Context(found, parent=context, info_name=name, terminal_width=110, max_content_width=110)
    found = copy.copy(found)
    found._help_option = None  # click keeps it as the first caller in this process had it
    return found.get_help(context)


def updated(text: str) -> str:
    """Give a document with its generated parts as they should be."""
    return PART.sub(
        lambda m: f"{m[1]}```console\n$ slotpy {m['command']} --help\n{help_text(m['command'])}\n```\n{m[3]}", text
    )


def main() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()

"""Generated parts of the documents are up to date, and links between documents lead somewhere."""

import re
from pathlib import Path

import pytest

from tools.update_docs import PART, updated

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path):
    assert updated(path.read_text()) == path.read_text(), "run `python tools/update_docs.py`"


def test_generated_parts_exist():
    assert len(PART.findall((ROOT / "docs" / "running.md").read_text())) == 3


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_nobody_is_told_to_install_the_other_slotpy():
    for path in [*DOCUMENTS, *ROOT.glob("*/README.md")]:
        assert not re.search(r"pip install [\"']?slotpy(?!-mlx)", path.read_text()), path

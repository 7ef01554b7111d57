"""Opening a directory: the first thing that is wrong is what the error is about."""

import pytest

from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.manifest import JOURNAL_NAME
from slotpy.errors import CheckpointError


def test_unfinished_pack_says_how_to_go_on(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text("")
    with pytest.raises(CheckpointError, match=r"unfinished pack.*goes on where it stopped"):
        open_checkpoint(tmp_path)

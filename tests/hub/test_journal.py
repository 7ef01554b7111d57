"""What a journal gives back after every kind of end."""

import pytest

from slotpy.hub.journal import Journal, PartState
from slotpy.hub.ranges import Ranges

FIRST = PartState("sha256:a", Ranges([(0, 10)]), {10: "aa"})
SECOND = PartState("sha256:a", Ranges([(0, 20), (30, 40)]), {20: "bb"})


def write(path, *lines):
    journal = Journal(path)
    journal.append(lines)
    journal.close()


def read(path):
    journal = Journal(path)
    journal.close()
    return journal.parts


def test_the_last_line_counts_and_marks_add_up(tmp_path):
    write(tmp_path / "j", FIRST.to_line("f", afresh=True), SECOND.to_line("f", afresh=False))
    assert read(tmp_path / "j")["f"] == PartState("sha256:a", SECOND.have, {10: "aa", 20: "bb"})


def test_a_file_begun_afresh_has_no_older_marks(tmp_path):
    write(tmp_path / "j", FIRST.to_line("f", afresh=True), SECOND.to_line("f", afresh=True))
    assert read(tmp_path / "j")["f"].marks == {20: "bb"}


@pytest.mark.parametrize("cut", range(1, 80, 7))
def test_a_torn_last_line_is_cut_off_and_the_next_one_is_whole(cut, tmp_path):
    path = tmp_path / "j"
    write(path, FIRST.to_line("f", afresh=True))
    whole = path.read_bytes()
    write(path, SECOND.to_line("f", afresh=False))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read(path)["f"].have == FIRST.have
    assert path.read_bytes() == whole
    write(path, SECOND.to_line("f", afresh=False))
    assert read(path)["f"].have == SECOND.have

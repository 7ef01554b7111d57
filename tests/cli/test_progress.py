"""What the long commands print while they write."""

import pytest

from slotpy.cli import progress


def test_progress_on_a_terminal_is_one_line_that_ends_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_REDRAW_S", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = progress.ProgressLine()
    for done in (0, 1 << 30, 3 << 30):
        line("rows-00001.safetensors", done, 3 << 30)
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.endswith("\n")
    assert "rows-00001.safetensors  1 GiB of 3 GiB  33 %" in text
    assert "3 GiB of 3 GiB  100 %" in text.split("\r")[-1]

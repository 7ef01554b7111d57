"""`slotpy pack` as a user meets it: what it prints, Ctrl-C, and going on afterwards."""

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slotpy.checkpoint import writing
from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.manifest import verify_pack
from slotpy.cli.pack import pack_command
from slotpy.errors import UsageError
from tests.tiny import write_tiny


def slotpy_pack(source: Path, out: Path) -> Result:
    return CliRunner().invoke(pack_command, [str(source), str(out)])


def test_pack_writes_a_checkpoint_that_opens_and_says_what_is_in_it(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "in", "mlx"), tmp_path / "out"
    (source / "figures").mkdir()
    result = slotpy_pack(source, out)
    assert result.exit_code == 0
    packed = open_checkpoint(out)
    assert f"experts: {packed.experts.num_records} records of " in result.stdout
    assert f"rows: {packed.rows.num_records} records of " in result.stdout
    assert "every one with its SHA-256" in result.stdout
    assert "Not copied: figures." in result.stdout
    assert "experts-00001.safetensors: 0 B of " in result.stderr
    assert "\r" not in result.stderr


def test_ctrl_c_leaves_a_pack_that_the_same_command_finishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_tiny(tmp_path / "in", "mlx"), tmp_path / "out"
    write_all = writing.write_all
    calls = 0

    def press_ctrl_c(descriptor: int, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            os.kill(os.getpid(), signal.SIGINT)
        write_all(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_all", press_ctrl_c)
        result = slotpy_pack(source, out)
    assert result.exit_code == 130
    assert "Stopped. Run the same command again" in result.stderr
    assert slotpy_pack(source, out).exit_code == 0
    verify_pack(out)


def test_errors_reach_the_one_map_of_the_command_line(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "in", "mlx")
    result = slotpy_pack(source, source)
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_code == 2

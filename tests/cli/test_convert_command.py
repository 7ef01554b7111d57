"""`slotpy convert` as a user meets it: its options, what it prints, Ctrl-C, and going on afterwards."""

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slotpy.checkpoint import writing
from slotpy.checkpoint.checkpoint import open_checkpoint
from slotpy.checkpoint.formats import WeightFormat
from slotpy.cli.convert import convert_command
from slotpy.errors import UsageError
from tests.tiny import write_tiny


def slotpy_convert(source: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(convert_command, [str(source), str(out), *options])


def small(directory: Path, layout: str = "bf16") -> Path:
    return write_tiny(directory, layout, num_layers=4, num_experts=4, shards=4)


def test_convert_writes_a_checkpoint_that_opens_and_says_what_is_in_it(tmp_path: Path) -> None:
    source, out = small(tmp_path / "in"), tmp_path / "out"
    (source / "figures").mkdir()
    result = slotpy_convert(source, out)
    assert result.exit_code == 0
    converted = open_checkpoint(out)
    assert converted.layout == "mlx-affine"
    assert converted.expert_format == WeightFormat("affine", 4, 64)
    assert f"experts: {converted.experts.num_records} of " in result.stdout
    assert f"rows: {converted.rows.num_records} of " in result.stdout
    assert "every one with its SHA-256" in result.stdout
    assert "21 vision tensors (86.3 KiB) are left out" in result.stdout
    assert "Not copied: figures." in result.stdout
    assert "model-00001.safetensors: 0 B of " in result.stderr


def test_options_choose_the_format(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert slotpy_convert(small(tmp_path / "in"), out, "--bits", "8", "--group-size", "32").exit_code == 0
    assert open_checkpoint(out).expert_format == WeightFormat("affine", 8, 32)


@pytest.mark.parametrize("option", [("--bits", "3"), ("--group-size", "16")])
def test_other_formats_are_wrong_usage(tmp_path: Path, option: tuple[str, str]) -> None:
    result = slotpy_convert(tmp_path, tmp_path / "out", *option)
    assert result.exit_code == 2
    assert f"Invalid value for '{option[0]}'" in result.stderr


def test_ctrl_c_leaves_a_conversion_that_the_same_command_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = small(tmp_path / "in", "fp8"), tmp_path / "out"
    write_all = writing.write_all
    calls = 0

    def press_ctrl_c(descriptor: int, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls == 100:
            os.kill(os.getpid(), signal.SIGINT)
        write_all(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_all", press_ctrl_c)
        result = slotpy_convert(source, out)
    assert result.exit_code == 130
    assert "Stopped. Run the same command again" in result.stderr
    assert not (out / "config.json").exists()
    assert slotpy_convert(source, out).exit_code == 0
    assert open_checkpoint(out).layout == "mlx-affine"


def test_errors_reach_the_one_map_of_the_command_line(tmp_path: Path) -> None:
    result = slotpy_convert(small(tmp_path / "in", "mlx"), tmp_path / "out")
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_code == 2
    assert "is quantised already (mlx-affine). Run it as it is" in str(result.exception)

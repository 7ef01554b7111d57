"""`slotpy check` on the golden model: what passes, what fails, and with which exit code."""

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from slotpy.cli import check as check_module
from slotpy.cli.check import check
from slotpy.engine.session import Session
from slotpy.errors import CheckpointError, SlotpyError, UsageError
from tests.golden_model import GOLDEN, REF

REFERENCE = str(GOLDEN / "reference.safetensors")


def invoke(command, *args):
    return CliRunner().invoke(command, [str(arg) for arg in args])


def changed_reference(tmp_path, **tensors):
    kept = {key: REF[key] for key in ("input_ids", "logits_fp32")}
    save_file(kept | tensors, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


def test_reference_passes_and_prints_the_worst_error_last():
    result = invoke(check, "reference", GOLDEN, "--reference", REFERENCE)
    assert result.exit_code == 0
    assert [line.split(" max")[0].strip() for line in result.stdout.splitlines()[:3]] == [
        "one pass",
        "passes of 16",
        "token by token",
    ]
    assert float(result.stdout.splitlines()[-1].split()[3]) < 1e-4


@pytest.mark.parametrize("wrong", [0.01, np.nan])
def test_reference_fails_when_one_logit_differs(tmp_path, wrong):
    logits = REF["logits_fp32"].copy()
    logits[3, 5] += wrong
    result = invoke(check, "reference", GOLDEN, "--reference", changed_reference(tmp_path, logits_fp32=logits))
    assert result.exit_code == 1


def test_reference_of_another_model_is_refused_with_both_shapes(tmp_path):
    path = changed_reference(tmp_path, logits_fp32=REF["logits_fp32"][:, :100].copy())
    result = invoke(check, "reference", GOLDEN, "--reference", path)
    assert isinstance(result.exception, CheckpointError)
    assert "(72, 256)" in str(result.exception) and "(72, 100)" in str(result.exception)


def test_reference_without_its_tensors_is_refused(tmp_path):
    save_file({"input_ids": REF["input_ids"]}, tmp_path / "half.safetensors")
    result = invoke(check, "reference", GOLDEN, "--reference", tmp_path / "half.safetensors")
    assert isinstance(result.exception, CheckpointError)
    assert "logits_fp32" in str(result.exception)


def test_a_file_that_is_no_reference_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    result = invoke(check, "reference", GOLDEN, "--reference", tmp_path / "text")
    assert isinstance(result.exception, CheckpointError)


def test_cache_sizes_are_identical_for_both_layouts_and_readers():
    result = invoke(check, "cache-sizes", GOLDEN, "--slots", "1,5,all", "--tokens", 4)
    assert result.exit_code == 0
    *runs, verdict = result.stdout.splitlines()
    assert verdict == "identical"
    # Three sizes, original and packed, native and Python reader.
    assert len(runs) == 3 * 2 * 2
    assert len({line.split()[-1] for line in runs}) == 1


def test_cache_sizes_refuse_logits_that_are_not_finite(monkeypatch):
    """All sizes agree on a NaN."""
    monkeypatch.setattr(Session, "prefill", lambda self, tokens: np.full(16, np.nan, dtype=np.float32))
    result = invoke(check, "cache-sizes", GOLDEN, "--slots", "2,all", "--tokens", 1)
    assert isinstance(result.exception, SlotpyError) and "not finite" in str(result.exception)


def test_cache_sizes_fail_when_one_run_differs(monkeypatch):
    def digest(variant, num_tokens, options):
        return ("other" if variant.slots == 5 and variant.layout == "packed" else "same"), 0.5

    monkeypatch.setattr(check_module, "digest", digest)
    result = invoke(check, "cache-sizes", GOLDEN, "--slots", "1,5", "--tokens", 2)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "2 different digests"


@pytest.mark.parametrize("sizes", ["0", "a,b", "", "-3"])
def test_sizes_that_are_no_sizes_are_refused(sizes):
    result = invoke(check, "cache-sizes", GOLDEN, "--slots", sizes)
    assert isinstance(result.exception, UsageError)


def test_default_sizes_begin_below_one_layers_experts():
    result = invoke(check, "cache-sizes", GOLDEN, "--tokens", 1)
    assert result.stdout.split()[0] == "1"
    assert result.exit_code == 0

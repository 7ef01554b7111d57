"""`slotpy pull`, `list` and `rm` as a user meets them, in processes of their own, against a hub on loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from slotpy.cli.list import list_command
from slotpy.cli.pull import pull_command
from slotpy.cli.rm import rm_command
from slotpy.engine.engine import resolve_model
from slotpy.errors import CheckpointError, UsageError
from tests.hub.conftest import make_files
from tests.hub.fault_hub import FaultHub


@pytest.fixture
def hub():
    with FaultHub(make_files()) as hub:
        yield hub


@pytest.fixture
def slotpy(hub, tmp_path):
    """Start the command line, with the hub on loopback as HF_ENDPOINT and nothing else of the environment."""

    def start(*arguments, **options):
        environment = {"HF_ENDPOINT": hub.url, "SLOTPY_MODELS": str(tmp_path / "models"), "PATH": os.environ["PATH"]}
        environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", "from slotpy.cli.main import main; main()", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)

    return start


def run(process, text=None):
    out, err = process.communicate(text, timeout=30)
    return process.returncode, out, err


def test_ctrl_c_exits_130_and_a_second_process_fetches_only_what_is_missing(slotpy, hub, tmp_path):
    hub.bytes_per_s = 400_000
    process = slotpy("pull", "org/model")
    while hub.bytes_sent < 200_000 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, _, err = run(process)
    assert code == 130
    assert "Run the same command again" in err and "Traceback" not in err
    hub.bytes_per_s = 0
    hub.requests.clear()
    code, out, err = run(slotpy("pull", "org/model"))
    assert (code, "every file verified" in out) == (0, True), err
    assert "from before)" in err
    ranges = [request.headers.get("range") for request in hub.requests if "/signed/" in request.path]
    starts = [int(re.fullmatch(r"bytes=(\d+)-\d+", text)[1]) for text in ranges if text]
    assert starts and min(starts) > 0, "no file is begun again"
    for path, content in hub.files.items():
        assert (tmp_path / "models/org/model" / path).read_bytes() == content


def test_list_verify_use_and_rm(slotpy, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTPY_MODELS", str(tmp_path / "models"))
    with pytest.raises(UsageError, match=r"org/model is not here\. Run `slotpy pull org/model`"):
        resolve_model("org/model")
    assert run(slotpy("pull", "org/model"))[0] == 0
    directory = resolve_model("org/model")
    assert resolve_model(directory) == directory
    listed = CliRunner().invoke(list_command).output
    assert re.search(r"^org/model +\S+ KiB  c0ffeec0ffee  ready$", listed, re.MULTILINE)
    with open(directory / "model-00002.safetensors", "r+b") as file:
        file.write(bytes(8))
    result = CliRunner().invoke(pull_command, ["--verify", "org/model"])
    assert "model-00002.safetensors has other bytes" in result.output
    assert "Run `slotpy pull org/model`" in str(result.exception)
    with pytest.raises(CheckpointError, match=r"not verified.*model-00002.*Run `slotpy pull org/model`"):
        resolve_model("org/model")
    assert "% verified, pull again" in CliRunner().invoke(list_command).output
    assert CliRunner().invoke(rm_command, ["org/model"], input="n\n").exit_code == 1 and directory.is_dir()
    assert CliRunner().invoke(rm_command, ["org/model"], input="y\n").exit_code == 0 and not directory.exists()
    assert "No models" in CliRunner().invoke(list_command).output


def test_a_directory_that_slotpy_did_not_pull_is_used_as_it_is(tmp_path):
    assert resolve_model(tmp_path) == tmp_path


def test_pull_draws_bars_on_a_terminal(hub, tmp_path, slotpy):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {"HF_ENDPOINT": hub.url, "SLOTPY_MODELS": str(tmp_path / "models"), "PATH": os.environ["PATH"]}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.getcwd(), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", "from slotpy.cli.main import main; main()", "pull", "org/model"]
    hub.bytes_per_s = 1_000_000
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 1 << 16):
            seen += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(30) == 0
    text = seen.decode()
    assert "total" in text and "model-00001.safetensors" in text and re.search(r"[kM]B/s", text)
    assert Path(tmp_path / "models/org/model/config.json").exists()

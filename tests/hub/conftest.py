"""A model to pull, a hub that has it, and no way to the real one."""

import random
from pathlib import Path

import huggingface_hub.constants
import pytest

from slotpy.hub.events import Event
from slotpy.hub.names import parse_name
from slotpy.hub.pull import Pulled, pull
from slotpy.hub.transfer import Limits
from tests.hub.fault_hub import FaultHub

CHUNK = 64 << 10
LIMITS = Limits(
    connections=3, chunk_bytes=CHUNK, stall_s=0.4, patience_s=(8.0, 8.0), sync_s=0.05, backoff_s=0.01, spare_bytes=0
)


def make_files(seed: int = 0, size: int = 10 * CHUNK + 4321) -> dict[str, bytes]:
    draw = random.Random(seed)
    return {
        "config.json": b'{"model_type": "qwen4_exp"}',
        "empty.txt": b"",
        "model-00001.safetensors": draw.randbytes(size),
        "model-00002.safetensors": draw.randbytes(size // 2),
        "tokenizer.json": draw.randbytes(3000),
    }


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let nothing here reach another machine, whatever the environment says."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "SLOTPY_MODELS"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("SLOTPY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    huggingface_hub.close_session()  # it would keep the proxies of another test


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Do what HF_ENDPOINT does, which huggingface_hub reads once, when it is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with FaultHub(make_files()) as hub:
        use_endpoint(monkeypatch, hub.url)
        yield hub


class Puller:
    """Pull the hub's model into one directory, and compare what lies there."""

    def __init__(self, hub: FaultHub, models: Path) -> None:
        self.hub, self.models = hub, models
        self.directory = models / hub.repo
        self.events: list[Event] = []

    def __call__(self, limits: Limits = LIMITS, name: str = "") -> Pulled:
        return pull(parse_name(name or self.hub.repo), self.models, limits, self.events.append)

    def assert_right(self) -> None:
        found = {path.name: path.read_bytes() for path in self.directory.iterdir()}
        found.pop("slotpy-model.json")
        assert found == self.hub.files


@pytest.fixture
def puller(hub: FaultHub, tmp_path: Path) -> Puller:
    return Puller(hub, tmp_path / "models")

"""What a pull says while it runs. The command line draws these; the server sends them as Ollama's `/api/pull` lines."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Status:
    """Name the step that begins, in Ollama's words: `pulling manifest`, `verifying sha256 digest`, `success`."""

    status: str


@dataclass(frozen=True)
class FileProgress:
    """Say how much of one file is on the disk: `completed_bytes` of `total_bytes`, `resumed_bytes` from earlier calls.

    `completed_bytes` falls when bytes turn out to be wrong and are fetched again.
    """

    path: str
    digest: str
    total_bytes: int
    completed_bytes: int
    resumed_bytes: int


@dataclass(frozen=True)
class Waiting:
    """Say why no bytes come for now and for how long the next try waits."""

    reason: str
    seconds: float


Event = Status | FileProgress | Waiting


def to_ollama(event: Event) -> dict[str, Any]:
    """Give an event as a line of Ollama's `/api/pull`.

    Source: https://github.com/ollama/ollama/blob/main/docs/api.md#pull-a-model
    """
    if isinstance(event, Status):
        return {"status": event.status}
    if isinstance(event, Waiting):
        return {"status": f"waiting {event.seconds:.0f} s: {event.reason}"}
    _, _, short = event.digest.partition(":")
    return {
        "status": f"pulling {short[:12] or event.path}",
        "digest": event.digest,
        "total": event.total_bytes,
        "completed": event.completed_bytes,
    }

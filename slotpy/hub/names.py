"""What a model can be called, and the directory each name stands for. Asks nobody: a name alone decides."""

import re
from dataclasses import dataclass
from pathlib import Path

from slotpy.errors import UsageError
from slotpy.hub.manifest import Manifest, pinned_manifests

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?({_PART}/{_PART})(?:@([A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True)
class ModelName:
    """A parsed name: a pinned model, or a repository of the hub at `revision` ("" is its newest at first pull)."""

    text: str
    pinned: Manifest | None = None
    repo: str = ""
    revision: str = ""

    def directory(self, models: Path) -> Path:
        """Give where this model lives under the directory of all models."""
        return models / self.text.replace(":", "-")


def parse_name(text: str) -> ModelName:
    """Read `qwen3.8-flash-next[:4bit]`, `org/repo[@revision]` or `hf.co/org/repo[@revision]`.

    Raises: UsageError for anything else, listing the names there are.
    """
    pinned = pinned_manifests()
    # Without a tag a name means its only variant; with several, the error below lists them.
    matching = [name for name in pinned if text in (name, name.partition(":")[0])]
    if len(matching) == 1:
        return ModelName(matching[0], pinned=pinned[matching[0]])
    found = _REPOSITORY.fullmatch(text)
    if found is None or ".." in text:
        names = ", ".join(sorted(["demo", *pinned]))
        raise UsageError(
            f"There is no model {text!r}.",
            hint=f"Give {names}, a hub repository as org/repo or org/repo@revision, or a directory with a model.",
        )
    repo, revision = found[1], found[2] or ""
    if "/" in revision:
        raise UsageError(f"{revision!r} is no revision that can be pinned.", hint="Give a commit, a tag or a branch.")
    return ModelName(f"{repo}@{revision}" if revision else repo, repo=repo, revision=revision)

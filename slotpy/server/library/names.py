"""What clients may call a model, and which names mean the same one. Serves the library; asks nobody."""

import re
from dataclasses import dataclass

from slotpy.hub.names import ModelName, parse_name
from slotpy.server.errors import ApiError

DEFAULT_TAG = "latest"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
# Up to a host and two folders before the model. A tag may follow an @ too, as in the hub's own names.
_NAME = re.compile(rf"({_PART}(?::[0-9]+(?=/))?(?:/{_PART}){{0,3}})(?:[:@]({_PART}))?")
_MAX_MODEL, _MAX_TAG = 160, 60  # a record's file is named after its model, and file systems take 255 bytes
_DEFAULT_PLACES = ("registry.ollama.ai/library/", "registry.ollama.ai/", "library/", "hf.co/", "huggingface.co/")


class InvalidName(ApiError):
    """Refuse a name that can be no model's."""

    def __init__(self, name: str) -> None:
        super().__init__(400, "invalid model name")
        self.name = name


@dataclass(frozen=True)
class ServedName:
    """A parsed name: the model without its usual places, and its tag, "" where none was given."""

    model: str
    tag: str = ""

    def __str__(self) -> str:
        return f"{self.model}:{self.tag or DEFAULT_TAG}"

    @property
    def key(self) -> str:
        """What equal names have in common: case does not count."""
        return str(self).lower()

    @property
    def is_remote(self) -> bool:
        """Tell whether it names one of ollama.com's hosted models, which no other server runs."""
        return self.tag == "cloud" or self.tag.endswith("-cloud")

    def hub_name(self) -> ModelName:
        """Give what can be pulled under this name; the tag is a revision. Raises: UsageError if nothing can be."""
        tag = "" if self.tag == DEFAULT_TAG else self.tag
        if "/" in self.model:
            return parse_name(f"{self.model}@{tag}" if tag else self.model)
        return parse_name(f"{self.model}:{tag}".lower() if tag else self.model.lower())


def parse_served(text: str) -> ServedName:
    """Read `[host/][namespace/]model[:tag]`, as clients send it. Raises: InvalidName."""
    found = _NAME.fullmatch(text.removeprefix("https://").removeprefix("http://"))
    if found is None or len(found[1]) > _MAX_MODEL or len(found[2] or "") > _MAX_TAG:
        raise InvalidName(text)
    model = found[1]
    for place in _DEFAULT_PLACES:
        if model.lower().startswith(place):
            model = model[len(place) :]
            break
    return ServedName(model, found[2] or "")

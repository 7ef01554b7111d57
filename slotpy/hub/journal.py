"""Which bytes of unfinished files are known to be on the disk: `slotpy-pull.journal`.

One JSON line each time more bytes became durable; the last line of a file counts. A line is added only after the bytes
it speaks of were synced, and a torn last line is ignored.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotpy.checkpoint.writing import sync, write_all
from slotpy.hub.ranges import Ranges


@dataclass
class PartState:
    """Describe an unfinished file: what it is to become, the bytes it has, the marks taken on the way."""

    digest: str
    have: Ranges = field(default_factory=Ranges)
    marks: dict[int, str] = field(default_factory=dict)

    def to_line(self, path: str, *, afresh: bool) -> dict[str, Any]:
        """Give a journal line; its marks are added to those of earlier lines, or replace them with `afresh`."""
        return {"path": path, "digest": self.digest, "have": list(self.have), "marks": self.marks, "afresh": afresh}


class Journal:
    """Read what an earlier call left, then add to it. The caller holds the directory's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        self.parts: dict[str, PartState] = {}
        end = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or not self._take(line):
                break
            end += len(line)
        os.ftruncate(self._descriptor, end)

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add lines, durably."""
        write_all(self._descriptor, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        sync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _take(self, line: bytes) -> bool:
        """Apply one line; False for one that was never finished."""
        try:
            fields = json.loads(line)
            path, digest, afresh = fields["path"], fields["digest"], fields["afresh"]
            have = Ranges((start, end) for start, end in fields["have"])
            marks = {int(position): mark for position, mark in fields["marks"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        old = self.parts.get(path)
        known = old.marks if old is not None and not afresh else {}
        self.parts[path] = PartState(digest, have, known | marks)
        return True

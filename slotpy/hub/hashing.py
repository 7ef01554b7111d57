"""What proves that a file's bytes are right, computed in one pass. Touches no file."""

import hashlib

from slotpy.hub.manifest import FileEntry

_MARK_DIGITS = 16


class FileHash:
    """Hash one file's bytes in order. `copy` keeps a state to go back to."""

    def __init__(self, entry: FileEntry) -> None:
        self._entry = entry
        self._sha256 = hashlib.sha256()
        # Git hashes a file with its length before it; only small files of a hub repository have no SHA-256.
        self._sha1 = None if entry.sha256 else hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)

    def update(self, data: memoryview) -> None:
        self._sha256.update(data)
        if self._sha1 is not None:
            self._sha1.update(data)

    def copy(self) -> "FileHash":
        other = FileHash(self._entry)
        other._sha256 = self._sha256.copy()
        other._sha1 = self._sha1.copy() if self._sha1 is not None else None
        return other

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def mark(self) -> str:
        """Give a short form of the hash so far: enough to find a damage, not to prove that there is none."""
        return self.sha256[:_MARK_DIGITS]

    @property
    def digest(self) -> str:
        """Give the hash so far in the form in which the entry knows its own."""
        return f"sha256:{self.sha256}" if self._sha1 is None else f"git-sha1:{self._sha1.hexdigest()}"

    def is_right(self) -> bool:
        return self.digest == self._entry.digest


def next_mark(position: int, chunk_bytes: int, size: int) -> int:
    """Give the first place after `position` where a mark is taken: the end of a chunk or of the file."""
    return min(size, (position // chunk_bytes + 1) * chunk_bytes)

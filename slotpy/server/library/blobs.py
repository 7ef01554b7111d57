"""Files that clients send before they make a model of them, by digest, under `blobs` in slotpy's home.

A file has its final name only once its bytes were all there and right. A model made of blobs holds links to them.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from slotpy.checkpoint.writing import writing
from slotpy.server.errors import ApiError

_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_PART = "part-"
_UNUSED_S = 24 * 3600.0


class Blobs:
    """Keep blobs in `directory`, which is made when it is needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, digest: str) -> Path | None:
        """Give a blob's file; None if it is not here. Raises: ApiError for what is no digest."""
        path = self._path(digest)
        return path if path.is_file() else None

    def begin(self, digest: str) -> "Upload":
        """Begin to receive a blob; first clears what nobody came back for. Raises: ApiError; SlotpyError."""
        path = self._path(digest)
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clear()
            return Upload(path)

    def forget(self, inodes: Iterable[int]) -> None:
        """Remove those blobs, if no model has links to them."""
        wanted = set(inodes)
        self._remove(lambda status: status.st_ino in wanted and status.st_nlink == 1)

    def _clear(self) -> None:
        """Remove what is a day old and belongs to no model: broken uploads too."""
        before = time.time() - _UNUSED_S
        self._remove(lambda status: status.st_mtime < before and status.st_nlink == 1)

    def _remove(self, is_unwanted: Callable[[os.stat_result], bool]) -> None:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another request was faster
                    if is_unwanted(os.stat(entry.path)):
                        os.unlink(entry.path)

    def _path(self, digest: str) -> Path:
        found = _DIGEST.fullmatch(digest)
        if found is None:
            raise ApiError(400, "invalid digest format")
        return self._directory / f"sha256-{found[1].lower()}"


class Upload:
    """One blob that arrives. Close it on every way out; that may be while another thread still writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor, name = tempfile.mkstemp(prefix=_PART, dir=path.parent)
        self._file, self._part = os.fdopen(descriptor, "wb", buffering=0), Path(name)
        self._sha256 = hashlib.sha256()
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Add bytes. Raises: SlotpyError when the disk does not take them."""
        with self._lock, writing(self._path.parent):
            self._sha256.update(data)
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Give the file its name. Raises: ApiError if these are not the bytes of the digest; SlotpyError."""
        expected, found = self._path.name.replace("-", ":"), f"sha256:{self._sha256.hexdigest()}"
        if found != expected:
            raise ApiError(400, f'digest mismatch, expected "{expected}", got "{found}"')
        with writing(self._path.parent):
            os.fsync(self._file.fileno())
            os.replace(self._part, self._path)

    def close(self) -> None:
        """Close the file, and remove it if it was not finished."""
        with self._lock:
            self._file.close()
            self._part.unlink(missing_ok=True)

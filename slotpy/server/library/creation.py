"""A model's directory made of files that a client sent: links to blobs, checked before it counts as a model."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from slotpy.checkpoint.writing import writing
from slotpy.errors import SlotpyError
from slotpy.server.errors import ApiError
from slotpy.server.library.blobs import Blobs
from slotpy.server.library.facts import fingerprint, read_facts

_FILE_NAME = re.compile(r"(?!slotpy-)[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,199}")
_GGUF = b"GGUF"


def create_directory(blobs: Blobs, parent: Path, files: Mapping[str, str]) -> str:
    """Make a directory of `files` (name to digest) under `parent` and give its name, the same for the same files.

    Reads headers, not weights. One call at a time.

    Raises: ApiError for files that are no checkpoint that slotpy runs; SlotpyError.
    """
    found = {name: _find(blobs, name, digest) for name, digest in files.items()}
    name = hashlib.sha256(json.dumps(sorted((k, path.name) for k, path in found.items())).encode()).hexdigest()
    directory, part = parent / name, parent / f".{name}"
    if directory.is_dir():
        return name
    with writing(parent):
        for left in parent.glob(".*"):  # of a process that was killed; their links would hold the blobs for good
            shutil.rmtree(left)
        part.mkdir(parents=True)
        try:
            for file, blob in found.items():
                os.link(blob, part / file)
            _check(part)
            os.rename(part, directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return name


def _find(blobs: Blobs, name: str, digest: str) -> Path:
    if not _FILE_NAME.fullmatch(name):
        raise ApiError(400, f"{name!r} is no name for a model's file")
    path = blobs.find(digest)
    if path is None:
        raise ApiError(400, f'blob "{digest}" for {name} not found: send it to /api/blobs/{digest} first')
    with open(path, "rb") as file:
        is_gguf = file.read(len(_GGUF)) == _GGUF
    if is_gguf or name.lower().endswith(".gguf"):
        raise ApiError(
            400,
            f"{name} is a GGUF file, which slotpy cannot run: it streams safetensors checkpoints. "
            "Create the model from the directory of one, or pull one by its hub name, as in org/repo.",
        )
    return path


def _check(directory: Path) -> None:
    """Refuse files that do not make a model that can be loaded and talked to."""
    try:
        facts = read_facts(directory, fingerprint(directory))
        _ = facts.text.tokenizer.num_ids
    except SlotpyError as error:
        text = str(error).replace(f"{directory}/", "").replace(str(directory), "the model")
        raise ApiError(400, f"these files are no model that slotpy can run: {text}") from error

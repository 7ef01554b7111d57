"""The models on this machine: where they live, what state they are in, and taking one away.

Owns the quick check before a model is used. Asks no network.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotpy.errors import CheckpointError, UsageError
from slotpy.hub.manifest import JOURNAL_NAME, MANIFEST_NAME, PART_SUFFIX, FileEntry, Manifest, Verified, load_manifest


@dataclass(frozen=True)
class StoredModel:
    """Describe one model of the library; `present_bytes` are those of its verified files."""

    directory: Path
    manifest: Manifest
    present_bytes: int

    @property
    def is_complete(self) -> bool:
        return not unverified_files(self.directory, self.manifest)


def list_models(models: Path) -> list[StoredModel]:
    """List what was pulled, by name. Raises: CheckpointError for a manifest that cannot be read."""
    found = []
    for path in sorted([*models.glob(f"*/{MANIFEST_NAME}"), *models.glob(f"*/*/{MANIFEST_NAME}")]):
        manifest = load_manifest(path.parent)
        if manifest is not None:
            present = sum(file.size for file in manifest.files if is_verified(path.parent, file))
            found.append(StoredModel(path.parent, manifest, present))
    return found


def is_verified(directory: Path, entry: FileEntry) -> bool:
    """Tell whether a file is as it was when its hash was found right: the same size and time of change."""
    try:
        return entry.verified is not None and Verified.of(os.stat(directory / entry.path)) == entry.verified
    except OSError:
        return False


def unverified_files(directory: Path, manifest: Manifest) -> list[str]:
    """Name the files that the model needs and that were never verified, or were touched since."""
    return [
        file.path
        for file in manifest.files
        if not is_verified(directory, file) and not (file.optional and not os.path.lexists(directory / file.path))
    ]


def check_verified(directory: Path) -> None:
    """Refuse a pulled model that is not complete and verified; a directory that slotpy did not pull passes.

    A quick check, of sizes and times: `slotpy pull --verify` reads every byte.

    Raises: CheckpointError naming the command to run.
    """
    manifest = load_manifest(directory)
    if manifest is None:
        return
    unverified = unverified_files(directory, manifest)
    if unverified:
        others = f" and {len(unverified) - 1} more" if len(unverified) > 1 else ""
        raise CheckpointError(
            f"{manifest.model} has files that are not verified",
            file=f"{directory / unverified[0]}{others}",
            hint=f"Run `slotpy pull {manifest.model}`: it fetches what is missing or wrong.",
        )


def remove_model(directory: Path) -> list[str]:
    """Remove the files of a pulled model; give the names of what else lies in its directory, which stays.

    Raises: UsageError while a pull writes there; OSError.
    """
    manifest = load_manifest(directory)
    if manifest is None:
        raise UsageError(f"{directory} was not pulled by slotpy.", hint="Remove it yourself if you want to.")
    with lock_directory(directory):
        ours = [file.path + suffix for file in manifest.files for suffix in ("", PART_SUFFIX)]
        # The manifest goes last: until then the rest can still be told from what is not ours.
        for name in [*ours, JOURNAL_NAME, f"{MANIFEST_NAME}.tmp", MANIFEST_NAME]:
            (directory / name).unlink(missing_ok=True)
        left = sorted(os.listdir(directory))
        if not left:
            directory.rmdir()
            with contextlib.suppress(OSError):  # the folder of an organisation, with other models in it
                directory.parent.rmdir() if len(manifest.model.split("/")) > 1 else None
    return left


@contextlib.contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold a model's directory for one call. The lock ends with the process, however that ends.

    Raises: UsageError while another call holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"Another slotpy works on {directory}.", hint="Wait for it, or stop it.") from error
        yield
    finally:
        os.close(descriptor)

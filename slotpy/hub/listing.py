"""What the hub says: which files a repository has at a revision, their addresses, and who may have them.

The only module that uses huggingface_hub, so its endpoint, mirror, token and offline settings hold for all of a pull.
Its names are looked up when they are used: loading all of it would cost every command a quarter of a second.
"""

import time
from dataclasses import dataclass

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from slotpy import __version__
from slotpy.errors import SlotpyError, UsageError
from slotpy.hub.manifest import FileEntry, Manifest, Source

_TIMEOUT_S = 30.0
_TRIES = 5
# Weights in forms that slotpy does not read; a repository may hold them besides.
_OTHER_WEIGHTS = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth")
_ACCESS = "Accept the model's terms on its page if it has some, and set HF_TOKEN to a token that may read it."


@dataclass(frozen=True)
class HubAddress:
    """Give where to ask for a repository's files, and the headers (with the user's token) that only the hub may see."""

    base: str
    headers: dict[str, str]

    def url(self, path: str) -> str:
        return f"{self.base}/{path}"


def hub_address(source: Source) -> HubAddress:
    """Give the address of a source's files at its revision."""
    probe = huggingface_hub.hf_hub_url(source.repo, "x", revision=source.revision)
    headers = {"User-Agent": f"slotpy/{__version__}"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return HubAddress(probe.removesuffix("/x"), headers)


def refuse_offline() -> None:
    """Raise where the user said that the hub must not be asked."""
    if constants.is_offline_mode():
        raise SlotpyError("HF_HUB_OFFLINE is set, and files are missing.", hint="Unset it, then pull again.")


def list_repository(name: str, repo: str, revision: str) -> Manifest:
    """Ask the hub for a repository's files; what comes back names the commit, so it means the same bytes for good.

    Files in folders, hidden files and weights in other forms are left out.

    Raises: UsageError for a repository, a revision or a token that is none; SlotpyError when the hub does not answer.
    """
    refuse_offline()
    info = _model_info(repo, revision or None)
    files = []
    for sibling in info.siblings or []:
        path = sibling.rfilename
        if "/" in path or path.startswith(".") or path.endswith(_OTHER_WEIGHTS):
            continue
        sha256 = sibling.lfs.sha256 if sibling.lfs else ""
        size = sibling.lfs.size if sibling.lfs else sibling.size
        try:
            files.append(FileEntry(path, size or 0, sha256=sha256, git_sha1="" if sha256 else sibling.blob_id or ""))
        except ValueError as error:
            raise SlotpyError(f"{repo} cannot be pulled: {error}.") from error
    if not any(file.path.endswith(".safetensors") for file in files):
        raise UsageError(f"{repo} holds no .safetensors files.", hint="Name a repository with weights in that form.")
    return Manifest(name, (Source(repo, str(info.sha)),), tuple(files))


def _model_info(repo: str, revision: str | None) -> "huggingface_hub.ModelInfo":
    for attempt in range(_TRIES):
        try:
            return huggingface_hub.HfApi(library_name="slotpy").model_info(
                repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
            )
        except GatedRepoError as error:
            raise UsageError(f"{repo} asks who you are.", hint=_ACCESS) from error
        except RevisionNotFoundError as error:
            raise UsageError(f"{repo} has no revision {revision!r}.", hint="Look for its name on the hub.") from error
        except RepositoryNotFoundError as error:
            raise UsageError(
                f"The hub knows no {repo}, or does not show it to you.", hint=f"Check the name. {_ACCESS}"
            ) from error
        except HFValidationError as error:
            raise UsageError(f"{repo} is no name for a repository: {error}.") from error
        except OfflineModeIsEnabled as error:
            raise SlotpyError(str(error)) from error
        except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
            if attempt == _TRIES - 1 or (400 <= status < 500 and status not in (408, 429)):
                raise SlotpyError(
                    f"The hub did not list the files of {repo}: {error}.",
                    hint="Check the connection, HF_ENDPOINT and the proxy, then pull again.",
                ) from error
            time.sleep(min(2.0**attempt / 2, 10))
    raise AssertionError("unreachable")

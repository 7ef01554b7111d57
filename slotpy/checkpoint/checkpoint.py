"""A checkpoint directory as the rest of slotpy sees it: its config, its records, its resident tensors.

Owns the choice of the model family and of packed or unpacked. The families' layouts own the tensor names.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slotpy.checkpoint.formats import ResidentTensor, WeightFormat
from slotpy.checkpoint.header import parse_json_object
from slotpy.checkpoint.index import TensorIndex, resolve_directory
from slotpy.checkpoint.manifest import is_pack, load_pack
from slotpy.checkpoint.qwen4_exp.config import Qwen4ExpConfig, parse_config
from slotpy.checkpoint.qwen4_exp.keys import MODEL_TYPES
from slotpy.checkpoint.qwen4_exp.layout import read_layout, read_packed_layout
from slotpy.checkpoint.records import RecordSet
from slotpy.errors import CheckpointError

__all__ = ["Checkpoint", "ResidentTensor", "WeightFormat", "open_checkpoint"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Describe an opened checkpoint; nothing but headers and a few constants has been read.

    `files` is what the record sets index: the files of `index`, then those of a pack. `resident` maps canonical names
    (`layers.0.mlp.gate`) to tensors of `index`. Keys: an expert is `layer * num_experts + expert`, a row its n-gram id.
    `row_scale` names the tensor that scales all fp8 rows. `notes` are for the user.
    """

    directory: Path
    config: Qwen4ExpConfig
    index: TensorIndex
    files: tuple[Path, ...]
    packed: bool
    layout: str
    experts: RecordSet
    expert_format: WeightFormat
    rows: RecordSet
    row_format: WeightFormat
    row_scale: str | None
    mtp_experts: RecordSet | None
    mtp_expert_format: WeightFormat | None
    resident: dict[str, ResidentTensor]
    notes: tuple[str, ...]

    def read_bytes(self, name: str) -> np.ndarray:
        """Read one resident tensor's bytes into a new (nbytes,) uint8 array. Raises: as `TensorIndex.read`."""
        return self.index.read(name)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json, the headers and, for a pack, its manifest, and check them against each other.

    Raises CheckpointError for anything that is missing, unknown or contradictory.
    """
    directory = resolve_directory(directory)
    # Before anything else: an unfinished pack has no config.json yet, and its own message says how to go on.
    pack = load_pack(directory) if is_pack(directory) else None
    config = _read_config(directory / "config.json")
    index = TensorIndex.open(directory)
    layout = read_layout(index, config) if pack is None else read_packed_layout(index, config, pack)
    files = index.files if pack is None else index.files + pack.record_files
    return Checkpoint(directory, config, files=files, packed=pack is not None, **vars(layout))


def _read_config(file: Path) -> Qwen4ExpConfig:
    try:
        text = file.read_bytes()
    except OSError as error:
        hint = "Is this the directory of a downloaded model?"
        raise CheckpointError(
            "cannot read the config", file=file, expected="a JSON file", found=error.strerror, hint=hint
        ) from error
    raw = parse_json_object(file, text, "the config")
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            "unsupported model_type", file=file, expected=f"one of {', '.join(MODEL_TYPES)}", found=repr(model_type)
        )
    return parse_config(raw, file)

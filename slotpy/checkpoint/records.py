"""Where the bytes of one record lie: a record is one routed expert or one n-gram row.

Owns the arithmetic from a record key to file offsets. Knows no tensor names (a family's layout does) and reads nothing
(the store does).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Role:
    """Name one piece of a record, e.g. `gate.weight`, with its safetensors dtype and its shape inside one record."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class RecordSet:
    """Locate every record of one geometry.

    Keys are integers: `key = shard * rows_per_shard + row`. A stacked expert tensor is a shard per layer and a row per
    expert; per-expert tensors are shards of one row; an n-gram table is its shards and rows. Piece `r` of a record lies
    in `files[shard, r]` at `bases[shard, r] + row * strides[r]`.

    `files` is (num_shards, R) int32, indexes into the checkpoint's file list; `bases` is (num_shards, R) int64 absolute
    byte offsets; `strides` is (R,) int64 bytes between neighbouring rows.
    """

    roles: tuple[Role, ...]
    rows_per_shard: int
    files: np.ndarray
    bases: np.ndarray
    strides: np.ndarray

    @property
    def num_records(self) -> int:
        return len(self.bases) * self.rows_per_shard

    @cached_property
    def record_nbytes(self) -> int:
        return sum(role.nbytes for role in self.roles)

    def locate(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give the (n, R) file indexes and byte offsets of the pieces of n records."""
        shard, row = np.divmod(keys, self.rows_per_shard)
        return self.files[shard], self.bases[shard] + row[:, None] * self.strides

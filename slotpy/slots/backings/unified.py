"""Slot memory that host and device share: Apple silicon and the CPU backend; CUDA through managed memory.

One MLX array per role, because a single Metal buffer has a size limit. Reads land in the memory that kernels read.
"""

from typing import Any

import mlx.core as mx

from slotpy.checkpoint.records import Role

MLX_DTYPES = {
    "U8": mx.uint8, "F8_E4M3": mx.uint8, "U32": mx.uint32,
    "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32,
}  # fmt: skip


class UnifiedBacking:
    """Own the slot arrays of one record geometry.

    `arrays` maps a role to its array (num_slots, *role shape). `buffers` are writable byte views of the same memory, in
    role order. On CUDA the first host view moves an array to managed memory, where its pointer stays for good.
    """

    def __init__(self, roles: tuple[Role, ...], num_slots: int) -> None:
        self.roles = roles
        self.arrays = {r.name: mx.zeros((num_slots, *r.shape), dtype=MLX_DTYPES[r.dtype]) for r in roles}
        mx.eval(list(self.arrays.values()))
        self.buffers = [_bytes_of(self.arrays[r.name]) for r in roles]


def _bytes_of(array: mx.array) -> memoryview:
    """View an evaluated array's own memory as bytes; through the buffer protocol, because numpy has no bfloat16."""
    exporter: Any = array  # MLX's type stubs do not tell that arrays export their memory
    return memoryview(exporter).cast("B")

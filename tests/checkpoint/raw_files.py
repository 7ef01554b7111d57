"""Write safetensors files by hand, byte by byte, so that tests can break them in every way."""

import json
from collections.abc import Mapping
from pathlib import Path

Entry = tuple[str, tuple[int, ...], bytes]


def write_raw(path: Path, header: bytes | Mapping, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a header (JSON text, or an object for it), then data; `length` replaces the true header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_tensors(path: Path, tensors: Mapping[str, Entry]) -> Path:
    """Write tensors given as (dtype, shape, bytes), in their order."""
    header = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [position, position + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        position += len(data)
    return write_raw(path, header, b"".join(data for _, _, data in tensors.values()))

"""The accounting of a checkpoint's tensors: each is claimed with the shape the config asks for, or refused by name.

Owns the lookup by canonical name and the errors about missing, misshapen and unknown tensors. Knows no layout.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from slotpy.checkpoint.formats import DENSE, FP8_BLOCKS, NVFP4, Part, WeightFormat, parts_of
from slotpy.checkpoint.header import Span
from slotpy.checkpoint.index import TensorIndex
from slotpy.checkpoint.qwen4_exp.names import VISION, canonical
from slotpy.checkpoint.qwen4_exp.quantization import Quantization
from slotpy.errors import CheckpointError
from slotpy.units import format_bytes

# ModelOpt's calibration of activations and of the KV cache (only weights are quantised here), and a table that
# follows from the config.
_IGNORABLE = re.compile(r"\.input_scale$|\.self_attn\.[kv]_proj\.[kv]_scale$|\brotary_emb\.inv_freq$")
_MODEL_NAMES = ("model.", "language_model.", "lm_head.", "mtp.layers.")
# Stands for a missing tensor until `finish` reports them all.
_NOWHERE = Span(0, 0, 0, "", ())
_parts_of = lru_cache(parts_of)


class Claims:
    """Hand out the spans of an index by canonical name; `finish` tells what was missing and what was not asked for."""

    def __init__(self, index: TensorIndex, quantization: Quantization) -> None:
        self._index = index
        self._quantization = quantization
        self._names: dict[str, str] = {}
        for name in index.spans:
            if (other := self._names.setdefault(canonical(name), name)) != name:
                raise self.error("two names of one weight", name, f"{other} or {name}", "both")
        self._claimed: set[str] = set()
        self._missing: list[str] = []
        self._prefix = next((n.removesuffix(key) for key, n in self._names.items() if key.startswith("layers.")), "")

    def name_of(self, key: str) -> str:
        """Give a tensor's full name; a missing one is spelled as its neighbours are."""
        top_level = key.startswith(("mtp.", "lm_head."))
        return self._names.get(key) or (key if top_level else self._prefix + key)

    def first(self, prefix: str, pattern: str) -> re.Match[str] | None:
        """Find the first canonical name that begins with `prefix` and goes on as `pattern` says."""
        compiled, start = re.compile(pattern), len(prefix)
        keys = (key for key in self._names if key.startswith(prefix))  # files of one tensor per expert have 300,000
        return next((match for key in keys if (match := compiled.match(key, start))), None)

    def format_of(self, modules: Iterable[str], eight_bit: WeightFormat = FP8_BLOCKS) -> WeightFormat:
        """Tell the format of the first of `modules` that is there, by its dtype; the config must say the same.

        The dtype alone cannot tell which E4M3 format it is: that is `eight_bit`.
        """
        module = next((module for module in modules if f"{module}.weight" in self._names), None)
        if module is None:
            return DENSE
        name = self._names[f"{module}.weight"]
        match self._span(f"{module}.weight").dtype:
            case "U32":
                stored = self._quantization.format_of(module)
                if stored.kind != "affine":
                    raise self.error("config.json declares no format for this tensor", name, "affine quantization")
                return stored
            case "F8_E4M3":
                stored = eight_bit
            case "U8":
                stored = NVFP4
            case _:
                return DENSE
        # A table with its own scale needs no word in the config.
        if stored.kind != "fp8" and not self._quantization.declares(stored):
            raise self.error("config.json declares no such format", name, f"{stored.kind} in its quantization block")
        return stored

    def weight(self, module: str, stored: WeightFormat, shape: tuple[int, ...], *outer: int) -> dict[str, Span]:
        """Claim the tensors of `outer` stacked weights of `shape` (..., in): part name to span."""
        return {
            part.name: self.tensor(module + part.ending, part.dtypes, (*outer, *part.shape))
            for part in self.parts(module, stored, shape)
        }

    def names(self, module: str, stored: WeightFormat, shape: tuple[int, ...]) -> dict[str, str]:
        """Give the names of the tensors of a weight: part name to tensor name."""
        return {part.name: self.name_of(module + part.ending) for part in self.parts(module, stored, shape)}

    def parts(self, module: str, stored: WeightFormat, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """List what stores a weight. Raises CheckpointError when the format cannot hold its shape."""
        try:
            return _parts_of(stored, shape)
        except ValueError as error:
            problem = f"{stored.kind} of {stored.bits} bits and groups of {stored.group_size} does not fit"
            raise self.error(problem, self.name_of(f"{module}.weight"), list(shape), error) from error

    def tensor(self, key: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Span:
        """Claim one tensor of any of these dtypes and shapes."""
        name = self._names.get(key)
        if name is None:
            self._missing.append(key)
            return _NOWHERE
        self._claimed.add(key)
        span = self._span(key)
        if span.shape not in shapes and (shapes != ((),) or span.shape != (1,)):  # a scalar may be written as [1]
            raise self.error("wrong shape", name, " or ".join(str(list(s)) for s in shapes), list(span.shape))
        if span.dtype not in dtypes:
            raise self.error("wrong dtype", name, " or ".join(dtypes), span.dtype)
        return span

    def uneven(self, span: Span, expected: str) -> CheckpointError:
        """Report a span whose dtype differs from the same piece of other records."""
        name = next(name for name, s in self._index.spans.items() if s.file == span.file and s.offset == span.offset)
        return self.error("records of two dtypes", name, expected, span.dtype)

    def check_values(self, key: str, expected: tuple[int, ...]) -> None:
        """Read a small integer tensor and compare."""
        name = self._names[key]
        found = self._index.read_array(name).tolist()
        if found != list(expected):
            raise self.error("the stored hash constants are not those of the config", name, list(expected), found)

    def finish(self) -> tuple[TensorIndex, tuple[str, ...]]:
        """Refuse missing and unknown tensors; give the index without stray files, and notes on what is left out."""
        left = [key for key in self._names if key not in self._claimed]
        vision = [key for key in left if key.startswith(VISION)]
        unknown = [key for key in left if not key.startswith(VISION) and not _IGNORABLE.search(key)]
        strays = self._stray_files(unknown)
        unknown = [key for key in unknown if self._span(key).file not in strays]
        if self._missing:
            raise self._missing_error(unknown)
        if unknown:
            count = f"{len(unknown)} unknown tensors" if len(unknown) > 1 else "1 unknown tensor"
            raise self.error(f"{count} in the checkpoint", self._names[unknown[0]], "only tensors of qwen4_exp")
        notes = [f"{self._index.files[file].name} holds no tensor of qwen4_exp and is left out." for file in strays]
        if vision:
            size = format_bytes(sum(self._span(key).nbytes for key in vision))
            notes.append(f"{len(vision)} vision tensors ({size}) are left out: only text is run.")
        return self._without(strays), tuple(notes)

    def _without(self, files: list[int]) -> TensorIndex:
        if not files:
            return self._index
        spans = {name: span for name, span in self._index.spans.items() if span.file not in files}
        return replace(self._index, spans=spans)

    def _stray_files(self, unknown: list[str]) -> list[int]:
        """List the files that hold other things: nothing known, and no name that looks like one of the model's."""
        if not unknown:
            return []
        known = {self._span(key).file for key in self._names.keys() - set(unknown)}
        known |= {self._span(key).file for key in unknown if self._names[key].startswith(_MODEL_NAMES)}
        return sorted({self._span(key).file for key in unknown} - known)

    def _span(self, key: str) -> Span:
        return self._index.spans[self._names[key]]

    def _missing_error(self, unknown: list[str]) -> CheckpointError:
        needed = len(self._claimed) + len(self._missing)
        hint = "Download the missing files."
        if unknown:
            hint = f"{len(unknown)} other tensors have no place, such as {self._names[unknown[0]]}."
        return CheckpointError(
            "missing tensors, the first of which is named here",
            file=self._index.files[0].parent,
            tensor=self.name_of(self._missing[0]),
            expected=f"{needed} tensors",
            found=f"{needed - len(self._missing)} of them",
            hint=hint,
        )

    def error(self, problem: str, name: str, expected: object, found: object = None) -> CheckpointError:
        """Report a tensor by its full name, with its file, and its dtype and shape unless `found` says more."""
        span = self._index.spans.get(name)
        if found is None and span is not None:
            found = f"{span.dtype} {list(span.shape)}"
        file = self._index.files[span.file] if span else self._index.files[0].parent
        return CheckpointError(problem, file=file, tensor=name, expected=expected, found=found)

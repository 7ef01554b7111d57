"""Ollama's `options`: checked as Ollama checks them, then brought within what the sampler takes.

Ollama checks types and no ranges, so clients send values that mean nothing; none of them may be an error here.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotpy.server.errors import ApiError
from slotpy.server.library.library import Model

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.0}
"""Ollama's sampling where neither the request nor the model says otherwise."""

_FLOATS = ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "typical_p")
# The last six have no effect. slotpy's plan decides what llama.cpp's runner is told by them and by use_mmap; a prompt
# that is too long loses whole messages, so there is nothing for num_keep to do.
_INTEGERS = (
    *("seed", "top_k", "repeat_last_n", "num_predict", "num_ctx", "num_keep"),
    *("num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict"),
)
# Within SamplingParams' own limits, as the tests ask.
_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e30),
    "top_k": (0, 1 << 62),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-1000.0, 1000.0),
    "frequency_penalty": (-1000.0, 1000.0),
    "repeat_penalty": (0.001, 1000.0),
    "repeat_last_n": (-1, 1 << 62),
}


@dataclass(frozen=True)
class Options:
    """Hold what the options ask for. `sampling` has SamplingParams' names and only what was given.

    `num_predict` and `num_ctx` are in tokens, None without a limit or wish.
    """

    sampling: Mapping[str, Any]
    num_predict: int | None
    stops: tuple[str, ...]
    num_ctx: int | None

    def asked(self, model: Model) -> dict[str, Any]:
        """Give what they ask of a model, in GenerationRequest's fields."""
        return {
            "sampling": self.sampling,
            "max_tokens": self.num_predict,
            "stops": self.stops,
            "context_tokens": context_tokens(self.num_ctx, model),
        }


def read_options(raw: Mapping[str, Any], beneath: Mapping[str, Any] | None = None) -> Options:
    """Read a request's options over those `beneath`, the model's own. A null is not given; unknown names are logged.

    Raises: ApiError 400 naming the option and its type.
    """
    given = _checked(beneath or {}) | _checked(raw)
    if given.get("typical_p", 1.0) < 1:
        log.warning("ignored typical_p: there is no such filter here")
    num_predict, num_ctx = given.get("num_predict"), given.get("num_ctx")
    return Options(
        sampling=clamp_sampling({name: given[name] for name in (*_LIMITS, "seed") if name in given}),
        num_predict=num_predict if num_predict is not None and num_predict >= 0 else None,
        stops=tuple(given.get("stop", ())),
        num_ctx=num_ctx if num_ctx is not None and num_ctx > 0 else None,
    )


def context_tokens(num_ctx: int | None, model: Model) -> int | None:
    """Give the context that `num_ctx` asks for: no model has more than its own."""
    return None if num_ctx is None else min(num_ctx, model.context_length)


def clamp_sampling(values: Mapping[str, float]) -> dict[str, Any]:
    """Bring numbers under SamplingParams' names within its limits, as near to what they mean as can be.

    A seed of -1 is a fresh one and left out; others outside 64 bits wrap around.
    """
    clamped: dict[str, Any] = {}
    for name, value in values.items():
        if name == "seed":
            if value != -1:
                clamped[name] = int(value) % (1 << 64)
        elif name == "repeat_penalty" and value <= 0:
            clamped[name] = 1.0  # it would divide by nothing: no penalty can be meant
        else:
            low, high = _LIMITS[name]
            clamped[name] = min(max(value, low), high)
    return clamped


def _checked(raw: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in raw.items():
        if value is None:
            continue
        if name in _FLOATS:
            checked[name] = float(_number(name, value, "float32"))
        elif name in _INTEGERS:
            checked[name] = int(_number(name, value, "integer"))
        elif name == "stop":
            checked[name] = _strings(name, value)
        elif name == "use_mmap":
            if not isinstance(value, bool):
                raise ApiError(400, f'option "{name}" must be of type boolean')
        else:
            log.warning("ignored an unknown option: %r", name)
    return checked


def _number(name: str, value: Any, wanted: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f'option "{name}" must be of type {wanted}')
    return value


def _strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ApiError(400, f'option "{name}" must be of type array')
    if not all(isinstance(item, str) for item in value):
        raise ApiError(400, f'option "{name}" must be of an array of strings')
    return value

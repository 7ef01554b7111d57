"""What OpenAI's endpoints have in common: sampling fields, usage, log-probabilities, errors in streams."""

from collections.abc import Mapping
from typing import Any

from slotpy.engine.generation import Finished, TokenLogprob
from slotpy.server.errors import ApiError, error_body
from slotpy.server.gojson import ANY, BOOL, FLOAT, INT, OBJECT, Kind, Struct
from slotpy.server.library.library import Model
from slotpy.server.options import Options, read_options
from slotpy.server.stream import Sse

FINGERPRINT = "fp_slotpy"

SAMPLING: Mapping[str, Kind] = {
    "temperature": FLOAT,
    "top_p": FLOAT,
    "top_k": INT,
    "min_p": FLOAT,
    "seed": INT,
    "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT,
}
"""Fields that mean what Ollama's options of the same names mean. OpenAI has no top_k and min_p; other servers do."""

CHOICES: Mapping[str, Kind] = {"n": INT, "logit_bias": OBJECT, "stop": ANY}

STREAM_OPTIONS = Struct("openai.StreamOptions", {"include_usage": BOOL})

LEAST_LOGPROB = -9999.0
"""What stands for a probability of nothing, as JSON has no infinity. OpenAI's choice."""


def options_of(model: Model, body: Mapping[str, Any], max_tokens: int | None) -> Options:
    """Read a request's sampling fields over the model's own parameters. Raises: ApiError for what cannot be done."""
    if body.get("n", 1) != 1:
        raise ApiError(400, "n must be 1: send one request for each choice")
    if body.get("logit_bias"):
        raise ApiError(400, "logit_bias is not supported")
    options = {name: body[name] for name in SAMPLING if name in body}
    if max_tokens is not None:
        options["num_predict"] = max_tokens
    if "stop" in body:
        options["stop"] = _stops(body["stop"])
    return read_options(options, model.parameters)


def top_logprobs_of(count: int, name: str) -> int:
    """Check how many alternatives are asked for. Raises: ApiError."""
    if not 0 <= count <= 20:
        raise ApiError(400, f"{name} must be between 0 and 20")
    return count


def usage_of(finished: Finished) -> dict[str, int]:
    """Give the token counts of a reply."""
    prompt, completion = finished.prompt_tokens, finished.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    """Give a token's log-probability, and of those beside it."""
    return {**_alternative(token), "top_logprobs": [_alternative(other) for other in token.top]}


def fail(error: Exception) -> list[Sse]:
    """End a stream with an error; without [DONE], so that no client takes it for whole."""
    return [Sse(error_body("openai", error, ""))]


def _alternative(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": list(token.raw)}


def finite(logprob: float) -> float:
    """Give a log-probability that JSON can carry."""
    return max(logprob, LEAST_LOGPROB)


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ApiError(400, "stop must be a string or a list of strings")
    return stops

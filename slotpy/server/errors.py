"""Errors as answers: which status, and the body each dialect has for it."""

import json
from typing import Any, Literal

from slotpy.errors import BusyError, CapacityError, PromptTooLongError, SlotpyError, UsageError

Dialect = Literal["ollama", "openai", "anthropic"]

_OPENAI_TYPES = {400: "invalid_request_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    """Answer a request with `status` and `message`, in the dialect of its path."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def unsupported(name: str, what: str) -> ApiError:
    """Give the error for a model that cannot do something."""
    return ApiError(400, f"{json.dumps(name, ensure_ascii=False)} does not support {what}")


def dialect_of(path: str) -> Dialect:
    """Tell which dialect a path speaks."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    return "openai" if path.startswith("/v1/") else "ollama"


def status_of(error: Exception) -> int:
    """Give the status for an error that reached the server."""
    if isinstance(error, ApiError):
        return error.status
    if isinstance(error, UsageError | PromptTooLongError):
        return 400
    if isinstance(error, BusyError | CapacityError):  # memory that is lacking now may be there later
        return 503
    return 500


def is_bug(error: Exception) -> bool:
    """Tell whether an error was raised by nobody on purpose, so belongs in the log with its traceback."""
    return not isinstance(error, ApiError | SlotpyError)


def message_of(error: Exception) -> str:
    """Give the text for the client: a bug's own text stays in the log, it may hold anything."""
    if not is_bug(error):
        return str(error)
    return f"internal error ({type(error).__name__}); the server's log has the details"


def error_body(dialect: Dialect, error: Exception, request_id: str) -> dict[str, Any]:
    """Give the body of an error answer; the same object ends a stream that fails."""
    status, message = status_of(error), message_of(error)
    if dialect == "ollama":
        return {"error": message}
    if dialect == "openai":
        kind = _OPENAI_TYPES.get(status, "api_error")
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": f"req_{request_id}"}

"""Every error slotpy raises on purpose, in one tree.

A `SlotpyError` is something a user can act on: `cli/main.py` prints it without a traceback. Anything else is a bug
and keeps its traceback.
"""


class SlotpyError(Exception):
    """Report a problem with the real values, and say in `hint` what to do next.

    `exit_code` is what the command line returns: 1 failed, 2 wrong usage.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} {self.hint}" if self.hint else message


class UsageError(SlotpyError):
    """Report arguments or options that cannot be right together."""

    exit_code = 2


class CheckpointError(SlotpyError):
    """Report a checkpoint that cannot be read as what its config says it is.

    Names the file, the tensor where there is one, and what was expected and found.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: object = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str = "",
    ) -> None:
        parts = [problem]
        if file is not None:
            parts.append(f"file {file}")
        if tensor is not None:
            parts.append(f"tensor {tensor}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if found is not None:
            parts.append(f"found {found}")
        super().__init__("; ".join(parts) + ".", hint=hint)
        self.file, self.tensor, self.expected, self.found = file, tensor, expected, found


class ReadError(SlotpyError):
    """Report bytes that could not be read in full: a short read, an I/O error, a file changed underneath."""


class CapacityError(SlotpyError):
    """Report a request that does not fit the slots, the memory or the disk there is for it."""


class PromptTooLongError(CapacityError):
    """Report a prompt that leaves no room for a reply in the context."""


class BusyError(SlotpyError):
    """Report that a request cannot be taken now, and could be later: the queue is full, or the process is ending."""

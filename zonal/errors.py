"""Errors for users: each names the call, what was required, what was received, and what to do next.

The command line prints these in one line and exits with status 2; anything else is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class ZonalError(Exception):
    """Base of every error that a user can cause and fix."""


class ArgumentError(ZonalError, ValueError):
    """An argument does not fit: wrong shape, dtype, range or name."""


class PathError(ZonalError, ValueError):
    """The requested execution path cannot run this operator on this input."""


class FileFormatError(ZonalError, ValueError):
    """A file is missing, truncated, corrupt, or of another kind than required."""


class NonFiniteError(ZonalError, ArithmeticError):
    """NaN or infinity appeared where training or a memory needs finite numbers."""


class ConvergenceError(ZonalError, ArithmeticError):
    """An iteration did not reach its tolerance within its limit."""


class MissingKernelsWarning(UserWarning):
    """No compiler was found for the kernels, so that torch is used instead. Given once per process."""


class InsufficientMemoryError(ZonalError, MemoryError):
    """A call would need more memory than is free; nothing was allocated."""


class FileWriteError(ZonalError, OSError):
    """A file or a folder cannot be written; nothing was left half written."""


class InsufficientSpaceError(FileWriteError):
    """The disk is full; nothing was left half written."""


def unknown_name(call: str, kind: str, got: str, valid: Iterable[str]) -> ArgumentError:
    """The error for a misspelt name: lists the valid ones and the nearest."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ArgumentError(f"{call}: unknown {kind} {got!r}.{hint} Valid names: {', '.join(names)}.")

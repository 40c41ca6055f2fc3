"""The warning that the rounding errors of a memory's sums may have grown large."""

import warnings
from typing import ClassVar, Protocol

import torch

from zonal.memory.form import ENDLESS, Form

LARGEST = 0.25
"""The bound on rounding errors past which a memory warns."""


class Drifting(Protocol):
    """What is asked of a memory."""

    kind: ClassVar[str]

    @property
    def form(self) -> Form: ...
    @property
    def count(self) -> int: ...
    @property
    def drift_each(self) -> float: ...
    @property
    def unfaded(self) -> float: ...


def tokens_within(memory: Drifting) -> int:
    """After how many tokens the bound on the rounding errors of a memory like this reaches ``LARGEST``."""
    each = memory.drift_each
    return int(LARGEST / each) - 8 if each else ENDLESS


def warn_of_drift(before: int, memory: Drifting, stacklevel: int) -> None:
    """Warn where the bound on the rounding errors of a memory has passed ``LARGEST`` since it held ``before`` tokens.

    Where the past fades, the tokens count that have not faded, as errors fade with the terms that they are errors of.
    This waits for the device, and so is asked only once in ``tokens_within`` tokens.
    """
    if torch.compiler.is_compiling():
        return
    most = tokens_within(memory)
    if memory.count // most <= before // most or memory.unfaded < most:
        return
    remedy = (
        "leave out compact=True, so that the sums are float64"
        if memory.kind == "compact"
        else "make the memory with dtype=torch.float64"
    )
    warnings.warn(
        f"Memory: this memory of kind {memory.kind!r} holds sums of {memory.form.statistics} over so many tokens that "
        f"their rounding errors may exceed {LARGEST} of their terms (Memory.drift is the bound). For so many tokens "
        f"{remedy}, or absorb the tokens that still matter into a new memory.",
        stacklevel=stacklevel,
    )


__all__ = ["LARGEST", "tokens_within", "warn_of_drift"]

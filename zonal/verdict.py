"""Verdict: the three answers to the question whether something is known."""

from enum import IntEnum


class Verdict(IntEnum):
    """The report on a record of an o-set, or on a query that a memory answers. Tensors hold it as int8."""

    CONTRADICTED = -1
    UNDECIDED = 0
    ACCEPTED = 1


__all__ = ["Verdict"]

"""Criterion: what a memory asks of the evidence for a query before it accepts its own answer, and the file it is kept
in.
"""

import math
import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zonal.errors import ArgumentError, FileFormatError
from zonal.store import checked, read_json, write_checked
from zonal.typed import check_fields
from zonal.verdict import Verdict

KIND = "criterion"
Thresholds = float | tuple[float, ...]
Rule = TypeVar("Rule")


class Evidence(NamedTuple):
    """What a memory knows about queries, (B, H, T) each, in [0, 1]. support: how much of a query the stored keys span.
    residual: the ``gap`` between the answer and what it is compared with; None where there is nothing to compare."""

    support: Tensor
    residual: Tensor | None


@dataclass(frozen=True)
class Criterion:
    """A query is decided when its support is more than ``support``. A decided query is accepted when its residual is
    unknown or at most ``residual``, and contradicted otherwise. All other queries are undecided.

    Args:
        support, residual: in [0, 1], one number, or one per query head.
        rate: at most this part of the queries that were never stored is decided, in a memory of at most ``tokens``
            tokens. None: nothing is stated.
        miss: at most this part of right claims is contradicted. None: nothing is stated.

    ``Memory.calibrate`` finds all of them.

    Raises: ArgumentError for numbers outside [0, 1].
    """

    support: Thresholds = 0.8
    residual: Thresholds = 0.25
    rate: float | None = None
    miss: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("support", "residual", "rate", "miss"):
            given, by_head = getattr(self, name), name in ("support", "residual")
            values = given if by_head and isinstance(given, tuple) else (given,)
            if not values or not all(is_share(x) for x in values if x is not None or by_head):
                raise ArgumentError(
                    f"Criterion: {name} must lie in [0, 1], received {given!r}. Let Memory.calibrate find it, or "
                    "leave it out."
                )
        whole = isinstance(self.tokens, int) and not isinstance(self.tokens, bool) and self.tokens >= 0
        if self.tokens is not None and not whole:
            raise ArgumentError(f"Criterion: tokens must be a whole number >= 0, received {self.tokens!r}.")

    def columns(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both thresholds as (1, H or 1, 1). Raises: ArgumentError for another number of heads than there are."""

        def column(name: str, value: Thresholds) -> Tensor:
            values = value if isinstance(value, tuple) else (value,)
            if len(values) not in (1, heads):
                raise ArgumentError(
                    f"Memory.read: the criterion has a {name} for {len(values)} heads and the queries have {heads}. "
                    "Calibrate with queries of as many heads, or give one number."
                )
            return torch.tensor(values, dtype=torch.float64, device=like.device).view(1, -1, 1)

        return column("support", self.support), column("residual", self.residual)

    def verdict(self, evidence: Evidence) -> Tensor:
        """The ``Verdict`` of each query, (B, H, T) int8.

        Raises: ArgumentError for thresholds of another number of heads than the evidence has.
        """
        support, residual = self.columns(evidence.support.shape[1], evidence.support)
        decided = evidence.support > support
        if evidence.residual is None:
            return torch.where(decided, Verdict.ACCEPTED, Verdict.UNDECIDED).to(torch.int8)
        known = torch.where(evidence.residual <= residual, Verdict.ACCEPTED, Verdict.CONTRADICTED)
        return torch.where(decided, known, Verdict.UNDECIDED).to(torch.int8)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a JSON file, atomically."""
        save_rule(path, KIND, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Criterion":
        """Read a file of ``save``. Raises: FileFormatError for missing, damaged and foreign files."""
        return load_rule(path, KIND, Criterion)


def save_rule(path: str | os.PathLike[str], kind: str, rule: Any) -> None:
    """Write a dataclass of plain values to a JSON file, atomically."""
    write_checked(path, {"kind": kind, **asdict(rule)})


def load_rule(path: str | os.PathLike[str], kind: str, rule: type[Rule]) -> Rule:
    """Read a file of ``save_rule``. Raises: FileFormatError for missing, damaged and foreign files."""
    found: Any = checked(path, read_json(path))
    if not isinstance(found, dict) or found.pop("kind", None) != kind:
        raise FileFormatError(f"load {kind}: {path} holds something else. Required: a file of {rule.__name__}.save.")
    try:
        check_fields(rule.__name__, rule, found)
        return rule(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
    except (TypeError, ArgumentError) as error:
        raise FileFormatError(
            f"load {kind}: {path} does not fit: {str(error).rstrip('.')}. Calibrate again."
        ) from error


def is_share(value: object) -> bool:
    """Whether a value is a number in [0, 1]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in [0, 1], 0 where the whole is not above 0."""
    some = whole > 0
    return torch.where(some, (part / torch.where(some, whole, 1)).clamp(0, 1), 0)


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| / (|a| + |b|) over the last axis, in [0, 1]: 0 for equal vectors, 1 for opposite ones and where only one
    is zero.
    """
    return ratio((a - b).norm(dim=-1), a.norm(dim=-1) + b.norm(dim=-1))


def bound_of(name: str, found: Tensor, rate: float, least: float = 0.0) -> tuple[float, ...]:
    """For each head the number that a further value of the same kind exceeds with a probability of at most ``rate``:
    found (B, H, n) in [0, 1].

    Of n values that could come in any order, the next one exceeds the k-th smallest with a probability of at most 1 - k
    / (n + 1).

    Raises: ArgumentError for a rate outside [0, 1], and for fewer values than it takes.
    """
    if not is_share(rate):
        raise ArgumentError(
            f"Memory.calibrate: {name} must lie in [0, 1], received {rate!r}. 0.01 is one in a hundred."
        )
    values = found.detach().double().transpose(0, 1).flatten(1).sort(-1).values
    n = values.shape[-1]
    place = math.ceil((n + 1) * (1 - rate) * (1 - 1e-12))
    if place > n:
        need = f"at least {math.ceil(1 / rate) - 1} of each head" if rate > 0 else "only a rate above 0 can be shown"
        raise ArgumentError(
            f"Memory.calibrate: {n} queries cannot show {name} {rate:g}: {need}. Give more of them, or a larger {name}."
        )
    if place <= 0:
        return (least,) * values.shape[0]
    return tuple(values[:, place - 1].clamp_min(least).tolist())


__all__ = ["KIND", "Criterion", "Evidence", "bound_of", "gap", "is_share", "load_rule", "ratio", "save_rule"]

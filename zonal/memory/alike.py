"""Which operators share memories: those declared alike that have drawn the same numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.declaration import expand_rows
from zonal.errors import ArgumentError
from zonal.store import checksum


def declared_alike(operator: Operator, config: Mapping[str, Any]) -> bool:
    """Whether an operator is declared as ``Operator.config`` says (names and learned values apart)."""
    mine = operator.config()
    return all(mine[slot] == config[slot] for slot in ("score", "link", "anchor", "prior"))


def unlike_draws(a: Operator, b: Operator) -> list[str]:
    """The names of what two operators drew at random, or were fitted to, where the numbers differ; rows of heads are
    repeated.
    """
    if a is b or a.fixed_parts is b.fixed_parts:
        return []
    mine, theirs = (dict(operator.fixed_parts.named_buffers()) for operator in (a, b))
    return [name for name in sorted({*mine, *theirs}) if not equal_rows(mine.get(name), theirs.get(name))]


def digests_of_draws(operator: Operator) -> dict[str, str]:
    """What stands in a file for numbers that an operator drew at random, or was fitted to: a digest of each."""
    drawn = dict(operator.fixed_parts.named_buffers())
    return {name: checksum({name: x.detach().to("cpu", torch.float64)}, {}) for name, x in drawn.items()}


def equal_rows(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether drawn numbers are the same for every head; fewer rows serve the heads in turn."""
    if a is None or b is None or a.shape[1:] != b.shape[1:] or max(len(a), len(b)) % min(len(a), len(b)):
        return False
    rows = max(len(a), len(b))
    return torch.equal(*(expand_rows(x, rows, "draw").to("cpu", torch.float64) for x in (a, b)))


def check_draws(call: str, a: Operator, b: Operator) -> None:
    """Raises: ArgumentError when two operators declared alike have drawn other numbers, as two layers do: sums over
    their features do not mix.
    """
    if same_declaration(a, b) and (unlike := unlike_draws(a, b)):
        raise ArgumentError(
            f"{call}: both operators are declared as {a.name!r}, but their drawn numbers differ "
            f"({', '.join(unlike)}); each layer draws its own. "
            "Use memories of one layer, or absorb the tokens again into Memory.empty of its operator."
        )


def same_declaration(a: Operator, b: Operator) -> bool:
    """Whether two operators are declared alike (names and learned values apart)."""
    return (a.score, a.link, a.anchor, a.prior) == (b.score, b.link, b.anchor, b.prior)


__all__ = ["check_draws", "declared_alike", "digests_of_draws", "equal_rows", "same_declaration", "unlike_draws"]

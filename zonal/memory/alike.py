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
    # torch.export hands out proxies of modules, and tensors without numbers
    if a is b or a.fixed_parts is b.fixed_parts or torch.compiler.is_exporting():
        return []
    mine, theirs = (dict(operator.fixed_parts.named_buffers()) for operator in (a, b))
    return [name for name in sorted({*mine, *theirs}) if not equal_rows(mine.get(name), theirs.get(name))]


def digests_of_draws(operator: Operator) -> dict[str, list[str]]:
    """What stands in a file for numbers that an operator drew at random, or was fitted to: digests of each, as it is
    and as half-precision types round it, so that one layer is known again in another type.
    """
    drawn = dict(operator.fixed_parts.named_buffers())
    return {
        name: [checksum({name: form.to(torch.float64)}, {}) for form in _forms(x.detach().cpu())]
        for name, x in drawn.items()
    }


def unlike_digests(mine: Mapping[str, list[str]], told: Mapping[str, str | list[str]]) -> list[str]:
    """The names of drawn numbers with no digest in common. Files of earlier versions tell one digest of each."""
    given = {name: {each} if isinstance(each, str) else {*each} for name, each in told.items()}
    return [name for name in sorted({*mine, *given}) if not given.get(name, set()).intersection(mine.get(name, []))]


def same_but_for_type(a: Tensor, b: Tensor) -> bool:
    """``equal_rows`` of numbers, or of one of them rounded to the type of the other."""
    return equal_rows(a.to(b.dtype), b) or equal_rows(a, b.to(a.dtype))


def _forms(x: Tensor) -> list[Tensor]:
    """Drawn numbers as they are, and as half-precision types round them."""
    return [x, x.to(torch.bfloat16), x.to(torch.float16)] if x.is_floating_point() else [x]


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
            f"{call}: two operators are declared as {a.name!r}, but their drawn numbers differ "
            f"({', '.join(unlike)}); each layer draws its own. "
            "Use memories of one layer, or absorb the tokens again into Memory.empty of its operator."
        )


def same_declaration(a: Operator, b: Operator) -> bool:
    """Whether two operators are declared alike (names and learned values apart)."""
    return (a.score, a.link, a.anchor, a.prior) == (b.score, b.link, b.anchor, b.prior)


__all__ = [
    "check_draws",
    "declared_alike",
    "digests_of_draws",
    "equal_rows",
    "same_but_for_type",
    "same_declaration",
    "unlike_digests",
    "unlike_draws",
]

"""The quality of evidence for answers: how well it separates right from wrong, and the errors of answering by it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zonal.errors import ArgumentError


def auroc(positive: Tensor, negative: Tensor) -> float:
    """The probability that evidence drawn from ``positive`` is above one drawn from ``negative``, ties counted half: 1
    tells them apart, 0.5 not at all.

    Raises: ArgumentError without any of either, or with NaN.
    """
    a, b = positive.double().flatten(), negative.double().flatten().sort().values
    if not a.numel() or not b.numel() or bool(torch.cat([a, b]).isnan().any()):
        raise ArgumentError(
            f"auroc: evidence of both kinds without NaN is required, received {a.numel()} and {b.numel()} numbers. "
            "Leave out queries without evidence."
        )
    below, up_to = torch.searchsorted(b, a), torch.searchsorted(b, a, right=True)
    return float((below + up_to).double().mean() / (2 * b.numel()))


def risk_curve(evidence: Tensor, right: Tensor, shares: Sequence[float]) -> list[float]:
    """The part of wrong answers among the ``shares`` of queries that have the most evidence; of queries that tie, all
    in the same proportion.

    evidence, right (bool) of one shape. Raises: ArgumentError for shapes that differ, numbers for ``right``, shares
    outside (0, 1], or NaN.
    """
    if (
        evidence.shape != right.shape
        or right.dtype != torch.bool
        or not evidence.numel()
        or bool(evidence.isnan().any())
        or not all(0 < share <= 1 for share in shares)
    ):
        raise ArgumentError(
            "risk_curve: evidence without NaN, right in bool of the same shape and shares in (0, 1] are required, "
            f"received shape {tuple(evidence.shape)}, {right.dtype} of shape {tuple(right.shape)} and {list(shares)}."
        )
    wrong = (~right).double().flatten().cpu()
    _, level = torch.unique(-evidence.double().flatten().cpu(), return_inverse=True)
    count, errors = level.bincount().double(), level.bincount(wrong)
    found = []
    for share in shares:
        asked = share * wrong.numel()
        taken = (asked - (count.cumsum(0) - count)).clamp_min(0).minimum(count)
        found.append(float((errors * taken / count).sum() / asked))
    return found

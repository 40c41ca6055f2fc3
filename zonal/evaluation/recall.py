"""How well an approximate search finds the largest entries of a row: recall, and the attention mass it found."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.errors import ArgumentError


@dataclass(frozen=True)
class Coverage:
    """Means over rows. recall: how many of a row's exact top K are among those kept. mass: the part of the row's whole
    sum of K that is kept, and exact_mass that of the exact top K, the most there is to be had. met: keys that a row
    met; seen: keys that it may see; rows: how many were looked at.
    """

    recall: float
    mass: float
    exact_mass: float
    met: float
    seen: float
    rows: int

    def __str__(self) -> str:
        return (
            f"recall {self.recall:.3f} of the exact largest, {self.mass:.3f} of the attention mass (the exact ones "
            f"have {self.exact_mass:.3f}), "
            f"{self.met:.0f} of {self.seen:.0f} keys met, means of {self.rows} rows"
        )


def coverage(log_kernel: Tensor, met: Tensor, k: int) -> dict[str, Tensor]:
    """Of each row with a visible key, flat, in float64: recall, mass, exact_mass, met, seen.

    log_kernel: log K (…, S), -inf where a key is forbidden. met: bool (…, S), the keys that were looked at, of which
    the k largest are kept. Ties of the k-th largest are kept, too, as ``anchor.TopK`` does.

    Raises: ArgumentError for shapes that differ, or k < 1.
    """
    if log_kernel.shape != met.shape or met.dtype != torch.bool or k < 1:
        raise ArgumentError(
            "coverage: log_kernel and a bool met of one shape and k >= 1 are required, "
            f"received {tuple(log_kernel.shape)}, {met.dtype} of {tuple(met.shape)} and {k}."
        )
    log_kernel, met = log_kernel.double().flatten(0, -2), met.flatten(0, -2)
    some = (log_kernel > float("-inf")).any(-1)
    log_kernel, met = log_kernel[some], met[some]
    whole = log_kernel.logsumexp(-1, keepdim=True)
    share = (log_kernel - whole).exp()
    seen = log_kernel > float("-inf")

    def largest(rows: Tensor) -> Tensor:
        return (rows >= rows.topk(min(k, rows.shape[-1])).values[:, -1:]) & (rows > float("-inf"))

    exact, kept = largest(log_kernel), largest(log_kernel.masked_fill(~met, float("-inf")))
    return {
        "recall": (exact & kept).sum(-1) / exact.sum(-1).double(), "mass": (share * kept).sum(-1),
        "exact_mass": (share * exact).sum(-1), "met": (met & seen).sum(-1).double(), "seen": seen.sum(-1).double(),
    }  # fmt: skip


def summarised(rows: dict[str, Tensor]) -> Coverage:
    """The means of ``coverage``'s rows. Raises: ArgumentError without any."""
    count = rows["recall"].numel()
    if count == 0:
        raise ArgumentError("coverage: rows that see a key are required, received none.")
    return Coverage(**{name: float(x.mean()) for name, x in rows.items()}, rows=count)

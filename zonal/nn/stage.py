"""Depth as a sequence of stages.

    m = memory(r_0, ..., r_n),   h = chart(m),   increment = update(h),   r_{n+1} = compose(m, increment)

The records r_0, ..., r_n are the results of earlier stages. An update is a layer, or any function of tokens. The four
parts give the usual residual connections:

    pre-norm    Stage(update, chart=norm)
    post-norm   Stage(update, compose=PostNorm(norm))
    gated       Stage(update, chart=norm, compose=GatedResidual(dim))
    dense skip  Stage(update, memory=DenseSkip(dim, n + 1), chart=norm)

A row that sees no key has increment 0. A sum and a gate then return m bit for bit. A post-norm returns norm(m), which
equals m only if m is an output of the same norm with a gain of 1, so the assumption of the source does not hold for it.

Source: Geometric Attention, definitions 5.3, 5.6 and 5.7, remark 5.9, assumption 5.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.initialise import Draws
from zonal.nn.norm import accumulation_dtype

Records = tuple[Tensor, ...]
"""What stages have left on record, oldest first, each (B, T, dim)."""

_OPEN = 2.0


class Latest:
    """The memory of a plain residual stream: it reads and keeps only the last record."""

    def reset_parameters(self) -> None:
        """Nothing is learned."""

    def __call__(self, records: Records) -> Tensor:
        return records[-1]

    def kept(self, records: Records, record: Tensor) -> Records:
        """The records to keep after one more."""
        return (record,)


LATEST = Latest()


class DenseSkip(nn.Module):
    """The memory that reads all records: m = Σ_k g_k ⊙ r_k, with a learned weight per record and channel.

    At the start m is the last record. Each token reads only its own records.

    Args:
        dim: number of channels.
        records: number of records to read.

    Source: Geometric Attention, equation 5.1, with constant gates; with one gate per record, Pagliardini et al. 2024,
        arXiv 2402.02622.

    Raises:
        ArgumentError: sizes do not fit.
    """

    def __init__(self, dim: int, records: int) -> None:
        super().__init__()
        if dim < 1 or records < 1:
            raise ArgumentError(
                f"nn.DenseSkip: required dim >= 1 and records >= 1, received dim={dim}, records={records}."
            )
        self.weight = nn.Parameter(torch.empty(records, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 1 for the last record and 0 for the others."""
        with torch.no_grad():
            self.weight.zero_()[-1] = 1

    def forward(self, records: Records) -> Tensor:
        """A tuple of records (..., dim), one per weight, oldest first -> m (..., dim)."""
        if len(records) != len(self.weight):
            raise ArgumentError(
                f"nn.DenseSkip: {len(self.weight)} records are required, oldest first, received {len(records)}. "
                "Pass on what kept() returns."
            )
        weight = self.weight.to(records[-1].dtype)
        m = weight[-1] * records[-1]
        for one, gate in zip(records[:-1], weight, strict=False):
            m = torch.addcmul(m, one, gate)
        return m

    def kept(self, records: Records, record: Tensor) -> Records:
        """All records."""
        return (*records, record)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, records={self.weight.shape[0]}"


@dataclass(frozen=True, eq=False)
class PostNorm:
    """compose(m, increment) = norm(m + increment)."""

    norm: Callable[[Tensor], Tensor]

    def __call__(self, m: Tensor, increment: Tensor) -> Tensor:
        return self.norm(m + increment)


class GatedResidual(nn.Module):
    """compose(m, increment) = m + σ(W m̂ + b) ⊙ increment, where m̂ is m divided by its root mean square.

    The gate is nearly open at the start (b = 2).

    Args:
        dim: number of channels.
        eps: ε of the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.projection = nn.Linear(dim, dim)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw W, and set b = 2, which gives a gate of 0.88."""
        draws.normal_(self.projection.weight, "projection.weight")
        nn.init.constant_(self.projection.bias, _OPEN)

    def forward(self, m: Tensor, increment: Tensor) -> Tensor:
        """m, increment (..., dim) -> (..., dim)."""
        dtype = accumulation_dtype(m.dtype)
        gate = self.projection(F.rms_norm(m.to(dtype), (m.shape[-1],), None, self.eps).to(m.dtype)).sigmoid()
        return m + gate.to(m.dtype) * increment


def _unchanged(m: Tensor) -> Tensor:
    return m


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage: a value that holds its four parts. Their parameters belong to the module that contains them.

    Args:
        update: h (B, T, dim) -> an increment of this shape, or a tuple that begins with it.
        memory: records -> m.
        chart: m -> h.
        compose: (m, increment) -> the next record.
    """

    update: Callable[[Tensor], Any]
    memory: Latest | DenseSkip = LATEST
    chart: Callable[[Tensor], Tensor] = _unchanged
    compose: Callable[[Tensor, Tensor], Tensor] = torch.add

    def charted(self, records: Tensor | Records) -> Tensor:
        """h, the input of the update."""
        return self.chart(self.memory(_records(records)))

    def __call__(self, records: Tensor | Records) -> Any:
        """The records, or a single record -> the next record. If the update returns a tuple, so does the stage, with
        the next record first.
        """
        m = self.memory(_records(records))
        found = self.update(self.chart(m))
        return (self.compose(m, found[0]), *found[1:]) if isinstance(found, tuple) else self.compose(m, found)


def _records(records: Tensor | Records) -> Records:
    return (records,) if isinstance(records, Tensor) else records


__all__ = ["LATEST", "DenseSkip", "GatedResidual", "Latest", "PostNorm", "Records", "Stage"]

"""Depth as stages: what a stage takes from the records so far, how that is charted, what updates it, and how the
increment is composed with it.

    m = memory(r_0, ..., r_n),   h = chart(m),   increment = update(h),   r_{n+1} = compose(m, increment)

An update is a layer, or any function of tokens. The four parts make the usual ways to stack layers:

    pre-norm    Stage(update, chart=norm)
    post-norm   Stage(update, compose=PostNorm(norm))
    gated       Stage(update, chart=norm, compose=GatedResidual(dim))
    dense skip  Stage(update, memory=DenseSkip(dim, n + 1), chart=norm)

No evidence, no change: where a row sees no key its increment is 0, and compose(m, 0) = m to the bit for a sum and a
gated one. After a post-norm it is norm(m), which is m only for what the same norm has made, as long as its gain is 1:
there the source's assumption does not hold, and no smooth rule could mend it.

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
    """The memory of a plain residual stream: the last record, and no other is kept."""

    def reset_parameters(self) -> None:
        """Nothing is learned."""

    def __call__(self, records: Records) -> Tensor:
        return records[-1]

    def kept(self, records: Records, record: Tensor) -> Records:
        """What is on record after one more."""
        return (record,)


LATEST = Latest()


class DenseSkip(nn.Module):
    """The memory that reads all records: m = Σ_k g_k ⊙ r_k, a learned weight per record and channel.

    At the start m is the last record.

    Tokens do not meet in it, so that it reaches no further than the last record does. Full history: equation 5.1 of the
    source, with constant gates; with one gate a record, Pagliardini et al. 2024, arXiv 2402.02622.

    Args:
        dim: channels.
        records: how many there are to read.
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
        """1 for the last record, 0 for the others."""
        with torch.no_grad():
            self.weight.zero_()[-1] = 1

    def forward(self, records: Records) -> Tensor:
        """records, as many as there are weights, of (..., dim) -> m (..., dim)."""
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
        """All of them."""
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
    """compose(m, increment) = m + σ(W m̂ + b) ⊙ increment, with m̂ = m over its root mean square.

    Nearly open at the start (b = 2).

    Args:
        dim: channels. eps: ε of the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.projection = nn.Linear(dim, dim)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw W; b = 2, which is a gate of 0.88."""
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
    """One stage, a value that holds its four parts and does not own them: their parameters belong to the module that
    has them.

    Args:
        update: h (B, T, dim) -> increment of that shape, or a tuple that begins with it.
        memory: records -> m. chart: m -> h. compose: (m, increment) -> the next record.
    """

    update: Callable[[Tensor], Any]
    memory: Latest | DenseSkip = LATEST
    chart: Callable[[Tensor], Tensor] = _unchanged
    compose: Callable[[Tensor, Tensor], Tensor] = torch.add

    def charted(self, records: Tensor | Records) -> Tensor:
        """h: what the update is given."""
        return self.chart(self.memory(_records(records)))

    def __call__(self, records: Tensor | Records) -> Any:
        """records (or the one record there is) -> the next record, in a tuple with what else the update returned if it
        returned a tuple.
        """
        m = self.memory(_records(records))
        found = self.update(self.chart(m))
        return (self.compose(m, found[0]), *found[1:]) if isinstance(found, tuple) else self.compose(m, found)


def _records(records: Tensor | Records) -> Records:
    return (records,) if isinstance(records, Tensor) else records


__all__ = ["LATEST", "DenseSkip", "GatedResidual", "Latest", "PostNorm", "Records", "Stage"]

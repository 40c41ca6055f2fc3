"""How much an approximate search finds: recall of a row's largest entries, and the attention mass it found."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from zonal.algebra import Operator, definition
from zonal.algebra.anchor import TopK
from zonal.errors import ArgumentError
from zonal.execution.call import Call, prepare
from zonal.execution.paths import sparse
from zonal.execution.paths.candidates import candidates, keys_of, search_of
from zonal.kernels.sparse import Candidates

# numbers of a row, all heads, that are looked at together
_AT_ONCE = 1 << 22


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
            f"have {self.exact_mass:.3f}), {self.met:.0f} of {self.seen:.0f} keys met, means of {self.rows} rows"
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
    log_kernel, met = log_kernel.double()[None].flatten(0, -2), met[None].flatten(0, -2)
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


@torch.no_grad()
def measured(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    rows: int = 256,
    seed: int = 0,
) -> Coverage:
    """Coverage of the sparse path for queries (B, H, T, D) and keys (B, Hkv, S, D), on a sample of rows.

    The sample has ``rows`` query positions, drawn by ``seed``, of every head.

    Raises: ArgumentError for arguments that do not fit, for an operator that the sparse path cannot run, and when no
        query sees a key.
    """
    call = prepare(
        operator, q, k, k, causal=causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, scale=scale
    )
    reason = sparse.refusal(call)
    if reason is not None:
        raise ArgumentError(f"coverage: operator {operator.name!r} has no sparse path to measure: {reason}.")
    anchor = cast(TopK, call.bound.anchor)
    search, found = search_of(call), candidates(call, native=sparse.kernel_refusal(call) is None)
    chosen = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(seed))[:rows].sort().values
    keys, most = k.shape[2], max(search.reach, search.window)
    size = max(1, _AT_ONCE // max(q.shape[0] * q.shape[1] * max(keys, most * (search.tables + 1)), 1))
    parts = []
    for some in chosen.split(size) if keys else ():
        own = found._replace(start=found.start[:, :, some], stop=found.stop[:, :, some])
        parts.append(_rows(call, anchor, own, some, min(most, keys)))
    if not parts:
        raise ArgumentError("coverage: at least one query and one key are required, received none.")
    return summarised({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _rows(call: Call, anchor: TopK, found: Candidates, rows: Tensor, reach: int) -> dict[str, Tensor]:
    seen, place = call.visibility, torch.arange(call.k.shape[2])
    log_kernel = definition.kernel(call.bound, call.coefficients, call.q[:, :, rows], call.expand(call.k))
    visible = ((place >= seen.lo[rows, None]) & (place < seen.hi[rows, None])).to(call.device)[None, None]
    if seen.key_mask is not None:
        visible = visible & seen.key_mask[:, None, None]
    key, fresh = keys_of(found, slice(None), reach)
    times = torch.zeros(log_kernel.shape, dtype=torch.int32, device=call.device)
    met = times.scatter_add_(-1, key, fresh.to(torch.int32)) > 0
    return coverage(log_kernel.masked_fill(~visible, float("-inf")), met, anchor.k)


__all__ = ["Coverage", "coverage", "measured"]

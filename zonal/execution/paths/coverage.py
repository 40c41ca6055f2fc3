"""What the sparse path catches of a call, measured on some of its rows against all keys."""

from typing import cast

import torch
from torch import Tensor

from zonal.algebra import Operator, definition
from zonal.algebra.anchor import TopK
from zonal.algebra.hashing import LSH
from zonal.errors import ArgumentError
from zonal.evaluation.recall import Coverage, coverage, summarised
from zonal.execution.call import Call, prepare
from zonal.execution.paths import sparse
from zonal.execution.paths.candidates import candidates, keys_of
from zonal.execution.paths.sparse import refusal
from zonal.kernels.sparse import Candidates

# numbers of a row, all heads, that are looked at together
_AT_ONCE = 1 << 22


@torch.no_grad()
def measured(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    rows: int = 256,
    seed: int = 0,
) -> Coverage:
    """Coverage of the sparse path for queries (B, H, T, D) and keys (B, Hkv, S, D), on a sample of rows.

    The sample has ``rows`` query positions, drawn by ``seed``, of every head.

    Raises: ArgumentError for arguments that do not fit, for an operator that the sparse path cannot run, and when no
        query sees a key.
    """
    call = prepare(operator, q, k, k, causal=causal, key_padding_mask=key_padding_mask)
    reason = refusal(call)
    if reason is not None:
        raise ArgumentError(f"coverage: operator {operator.name!r} has no sparse path to measure: {reason}.")
    anchor = cast(TopK, call.bound.anchor)
    search = cast(LSH, anchor.search)
    found = candidates(call, search, sparse.kernel_refusal(call) is None)
    chosen = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(seed))[:rows].sort().values
    keys, most = k.shape[2], max(search.reach, search.window)
    size = max(1, _AT_ONCE // max(q.shape[0] * q.shape[1] * max(keys, most * (search.tables + 1)), 1))
    parts = (
        [
            _rows(
                call,
                anchor,
                found._replace(start=found.start[:, :, some], stop=found.stop[:, :, some]),
                some,
                min(most, keys),
            )
            for some in chosen.split(size)
        ]
        if keys
        else []
    )
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
    met = (
        torch.zeros(log_kernel.shape, dtype=torch.int32, device=call.device).scatter_add_(
            -1, key, fresh.to(torch.int32)
        )
        > 0
    )
    return coverage(log_kernel.masked_fill(~visible, float("-inf")), met, anchor.k)


__all__ = ["Coverage", "measured"]

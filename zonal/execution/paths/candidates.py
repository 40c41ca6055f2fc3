"""The keys that each query compares on the sparse path: those in its buckets of hash tables, and the nearest ones."""

from typing import cast

import torch
from torch import Tensor

from zonal.algebra.anchor import TopK
from zonal.algebra.bound import expanded
from zonal.algebra.hashing import LSH
from zonal.execution.call import Call
from zonal.features import hashing
from zonal.kernels import sparse as kernel
from zonal.kernels.sparse import Candidates
from zonal.tracing import untraced


def search_of(call: Call) -> LSH:
    """The search that the anchor of a call declares."""
    return cast(LSH, cast(TopK, call.bound.anchor).search)


@untraced  # random numbers are drawn and cached, which a traced graph cannot do
def candidates(call: Call, native: bool) -> Candidates:
    """The candidates of a call's queries. The window is the first table, with a single bucket that holds every key.

    native: the kernel sorts them.
    """
    seen, score, width = call.visibility, call.bound.score, call.k.shape[3]
    search = search_of(call).sized(call.k.shape[2], hashing.spaces(score))
    codes = kernel.codes if native else hashing.codes
    asked, held = (codes(hashing.functions(score, search, x, width), search.tables) for x in (call.q, call.k))
    reach = torch.tensor([search.window] + [search.reach] * search.tables, dtype=torch.int64)
    lo, hi, position = seen.lo, torch.maximum(seen.lo, seen.hi), seen.position
    if native:
        return kernel.places(asked, held, lo, hi, position, reach, seen.key_mask)
    lo, hi, position, reach = (x.to(call.device) for x in (lo, hi, position, reach))
    return places(asked, held, lo, hi, position, reach, seen.key_mask)


def places(
    asked: Tensor, held: Tensor, lo: Tensor, hi: Tensor, position: Tensor, reach: Tensor, key_mask: Tensor | None
) -> Candidates:
    """``places`` of the kernel by torch, on any device."""
    keys, groups = held.shape[3], asked.shape[1] // held.shape[1]
    held, size = held.long(), keys + 1
    if key_mask is not None:  # padding is in no query's bucket
        held = torch.where(key_mask[:, None, None], held, hashing.CODES)
    ranked, order = (held * size + torch.arange(keys, device=held.device)).sort(-1)
    base = asked.long() * size
    ranked = expanded(ranked, groups)

    def place(at: Tensor) -> Tensor:
        return torch.searchsorted(ranked, (base + at.clamp(0, keys)).contiguous())

    first, last, own, most = place(lo), place(hi), place(position + 1), reach[:, None]
    stop = torch.minimum(torch.maximum(torch.minimum(own, last) - (most + 1) // 2, first) + most, last)
    walk = asked[:, :, -1].sort(dim=-1, stable=True).indices
    start, stop = (x.transpose(2, 3).contiguous() for x in (torch.maximum(stop - most, first), stop))
    return Candidates(*(x.to(torch.int32) for x in (order, start, stop, walk)))


def keys_of(found: Candidates, span: slice, reach: int) -> tuple[Tensor, Tensor]:
    """The keys that the queries of a span compare, (B, H, t, C) int64, and a mask of those that count (each key once).

    reach: the most keys that a table gives.
    """
    start, stop = (x[:, :, span].long() for x in (found.start, found.stop))
    groups = start.shape[1] // found.order.shape[1]
    order = expanded(found.order.long(), groups)
    step = torch.arange(reach, device=order.device)
    at = start[..., None] + step  # (B, H, t, L, reach)
    there = at < stop[..., None]
    flat = at.clamp_max(max(order.shape[3] - 1, 0)).transpose(2, 3).flatten(3)
    key = order.gather(3, flat).unflatten(3, at.shape[2::2]).transpose(2, 3)
    key = torch.where(there, key, order.shape[3]).flatten(3).sort(-1).values
    fresh = torch.nn.functional.pad(key[..., 1:] != key[..., :-1], (1, 0), value=True) & (key < order.shape[3])
    # Rows are padded with one of their own keys: a score may look at all keys together, and later ones must not count.
    return torch.where(key < order.shape[3], key, key[..., :1]).clamp_max(max(order.shape[3] - 1, 0)), fresh


__all__ = ["candidates", "keys_of", "places", "search_of"]

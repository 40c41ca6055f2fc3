"""Packed documents as a batch: each document becomes a row, in a few groups of similar length.

Code for batches then runs packed sequences too, in parallel over documents. At most half of a group is padding.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zonal.execution.call import Call, Prepared


def by_document(call: Call, run: Callable[[Call], Tensor]) -> Tensor:
    """y of a packed call (batch 1) from ``run`` on groups of documents."""
    assert call.visibility.borders is not None
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(call.visibility.borders.tolist()):
        groups.setdefault((end - start - 1).bit_length(), []).append((start, end - start))
    parts, places = [], []
    for members in groups.values():
        call_of_group, index, inside = _gathered(call, members)
        y = run(call_of_group).transpose(0, 1)  # (H, documents, L, P)
        parts.append(y[:, inside])
        places.append(index[inside])
    order = torch.cat(places).argsort().to(call.q.device)
    return torch.cat(parts, 1).index_select(1, order)[None]


def _gathered(call: Call, members: list[tuple[int, int]]) -> tuple[Call, Tensor, Tensor]:
    """(the call of some documents as a batch, the position of each token (n, L), and which tokens are real (n, L))."""
    start = torch.tensor([s for s, _ in members], dtype=torch.int64)[:, None]
    length = torch.tensor([n for _, n in members], dtype=torch.int64)[:, None]
    step = torch.arange(int(length.max()))
    inside = step < length
    index = (start + torch.minimum(step, length - 1)).to(call.q.device)
    even = bool(inside.all())
    inside = inside.to(call.q.device)

    def rows(x: Tensor) -> Tensor:  # (1, h, S, …) -> (n, h, L, …)
        return x[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)

    mask = None if even else inside
    if call.visibility.key_mask is not None:
        own = call.visibility.key_mask[0][index]
        mask = own if mask is None else own & mask
    decay, bias = call.log_decay, call.key_bias
    decay = None if decay is None else rows(decay)
    if decay is not None and mask is not None:
        decay = decay * mask[:, None]
    seen = call.seen(index.shape[1], index.shape[1], mask)
    group = replace(
        call, raw=None, prepared=Prepared(rows(call.q), rows(call.k), rows(call.v)), visibility=seen,
        log_decay=decay, key_bias=None if bias is None else rows(bias),
    )  # fmt: skip
    return group, index, inside

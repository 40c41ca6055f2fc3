"""How sums over features lie in memory on CUDA, which features they are, and between which keys they are known.

The features of a vector x of d numbers are products x_i x_j in pairs (a, b) of blocks of coordinates, a <= b, then x
itself, then 1. A pair has all B^2 products. With a < b each is two monomials and counts twice; with a = b both orders
are present.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.kernels.sums import tables
from zonal.kernels.triton.sizes import SHARED, block_of, ceil_div, padded, pairs_of, rows_of


class Layout(NamedTuple):
    """The sums of one head: pairs B B + width + 1 rows of P numbers; for the row anchor also as many numbers for v = 1.

    left, right (pairs,): blocks of each pair, int32. width: of x, padded. place, share (rows,): a memory's row for each
    row, and the factor of its number (0 = none). first, root, times (features of a memory,): a row that has this
    feature, the factor of its number in a memory, and how many rows have it.
    """

    block: int
    width: int
    left: Tensor
    right: Tensor
    place: Tensor
    share: Tensor
    first: Tensor
    root: Tensor
    times: Tensor

    @property
    def pairs(self) -> int:
        return self.left.shape[0]

    @property
    def rows(self) -> int:
        return self.place.shape[0]


def layout(degree: int, lowest: int, dim: int, device: torch.device) -> Layout:
    """The layout for powers of the score up to ``degree`` <= 2 of vectors of ``dim`` numbers."""
    return _layout(degree, lowest, dim, block_of(dim), device)


@functools.lru_cache(maxsize=64)
def _layout(degree: int, lowest: int, dim: int, block: int, device: torch.device) -> Layout:
    pairs = pairs_of(dim, block) if degree == 2 else []
    width, squares = padded(dim), len(pairs) * block**2
    number = {pair: index for index, pair in enumerate(pairs)}

    def row(i: int, j: int) -> int:
        return (number[i // block, j // block] * block + i % block) * block + j % block

    rows = rows_of(degree, dim, block)
    place, share = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.float32)
    first, root, times = [], [], []
    table = tables(degree, lowest, dim)
    order = table.place.argsort()
    for at, (left, right, power) in enumerate(
        zip(*(x[order].tolist() for x in (table.left, table.right, table.degree)), strict=True)
    ):
        # rows of the table are 1, then the vector
        i, j = left - 1, right - 1
        found = (
            {rows - 1}
            if power == 0
            else {squares + j}
            if power == 1
            else {row(i, j)} | ({row(j, i)} if i // block == j // block else set())
        )
        weight = 2**0.5 if power == 2 and i != j else 1.0
        for each in found:
            place[each], share[each] = at, 1 / weight
        first.append(min(found))
        root.append(weight)
        times.append(float(len(found)))
    left, right = torch.tensor(pairs, dtype=torch.int32).view(len(pairs), 2).T.contiguous()
    made = (
        left,
        right,
        place,
        share,
        torch.tensor(first, dtype=torch.int64),
        torch.tensor(root, dtype=torch.float32),
        torch.tensor(times, dtype=torch.float32),
    )
    return Layout(block, width, *(x.to(device) for x in made))


def from_memory(memory: Tensor, form: Layout) -> Tensor:
    """Sums (B, Hkv, size) from a memory's state (B, Hkv, m, P or P + 1)."""
    return memory.float().index_select(2, form.place) * form.share[:, None]


def to_memory(sums: Tensor, form: Layout) -> Tensor:
    """A memory's state from sums (B, Hkv, rows, P or P + 1)."""
    return sums.index_select(2, form.first) * form.root[:, None]


def from_memory_gradient(memory: Tensor, form: Layout) -> Tensor:
    """The gradient of sums from that of a memory's state made of them.

    ``to_memory`` reads one of the equal rows, but each gets its share of the gradient.
    """
    return memory.float().mul(form.root[:, None] / form.times[:, None]).index_select(2, form.place) * (
        form.share[:, None] != 0
    )


def to_memory_gradient(sums: Tensor, form: Layout) -> Tensor:
    """The gradient of a memory's state from that of the sums made of it. Equal rows have equal gradients."""
    return sums.index_select(2, form.first) * (form.times / form.root)[:, None]


def into_rows(flat: Tensor, form: Layout, width: int, mass: bool) -> Tensor:
    """(B, Hkv, rows, P or P + 1) from the sums of one border (B, Hkv, size)."""
    rows = flat[..., : form.rows * width].unflatten(-1, (form.rows, width))
    return torch.cat([rows, flat[..., form.rows * width :, None]], -1) if mass else rows


def from_rows(rows: Tensor, width: int) -> Tensor:
    """And back."""
    return torch.cat([rows[..., :width].flatten(-2), rows[..., width:].flatten(-2)], -1)


class Borders(NamedTuple):
    """Sums are known at borders 0 … n. Border b is before key min(b chunk, S), for keys of the previous key's document.

    edges (2, T): lo and hi of each query. border (T,): the border that it reads, rising; it reads if lo is before it.
    keys (2, n + 1): the keys between borders b - 1 and b in its sum; queries (2, n + 1): the queries that read it.
    seeing (S,): the first query with hi > s. kept (n,): whether the sum at b + 1 continues that at b. All int32.
    """

    chunk: int
    count: int
    edges: Tensor
    border: Tensor
    keys: Tensor
    queries: Tensor
    seeing: Tensor
    kept: Tensor


def borders(
    lo: Tensor, hi: Tensor, segment_start: Tensor | None, keys: int, chunk: int, every: bool, device: torch.device
) -> Borders:
    """The borders of a call. lo, hi, segment_start (T,): as for ``feature_sums``. every: also the sum over all keys.

    Nothing waits for the device where these are on the CPU, as calls have them.
    """
    queries, whole = lo.shape[0], ceil_div(keys, chunk)
    count = whole if every else 0
    if queries and not every:
        furthest = max(int(x[(queries - 1) // SHARED * SHARED]) for x in (lo, hi))
        count = whole if furthest >= keys else furthest // chunk
    lo, hi = (x.to(torch.int32).to(device) for x in (lo, hi))
    hi = torch.maximum(lo, hi)
    shared = hi[torch.arange(queries, device=device) // SHARED * SHARED]
    border = torch.where(shared >= keys, whole, shared // chunk).int()
    ends = (torch.arange(count + 1, device=device, dtype=torch.int32) * chunk).clamp(max=keys)
    starts = F.pad(ends[:-1], (1, 0))
    kept = torch.ones(count, dtype=torch.int32, device=device)
    if segment_start is not None and count:
        owner = segment_start.to(torch.int32).to(device)[ends[1:] - 1]
        kept = (owner < starts[1:]).int()
        starts[1:] = torch.maximum(starts[1:], owner)
    readers = torch.searchsorted(border, torch.arange(count + 2, device=device, dtype=torch.int32), out_int32=True)
    seeing = torch.searchsorted(hi, torch.arange(keys, device=device, dtype=torch.int32), right=True, out_int32=True)
    return Borders(
        chunk,
        count,
        torch.stack([lo, hi]),
        border,
        torch.stack([starts, ends]),
        torch.stack([readers[:-1], readers[1:]]),
        seeing,
        kept,
    )


__all__ = [
    "Borders",
    "Layout",
    "borders",
    "from_memory",
    "from_memory_gradient",
    "from_rows",
    "into_rows",
    "layout",
    "to_memory",
    "to_memory_gradient",
]

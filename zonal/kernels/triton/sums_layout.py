"""How sums over features lie in memory on CUDA, which features they are, and between which keys they are known.

The features of a vector x of d numbers are products x_i x_j in pairs (a, b) of blocks of coordinates, a <= b, then x
itself, then 1. A pair has all B^2 products. With a < b each is two monomials and counts twice; with a = b both orders
are present.
"""

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.kernels.sums import tables
from zonal.kernels.triton.sizes import ceil_div, padded, power_of_two

# queries whose first one says which sum all of them read: no tile of queries is larger
SHARED = 128
# keys from one known sum to the next: few where the sums of features are small beside the tokens
_CHUNKS = (128, 8192)


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


def block_of(dim: int) -> int:
    """Coordinates of a block."""
    return 8 if dim <= 8 else 16


@functools.lru_cache(maxsize=64)
def layout(degree: int, lowest: int, dim: int, block: int, device: torch.device) -> Layout:
    """The layout for powers of the score up to ``degree`` <= 2 of vectors of ``dim`` numbers."""
    pairs = list(itertools.combinations_with_replacement(range(ceil_div(dim, block)), 2)) if degree == 2 else []
    width, squares = padded(dim), len(pairs) * block**2
    number = {pair: index for index, pair in enumerate(pairs)}

    def row(i: int, j: int) -> int:
        return (number[i // block, j // block] * block + i % block) * block + j % block

    rows = squares + width + 1
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


def chunk_of(rows: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Keys from one known sum to the next: about so many that the sums take no more room than q, k, v and y."""
    state, token = 4 * rows * (value_dim + 1), 2 * itemsize * (key_dim + value_dim)
    return min(max(power_of_two(ceil_div(state, token)), _CHUNKS[0]), _CHUNKS[1])


def from_memory(state: Tensor, form: Layout, width: int) -> Tensor:
    """The sums of one border (B, Hkv, size), of values of ``width`` numbers, from a memory's state (B, Hkv, m, P or
    P + 1).
    """
    return _flat(state.float().index_select(2, form.place) * form.share[:, None], width)


def to_memory(sums: Tensor, form: Layout, width: int) -> Tensor:
    """And back."""
    return _rows(sums, form, width).index_select(2, form.first) * form.root[:, None]


def from_memory_gradient(state: Tensor, form: Layout, width: int) -> Tensor:
    """The gradient of sums from that of a memory's state made of them.

    ``to_memory`` reads one of the equal rows, but each gets its share of the gradient.
    """
    rows = state.float().mul(form.root[:, None] / form.times[:, None]).index_select(2, form.place)
    return _flat(rows * (form.share[:, None] != 0), width)


def to_memory_gradient(sums: Tensor, form: Layout, width: int) -> Tensor:
    """The gradient of a memory's state from that of the sums made of it. Equal rows have equal gradients."""
    return _rows(sums, form, width).index_select(2, form.first) * (form.times / form.root)[:, None]


def _rows(sums: Tensor, form: Layout, width: int) -> Tensor:
    """(B, Hkv, rows, P or P + 1) from (B, Hkv, size)."""
    values, mass = sums[..., : form.rows * width], sums[..., form.rows * width :]
    return torch.cat([x.unflatten(-1, (form.rows, -1)) for x in (values, mass) if x.shape[-1]], -1)


def _flat(rows: Tensor, width: int) -> Tensor:
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
    """The borders of a call. lo, hi, segment_start (T,): as in ``SumsInputs``. every: also the sum over all keys.

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
    "SHARED", "Borders", "Layout", "block_of", "borders", "chunk_of", "from_memory", "from_memory_gradient", "layout",
    "to_memory", "to_memory_gradient",
]  # fmt: skip

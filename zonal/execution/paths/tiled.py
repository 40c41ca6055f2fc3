"""Exact attention in score tiles that are discarded after use: memory is linear in the number of tokens.

Forward keeps y and one number per row (the anchor's factor, or the log of the row's sum). Backward computes every tile
again. Per tile, with D_t = dy_t . y_t for a row anchor (0 otherwise): in log space W = exp(log K - lse), dV = W^T dY
and dS = W (dY V^T - D); else, with dY and D times the row's factor, dV = K^T dY, dK = dY V^T - D and dS = dK B l'(S).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from zonal.algebra.anchor import PlanAnchor, Row, SumAnchor, TopK
from zonal.algebra.bound import expanded
from zonal.algebra.link import Link
from zonal.algebra.prior import Bias, KeyRange, Visibility
from zonal.algebra.score import Score
from zonal.algebra.score.base import paired_scores
from zonal.execution.call import Call
from zonal.execution.paths.tree import hierarchy_refusal
from zonal.kernels.op import no_second_derivative

# The fastest of seven sizes between 32 x 512 and 256 x 512 for 8 heads on two cores: 1 or 2 MB of scores, which stay in
# the cache. Long sequences waste few tiles on the diagonal and gain from larger ones.
_QUERIES, _KEYS, _LONG = 128, 256, 2048
# more heads than that are taken a few sequences at a time
_TILE_ELEMENTS = 1 << 18
# what the largest entries of a row are picked from: whole rows of some queries
_ROW_ELEMENTS = 1 << 23


class Parts(NamedTuple):
    """What a tile is made from, apart from the tensors that get gradients."""

    score: Score
    link: Link
    anchor: SumAnchor
    top: TopK | None  # then the anchor is Row, of what is not below a row's least
    log: bool
    visibility: Visibility
    slope: Tensor | None
    groups: int


def refusal(call: Call) -> str | None:
    """Why the tiled path cannot run a call, or None."""
    anchor, family = call.bound.anchor, call.tags.family
    if family == "plan" and cast(PlanAnchor, anchor).gradient == "unrolled":
        return (
            "gradient='unrolled' goes back through every iteration, for which whole plans are kept; "
            "gradient='implicit' is for this path"
        )
    if family == "tree":
        return hierarchy_refusal(call)
    if family == "window":
        return (
            f"anchor {type(anchor).__name__} has another kernel for keys before its window; path 'chunked' runs tiles "
            "of the window and sums before it"
        )
    if family not in ("sums", "plan"):
        why = "solves with the kernel among keys" if anchor.solves else "may weigh a row in any way"
        return f"anchor {type(anchor).__name__} {why}, which is no sum over keys"
    return None


def blocks(heads: int, queries: int, keys: int, rows: bool = False) -> tuple[int, int, int]:
    """(sequences, queries, keys) computed at once, in one tile for H heads. rows: whole rows are kept meanwhile."""
    query_block = min(2 * _QUERIES if queries >= _LONG else _QUERIES, max(queries, 1))
    key_block = min(_KEYS, max(keys, 1))
    if rows:
        query_block = max(1, min(query_block, _ROW_ELEMENTS // max(heads * keys, 1)))
    return max(1, _TILE_ELEMENTS // (heads * query_block * key_block)), query_block, key_block


def parts_of(call: Call) -> Parts:
    """What the tiles of a call are made from."""
    anchor = call.bound.anchor
    top = cast(TopK, anchor) if call.tags.top else None
    summed = Row() if top else cast(SumAnchor, anchor)
    return Parts(
        call.bound.score,
        call.bound.link,
        summed,
        top,
        call.tags.log_space,
        call.visibility,
        call.bound.slopes,
        call.bound.groups,
    )


def tiled(call: Call) -> Tensor:
    """y (B, H, T, P) by torch."""
    parts, bias = parts_of(call), call.bias
    y = _Tiled.apply(call.q, call.k, call.v, call.coefficients, bias.row, bias.col, parts)
    return call.scaled(y)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, H, t, n) -> (B, Hkv, groups * t, n): the queries that share a key head are rows of one matrix."""
    return x if groups == 1 else x.reshape(x.shape[0], -1, groups * x.shape[2], x.shape[3])


class _Scratch:
    """Buffers that all tiles of a pass share. New buffers would cost more than the arithmetic: their pages are new."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._kept = like, {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        if name not in self._kept or self._kept[name].numel() < size:
            self._kept[name] = self._like.new_empty(size)
        return self._kept[name][:size].view(shape)


class _Tile(NamedTuple):
    """One tile, all (B, H, t, s): the score S, its prior's factor (None in log space), log K or K with the prior, and
    where it is masked."""

    score: Tensor
    prior: Tensor | None
    kernel: Tensor
    forbidden: Tensor | None
    diagonal: int | None

    def cut_(self, x: Tensor) -> Tensor:
        """x with zeros where the tile is forbidden."""
        if self.diagonal is not None:
            return x.tril_(self.diagonal)  # ten times faster than a mask
        return x if self.forbidden is None else x.masked_fill_(self.forbidden, 0)


class _Tiles(NamedTuple):
    """The tiles of a few sequences: what they are made from, how many queries and keys one has, and their buffers.

    q (b, H, T, D), k (b, Hkv, S, D); c: the coefficients of the link.
    """

    parts: Parts
    bias: Bias
    q: Tensor
    k: Tensor
    c: Tensor
    block: tuple[int, int]
    scratch: _Scratch

    def queries(self) -> Iterator[tuple[int, int, KeyRange]]:
        """From and to which query a row of tiles goes, and which keys its queries see."""
        for t0 in range(0, self.q.shape[2], self.block[0]):
            t1 = min(t0 + self.block[0], self.q.shape[2])
            yield t0, t1, self.parts.visibility.rows(t0, t1)

    def keys(self, rows: KeyRange) -> Iterator[tuple[int, int]]:
        """From and to which key each tile of a row goes."""
        for s0 in range(rows.first, rows.last, self.block[1]):
            yield s0, min(s0 + self.block[1], rows.last)

    def tile(self, span: tuple[int, int, int, int], rows: KeyRange, least: Tensor | None = None) -> _Tile:
        """The tile of queries [t0, t1) and keys [s0, s1), for span = (t0, t1, s0, s1).

        least: what the rows' entries of K (or log K) may not be below, (b, H, t, 1).
        """
        parts, scratch = self.parts, self.scratch
        score = self._score(self.q[:, :, slice(*span[:2])], self.k[:, :, slice(*span[2:])])
        seen = parts.visibility
        prior = self.bias.tile(*span, seen.position, score.dtype)
        free = seen.key_mask is None and rows.all_see(*span[2:])
        diagonal = (
            None
            if free or parts.log or parts.top or prior is not None or seen.key_mask is not None
            else rows.diagonal(span[2])
        )
        mask = None if free or diagonal is not None else seen.tile(*span, score.device)
        forbidden = None if mask is None else ~mask
        if prior is not None and forbidden is not None:
            prior = prior.masked_fill(forbidden, 0)
        if parts.log:
            # a bilinear score's gradient does without the score
            kernel = score if parts.score.bilinear else scratch.take("kernel", tuple(score.shape)).copy_(score)
            kernel = kernel if prior is None else kernel.add_(prior)
            if forbidden is not None:
                kernel.masked_fill_(forbidden, float("-inf"))
            if least is not None:
                kernel.masked_fill_(kernel < least, float("-inf"))
            return _Tile(score, None, kernel, forbidden, None)
        out = scratch.take("kernel", tuple(score.shape))
        kernel = parts.link.value_into(score, self.c, out)
        if kernel is score and (prior is not None or not free or least is not None):
            kernel = out.copy_(score)
        if prior is not None:
            prior = prior.exp()
            kernel.mul_(prior)
        tile = _Tile(score, prior, kernel, forbidden, diagonal)
        tile.cut_(kernel)
        if least is None:
            return tile
        below = kernel < least
        tile = tile._replace(forbidden=below if forbidden is None else below.logical_or_(forbidden))
        tile.cut_(kernel)
        return tile

    def _score(self, q: Tensor, k: Tensor) -> Tensor:
        """S (b, H, t, s) for q (b, H, t, D), k (b, Hkv, s, D)."""
        parts = self.parts
        if not parts.score.bilinear:
            score = paired_scores(parts.score, q, expanded(k, parts.groups))
        else:
            q, shape = _grouped(q, parts.groups), (*q.shape[:3], k.shape[2])
            score = self.scratch.take("score", shape)
            torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=score.view(-1, q.shape[2], k.shape[2]))
        # what a cosine exceeds its bound by is rounding, and does a polynomial no harm
        domain, bound = parts.link.domain, parts.score.bound
        if domain is None or (
            parts.link.degree is not None and bound is not None and -bound >= domain[0] and bound <= domain[1]
        ):
            return score
        return score.clamp_(*domain)

    def least(self, t0: int, t1: int, rows: KeyRange) -> Tensor | None:
        """The least entry that each of the rows [t0, t1) keeps, (b, H, t, 1); None for an anchor that keeps all."""
        if self.parts.top is None:
            return None
        whole = self.scratch.take("rows", (*self.q.shape[:2], t1 - t0, rows.last - rows.first))
        for s0, s1 in self.keys(rows):
            whole[..., s0 - rows.first : s1 - rows.first] = self.tile((t0, t1, s0, s1), rows).kernel
        return self.parts.top.least(whole)


def _sequences(parts: Parts, bias: Bias, q: Tensor, k: Tensor, c: Tensor) -> Iterator[tuple[slice, _Tiles]]:
    """The tiles of all sequences, of as many at once as one tile may have."""
    sequences, queries, keys = blocks(q.shape[1], q.shape[2], k.shape[2], parts.top is not None)
    for b in range(0, q.shape[0], sequences):
        span, mask = slice(b, b + sequences), parts.visibility.key_mask
        row, col = (x if x is None or x.shape[0] == 1 else x[span] for x in (bias.row, bias.col))
        seen = replace(parts.visibility, made=parts.visibility.intervals, key_mask=None if mask is None else mask[span])
        some = parts._replace(visibility=seen)
        yield span, _Tiles(some, Bias(row, col, bias.slope), q[span], k[span], c, (queries, keys), _Scratch(q))


def _forward(tiles: _Tiles, v: Tensor, y: Tensor, factor: Tensor, least: Tensor) -> None:
    """Fill y (b, H, T, P), the row factors (b, H, T, 1) and, where some keys are left out, the least that is kept."""
    parts, (batch, heads, _, _) = tiles.parts, tiles.q.shape
    groups, online = parts.groups, parts.log and parts.anchor.normalises
    count = parts.visibility.count(v.device)[..., None]
    for t0, t1, rows in tiles.queries():
        state = parts.anchor.init((batch, heads // groups, groups * (t1 - t0)), v.shape[3], tiles.q)
        kept = tiles.least(t0, t1, rows)
        if kept is not None:
            least[:, :, t0:t1] = kept
        for s0, s1 in tiles.keys(rows):
            tile = tiles.tile((t0, t1, s0, s1), rows, kept)
            kernel = tile.kernel.exp_() if parts.log and not online else tile.kernel
            state = parts.anchor.absorb(state, _grouped(kernel, groups), v[:, :, s0:s1], online)
        done = parts.anchor.finalise(state, count[:, :, t0:t1].repeat(1, 1, groups, 1), online)
        for whole, part in zip((y, factor), done, strict=True):
            whole[:, :, t0:t1] = part.expand(batch, heads // groups, -1, -1).reshape(batch, heads, t1 - t0, -1)


def _add_product(total: Tensor, a: Tensor, b: Tensor, scratch: _Scratch) -> None:
    """total += a @ b for a slice of rows, into which torch would multiply matrix by matrix."""
    total += torch.bmm(a, b, out=scratch.take("product", tuple(total.shape)))


class Passed(NamedTuple):
    """What ``run_forward`` was given and what it returned, for the way back."""

    q: Tensor
    k: Tensor
    v: Tensor
    c: Tensor
    y: Tensor
    factor: Tensor
    least: Tensor


class Gradients(NamedTuple):
    """The gradients of a call, or views of them that backward fills. c in float64; None where nobody asks."""

    q: Tensor
    k: Tensor
    v: Tensor
    c: Tensor | None
    row: Tensor | None
    col: Tensor | None


def _slope(
    tiles: _Tiles, tile: _Tile, span: tuple[int, int, int, int], kernel: Tensor, ds: Tensor, out: Gradients
) -> None:
    """Turn ds, the gradient with respect to a tile's K, into that with respect to its S, in its place. In log space
    log K is S with the prior added.

    The gradients of the biases and of the link's coefficients are added to ``out``.
    """
    parts, (t0, t1, s0, s1) = tiles.parts, span
    if parts.log:
        dlog = ds.mul_(kernel)
    else:
        dlog = None if out.row is None and out.col is None else ds * kernel
        if tile.prior is not None:
            ds.mul_(tile.prior)
        tile.cut_(ds)
        spare = tiles.scratch.take("kernel", tuple(ds.shape))  # K is not needed any more
        if out.c is not None:
            out.c.add_(parts.link.coefficient_vjp_into(tile.score, ds, tiles.c, spare).sum_to_size(out.c.shape))
        ds.mul_(parts.link.derivative_into(tile.score, tiles.c, spare))
    if dlog is not None and out.row is not None:
        out.row[..., t0:t1] += dlog.sum(-1).sum_to_size(out.row[..., t0:t1].shape)
    if dlog is not None and out.col is not None:
        out.col[..., s0:s1] += dlog.sum(-2).sum_to_size(out.col[..., s0:s1].shape)


def _backward(tiles: _Tiles, v: Tensor, y: Tensor, factor: Tensor, dy: Tensor, least: Tensor, out: Gradients) -> None:
    """Add the gradients of a few sequences to ``out``."""
    parts, _, q, k, _, _, scratch = tiles
    groups, online = parts.groups, parts.log and parts.anchor.normalises
    batch, heads, _, _ = q.shape
    shared = (dy * y).sum(-1, keepdim=True) if parts.anchor.normalises else None
    if not online:  # the row's factor goes with dy, which is narrower than a tile
        dy = dy * factor
        shared = None if shared is None else shared * factor
    dk_all, dv_all = out.k.flatten(0, 1), out.v.flatten(0, 1)
    for t0, t1, rows in tiles.queries():
        q_row, factor_row, kept = q[:, :, t0:t1], factor[:, :, t0:t1], None if parts.top is None else least[:, :, t0:t1]
        # rows of one matrix a key head
        q_flat, dy_flat = (_grouped(x[:, :, t0:t1], groups).flatten(0, 1) for x in (q, dy))
        dq_flat = torch.zeros_like(q_flat)
        for s0, s1 in tiles.keys(rows):
            k_tile, v_tile = k[:, :, s0:s1], v[:, :, s0:s1]
            tile = tiles.tile((t0, t1, s0, s1), rows, kept)
            shape, flat = (batch, heads, t1 - t0, s1 - s0), (-1, groups * (t1 - t0), s1 - s0)
            kernel = tile.kernel.sub_(factor_row).exp_() if online else tile.kernel.exp_() if parts.log else tile.kernel
            _add_product(dv_all[:, s0:s1], kernel.reshape(flat).mT, dy_flat, scratch)
            ds = scratch.take("slope", shape)
            torch.bmm(dy_flat, v_tile.flatten(0, 1).mT, out=ds.view(flat))
            if shared is not None:
                ds -= shared[:, :, t0:t1]
            _slope(tiles, tile, (t0, t1, s0, s1), kernel, ds, out)
            if parts.score.bilinear:
                dq_flat.baddbmm_(ds.view(flat), k_tile.flatten(0, 1))
                _add_product(dk_all[:, s0:s1], ds.view(flat).mT, q_flat, scratch)
            else:
                dq_tile, dk_tile = parts.score.pair_vjp(q_row, expanded(k_tile, groups), tile.score, ds)
                dq_flat += _grouped(dq_tile, groups).flatten(0, 1)
                dk_all[:, s0:s1] += dk_tile.unflatten(1, (-1, groups)).sum(2).flatten(0, 1)
        out.q[:, :, t0:t1] = dq_flat.view(batch, heads, t1 - t0, -1)


def run_forward(parts: Parts, bias: Bias, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, H, T, P), the row factors (B, H, T, 1) and the least that is kept (empty where all is)."""
    batch, heads, queries, _ = q.shape
    y, factor = q.new_empty(batch, heads, queries, v.shape[3]), q.new_empty(batch, heads, queries, 1)
    least = q.new_empty(batch, heads, queries if parts.top else 0, 1)
    for span, tiles in _sequences(parts, bias, q, k, c):
        _forward(tiles, v[span], y[span], factor[span], least[span])
    return y, factor, least


def run_backward(
    parts: Parts, bias: Bias, passed: Passed, dy: Tensor, *, c: bool = False, row: bool = False, col: bool = False
) -> Gradients:
    """The gradients of q, k, v, and where they are asked for those of c, row and col."""
    q, k, v, coefficients, y, factor, least = passed
    dq, dk, dv = torch.empty_like(q, memory_format=torch.contiguous_format), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dc = torch.zeros_like(coefficients, dtype=torch.float64) if c else None
    drow = torch.zeros_like(bias.row) if row and bias.row is not None else None
    dcol = torch.zeros_like(bias.col) if col and bias.col is not None else None
    for span, tiles in _sequences(parts, bias, q, k, coefficients):
        views = [x if x is None or x.shape[0] == 1 else x[span] for x in (drow, dcol)]
        out = Gradients(dq[span], dk[span], dv[span], dc, *views)
        _backward(tiles, v[span], y[span], factor[span], dy[span], least[span], out)
    return Gradients(dq, dk, dv, dc, drow, dcol)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, c: Tensor, row: Tensor | None, col: Tensor | None, parts: Parts
    ) -> Tensor:
        y, factor, least = run_forward(parts, Bias(row, col, parts.slope), q, k, v, c)
        ctx.parts = parts
        ctx.save_for_backward(q, k, v, c, row, col, y, factor, least)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        no_second_derivative("tiled")
        q, k, v, c, row, col, y, factor, least = ctx.saved_tensors
        parts: Parts = ctx.parts
        bias, passed = Bias(row, col, parts.slope), Passed(q, k, v, c, y, factor, least)
        _, _, _, of_c, of_row, of_col, _ = ctx.needs_input_grad
        dq, dk, dv, dc, drow, dcol = run_backward(parts, bias, passed, dy, c=of_c, row=of_row, col=of_col)
        return dq, dk, dv, None if dc is None else dc.to(c), drow, dcol, None

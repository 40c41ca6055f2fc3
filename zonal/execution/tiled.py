"""Score tiles that are made, used and forgotten: exact attention in memory linear in the number of tokens.

Forward keeps y and one number a row (the anchor's factor, or the log of the row's sum); backward makes every tile again.
Per tile, with D_t = dy_t . y_t for a row anchor (0 otherwise): in log space W = exp(log K - lse), dV = W^T dY and
dS = W (dY V^T - D); else, with dY and D times the row's factor, dV = K^T dY, dK = dY V^T - D and dS = dK B l'(S).
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.anchor import Anchor, SumAnchor
from zonal.algebra.link import Link
from zonal.algebra.prior import Bias, Visibility
from zonal.algebra.score import Score
from zonal.errors import PathError
from zonal.execution import native
from zonal.execution.call import Call
from zonal.kernels.cpp.build import BuildError

# the fastest of seven sizes between 32 x 512 and 256 x 512 for 8 heads on two cores: 1 or 2 MB of scores, which stay in the cache.
# Long sequences have few tiles on the diagonal to waste and gain from larger ones.
_QUERIES, _KEYS, _LONG = 128, 256, 2048
# more heads than that are taken a few sequences at a time
_TILE_ELEMENTS = 1 << 18


class _Parts(NamedTuple):
    """What a tile is made from, apart from the tensors that get gradients."""

    score: Score
    link: Link
    anchor: SumAnchor
    log: bool
    visibility: Visibility
    slope: Tensor | None
    groups: int


def refusal(anchor: Anchor) -> str | None:
    """Why the tiled path cannot run an anchor, or None."""
    if not isinstance(anchor, SumAnchor):
        return f"anchor {type(anchor).__name__} solves with the kernel among keys, which is no sum over keys"
    return None


def blocks(heads: int, queries: int, keys: int) -> tuple[int, int, int]:
    """How much is in flight at once: (sequences, queries, keys) of a tile for H heads."""
    query_block, key_block = min(2 * _QUERIES if queries >= _LONG else _QUERIES, max(queries, 1)), min(_KEYS, max(keys, 1))
    return max(1, _TILE_ELEMENTS // (heads * query_block * key_block)), query_block, key_block


def tiled(call: Call) -> Tensor:
    """y (B, H, T, P)."""
    reason = refusal(call.bound.anchor)
    if reason is not None:
        raise PathError(f"attention: path 'tiled' cannot run operator: {reason}. Use path='dense' or path='chunked'.")
    assert isinstance(call.bound.anchor, SumAnchor)
    if native.refusal(call) is None:
        try:
            return call.scaled(native.tiled(call))
        except BuildError as error:  # once: from now on it is refused
            warnings.warn(f"zonal: torch's tiles run in place of the compiled kernel, several times slower. {error}", stacklevel=4)
    parts = _Parts(call.bound.score, call.bound.link, call.bound.anchor, call.tags.log_space, call.visibility, call.bias.slope, call.bound.groups)
    y = _Tiled.apply(call.q, call.k, call.v, call.coefficients, call.bias.row, call.bias.col, parts)
    return call.scaled(y)


def _expanded(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _folded(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads that share a key head."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


class _Tile(NamedTuple):
    """One tile: the score S, its prior's factor (None in log space), log K or K with the prior, and where it is forbidden."""

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


def _tile(parts: _Parts, q: Tensor, k: Tensor, c: Tensor, bias: Bias, span: tuple[int, int, int, int]) -> _Tile:
    score = parts.score.pair(q, k)
    if parts.link.domain is not None:
        score = score.clamp_(*parts.link.domain)
    seen = parts.visibility
    prior = bias.tile(*span, seen.position, score.dtype)
    free = seen.key_mask is None and seen.all_visible(*span)
    diagonal = None if free or parts.log or prior is not None else seen.diagonal(*span)
    mask = None if free or diagonal is not None else seen.tile(*span, score.device)
    forbidden = None if mask is None else ~mask
    if prior is not None and forbidden is not None:
        prior = prior.masked_fill(forbidden, 0)
    if parts.log:
        kernel = score if parts.score.bilinear else score.clone()  # a bilinear score's gradient does without the score
        kernel = kernel if prior is None else kernel.add_(prior)
        return _Tile(score, None, kernel if forbidden is None else kernel.masked_fill_(forbidden, float("-inf")), forbidden, None)
    kernel = parts.link.value(score, c)
    if kernel is score and (prior is not None or not free):
        kernel = kernel.clone()
    if prior is not None:
        prior = prior.exp()
        kernel.mul_(prior)
    tile = _Tile(score, prior, kernel, forbidden, diagonal)
    tile.cut_(kernel)
    return tile


def _sequences(parts: _Parts, bias: Bias, span: slice) -> tuple[_Parts, Bias]:
    """Masks and biases of some sequences of the batch."""
    mask = parts.visibility.key_mask
    row, col = (x if x is None or x.shape[0] == 1 else x[span] for x in (bias.row, bias.col))
    return parts._replace(visibility=replace(parts.visibility, made=parts.visibility.intervals, key_mask=None if mask is None else mask[span])), Bias(row, col, bias.slope)


def _forward(parts: _Parts, bias: Bias, q: Tensor, k: Tensor, v: Tensor, c: Tensor, y: Tensor, factor: Tensor, block: tuple[int, int]) -> None:
    """Fill y (b, H, T, P) and the row factors (b, H, T, 1)."""
    batch, heads, queries, _ = q.shape
    online = parts.log and parts.anchor.normalises
    count = parts.visibility.count(q.device)[..., None]
    for t0 in range(0, queries, block[0]):
        t1 = min(t0 + block[0], queries)
        state = parts.anchor.init((batch, heads, t1 - t0), v.shape[3], q)
        lo, hi = parts.visibility.key_range(t0, t1)
        for s0 in range(lo, hi, block[1]):
            s1 = min(s0 + block[1], hi)
            tile = _tile(parts, q[:, :, t0:t1], _expanded(k[:, :, s0:s1], parts.groups), c, bias, (t0, t1, s0, s1))
            kernel = tile.kernel.exp_() if parts.log and not online else tile.kernel
            state = parts.anchor.absorb(state, kernel, _expanded(v[:, :, s0:s1], parts.groups), online)
        y[:, :, t0:t1], factor[:, :, t0:t1] = parts.anchor.finalise(state, count[:, :, t0:t1], online)


class _Gradients(NamedTuple):
    """What backward fills: views of the whole gradients. c in float64; None where nobody asks."""

    q: Tensor
    k: Tensor
    v: Tensor
    c: Tensor | None
    row: Tensor | None
    col: Tensor | None


def _backward(parts: _Parts, bias: Bias, tensors: tuple[Tensor, ...], out: _Gradients, block: tuple[int, int]) -> None:
    """Add the gradients of some sequences to ``out``."""
    q, k, v, c, y, factor, dy = tensors
    online = parts.log and parts.anchor.normalises
    queries = q.shape[2]
    shared = (dy * y).sum(-1, keepdim=True) if parts.anchor.normalises else None
    if not online:  # the row's factor goes with dy, which is narrower than a tile
        dy = dy * factor
        shared = None if shared is None else shared * factor
    for t0 in range(0, queries, block[0]):
        t1 = min(t0 + block[0], queries)
        lo, hi = parts.visibility.key_range(t0, t1)
        q_tile, dy_tile, factor_tile = q[:, :, t0:t1], dy[:, :, t0:t1], factor[:, :, t0:t1]
        for s0 in range(lo, hi, block[1]):
            s1 = min(s0 + block[1], hi)
            k_tile, v_tile = _expanded(k[:, :, s0:s1], parts.groups), _expanded(v[:, :, s0:s1], parts.groups)
            tile = _tile(parts, q_tile, k_tile, c, bias, (t0, t1, s0, s1))
            kernel = tile.kernel.sub_(factor_tile).exp_() if online else tile.kernel.exp_() if parts.log else tile.kernel
            out.v[:, :, s0:s1] += _folded(kernel.mT @ dy_tile, parts.groups)
            ds = dy_tile @ v_tile.mT
            if shared is not None:
                ds -= shared[:, :, t0:t1]
            tilted = out.row is not None or out.col is not None
            dlog = (ds.mul_(kernel) if parts.log else ds * kernel) if parts.log or tilted else None
            if not parts.log:
                if tile.prior is not None:
                    ds.mul_(tile.prior)
                tile.cut_(ds)
                if out.c is not None:
                    out.c.add_(parts.link.coefficient_vjp(tile.score, ds, c).sum_to_size(out.c.shape))
                ds.mul_(parts.link.derivative(tile.score, c))
            if dlog is not None and out.row is not None:
                out.row[..., t0:t1] += dlog.sum(-1).sum_to_size(out.row[..., t0:t1].shape)
            if dlog is not None and out.col is not None:
                out.col[..., s0:s1] += dlog.sum(-2).sum_to_size(out.col[..., s0:s1].shape)
            dq_tile, dk_tile = parts.score.pair_vjp(q_tile, k_tile, tile.score, ds)
            out.q[:, :, t0:t1] += dq_tile
            out.k[:, :, s0:s1] += _folded(dk_tile, parts.groups)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, c: Tensor, row: Tensor | None, col: Tensor | None, parts: _Parts
    ) -> Tensor:
        batch, heads, queries, _ = q.shape
        y, factor = q.new_empty(batch, heads, queries, v.shape[3]), q.new_empty(batch, heads, queries, 1)
        sequences, *block = blocks(heads, queries, k.shape[2])
        for b in range(0, batch, sequences):
            span = slice(b, b + sequences)
            some, bias = _sequences(parts, Bias(row, col, parts.slope), span)
            _forward(some, bias, q[span], k[span], v[span], c, y[span], factor[span], (block[0], block[1]))
        ctx.parts = parts
        ctx.save_for_backward(q, k, v, c, row, col, y, factor)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise PathError(
                "attention: path 'tiled' recomputes its tiles in backward and has no second derivative. "
                "Use path='dense' where you need create_graph=True."
            )
        q, k, v, c, row, col, y, factor = ctx.saved_tensors
        parts: _Parts = ctx.parts
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dc = torch.zeros_like(c, dtype=torch.float64) if ctx.needs_input_grad[3] else None
        drow = torch.zeros_like(row) if ctx.needs_input_grad[4] else None
        dcol = torch.zeros_like(col) if ctx.needs_input_grad[5] else None
        sequences, *block = blocks(q.shape[1], q.shape[2], k.shape[2])
        for b in range(0, q.shape[0], sequences):
            span = slice(b, b + sequences)
            some, bias = _sequences(parts, Bias(row, col, parts.slope), span)
            views = [x if x is None or x.shape[0] == 1 else x[span] for x in (drow, dcol)]
            out = _Gradients(dq[span], dk[span], dv[span], dc, *views)
            _backward(some, bias, (q[span], k[span], v[span], c, y[span], factor[span], dy[span]), out, (block[0], block[1]))
        return dq, dk, dv, None if dc is None else dc.to(c), drow, dcol, None

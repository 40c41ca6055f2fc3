"""Ridge and Koopman read-outs whose past fades, in blocks: exact token by token, whatever the block size.

Within a block all sums are counted in units of its start. With g_i the inverse of the product of rates up to token i,
token i adds the rows z_i sqrt(g_i) and its pseudo-key e sqrt(r rho (1 - l_i) g_i), and A_t = A_0 + the sum of the rows
it sees. A read-out does not change when G, M and C are scaled together, so nothing is scaled back. Blocks are short
enough that g stays small, as a large g costs the factorisation digits. Between blocks the sums are carried in units of
their own time, where nothing grows. float64 throughout.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import Ridge
from zonal.algebra.declaration import require_values
from zonal.algebra.primal import factorised, on_heads
from zonal.execution.call import Call
from zonal.execution.paths.blocks import (
    Factor,
    Sight,
    into_blocks,
    refuse_second_derivative,
    rows_from_blocks,
    rows_into_blocks,
)
from zonal.memory import FadingStatistics, Tokens
from zonal.memory.fading import directions, given_back
from zonal.memory.inverse import positive_inverse
from zonal.memory.ridge import previous_keys, rows_of

MOST_GROWTH = 12.0
"""The largest log g within a block: 1e5 in units of rounding."""


class _Carried(torch.autograd.Function):
    """The sums S_0 … S_{n-1} with S_0 = first, S_{n+1} = e^{log_keep_n} S_n + part_n.

    parts: (B, Hkv, n, …); log_keep: (B, Hkv, n). The result is stacked like parts.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, first: Tensor, log_keep: Tensor) -> Tensor:  # type: ignore[override]
        keep = log_keep.exp().view(*log_keep.shape, *[1] * (parts.ndim - 3))
        carried = [first.expand_as(parts[:, :, 0])]
        for n in range(parts.shape[2] - 1):
            carried.append(torch.addcmul(parts[:, :, n], carried[n], keep[:, :, n]))
        states = torch.stack(carried, 2)
        ctx.save_for_backward(states, keep)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        states, keep = ctx.saved_tensors
        # of S_{n+1}, which is what part n goes into; nothing reads what follows the last block
        found = [torch.zeros_like(grad[:, :, 0])]
        for n in range(grad.shape[2] - 1, 0, -1):
            found.append(torch.addcmul(grad[:, :, n], found[-1], keep[:, :, n]))
        later = torch.stack(found[::-1], 2)
        first = grad[:, :, 0] + later[:, :, 0] * keep[:, :, 0]
        return later, first, (later * states * keep).flatten(3).sum(-1)


class FadingRows(NamedTuple):
    """The rows that the tokens of blocks add to A.

    They are keys z (B, Hkv, n, C, r) times weight (B, Hkv, n, C), and unit vectors with index direction (B or 1, 1, n,
    C) times back (B, Hkv, n, C).
    """

    z: Tensor
    weight: Tensor
    direction: Tensor
    back: Tensor


@torch.no_grad()
def factorise(rows: FadingRows, start: Tensor, sight: Sight | None) -> Factor:
    """The factor of blocks that start from A_0 = start (B, Hkv, n, r, r). Without sight their queries see A_0 alone."""
    inverse = positive_inverse(start, "attention")
    if sight is None:
        return Factor(inverse, None, None)
    z, r = rows.z, start.shape[-1]
    units = F.one_hot(rows.direction, r).to(z).expand(z.shape)
    both = torch.stack([z * rows.weight.sqrt()[..., None], units * rows.back.sqrt()[..., None]], -2).flatten(-3, -2)
    spread = both @ inverse
    block = spread @ both.mT
    block.diagonal(dim1=-2, dim2=-1).add_(1)
    lower = factorised(block, "attention")
    return Factor(inverse, torch.linalg.solve_triangular(lower.mT, spread.mT, upper=True, left=False), doubled(sight))


def doubled(sight: Sight) -> Sight:
    """What is seen of two rows a key."""
    seen = torch.ones(sight.size, sight.size, dtype=torch.bool).tril(sight.diagonal)
    return Sight(sight.groups, sight.size, 0, seen.repeat_interleave(2, 1))


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        back: Tensor,
        start: Tensor,
        direction: Tensor,
        factor: Factor,
        sight: Sight | None,
    ) -> Tensor:
        y = factor.apply(x, x.new_ones(()))
        ctx.factor, ctx.sight = factor, sight
        ctx.save_for_backward(y, z, weight, direction)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        y, z, weight, direction = ctx.saved_tensors
        u = ctx.factor.apply(grad, grad.new_ones(()))
        product = u.mT @ y
        dstart = -0.5 * (product + product.mT)
        if ctx.sight is None:
            return u, None, None, None, dstart, None, None, None
        # dA_t = -u_t y_t^T, and A_t has the rows that t sees
        uz, yz = ctx.sight.cut_(u @ z.mT), ctx.sight.cut_(y @ z.mT)
        dz = -weight[..., None] * (uz.mT @ y + yz.mT @ u)
        index = direction.expand(z.shape[:-1])[..., None, :].expand(*u.shape[:-1], z.shape[-2])
        dback = -ctx.sight.cut_(u.gather(-1, index) * y.gather(-1, index)).sum(-2)
        return u, dz, -(uz * yz).sum(-2), dback, dstart, None, None, None


def usual_block(dim: int) -> int:
    """Tokens a block for keys of ``dim`` numbers, where decays allow it."""
    return max(16, min(dim, 64) // 2)


def block_length(decay: Tensor, usual: int) -> int:
    """Tokens per block: ``usual``, halved down to 1 until no block fades by more than e^-MOST_GROWTH.

    The shapes of a traced graph cannot depend on values: it takes ``usual`` and asserts that this suffices.
    decay: (B or 1, Hkv, S).
    """
    fading = -decay.detach()

    def faded(size: int) -> Tensor:
        return F.pad(fading, (0, -fading.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1).amax()

    if torch.compiler.is_compiling():
        require_values(
            faded(usual) <= MOST_GROWTH,
            f"attention: compiled, a past may fade by no more than e^-{MOST_GROWTH:g} over {usual} tokens. "
            "Run such decays without torch.compile.",
        )
        return usual
    size = usual
    while size > 1 and bool(faded(size) > MOST_GROWTH):
        size //= 2
    return size


def fading(call: Call, tokens: Tokens, begun: FadingStatistics, block: int | None) -> Tensor:
    """y (B, H, T, P) float64, before the anchor's factor, for causal queries at the last T tokens after ``begun``."""
    anchor, groups, queries, keys = cast(Ridge, call.bound.anchor), call.bound.groups, call.q.shape[2], tokens.length
    if queries == 0:
        return call.q[..., :1].expand(*call.q.shape[:3], call.v.shape[3])  # no rows, but part of the graph
    silent = tokens.silent()
    z, v = silent.k.double(), silent.v.double()
    r = z.shape[-1]
    decay = (z.new_zeros(z.shape[:3]) if tokens.log_decay is None else tokens.log_decay).expand(z.shape[:3])
    size = block_length(decay, min(block or usual_block(r), keys))
    direction = directions(tokens.mask, begun.real, keys, r)[:, None]
    rho = anchor.ridge(call.bound.anchor_params, call.bound.kv_heads).to(z).view(1, -1, 1)

    def cut(x: Tensor) -> Tensor:  # (B, h, S) -> (B, h, n, C)
        return F.pad(x, (0, -keys % size)).unflatten(-1, (-1, size))

    zb, vb, step, direction = into_blocks(z, size), into_blocks(v, size), cut(decay), cut(direction)
    grown = -step.cumsum(-1)
    weight, left = (
        grown.exp(),
        (grown - grown[..., -1:]).exp(),
    )  # of each token, in units of the block's start and of its end
    back, keep = -r * torch.expm1(step), -grown[..., -1]
    ended = zb * left[..., None]
    gram = _Carried.apply(ended.mT @ zb, begun.gram, keep)
    level = _Carried.apply(given_back(direction, back * left, r), begun.level, keep)
    start = gram + torch.diag_embed(rho[..., None] * level)
    rows = FadingRows(zb, weight, direction, rho[..., None] * back * weight)
    sight = None if size == 1 and not call.include_self else Sight(groups, size, 0 if call.include_self else -1)
    factor = factorise(rows, start, sight)

    def solved(x: Tensor) -> Tensor:
        return _Solve.apply(x, rows.z, rows.weight, rows.back, start, rows.direction, factor, sight)

    def summed(x: Tensor, k: Tensor, values: Tensor, first: Tensor) -> Tensor:
        """sum over visible s of (x_t . k_s) values_s."""
        y = x @ _Carried.apply(k.mT @ (values * left[..., None]), first, keep)
        return y if sight is None else y + sight.cut(x @ k.mT) @ (values * weight[..., None])

    q = call.q.double()
    x = solved(rows_into_blocks(F.pad(q, (0, 0, keys - queries, 0)), groups, size))
    if anchor.shifts:
        assert begun.shift is not None
        assert begun.last is not None
        earlier = into_blocks(previous_keys(z, tokens.mask, begun.last), size)
        for number in range(anchor.shifts):
            further = solved(summed(x, earlier, zb, begun.shift.mT))
            which = on_heads(anchor.powers(call.bound.heads), number, x.device)
            x = further if which is None else torch.where(rows_of(which, groups, size).unsqueeze(1), further, x)
    y = summed(x, zb, vb, begun.cross.mT)
    return rows_from_blocks(y, groups, size, keys)[:, :, keys - queries :]


__all__ = ["MOST_GROWTH", "block_length", "factorise", "fading", "usual_block"]

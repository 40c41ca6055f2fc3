"""Ridge and Koopman read-outs by torch, in blocks: exact token by token, whatever the block size.

Let A_0 be the sum of keys with its ridge at a block's start, and P its inverse. The tokens of the block add rows R to
A: their keys, and pseudo-keys where the past fades. With L = chol(I + R P R^T) and R^ = L^-1 R P, the factors of
leading blocks are the leading blocks of L. So ``apply(X) = X P - ((X R^^T) o mask) R^`` gives row t as P_t x_t, with
P_t the inverse of what row t sees. With u = P_t grad, the gradient of A_t is -u y^T: masked products within the block
for the rows, and -u^T y for A_0.

Where the past fades, all sums of a block are counted in units of its start. With g_i the inverse of the product of
rates up to token i, token i adds the rows z_i sqrt(g_i) and its pseudo-key e sqrt(r rho (1 - l_i) g_i). A read-out does
not change when G, M and C are scaled together, so nothing is scaled back. Blocks are short enough that g stays small,
as a large g costs the factorisation digits. Between blocks the sums are carried in units of their own time, where
nothing grows. Such read-outs are float64 throughout.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal import torch_func
from zonal.algebra.anchor import Ridge
from zonal.algebra.declaration import require_values
from zonal.algebra.primal import contraction, factorised, on_heads
from zonal.execution.call import Call, empty_memory
from zonal.execution.paths.scan import Rule, Step
from zonal.kernels.op import no_second_derivative
from zonal.memory import FadingStatistics, RidgeStatistics, Tokens
from zonal.memory.compact import statistics_of
from zonal.memory.fading import directions, given_back
from zonal.memory.inverse import positive_inverse, with_ridge
from zonal.memory.ridge import previous_keys, read_out, ridge_of, rows_of
from zonal.memory.whitened import WhitenedFeatures

MOST_GROWTH = 12.0
"""The largest log g within a block: 1e5 in units of rounding."""
_SAFE_TOKENS = 1024  # eps |G| / rho < 1e-3 for unit keys and rho = 0.1
_LOST = 1e-3  # of a number, from which on float32 is not enough: LOST of ridge.hpp
Statistics = RidgeStatistics | FadingStatistics


def usual_block(dim: int, fades: bool = False) -> int:
    """Tokens per block for keys of ``dim`` numbers. About ``dim`` rows are best (measured for 16 to 64)."""
    rows = min(max(dim, 32), 64)
    return rows // 2 if fades else rows


def by_torch(call: Call, tokens: Tokens, before: Statistics | None, block: int | None) -> Tensor:
    """y (B, H, T, P) before the anchor's factor, for queries at the last of the tokens that follow ``before``."""
    queries, keys = call.q.shape[2], tokens.length
    if call.causal and queries == 0:
        return call.q[..., :1].expand(*call.q.shape[:3], call.v.shape[3])  # no rows, but part of the graph
    begun = cast(Statistics, statistics_of(empty_memory(call))) if before is None else before
    dtype = torch.float64 if begun.fades or _loses_digits(call, tokens, begun) else tokens.k.dtype
    if not call.causal:
        return _free(call, tokens, begun, dtype)
    # keys before the first query (before its chunk) are summed up at once
    base = keys - queries if call.chunk is None else (keys - queries) // call.chunk * call.chunk
    if base:
        begun = cast(Statistics, begun.extended(tokens.span(0, base)))
    return _tied(call, tokens.span(base, keys), begun, dtype, block)


@torch.no_grad()
def _loses_digits(call: Call, tokens: Tokens, before: Statistics) -> bool:
    """Whether float32 would lose three digits.

    It does when the squared length of keys is large against the ridge: gradients lose as much. Past a thousand tokens
    it also does when keys that fill few directions, after others, make eps |G| |P| large.
    """
    z, anchor = _featured(call, tokens.silent().k), cast(Ridge, call.bound.anchor)
    if z.dtype == torch.float64 or z.numel() == 0:
        return False
    rho = anchor.ridge(call.bound.anchor_params, call.bound.kv_heads).to(z.device)
    eps, peak = torch.finfo(z.dtype).eps, z.square().sum(-1).amax(-1)
    if (
        not anchor.moving
        and not torch.compiler.is_compiling()
        and not torch_func.active()
        and bool((eps * (peak / rho).square() > _LOST).any())
    ):
        return True
    if tokens.length + before.count <= _SAFE_TOKENS:
        return False
    gram = (z.mT @ z).double() + before.whitened(call.bound)[0]
    peak = peak.to(gram)
    if before.peak is not None:
        peak = torch.maximum(peak, before.peak.to(gram))
    ridge = ridge_of(anchor, rho.view(1, -1, 1, 1), gram, peak[..., None, None])
    condition = torch.linalg.matrix_norm(gram) * torch.linalg.matrix_norm(
        positive_inverse(with_ridge(gram, ridge), "attention")
    )
    return bool((eps * condition > _LOST).any())


def _featured(call: Call, x: Tensor) -> Tensor:
    """Prepared queries or keys as the sums have them: whitened features, where there are features."""
    white = WhitenedFeatures.of(call.bound, call.head_dim)
    return x if white is None else white.whitened(x)


def _free(call: Call, tokens: Tokens, begun: Statistics, dtype: torch.dtype) -> Tensor:
    """All keys are visible to all queries: one solve, with the sums after the last key."""
    anchor, silent = cast(Ridge, call.bound.anchor), tokens.silent()
    z, v = _featured(call, silent.k).to(dtype), silent.v.to(dtype)
    gram, cross, shift, last = (None if x is None else x.to(dtype) for x in begun.whitened(call.bound))
    assert gram is not None
    assert cross is not None
    gram, cross, peak, contracted = gram + z.mT @ z, cross + v.mT @ z, begun.peak, None
    if peak is not None and tokens.length:
        peak = torch.maximum(peak.to(dtype), z.square().sum(-1).amax(-1))
    rho = anchor.ridge(call.bound.anchor_params, call.bound.kv_heads).to(z).view(1, -1, 1, 1)
    regular = with_ridge(gram, ridge_of(anchor, rho, gram, None if peak is None else peak[..., None, None]))
    if shift is not None and last is not None:
        shift = shift + z.mT @ previous_keys(z, tokens.mask, last)
        contracted = contraction(regular, shift, "attention") if anchor.spectral else None
    q, inverse = _featured(call, call.q.to(dtype)), positive_inverse(regular, "attention")
    return read_out(q, call.bound, inverse, shift, cross, contracted)


def _tied(call: Call, tokens: Tokens, begun: Statistics, dtype: torch.dtype, block: int | None) -> Tensor:
    """Each query sees the tokens before it (or before its chunk), after ``begun``."""
    anchor, bound = cast(Ridge, call.bound.anchor), call.bound
    queries, length, groups = call.q.shape[2], tokens.length, bound.groups
    silent = tokens.silent()
    q, z, v = _featured(call, call.q.to(silent.k)).to(dtype), _featured(call, silent.k).to(dtype), silent.v.to(dtype)
    _, cross, shift, last = (None if x is None else x.to(dtype) for x in begun.whitened(bound))
    assert cross is not None
    size, sight = _cut(call, tokens, begun, z.shape[3], block)
    blocks = _Blocks.of(call, tokens, begun, into_blocks(z, size), sight)
    x = blocks.solved(rows_into_blocks(F.pad(q, (0, 0, length - queries, 0)), groups, size))
    if shift is not None and last is not None:
        earlier, contracted = into_blocks(previous_keys(z, tokens.mask, last), size), None
        if anchor.spectral:
            shifts = blocks.carried(blocks.rows.z, earlier, shift)
            contracted = contraction(blocks.start, shifts, "attention")[..., None, None]
        for number in range(anchor.shifts):
            further = blocks.solved(blocks.summed(x, earlier, blocks.rows.z, shift.mT))
            further = further if contracted is None else further * contracted
            which = on_heads(anchor.powers(bound.heads), number, x.device)
            x = further if which is None else torch.where(rows_of(which, groups, size).unsqueeze(1), further, x)
    y = blocks.summed(x, blocks.rows.z, into_blocks(v, size), cross.mT)
    return rows_from_blocks(y, groups, size, length)[:, :, length - queries :]


def _cut(call: Call, tokens: Tokens, begun: Statistics, r: int, block: int | None) -> tuple[int, "Sight | None"]:
    """Tokens a block, and what its queries see of it: None where that is nothing."""
    usual, chunk, length = block or usual_block(r, begun.fades), call.chunk, tokens.length
    mask, diagonal = None, 0 if call.tags.includes_self else -1
    if chunk is not None:
        if call.tags.by_query or chunk > usual:
            return chunk, None
        size = chunk * max(1, usual // chunk)
        mask = Rule(True, False, chunk, 0).mask(Step(0, size, 0, size, True), tokens.k.device)
    elif tokens.log_decay is not None:
        size = block_length(tokens.log_decay, min(usual, length))
    else:
        size = min(usual, length)
        size = -(-length // -(-length // size)) if block is None else size  # even blocks
    return size, None if mask is None and size + diagonal < 1 else Sight(call.bound.groups, size, diagonal, mask)


class _Blocks(NamedTuple):
    """Blocks of keys with A_0 = start (B, Hkv, n, r, r) of each and its factor."""

    rows: "Rows"
    start: Tensor
    factor: "Factor"
    sight: "Sight | None"
    fading: "Fading | None"

    @staticmethod
    def of(call: Call, tokens: Tokens, begun: Statistics, z: Tensor, sight: "Sight | None") -> "_Blocks":
        """Of keys z (B, Hkv, n, C, r), those of ``tokens``, after ``begun``."""
        anchor, bound, (size, r) = cast(Ridge, call.bound.anchor), call.bound, z.shape[3:]
        rho = anchor.ridge(bound.anchor_params, bound.kv_heads).to(z).view(1, -1, 1, 1, 1)
        first = begun.whitened(bound)[0].to(z)
        if begun.level is None:
            gram, peak = carried(z.mT @ z, first), None
            if begun.peak is not None:
                largest = z.square().sum(-1).amax(-1)  # (B, Hkv, n)
                so_far = torch.cat([begun.peak.to(largest).unsqueeze(2), largest[:, :, :-1]], 2)
                peak = so_far.cummax(2).values[..., None, None]
            start = with_ridge(gram, ridge_of(anchor, rho, gram, peak))
            rows, fading = Rows(z, None, None, None), None
        else:
            fading = Fading.of(tokens, begun, size, r)
            gram = carried((z * fading.left[..., None]).mT @ z, first, fading.keep)
            given = given_back(fading.direction, fading.back * fading.left, r)
            start = with_ridge(gram, rho * carried(given, begun.level, fading.keep)[..., None])
            rows = Rows(z, fading.weight, rho[..., 0] * fading.back * fading.weight, fading.direction)
        return _Blocks(rows, start, factorise(rows, start, sight), sight, fading)

    def solved(self, x: Tensor) -> Tensor:
        """P_t x_t for rows x (B, Hkv, n, G C, r)."""
        return _Solve.apply(x, self.start, *self.rows, self.factor, self.sight)

    def carried(self, k: Tensor, values: Tensor, first: Tensor) -> Tensor:
        """sum of k^T values over the tokens before each block, which ``first`` precedes."""
        if self.fading is None:
            return carried(k.mT @ values, first)
        return carried(k.mT @ (values * self.fading.left[..., None]), first, self.fading.keep)

    def summed(self, x: Tensor, k: Tensor, values: Tensor, first: Tensor) -> Tensor:
        """sum over visible s of (x_t . k_s) values_s, which ``first`` precedes."""
        y = x @ self.carried(k, values, first)
        if self.sight is None:
            return y
        values = values if self.fading is None else values * self.fading.weight[..., None]
        return y + self.sight.cut(x @ k.mT) @ values


# -- a past that fades -------------------------------------------------------------------------------


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


class Fading(NamedTuple):
    """How the tokens of blocks (B, Hkv, n, C) fade.

    weight, left: of each token, in units of its block's start and of its end. keep (B, Hkv, n): log of what a block
    leaves of the past. direction (B or 1, 1, n, C), back: where each token gives back how much of the ridge.
    """

    weight: Tensor
    left: Tensor
    keep: Tensor
    direction: Tensor
    back: Tensor

    @staticmethod
    def of(tokens: Tokens, begun: Statistics, size: int, r: int) -> "Fading":
        """Of tokens after ``begun`` whose keys have r numbers, in blocks of ``size``."""
        assert tokens.log_decay is not None
        keys = tokens.length

        def cut(x: Tensor) -> Tensor:  # (B, h, S) -> (B, h, n, C)
            return F.pad(x, (0, -keys % size)).unflatten(-1, (-1, size))

        step = cut(tokens.log_decay.expand(tokens.k.shape[:3]))
        direction = cut(directions(tokens.mask, begun.real, keys, r)[:, None])
        grown = -step.cumsum(-1)
        left = (grown - grown[..., -1:]).exp()
        return Fading(grown.exp(), left, -grown[..., -1], direction, -r * torch.expm1(step))


def carried(parts: Tensor, first: Tensor, log_keep: Tensor | None = None) -> Tensor:
    """The sums S_0 … S_{n-1} with S_0 = first and S_{n+1} = e^{log_keep_n} S_n + part_n.

    parts: (B, Hkv, n, …); log_keep: (B, Hkv, n), None = nothing fades. The result is stacked like parts.
    """
    if log_keep is not None:
        return _Carried.apply(parts, first, log_keep)
    return torch.cat([first.unsqueeze(2), parts[:, :, :-1]], 2).cumsum(2)


class _Carried(torch.autograd.Function):
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


# -- solves within blocks ----------------------------------------------------------------------------


class Sight(NamedTuple):
    """Which rows of its own block each query sees: s <= t + diagonal, or a mask (size, rows) for any other rule."""

    groups: int
    size: int
    diagonal: int
    mask: Tensor | None = None

    def cut_(self, scores: Tensor) -> Tensor:
        """scores (…, G size, rows) with zeros, in place, where nothing is seen."""
        grid = scores.unflatten(-2, (self.groups, self.size))
        if self.mask is None:
            grid.tril_(self.diagonal)  # five times faster than a mask, and sets NaN to 0 as well
        else:
            grid.masked_fill_(~self.mask, 0)
        return scores

    def cut(self, scores: Tensor) -> Tensor:
        """``cut_`` that gradients pass through."""
        grid = scores.unflatten(-2, (self.groups, self.size))
        grid = grid.tril(self.diagonal) if self.mask is None else grid.masked_fill(~self.mask, 0)
        return grid.flatten(-3, -2)

    def doubled(self, device: torch.device) -> "Sight":
        """What is seen of two rows a key."""
        seen = torch.ones(self.size, self.size, dtype=torch.bool, device=device).tril(self.diagonal)
        return Sight(self.groups, self.size, 0, seen.repeat_interleave(2, 1))


class Rows(NamedTuple):
    """The rows that the tokens of blocks add to A.

    They are keys z (B, Hkv, n, C, r) times weight (B, Hkv, n, C), and unit vectors with index direction (B or 1, 1, n,
    C) times back (B, Hkv, n, C). The last three are None where nothing fades.
    """

    z: Tensor
    weight: Tensor | None
    back: Tensor | None
    direction: Tensor | None


class Factor(NamedTuple):
    """Inverses at the start of each block, (B, Hkv, n, r, r).

    R^^T (B, Hkv, n, r, rows) and the visibility within blocks are None when blocks see only earlier blocks.
    """

    inverse: Tensor
    half: Tensor | None = None
    sight: Sight | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Row t of x (B, Hkv, n, G C, r) -> P_t x_t."""
        y = x @ self.inverse
        if self.half is None or self.sight is None:
            return y
        near = self.sight.cut_(x @ self.half)
        return y.flatten(0, 2).baddbmm_(near.flatten(0, 2), self.half.mT.flatten(0, 2), alpha=-1).view(y.shape)


@torch.no_grad()
def factorise(rows: Rows, start: Tensor, sight: Sight | None) -> Factor:
    """The factor of blocks that start from A_0 = start (B, Hkv, n, r, r). Without sight their queries see A_0 alone."""
    inverse = positive_inverse(start, "attention")
    if sight is None:
        return Factor(inverse)
    added = rows.z
    if rows.weight is not None and rows.back is not None and rows.direction is not None:
        units = F.one_hot(rows.direction, start.shape[-1]).to(added).expand(added.shape)
        both = added * rows.weight.sqrt()[..., None], units * rows.back.sqrt()[..., None]
        added, sight = torch.stack(both, -2).flatten(-3, -2), sight.doubled(start.device)
    spread = added @ inverse
    block = spread @ added.mT
    block.diagonal(dim1=-2, dim2=-1).add_(1)
    lower = factorised(block, "attention")
    # R^^T = (R P)^T L^-T: the side on which the triangular solve is fast
    return Factor(inverse, torch.linalg.solve_triangular(lower.mT, spread.mT, upper=True, left=False), sight)


class _Solve(torch.autograd.Function):
    """P_t x_t for rows x, of which ``factor`` has the inverses."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, start: Tensor, z: Tensor, weight: Tensor | None, back: Tensor | None,
        direction: Tensor | None, factor: Factor, sight: Sight | None,
    ) -> Tensor:  # fmt: skip
        y = factor.apply(x)
        ctx.factor, ctx.sight = factor, sight
        ctx.save_for_backward(y, z, weight, direction)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        no_second_derivative("chunked")
        y, z, weight, direction = ctx.saved_tensors
        u = ctx.factor.apply(grad)
        product = u.mT @ y
        dstart = -0.5 * (product + product.mT)
        if ctx.sight is None:
            return u, dstart, None, None, None, None, None, None
        # dA_t = -u_t y_t^T, and A_t has the rows that t sees
        uz, yz = ctx.sight.cut_(u @ z.mT), ctx.sight.cut_(y @ z.mT)
        dz = -(uz.mT @ y + yz.mT @ u)
        if weight is None:
            return u, dstart, dz, None, None, None, None, None
        index = direction.expand(z.shape[:-1])[..., None, :].expand(*u.shape[:-1], z.shape[-2])
        dback = -ctx.sight.cut_(u.gather(-1, index) * y.gather(-1, index)).sum(-2)
        return u, dstart, dz * weight[..., None], -(uz * yz).sum(-2), dback, None, None, None


def into_blocks(x: Tensor, size: int) -> Tensor:
    """(B, Hkv, N, d) -> (B, Hkv, n, size, d), zeros at the end."""
    if x.shape[2] % size:
        x = F.pad(x, (0, 0, 0, -x.shape[2] % size))
    return x.unflatten(2, (-1, size))


def rows_into_blocks(q: Tensor, groups: int, size: int) -> Tensor:
    """Queries (B, H, N, d) -> (B, Hkv, n, G size, d)."""
    q = into_blocks(q, size).unflatten(1, (-1, groups))
    return q.transpose(2, 3).flatten(3, 4)


def rows_from_blocks(y: Tensor, groups: int, size: int, length: int) -> Tensor:
    """(B, Hkv, n, G size, P) -> (B, H, length, P)."""
    y = y.unflatten(3, (groups, size)).transpose(2, 3)
    return y.flatten(3, 4).flatten(1, 2)[:, :, :length]


__all__ = ["MOST_GROWTH", "block_length", "by_torch", "carried", "factorise", "usual_block"]

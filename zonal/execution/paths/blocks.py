"""Ridge and Koopman read-outs of a sequence in blocks: exact token by token, whatever the block size.

With P the inverse of G + rho I at a block's start and Z its keys: L = chol(I + Z P Z^T), Z^ = L^-1 Z P. The factors of
leading blocks are the leading blocks of L, so ``apply(X) = X P - ((X Z^^T) o mask) Z^`` gives row t as P_t x_t, with
the inverse that includes exactly the keys its mask allows. The block then carries on P <- P - Z^^T Z^.

The gradient needs no other factorisation. With u_t = P_t dx'_t (the same ``apply``), dG_t = -u_t x'_t^T, and each key
gets dz_s = -sum over t that see s of u_t (x'_t . z_s) + x'_t (u_t . z_s): two masked products within the block, and a
running r x r sum from later blocks.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.primal import factorised
from zonal.errors import PathError
from zonal.memory.inverse import REMAKE, positive_inverse, with_ridge


class Sight(NamedTuple):
    """Which keys of its own block each row sees: s <= t + diagonal, or a mask (size, size) for any other rule."""

    groups: int
    size: int
    diagonal: int
    mask: Tensor | None = None

    def cut_(self, scores: Tensor) -> Tensor:
        """scores (…, G size, size) with zeros, in place, where nothing is seen."""
        grid = scores.unflatten(-2, (self.groups, self.size))
        if self.mask is None:
            grid.tril_(self.diagonal)  # five times faster than a mask, and as deaf to NaN
        else:
            grid.masked_fill_(~self.mask, 0)
        return scores

    def cut(self, scores: Tensor) -> Tensor:
        """``cut_`` that gradients pass through."""
        grid = scores.unflatten(-2, (self.groups, self.size))
        grid = grid.tril(self.diagonal) if self.mask is None else grid.masked_fill(~self.mask, 0)
        return grid.flatten(-3, -2)


class Factor(NamedTuple):
    """Inverses at the start of each block, (B, Hkv, n, r, r); None for I / rho everywhere (one block, nothing before).

    Z^^T (B, Hkv, n, r, C) and the visibility within blocks are None when blocks see only earlier blocks.
    """

    inverse: Tensor | None
    half: Tensor | None
    sight: Sight | None

    def apply(self, x: Tensor, ridge: Tensor) -> Tensor:
        """Row t of x (B, Hkv, n, G C, r) -> P_t x_t."""
        y = x / ridge if self.inverse is None else x @ self.inverse
        if self.half is None or self.sight is None:
            return y
        near = self.sight.cut_(x @ self.half)
        return y.flatten(0, 2).baddbmm_(near.flatten(0, 2), self.half.mT.flatten(0, 2), alpha=-1).view(y.shape)


@torch.no_grad()
def factorise(z: Tensor, gram: Tensor | None, ridge: Tensor, sight: Sight | None) -> Factor:
    """The factor of blocks z (B, Hkv, n, C, r) after keys with sum ``gram``. Without sight, inverses are direct."""
    batch, heads, blocks, size, r = z.shape
    if sight is None:
        before = exclusive(z.mT @ z, gram)
        return Factor(positive_inverse(with_ridge(before, ridge), "attention"), None, None)
    rho = ridge.squeeze(2)
    inverse = None if gram is None else positive_inverse(with_ridge(gram, rho), "attention")
    inverses, halves = [], []
    total, since = gram, 0
    for n in range(blocks):
        part = z[:, :, n]
        zp = part / rho if inverse is None else part @ inverse
        block = (zp @ part.mT).flatten(0, 1)
        block.diagonal(dim1=-2, dim2=-1).add_(1)
        lower = factorised(block, "attention")
        # Z^^T = (Z P)^T L^-T: the side on which the triangular solve is fast
        half = torch.linalg.solve_triangular(lower.mT, zp.mT.flatten(0, 1), upper=True, left=False)
        inverses.append(inverse)
        halves.append(half.view(batch, heads, 1, r, size))
        if n + 1 == blocks:
            break
        if inverse is None:
            inverse = torch.diag_embed((1 / rho).expand(batch, heads, 1, r).squeeze(2))
            inverses[0] = inverse
        if n + 1 - since >= max(1, REMAKE // size):
            keys = z[:, :, since : n + 1].flatten(2, 3)
            added = keys.mT @ keys
            total, since = added if total is None else total + added, n + 1
            inverse = positive_inverse(with_ridge(total, rho), "attention")
        else:
            inverse = torch.baddbmm(inverse.flatten(0, 1), half, half.mT, alpha=-1).view(inverse.shape)
    first = inverses[0]
    if blocks == 1:
        return Factor(None if first is None else first.unsqueeze(2), halves[0], sight)
    return Factor(torch.stack(inverses, 2), torch.cat(halves, 2), sight)


def exclusive(parts: Tensor, first: Tensor | None) -> Tensor:
    """Running sums along axis 2 that leave out each part itself: (B, Hkv, n, …), starting at ``first``."""
    start = torch.zeros_like(parts[:, :, :1]) if first is None else first.unsqueeze(2).expand_as(parts[:, :, :1])
    return torch.cat([start, parts[:, :, :-1]], 2).cumsum(2)


def refuse_second_derivative() -> None:
    """Called in a backward pass that uses kept factors. Raises: PathError when that pass is itself differentiated."""
    if torch.is_grad_enabled():
        raise PathError(
            "attention: path 'chunked' uses its factors again in backward and has no second derivative. "
            "Use path='dense' where you need create_graph=True."
        )


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, z: Tensor, gram: Tensor | None, ridge: Tensor, factor: Factor
    ) -> Tensor:
        y = factor.apply(x, ridge)
        ctx.sight = factor.sight
        ctx.save_for_backward(z, y, ridge, factor.inverse, factor.half)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative()
        z, y, ridge, inverse, half = ctx.saved_tensors
        factor = Factor(inverse, half, ctx.sight)
        u = factor.apply(grad, ridge)
        _, needs_z, needs_gram, needs_ridge, _ = ctx.needs_input_grad
        dz = dgram = dridge = None
        blocks = z.shape[2]
        if needs_z or needs_gram:
            both = None
            if blocks > 1 or needs_gram:
                both = u.mT @ y
                both = both + both.mT
            if needs_z:
                dz = torch.zeros(z.shape, dtype=z.dtype, device=z.device)  # contiguous, whatever z is
                if factor.sight is not None:
                    flat = dz.flatten(0, 2)
                    for rows, other in ((y, u), (u, y)):
                        seen = factor.sight.cut_(rows @ z.mT)
                        flat.baddbmm_(seen.mT.flatten(0, 2), other.flatten(0, 2), alpha=-1)
                if blocks > 1 and both is not None:
                    later = both.flip(2).cumsum(2).flip(2)[:, :, 1:]
                    dz[:, :, :-1] -= z[:, :, :-1] @ later
            if needs_gram and both is not None:
                dgram = -0.5 * both.sum(2)
        if needs_ridge:
            per_row = -(u * y).sum(-1, keepdim=True)
            dridge = per_row.sum(3, keepdim=True).sum_to_size(ridge.shape)
        return u, dz, dgram, dridge, None


def solve(x: Tensor, z: Tensor, gram: Tensor | None, ridge: Tensor, factor: Factor) -> Tensor:
    """P_t x_t for rows x (B, Hkv, n, G C, r).

    Gradients go to x, the keys z, the starting gram and the ridge (B or 1, Hkv, n or 1, 1, 1).
    """
    return _Solve.apply(x, z, gram, ridge, factor)


def linear(x: Tensor, k: Tensor, v: Tensor, first: Tensor | None, sight: Sight | None) -> Tensor:
    """sum over visible s of (x_t . k_s) v_s.

    x (B, Hkv, n, G C, r), k (B, Hkv, n, C, r), v (B, Hkv, n, C, P); first (B, Hkv, r, P) is the sum before all of them.
    """
    y = None
    if sight is not None:
        y = sight.cut(x @ k.mT) @ v
    if k.shape[2] > 1 or first is not None or y is None:
        past = x @ exclusive(k.mT @ v, first)
        y = past if y is None else y + past
    return y


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


__all__ = ["Factor", "Sight", "factorise", "into_blocks", "linear", "rows_from_blocks", "rows_into_blocks", "solve"]

"""Symmetric powers: Sym_k(q) . Sym_k(k) = (q . k)^k with C(d + k - 1, k) numbers instead of d^k.

An entry of Sym_k(x) is sqrt(k! / a!) x^a, one for each multi-index a with |a| = k. Coefficients of a polynomial are
applied to queries only, so a sum over keys never depends on what a link has learned.

There are no gathers, because indices over d^k entries cost more than the arithmetic. Degree two is packed by cyclic
distance, x_i x_{(i + j) mod d} for j = 0 … d/2, which is one product of x with a strided view of itself. Higher degrees
multiply x_i with the tail of the degree below that starts at i, which is contiguous in the order used here.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side
from zonal.tracing import constant_kept, kept


@dataclass(frozen=True)
class SymmetricPowers(FeatureMap):
    """phi(x) = [Sym_lowest(x), …, Sym_degree(x)], lowest 0 or 1, with the kernel sum_k x^k.

    ``scale`` gives other coefficients. phi(x) is (…, m) with m = C(d + degree, degree), one less without the constant.
    There is nothing to prepare, and queries and keys have the same map.
    """

    unit = False
    claim = Claim("exact", "Sym_k(q) . Sym_k(k) = (q . k)^k", 0.0)

    degree: int
    lowest: int = 0

    def __post_init__(self) -> None:
        require_whole("SymmetricPowers: degree", self.degree, most=6)
        require(self.lowest in (0, 1), f"SymmetricPowers: lowest must be 0 or 1, received {self.lowest}.")

    def sizes(self, dim: int) -> tuple[int, ...]:
        """How many features each power has, from ``lowest`` to ``degree``."""
        require(dim >= 1, f"SymmetricPowers: vectors of at least one number are required, received a size of {dim}.")
        return tuple(math.comb(dim + k - 1, k) for k in range(self.lowest, self.degree + 1))

    def dimension(self, dim: int) -> int:
        """m, the number of features of a vector of ``dim`` numbers."""
        return sum(self.sizes(dim))

    def flops(self, dim: int) -> int:
        return 0 if self.trivial else 2 * self.dimension(dim)

    @property
    def trivial(self) -> bool:
        """Whether phi(x) = x."""
        return self.degree == 1 and self.lowest == 1

    @property
    def positive(self) -> bool:
        # 1 + x + … + x^n = (x^(n + 1) - 1)/(x - 1), whose two factors have one sign when n is even
        return self.lowest == 0 and self.degree % 2 == 0

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return torch.stack([x**k for k in range(self.lowest, self.degree + 1)]).sum(0)

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        """phi(x): (…, d) -> (…, m). Differentiable once; backward recomputes instead of keeping features."""
        return x if self.trivial else _Powers.apply(x, self)

    def write(self, x: Tensor) -> Tensor:
        """phi(x) without a graph."""
        if self.trivial:
            return x
        with torch.no_grad():  # torch.compile cannot trace a decorated method of this class
            dim = x.shape[-1]
            out = x.new_empty(*x.shape[:-1], self.dimension(dim))
            at = 0
            if self.lowest == 0:
                out[..., 0] = 1
                at = 1
            out[..., at : at + dim] = x
            if self.degree == 2:
                _write_square(x, out[..., at + dim :])
            elif self.degree > 2:
                _write_powers(x, out[..., at + dim :], self.degree)
            return out

    @torch.no_grad()
    def vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradient of sum(grad * phi(x)) with respect to x, without a graph."""
        if self.trivial:
            return grad
        dim = x.shape[-1]
        at = 1 - self.lowest
        dx = grad[..., at : at + dim]
        if self.degree == 2:
            return dx + _square_vjp(x, grad[..., at + dim :])
        return dx + _powers_vjp(x, grad[..., at + dim :], self.degree) if self.degree > 2 else dx

    def scale(self, c: Tensor, dim: int) -> Tensor:
        """Coefficients of x^0, x^1, … repeated over the features of each power: (degree + 1, H, 1, 1) -> (H, m)."""
        rows = c[self.lowest : self.degree + 1, :, 0, 0].T
        return rows.index_select(1, _power_of(dim, self.lowest, self.degree, c.device))

    def scale_vjp(self, grad: Tensor, dim: int, count: int) -> Tensor:
        """Gradient with respect to c, (count, H, 1, 1), from the gradient (H, m) of ``scale(c)``."""
        sums = [part.sum(-1) for part in grad.split(self.sizes(dim), -1)]
        zero = torch.zeros_like(sums[0])
        rows = [zero] * self.lowest + sums
        return torch.stack(rows + [zero] * (count - len(rows)))[:, :, None, None]


class _Powers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, features: SymmetricPowers) -> Tensor:  # type: ignore[override]
        ctx.features = features
        ctx.save_for_backward(x)
        return features.write(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.features.vjp(ctx.saved_tensors[0], grad), None


def _windows(x: Tensor, count: int) -> Tensor:
    """The view w[…, j, i] = x[(i + j + 1) mod d] for j < count."""
    dim = x.shape[-1]
    return torch.cat([x, x[..., :count]], -1).unfold(-1, dim, 1)[..., 1:, :]


def _multiply(a: Tensor, b: Tensor, place: Tensor) -> None:
    """place = a * b; torch.compile does not trace ``out=`` of a part of a tensor."""
    if torch.compiler.is_compiling():
        place.copy_(a * b)
    else:
        torch.mul(a, b, out=place)


def _write_square(x: Tensor, out: Tensor) -> None:
    """out = [x_i^2] + [sqrt 2 x_i x_{i + j}, j = 1 …], cyclic."""
    dim = x.shape[-1]
    full = (dim - 1) // 2
    _multiply(x, x, out[..., :dim])
    root = x * math.sqrt(2)
    end = dim + full * dim
    if full:
        _multiply(root.unsqueeze(-2), _windows(x, full), out[..., dim:end].unflatten(-1, (full, dim)))
    if dim % 2 == 0:  # the opposite point is met from both sides
        _multiply(root[..., : dim // 2], x[..., dim // 2 :], out[..., end:])


def _square_vjp(x: Tensor, grad: Tensor) -> Tensor:
    dim = x.shape[-1]
    full = (dim - 1) // 2
    end = dim + full * dim
    dx = 2 * x * grad[..., :dim]
    root = x * math.sqrt(2)
    if full:
        body = grad[..., dim:end].unflatten(-1, (full, dim))
        dx += (body * _windows(root, full)).sum(-2)
        # the other factor sits at (i + j) mod d: skew the rows by padding them, add them up, fold what ran over
        width = dim + full + 1
        skew = F.pad(body * root.unsqueeze(-2), (0, width - dim)).flatten(-2)[..., : full * (width - 1)]
        total = skew.unflatten(-1, (full, width - 1)).sum(-2)
        dx[..., 1:] += total[..., : dim - 1]
        dx[..., : full + 1] += total[..., dim - 1 :]
    if dim % 2 == 0:
        half = dim // 2
        tail = grad[..., end:]
        dx[..., :half] += tail * root[..., half:]
        dx[..., half:] += tail * root[..., :half]
    return dx


@kept
def _power_of(dim: int, lowest: int, degree: int, device: torch.device) -> Tensor:
    """Which power each feature belongs to, counted from ``lowest``."""
    sizes = SymmetricPowers(degree, lowest).sizes(dim)
    return torch.cat([torch.full((size,), power, dtype=torch.int64, device=device) for power, size in enumerate(sizes)])


def _size(dim: int, degree: int) -> int:
    return math.comb(dim + degree - 1, degree)


@constant_kept(64)
def _weights(dim: int, degree: int) -> tuple[float, ...]:
    """sqrt(k! / a!) for k = 2 … degree in the order of ``_write_powers``."""
    # the multiplicity of the leading index and the product of factorials, grown with the recursion
    lead = [(i, 1, 1.0) for i in range(dim)]
    out: list[float] = []
    for k in range(2, degree + 1):
        grown = []
        for i in range(dim):
            for first, times, factorials in lead[len(lead) - _size(dim - i, k - 1) :]:
                again = times + 1 if first == i else 1
                grown.append((i, again, factorials * again))
        lead = grown
        out += [math.sqrt(math.factorial(k) / factorials) for _, _, factorials in lead]
    return tuple(out)


@kept
def _cast_weights(dim: int, degree: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_weights(dim, degree), dtype=dtype, device=device)


def _write_powers(x: Tensor, out: Tensor, degree: int) -> None:
    """Plain monomials of degrees 2 … degree, each from the one below, then their weights."""
    dim = x.shape[-1]
    below, at = x, 0
    for k in range(2, degree + 1):
        size = _size(dim, k)
        block = out[..., at : at + size]
        to = 0
        for i in range(dim):
            tail = _size(dim - i, k - 1)
            _multiply(x[..., i : i + 1], below[..., below.shape[-1] - tail :], block[..., to : to + tail])
            to += tail
        below, at = block, at + size
    out *= _cast_weights(dim, degree, x.dtype, x.device)


def _powers_vjp(x: Tensor, grad: Tensor, degree: int) -> Tensor:
    dim = x.shape[-1]
    weights = _cast_weights(dim, degree, x.dtype, x.device)
    grad = grad * weights
    sizes = [_size(dim, k) for k in range(2, degree + 1)]
    plain = x.new_empty(*x.shape[:-1], sum(sizes[:-1]))
    _write_powers(x, plain, degree - 1)
    plain /= weights[: plain.shape[-1]]
    values = [x, *plain.split(sizes[:-1], -1)]
    grads = [g.clone() for g in grad.split(sizes, -1)]
    dx = torch.zeros_like(x)
    for k in range(degree, 1, -1):
        block, below = grads[k - 2], values[k - 2]
        target = grads[k - 3] if k > 2 else dx
        at = 0
        for i in range(dim):
            tail = _size(dim - i, k - 1)
            segment = block[..., at : at + tail]
            dx[..., i] += (segment * below[..., below.shape[-1] - tail :]).sum(-1)
            target[..., target.shape[-1] - tail :] += segment * x[..., i : i + 1]
            at += tail
    return dx


__all__ = ["SymmetricPowers"]

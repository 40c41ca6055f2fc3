"""Harmonics: R_k(q . k) of unit vectors as a dot product with one number per harmonic of degree k.

The kernel R_k has rank N_k on the sphere. Nyström features at N_k points or more, (R_k(x . p_i))_i V Λ^(-1/2) with V Λ
V^T = R_k(p_i . p_j), are therefore exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra import gegenbauer
from zonal.algebra.declaration import require, require_whole
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source
from zonal.tracing import concrete, constant_kept


@dataclass(frozen=True)
class Harmonics(FeatureMap):
    """phi(x) = [1, x, H_2(x), …, H_n(x)] for unit x in R^d, d >= 2, with H_k(q) . H_k(k) = R_k(q . k).

    x = 0 gives zeros. There is nothing to prepare, and queries and keys have the same map. A zonal polynomial sum_k a_k
    R_k is positive definite on the sphere if all a_k >= 0. It is then the dot product of sqrt(a_k) H_k: ``weights``
    finds the a_k of a polynomial, and ``scale`` repeats numbers over the features of each degree.
    """

    claim = Claim("exact", "H_k(q) . H_k(k) = R_k(q . k) on unit vectors", 0.0)

    degree: int

    def __post_init__(self) -> None:
        require_whole("Harmonics: degree", self.degree, 0, 6)

    def sizes(self, dim: int) -> tuple[int, ...]:
        """How many features each degree has."""
        require(
            dim >= 2,
            f"Harmonics: vectors of at least two numbers are required (one has no angle), received a size of {dim}.",
        )
        return tuple(gegenbauer.harmonic_dimension(k, dim - 1) for k in range(self.degree + 1))

    def dimension(self, dim: int) -> int:
        return sum(self.sizes(dim))

    def flops(self, dim: int) -> int:
        return sum(4 * size * (dim + self.degree + size) for size in self.sizes(dim)[2:])

    @property
    def positive(self) -> bool:
        return self.degree == 0

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return torch.stack(gegenbauer.basis(x, self.degree + 1, dim - 1)).sum(0)

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        dim = x.shape[-1]
        sizes = self.sizes(dim)
        some = (x != 0).any(-1, keepdim=True).to(x.dtype)
        found = [some, x * some][: self.degree + 1]
        for k in range(2, self.degree + 1):
            points, factor = (value.to(x.device, x.dtype) for value in _at_points(k, dim, sizes[k]))
            found.append((gegenbauer.basis(x @ points.mT, k + 1, dim - 1)[k] @ factor) * some)
        return torch.cat(found, -1)

    def weights(self, c: Tensor, dim: int) -> Tensor:
        """a_k, (n + 1, H, 1, 1), of sum_j c_j x^j = sum_k a_k R_k(x), c (n + 1, H, 1, 1) in float64."""
        rows = gegenbauer.to_monomials(self.degree, dim - 1).to(c.device)  # lower triangular: R_k has degree k
        return torch.linalg.solve_triangular(rows, c[:, :, 0, 0].T, upper=False, left=False).T[:, :, None, None]

    def scale(self, a: Tensor, dim: int) -> Tensor:
        """Numbers of each degree repeated over its features: (n + 1, H, 1, 1) -> (H, m)."""
        return torch.cat([row.expand(-1, size) for row, size in zip(a[:, :, 0], self.sizes(dim), strict=True)], -1)


@constant_kept(16)
def _at_points(k: int, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Points (2 N_k, d) in general position, and V Λ^(-1/2) (2 N_k, N_k), float64.

    Twice as many points as needed give a good condition number. They are numbers also within a trace of torch.export.
    """
    with concrete():
        points = Source(0, dim, 1, None).units(f"harmonics {k}", 2 * size)[0]
        values, vectors = torch.linalg.eigh(gegenbauer.basis(points @ points.mT, k + 1, dim - 1)[k])
        return points, vectors[:, -size:] * values[-size:].rsqrt()


__all__ = ["Harmonics"]

"""Keys as the exact features of their kernel, over which ridge and Koopman read-outs are those of a plain product."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.operator import Bound
from zonal.features import Harmonics, harmonics

MAX_STATISTICS = 1200
"""Past this many numbers a key, the square matrices of ridge statistics are not kept, and keys and values are."""


def harmonics_of(parts: Operator | Bound) -> Harmonics | None:
    """The map that serves the kernel among keys of unit vectors, or None: where there is no finite one, and where keys
    serve as they are.
    """
    fits = parts.anchor.solves and parts.score.plain and parts.score.bound is not None
    return harmonics(parts.link) if fits else None


def width_of(parts: Operator | Bound, key_dim: int) -> int:
    """How many numbers of a key ridge statistics are made of."""
    features = harmonics_of(parts)
    return parts.score.width(key_dim) if features is None else features.dimension(key_dim)


class WhitenedFeatures(NamedTuple):
    """features and, of each, the root of the weight of its harmonics: (Hkv or 1, m) float64. Weights are learned; sums
    over keys are of features alone.
    """

    features: Harmonics
    root: Tensor

    @classmethod
    def of(cls, bound: Bound, key_dim: int) -> Self | None:
        features = harmonics_of(bound)
        if features is None:
            return None
        c = bound.coefficients if bound.coefficients.shape[1] == 1 else bound.coefficients[:, :: bound.groups]
        weights = features.weights(bound.link.monomials(c.double()), key_dim)
        some = weights > 0  # what rounding leaves of a weight of zero may be negative, and a root has no gradient there
        return cls(features, features.scale(torch.where(some, torch.where(some, weights, 1).sqrt(), 0), key_dim))

    def whitened(self, x: Tensor) -> Tensor:
        """Features (B, H, T, m) of queries or keys (B, H, T, D) times the root of their weights, so that dot products
        are the kernel.
        """
        root = self.root.to(x)
        if root.shape[0] > 1:
            root = root.repeat_interleave(x.shape[1] // root.shape[0], 0)
        return self.features(x) * root[:, None]

    def columns(self, matrix: Tensor) -> Tensor:
        """A matrix over features, (B, Hkv, n, m), as one over whitened features."""
        return matrix * self.root.to(matrix)[:, None]

    def square(self, matrix: Tensor) -> Tensor:
        """The same of (B, Hkv, m, m), on both sides."""
        return self.columns(matrix) * self.root.to(matrix)[..., None]


__all__ = ["MAX_STATISTICS", "WhitenedFeatures", "harmonics_of", "width_of"]

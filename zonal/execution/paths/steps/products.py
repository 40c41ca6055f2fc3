"""A score and a link as the kernel of sums over features computes them at a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.bound import Bound
from zonal.features.serve import powers_of
from zonal.kernels.decode import Maps


class Product(NamedTuple):
    """A score as the kernel of sums computes it from raw queries and keys: scale f(q) . f(k), f the identity or, if
    ``normalise``, x / |x|; or with ``maps`` phi(scale q) . phi(k). scale: (H,) or a number.
    """

    scale: Tensor | float
    normalise: bool = False
    maps: Maps | None = None


def product_of(bound: Bound, dim: int, scale: float | None) -> Product | None:
    """The score for vectors of ``dim`` numbers; None = torch prepares queries and keys."""
    fused = bound.score.fused(dim, bound.score_params, scale)
    if fused is not None:
        return Product(fused.scale, fused.normalise)
    layers = bound.score.layers(dim, bound.score_params, scale)
    return None if layers is None else Product(1.0, maps=Maps(*layers))


def weights_of(bound: Bound, dim: int) -> Tensor:
    """The link's coefficient of each feature's power, (H or 1, features). dim: of prepared vectors."""
    features = powers_of(bound.link)
    trivial = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu").view(2, 1, 1, 1)
    monomials = trivial if features.trivial else bound.link.monomials(bound.coefficients)
    return features.scale(monomials.float(), dim)


def by_head(x: Tensor | float, heads: int) -> Tensor:
    """A number, or one of each head, as float32 (H,)."""
    return (x if isinstance(x, Tensor) else torch.tensor([x], dtype=torch.float32, device="cpu")).float().expand(heads)


__all__ = ["Product", "by_head", "product_of", "weights_of"]

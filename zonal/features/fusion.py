"""Products of two maps, phi_left ⊗ phi_right or cheaper substitutes, for the product of their kernels."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.algebra.score import FeatureLayer
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source, part, under
from zonal.features.random import convolve, count_sketch
from zonal.formula import Activation


@dataclass(frozen=True)
class Fused(FeatureMap, abc.ABC, abstract=True):
    """Base of maps made of two maps, phi_left and phi_right."""

    left: FeatureMap
    right: FeatureMap

    @property
    def unit(self) -> bool:
        return self.left.unit or self.right.unit

    @property
    def learned(self) -> tuple[str, ...]:
        return (*(f"left_{name}" for name in self.left.learned), *(f"right_{name}" for name in self.right.learned))

    @property
    def chosen(self) -> tuple[str, ...]:
        return (*(f"left_{name}" for name in self.left.chosen), *(f"right_{name}" for name in self.right.chosen))

    @property
    def nonnegative(self) -> bool:
        return self.left.nonnegative and self.right.nonnegative

    @property
    def alike(self) -> bool:
        return self.left.alike and self.right.alike

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return self.left.kernel(x, dim) * self.right.kernel(x, dim)

    def _product_claim(self, sampled: bool, text: str) -> Claim:
        claims = {claim.kind: claim for claim in (self.right.claim, self.left.claim)}
        if "learned" in claims:
            return Claim("learned", text)
        if "biased" in claims:
            return Claim("biased", f"{text}; {claims['biased'].text}")
        exact = set(claims) == {"exact"} and not sampled
        return Claim("exact", text, 0.0) if exact else Claim("unbiased", text)

    def draw(self, source: Source) -> dict[str, Tensor]:
        self.dimension(source.dim)  # of maps that fit
        return {**under("left", self.left.draw(source.child("left"))), **self.draw_rest(source)}

    def draw_rest(self, source: Source) -> dict[str, Tensor]:
        """As ``draw``, without the left map."""
        return under("right", self.right.draw(source.child("right")))

    @abc.abstractmethod
    def fuse(self, left: Tensor, right: Tensor, buffers: Buffers) -> Tensor:
        """phi from features of both maps."""

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        left, right = self.left(x, part(buffers, "left"), side), self.right(x, part(buffers, "right"), side)
        return self.fuse(left, right, buffers)


def side_by_side(layers: Sequence[FeatureLayer]) -> FeatureLayer:
    """The features of several layers, each of a matrix of its own, in one layer."""
    activations: list[Activation] = []
    weights: list[Tensor] = []
    rows = 0
    for layer in layers:
        assert layer.weight is not None
        activations += [each._replace(start=each.start + rows) for each in layer.activations]
        weights.append(layer.weight)
        rows += layer.weight.shape[1]
    return FeatureLayer(tuple(activations), torch.cat(weights, 1))


def product(left: FeatureLayer, nodes: Sequence[FeatureLayer]) -> FeatureLayer:
    """left ⊗ node, for each of the nodes, which have equally many features."""
    count = sum(each.count for each in left.activations)
    return side_by_side([left, *nodes])._replace(left=count, nodes=len(nodes))


@dataclass(frozen=True)
class TensorProduct(Fused):
    """phi = phi_left ⊗ phi_right with all m_left · m_right products: the product of both kernels, as exact as its
    factors.
    """

    @property
    def claim(self) -> Claim:
        return self._product_claim(False, "a product of kernels is a tensor product of features")

    @property
    def positive(self) -> bool:
        return self.left.positive and self.right.positive

    def dimension(self, dim: int) -> int:
        return self.left.dimension(dim) * self.right.dimension(dim)

    def flops(self, dim: int) -> int:
        return self.left.flops(dim) + self.right.flops(dim) + self.dimension(dim)

    def layer(self, buffers: Buffers, side: Side) -> FeatureLayer | None:
        left, right = self.left.layer(part(buffers, "left"), side), self.right.layer(part(buffers, "right"), side)
        whole = [each for each in (left, right) if each is not None and not each.softmax and each.left == 0]
        return product(whole[0], whole[1:]) if len(whole) == 2 else None

    def fuse(self, left: Tensor, right: Tensor, buffers: Buffers) -> Tensor:
        return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


@dataclass(frozen=True)
class Hadamard(Fused):
    """phi_i = sqrt(m) phi_left,i phi_right,i, for two independent maps of m features.

    Unbiased for the product of kernels if both maps are unbiased and the features of at least one are ``alike`` (random
    Maclaurin with positive random features). It has m terms where the tensor product has m^2, and therefore a larger
    variance.

    Raises: ArgumentError for maps of different sizes, when the sizes are known.
    """

    @property
    def claim(self) -> Claim:
        claim = self._product_claim(True, "index by index, two independent draws")
        if claim.kind == "unbiased" and not (self.left.alike or self.right.alike):
            return Claim("biased", "features of both maps differ by index: matching them by it mixes kernels")
        return claim

    def dimension(self, dim: int) -> int:
        left, right = self.left.dimension(dim), self.right.dimension(dim)
        require(left == right, f"Hadamard: two maps of equal size are required, received {left} and {right} features.")
        return left

    def flops(self, dim: int) -> int:
        return self.left.flops(dim) + self.right.flops(dim) + 2 * self.dimension(dim)

    def fuse(self, left: Tensor, right: Tensor, buffers: Buffers) -> Tensor:
        return left * right * left.shape[-1] ** 0.5


@dataclass(frozen=True)
class Sketched(Fused):
    """The count sketch of phi_left ⊗ phi_right in ``size`` numbers, by convolution.

    It is unbiased, and signed even for two nonnegative maps.
    """

    size: int = 64

    def __post_init__(self) -> None:
        require_whole("Sketched: size", self.size, most=2**16)

    @property
    def claim(self) -> Claim:
        return self._product_claim(True, "a count sketch of the tensor product")

    @property
    def nonnegative(self) -> bool:
        return False

    @property
    def alike(self) -> bool:
        return True

    def dimension(self, dim: int) -> int:
        return self.size

    def flops(self, dim: int) -> int:
        transforms = 3 * 5 * self.size * self.size.bit_length() // 2
        return sum(each.flops(dim) + 2 * each.dimension(dim) for each in (self.left, self.right)) + transforms

    def draw_rest(self, source: Source) -> dict[str, Tensor]:
        drawn = super().draw_rest(source)
        for name, factor in (("left", self.left), ("right", self.right)):
            count = factor.dimension(source.dim)
            drawn[f"{name}hash_bucket"] = source.integers(f"{name}.bucket", self.size, source.heads, count)
            drawn[f"{name}hash_sign"] = source.signs(f"{name}.sign", source.heads, count)
        return drawn

    def fuse(self, left: Tensor, right: Tensor, buffers: Buffers) -> Tensor:
        sketches = [
            count_sketch(phi, buffers[f"{name}hash_bucket"], buffers[f"{name}hash_sign"], self.size)
            for name, phi in (("left", left), ("right", right))
        ]
        return convolve(sketches)


@dataclass(frozen=True)
class SharedHadamard(FeatureMap):
    """phi_i = D^-1/2 (w_i . u)^2 exp(sqrt(2 s) w_i . u - s |u|^2): SLAY's fast baseline, one w_i in both factors.

    Its expectation is e^(2 s x) [(1 + m)^2 + 2 x^2 + 4 m x] with m = 2 s (1 + x)^2, not x^2 e^(2 s x).
    """

    claim = Claim("unbiased", "of another kernel than x^2 e^(2 s x)")
    nonnegative = True
    alike = True

    draws: int
    s: float = 0.5

    def __post_init__(self) -> None:
        require_whole("SharedHadamard: draws", self.draws, most=2**16)
        require(self.s >= 0, f"SharedHadamard: s must be >= 0, received {self.s}.")

    def dimension(self, dim: int) -> int:
        return self.draws

    def flops(self, dim: int) -> int:
        return self.draws * (2 * dim + 5) + 2 * dim

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return (2 * self.s * x).exp() * self.factor(x)

    def factor(self, x: Tensor) -> Tensor:
        """The kernel in place of x^2: (1 + m)^2 + 2 x^2 + 4 m x."""
        m = 2 * self.s * (1 + x).square()
        return (1 + m).square() + 2 * x.square() + 4 * m * x

    def draw(self, source: Source) -> dict[str, Tensor]:
        return {"omega": source.normal("omega", source.heads, self.draws, source.dim)}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        along = x @ buffers["omega"].mT
        exponent = along * (2 * self.s) ** 0.5 - self.s * x.square().sum(-1, keepdim=True)
        return along.square() * torch.exp(exponent) * self.draws**-0.5


__all__ = ["Fused", "Hadamard", "SharedHadamard", "Sketched", "TensorProduct", "product", "side_by_side"]

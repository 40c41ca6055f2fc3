"""SLAY: the spherical Yat kernel by quadrature nodes, a polynomial factor and positive random features."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_one_of
from zonal.algebra.score import FeatureLayer
from zonal.errors import ArgumentError, unknown_name
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source, part, under
from zonal.features.fusion import Fused, Hadamard, SharedHadamard, Sketched, TensorProduct, product, side_by_side
from zonal.features.landmarks import Anchors
from zonal.features.quadrature import Quadrature, Rule, quadrature
from zonal.features.random import PositiveRandom

Fusion = Literal["tensor", "hadamard", "shared", "sketch"]
_ANCHORS = Anchors(8)
# (R, D, P) of the three scales of the paper's ablation
_PRESETS = {"small": (2, 8, 8), "medium": (2, 16, 16), "large": (2, 32, 32)}


@dataclass(frozen=True)
class Slay(FeatureMap):
    """phi(u) = [sqrt(w_r) S(phi_poly(u) ⊗ phi_PRF(u; s_r))]_r for x^2/(2 + eps - 2x) ~ sum_r w_r x^2 e^(2 s_r x).

    Args:
        eps: of the Yat kernel. nodes: R. rule: ``laguerre`` (the paper) or ``minimax``. tolerance: the largest accepted
            quadrature error.
        polynomial: the map of x^2: Anchors(P) (the paper's default), square(), Nystrom, TensorSketch, RandomMaclaurin;
            None leaves the factor out ("Laplace only", the kernel 1/(2 + eps - 2x)).
        draws: number of random features per node, D. orthogonal, antithetic, learn: options of the random features.
        fusion: ``tensor`` (all products), ``sketch`` (a count sketch of them, in ``sketch_size`` numbers), ``hadamard``
            (index by index), ``shared`` (index by index, with the projections of the random features as anchors;
            ``polynomial`` is not used).
        anew: each node draws its own polynomial features; the paper's algorithm 1 draws them once for all nodes.

    m = R · (P D, D or sketch_size). docs/slay.md has measurements.

    Raises: ArgumentError for eps <= 0, a quadrature error above ``tolerance`` (with its value), and sizes that do not
    fit the fusion. Source: SLAY (paper 001), eqs. 8-10.
    """

    eps: float = 0.01
    nodes: int = 2
    rule: Rule = "laguerre"
    tolerance: float | None = None
    polynomial: FeatureMap | None = _ANCHORS
    draws: int = 8
    orthogonal: bool = False
    antithetic: bool = False
    learn: bool = False
    fusion: Fusion = "tensor"
    sketch_size: int = 64
    anew: bool = False

    def __post_init__(self) -> None:
        require_one_of("Slay: fusion", self.fusion, get_args(Fusion))
        require(
            self.fusion != "shared" or not (self.orthogonal or self.antithetic or self.learn),
            "Slay: fusion='shared' has independent draws that are not learned only.",
        )
        quadrature(self.rule, self.nodes, self.eps, self.tolerance)
        self._node(0.5)

    @staticmethod
    def preset(scale: str) -> "Slay":
        """The paper's ``small``, ``medium`` or ``large`` (table 10): R = 2 and D = P = 8, 16, 32.

        Change other fields with ``dataclasses.replace``.
        """
        if scale not in _PRESETS:
            raise unknown_name("Slay.preset", "scale", scale, _PRESETS)
        nodes, draws, anchors = _PRESETS[scale]
        return Slay(nodes=nodes, draws=draws, polynomial=Anchors(anchors))

    @property
    def rule_used(self) -> Quadrature:
        """Nodes s_r, log w_r and the largest relative error over x."""
        return quadrature(self.rule, self.nodes, self.eps)

    def _node(self, s: float) -> FeatureMap:
        random = PositiveRandom(self.draws, s, self.orthogonal, self.antithetic, self.learn)
        if self.fusion == "shared":
            return SharedHadamard(self.draws, s)
        if self.polynomial is None:
            return random
        if self.fusion == "sketch":
            return Sketched(self.polynomial, random, self.sketch_size)
        return (TensorProduct if self.fusion == "tensor" else Hadamard)(self.polynomial, random)

    @property
    def _parts(self) -> list[FeatureMap]:
        return [self._node(s) for s in self.rule_used.nodes]

    @property
    def _once(self) -> FeatureMap | None:
        """The polynomial map that all nodes share."""
        return None if self.anew or self.fusion == "shared" else self.polynomial

    @property
    def learned(self) -> tuple[str, ...]:
        return self._names([node.learned for node in self._parts])

    @property
    def chosen(self) -> tuple[str, ...]:
        return self._names([node.chosen for node in self._parts])

    def _names(self, of_nodes: list[tuple[str, ...]]) -> tuple[str, ...]:
        """Names of a node's buffers in the whole map."""
        found = [(r, name) for r, names in enumerate(of_nodes) for name in names]
        if self._once is None:
            return tuple(f"node{r}_{name}" for r, name in found)
        shared = [name.replace("left_", "polynomial_", 1) for r, name in found if r == 0 and name.startswith("left_")]
        return (*shared, *(f"node{r}_{name}" for r, name in found if not name.startswith("left_")))

    @property
    def claim(self) -> Claim:
        claim, error = self._parts[0].claim, self.rule_used.error
        text = f"at each of {self.nodes} {self.rule} nodes: {claim.text}; the quadrature itself is off by"
        # of Anchors and of shared projections the expectation is another kernel
        known = claim.kind == "unbiased" and self.fusion != "shared"
        return Claim(claim.kind, f"{text} {error:.3g} at most", error if known else None)

    @property
    def nonnegative(self) -> bool:
        return self._parts[0].nonnegative

    @property
    def positive(self) -> bool:
        return self._parts[0].positive

    def dimension(self, dim: int) -> int:
        return sum(node.dimension(dim) for node in self._parts)

    @property
    def _layered(self) -> bool:
        """Whether ``layer`` knows the map: products with the features of anchors, or no products."""
        return self.fusion == "tensor" and (self.polynomial is None or isinstance(self._once, Anchors))

    def factors(self, dim: int) -> int:
        once = self._once
        if once is None or not self._layered:
            return self.dimension(dim)
        return once.dimension(dim) + self.nodes * self.draws

    def flops(self, dim: int) -> int:
        saved = 0 if self._once is None else (self.nodes - 1) * self._once.flops(dim)
        return sum(node.flops(dim) + node.dimension(dim) for node in self._parts) - saved

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        used = self.rule_used
        # the exponential and its weight in one exponent; the rest of a node is its kernel at s = 0, except for shared
        # draws
        nodes = zip(used.nodes, used.log_weights, strict=True)
        return torch.stack([(log_w + 2 * s * x).exp() * self._factor(x, dim, s) for s, log_w in nodes]).sum(0)

    def _factor(self, x: Tensor, dim: int, s: float) -> Tensor:
        if self.fusion == "shared":
            return SharedHadamard(self.draws, s).factor(x)
        return torch.ones_like(x) if self.polynomial is None else self.polynomial.kernel(x, dim)

    def draw(self, source: Source) -> dict[str, Tensor]:
        once = self._once
        drawn = {} if once is None else under("polynomial", once.draw(source.child("polynomial")))
        for r, node in enumerate(self._parts):
            own = source.child(f"node{r}")
            made = node.draw(own) if once is None or not isinstance(node, Fused) else node.draw_rest(own)
            drawn |= under(f"node{r}", made)
        return drawn

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        roots = [math.exp(log_w / 2) for log_w in self.rule_used.log_weights]
        once = self._once
        left = None if once is None else once(x, part(buffers, "polynomial"), side)
        found = []
        for r, (node, root) in enumerate(zip(self._parts, roots, strict=True)):
            own = part(buffers, f"node{r}")
            if left is None or not isinstance(node, Fused):
                phi = node(x, own, side)
            else:
                phi = node.fuse(left, node.right(x, part(own, "right"), side), own)
            found.append(phi * root)
        return torch.cat(found, -1)

    def layer(self, buffers: Buffers, side: Side) -> FeatureLayer | None:
        if not self._layered:
            return None
        found = []
        for r, (node, log_weight) in enumerate(zip(self._parts, self.rule_used.log_weights, strict=True)):
            own = part(buffers, f"node{r}")
            layer = node.right.layer(part(own, "right"), side) if isinstance(node, Fused) else node.layer(own, side)
            assert layer is not None
            # in the exponent: the weight of a far node may be smaller than floats can hold
            weighted = (each._replace(offset=each.offset + log_weight / 2) for each in layer.activations)
            found.append(layer._replace(activations=tuple(weighted)))
        polynomial = None if self._once is None else self._once.layer(part(buffers, "polynomial"), side)
        return side_by_side(found) if polynomial is None else product(polynomial, found)

    def laplace_only(self) -> "Slay":
        """The paper's baseline without x^2, with an equal number of features through more draws.

        Raises: ArgumentError for another fusion than "tensor", and other polynomials than ``Anchors``.
        """
        if self.fusion != "tensor" or not isinstance(self.polynomial, Anchors | None):
            raise ArgumentError(
                "Slay.laplace_only: fusion 'tensor' with Anchors as polynomial is required, received "
                f"{self.fusion!r} with {type(self.polynomial).__name__}. Make Slay(polynomial=None, draws=...)."
            )
        anchors = 1 if self.polynomial is None else self.polynomial.count
        return replace(self, polynomial=None, draws=self.draws * anchors)


__all__ = ["Fusion", "Slay"]

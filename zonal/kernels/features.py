"""The kernel for feature maps of one layer (features.cpp): an elementwise function of a product with a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.score import FeatureLayer
from zonal.algebra.score.feature_layer import underflow_error
from zonal.formula import FORMULAS, Activation
from zonal.kernels import abi
from zonal.kernels.abi import Arguments
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, only_first

FAMILY = Family("features", FORMULAS["identity"], cuda=False)
_KINDS = {"exp": 0, "square": 1, "elu1": 2, "relu": 3, "silu": 4}
_BLOCK = abi.Struct("activations.hpp", "Block")
_LAYER = abi.Struct("features.cpp", "Layer", {
    "x": "B H T D", "weight": "heads rows D", "dy": "B H T F", "y": "B H T F", "dx": "B H T D",
    "dweight": "B H parts rows D", "lost": "one",
})  # fmt: skip
_TOKENS = 256
"""Tokens of a task."""


@dataclass(frozen=True)
class FeaturesSpec:
    """y = [gain g(z)] of all activations, z_i = factor w_i . u + offset - norm |u|^2, u = x, or x / |x| if ``unit``.

    softmax: gain times the softmax of all z in the place of gain g(z).
    """

    activations: tuple[Activation, ...]
    unit: bool = False
    softmax: bool = False

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(each.count for each in self.activations)


class FeaturesInputs(NamedTuple):
    """x (B, H, T, D), and w (heads, rows, D) in float32: head h has the rows of w[h // (H / heads)]."""

    x: Tensor
    weight: Tensor


def blocks_of(activations: Sequence[Activation]) -> bytes:
    """Activations as the C++ sources read them."""
    return b"".join(_BLOCK.pack(_KINDS[each.function], *each[1:]) for each in activations)


def _arguments(inputs: FeaturesInputs, spec: FeaturesSpec, tokens: int) -> Arguments:
    batch, heads, length, dim = inputs.x.shape
    call = Arguments(_LAYER, {
        "B": batch, "H": heads, "T": length, "D": dim, "F": spec.width, "heads": inputs.weight.shape[0],
        "rows": inputs.weight.shape[1], "count": len(spec.activations), "unit": spec.unit, "softmax": spec.softmax,
        "tokens": tokens, "parts": -(-length // tokens),
    }, {"one": 1})  # fmt: skip
    call.point("x", inputs.x)
    call.point("weight", inputs.weight)
    call.point_at_bytes("blocks", blocks_of(spec.activations))
    return call


def forward(inputs: FeaturesInputs, spec: FeaturesSpec) -> Results:
    """y (B, H, T, features) float32, and whether all features of some vector are 0, (1,) uint8."""
    call = _arguments(inputs, spec, _TOKENS)
    y, lost = call.new("y"), call.new("lost", zero=True)
    call.run(FAMILY.load().zonal_features_forward)
    return y, lost


def backward(
    grads: Gradients, inputs: FeaturesInputs, results: Results, spec: FeaturesSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of x and, if asked for, of the matrix."""
    # tasks of few tokens would leave many matrices to be summed up
    call = _arguments(inputs, spec, 4 * _TOKENS if "weight" in asked else _TOKENS)
    call.point("dy", grads[0])
    dx = call.new("dx")
    dweight = call.new("dweight", zero=True) if "weight" in asked else None
    call.run(FAMILY.load().zonal_features_backward)
    if dweight is None:
        return dx, None
    heads, *of_one = inputs.weight.shape
    return dx, dweight.sum((0, 2)).view(heads, -1, *of_one).sum(1)


def _shapes(inputs: FeaturesInputs, spec: FeaturesSpec) -> Results:
    x = inputs.x
    return x.new_empty((*x.shape[:3], spec.width), dtype=torch.float32), x.new_empty(1, dtype=torch.uint8)


features = Op(
    "feature_layer",
    FeaturesInputs,
    FeaturesSpec,
    results=2,
    learned=("x", "weight"),
    bodies={"cpu": Body(forward, backward)},
    shapes=_shapes,
    fixed=(1,),
    refusal=only_first("chunked"),
)
"""``FeaturesSpec``'s equation. The results are those of ``forward``."""


def made(x: Tensor, layer: FeatureLayer) -> Tensor:
    """The numbers that the features of x (B, H, T, D) are made of: the features themselves where ``layer.left`` is 0.

    layer: with a matrix. Without one torch is as fast.

    Raises: ArgumentError where all features of some vector are 0 and may not be.
    """
    assert layer.weight is not None
    spec = FeaturesSpec(layer.activations, layer.unit, layer.softmax)
    y, lost = features(FeaturesInputs(x, layer.weight.float()), spec)
    if layer.name and not torch.compiler.is_compiling() and bool(lost):
        raise underflow_error(layer.name, torch.float32)
    return y


__all__ = ["FAMILY", "FeaturesInputs", "FeaturesSpec", "blocks_of", "features", "made"]

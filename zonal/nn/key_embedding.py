"""The positions of the keys of a trained layer in the spaces of its metric, and their projection to two dimensions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.metric import Hyperbolic, Metric, Product, Sphere
from zonal.algebra.score import NegativeDistance
from zonal.errors import ArgumentError
from zonal.nn.attention import Attention


@dataclass(frozen=True)
class Part:
    """One space of the metric of a head.

    name: the name of its metric.
    curvature: 1, 0 or -1, or None if it is not constant.
    points: (n, 2), the projected keys (``on_paper``).
    share: the share of the sum of squares of the keys that the projection shows, in [0, 1].
    """

    name: str
    curvature: int | None
    points: Tensor
    share: float


def metric_of(layer: object) -> Metric | None:
    """The metric of a layer, or None if its score has none."""
    if not isinstance(layer, Attention) or not isinstance(layer.operator.score, NegativeDistance):
        return None
    return layer.operator.score.metric


@torch.no_grad()
def of_layer(layer: Attention, x: Tensor) -> list[list[Part]]:
    """For each key head of a layer, the spaces of its metric with the keys of x (B, T, dim), one sequence after
    another.

    Raises:
        ArgumentError: the score of the layer is not a distance, or keys are not finite.
    """
    metric = metric_of(layer)
    if metric is None:
        raise ArgumentError(
            "key_embedding.of_layer: a layer whose operator has the score NegativeDistance is required "
            "(mechanisms.rewa), received another."
        )
    keys = layer.stored_keys(x).transpose(0, 1).flatten(1, 2)
    if not isinstance(metric, Product):
        return [[_part(type(metric).__name__, metric, head)] for head in keys]
    sizes = metric.parts(keys.shape[-1])
    return [
        [_part(*each) for each in zip(metric.names, metric.factors, head.split(sizes, -1), strict=True)]
        for head in keys
    ]


def _part(name: str, metric: Metric, keys: Tensor) -> Part:
    return Part(name, metric.curvature, *on_paper(keys, metric))


def on_paper(points: Tensor, metric: Metric) -> tuple[Tensor, float]:
    """Points (n, D) of a space as float64 points (n, 2), and the share of their sum of squares in the two directions
    shown.

    A sphere is projected on its first two principal axes, so all points lie in the unit disk. Hyperbolic space is shown
    as the Poincaré disk: each point keeps its distance from the origin and the direction of its first two principal
    axes. All other spaces are centred and projected on their principal axes.

    Raises:
        ArgumentError: points are not a finite (n, D) tensor with n >= 1.
    """
    if points.ndim != 2 or points.numel() == 0 or not bool(torch.isfinite(points).all()):
        raise ArgumentError(
            "key_embedding.on_paper: one finite point or more, (n, D), are required, received shape "
            f"{tuple(points.shape)}, or numbers that are not finite."
        )
    x = points.double()
    if isinstance(metric, Sphere):
        x = F.normalize(x, dim=-1)
        axes, share = _axes(x - x.mean(0))
        return x @ axes, share
    if isinstance(metric, Hyperbolic):
        axes, share = _axes(x)
        return F.normalize(x @ axes, dim=-1) * (metric.polar(x)[0] / 2).tanh(), share
    x = x - x.mean(0)
    axes, share = _axes(x)
    return x @ axes, share


def _axes(x: Tensor) -> tuple[Tensor, float]:
    """The two directions (D, 2) in which most of x (n, D) lies, and the share that does.

    A second direction that there is not is zero.
    """
    _, sizes, rows = torch.linalg.svd(x, full_matrices=False)
    rows = rows[:2]
    # the signs of singular vectors are arbitrary: the largest entry of each is made positive, so that the same points
    # give the same picture
    rows = rows * rows.gather(-1, rows.abs().argmax(-1, keepdim=True)).sign()
    total = sizes.square().sum()
    return F.pad(rows, (0, 0, 0, 2 - rows.shape[0])).mT, float(sizes[:2].square().sum() / total) if total > 0 else 1.0


__all__ = ["Part", "metric_of", "of_layer", "on_paper"]

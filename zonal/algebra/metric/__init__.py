"""Metrics: distances between queries and keys, smooth at coincident points, with hand-written derivatives."""

from zonal.algebra.metric.base import DotReduction, Metric
from zonal.algebra.metric.curved import Hyperbolic, Sphere, from_ball, to_ball
from zonal.algebra.metric.euclidean import Euclidean, HilbertSchmidt, SquaredEuclidean
from zonal.algebra.metric.information import Fidelity, FisherRao, LeCam
from zonal.algebra.metric.product import Product
from zonal.algebra.metric.riemannian import Riemannian
from zonal.algebra.metric.topological import Topological

__all__ = [
    "DotReduction", "Euclidean", "Fidelity", "FisherRao", "HilbertSchmidt", "Hyperbolic", "LeCam", "Metric",
    "Product", "Riemannian", "Sphere", "SquaredEuclidean", "Topological", "from_ball", "to_ball",
]  # fmt: skip

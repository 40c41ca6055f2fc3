"""Metrics: distances between query and key points, smooth where points coincide, with hand-written derivatives for tiles."""

from zonal.algebra.declaration import Declaration
from zonal.algebra.metric.base import DotReduction, Metric
from zonal.algebra.metric.curved import Hyperbolic, Sphere, from_ball, to_ball
from zonal.algebra.metric.euclidean import Euclidean, HilbertSchmidt, SquaredEuclidean
from zonal.algebra.metric.information import Fidelity, FisherRao, LeCam
from zonal.algebra.metric.product import Product
from zonal.algebra.metric.riemannian import Riemannian
from zonal.algebra.metric.topological import Topological

METRICS: dict[str, type[Declaration]] = {
    kind.__name__: kind
    for kind in (
        Euclidean,
        SquaredEuclidean,
        HilbertSchmidt,
        Sphere,
        Hyperbolic,
        FisherRao,
        LeCam,
        Fidelity,
        Product,
        Riemannian,
        Topological,
    )
}

__all__ = [
    "METRICS",
    "DotReduction",
    "Euclidean",
    "Fidelity",
    "FisherRao",
    "HilbertSchmidt",
    "Hyperbolic",
    "LeCam",
    "Metric",
    "Product",
    "Riemannian",
    "Sphere",
    "SquaredEuclidean",
    "Topological",
    "from_ball",
    "to_ball",
]

"""Finite feature maps of kernels, phi_q(q) . phi_k(k): exact, random and learned. Sums over keys replace the keys."""

from typing import Any

from zonal.algebra.declaration import from_config
from zonal.errors import ArgumentError
from zonal.features.base import Claim, FeatureMap, repeat_heads
from zonal.features.fidelity import OutputFidelity, average_error, fidelity, mercer_bound, sample
from zonal.features.fit import SquareFit, fit_square, row_weights
from zonal.features.fusion import Hadamard, SharedHadamard, Sketched, TensorProduct
from zonal.features.harmonic import Harmonics
from zonal.features.landmarks import Anchors, LowRankSquare, Nystrom
from zonal.features.learned import LearnedExp, distil
from zonal.features.moments import moments
from zonal.features.polynomial import Polynomial, square, taylor_exp
from zonal.features.quadrature import Quadrature, quadrature
from zonal.features.random import Fourier, PositiveRandom, RandomMaclaurin, TensorSketch
from zonal.features.score import Features
from zonal.features.serve import feature_map, harmonics
from zonal.features.slay import Slay
from zonal.features.stationary import Stationary
from zonal.features.symmetric import SymmetricPowers


def features_from_config(config: dict[str, Any]) -> FeatureMap:
    """The map that ``config()`` described. Raises: ArgumentError for unknown types or fields."""
    found = from_config(config, "features")
    if not isinstance(found, FeatureMap):
        raise ArgumentError(f"features_from_config: a feature map is required, received {config['type']!r}.")
    return found


__all__ = [
    "Anchors", "Claim", "FeatureMap", "Features", "Fourier", "Hadamard", "Harmonics", "LearnedExp", "LowRankSquare",
    "Nystrom", "OutputFidelity", "Polynomial", "PositiveRandom", "Quadrature", "RandomMaclaurin", "SharedHadamard",
    "Sketched", "Slay", "SquareFit", "Stationary", "SymmetricPowers", "TensorProduct", "TensorSketch",
    "average_error", "distil", "feature_map", "features_from_config", "fidelity", "fit_square", "harmonics",
    "mercer_bound", "moments", "quadrature", "repeat_heads", "row_weights", "sample", "square", "taylor_exp",
]  # fmt: skip

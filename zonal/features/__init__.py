"""Finite feature maps of links: the kernel of a polynomial link as a dot product, so that sums over keys can be kept instead of keys."""

from zonal.features.moments import moments
from zonal.features.serve import feature_map
from zonal.features.symmetric import SymmetricPowers

__all__ = ["SymmetricPowers", "feature_map", "moments"]

"""What the distance kernel is told apart from tensors: the distances, and the rules that a tile kernel is told."""

from dataclasses import dataclass

from zonal.formula import Term
from zonal.kernels.spec import TileSpec

TERMS = WAVES = 8
"""The most distances of a sum, and the most waves, that the kernel takes."""


@dataclass(frozen=True)
class DistanceSpec:
    """One call's rules: y_t = factor_t sum_s K_ts v_s, log K_ts = x_ts = sum_f w_tf d_f(q_t, k_s), d_f as ``terms`` say.

    waves: n > 0 makes log K = sum_k a_k e^(-b_k d) cos(c_k d) of d = max(-x, 0) instead, with coefficients (a, b, c) a head. rules: link exp, anchor and
    who sees whom, as in ``TileSpec``; neither norms nor scale.
    """

    rules: TileSpec
    terms: tuple[Term, ...]
    waves: int = 0


__all__ = ["TERMS", "WAVES", "DistanceSpec"]

"""What the kernel for sums over features is told apart from tensors: the link, its feature map, the anchor."""

import math
from dataclasses import dataclass
from typing import Literal

from zonal.formula import Formula


@dataclass(frozen=True)
class SumsSpec:
    """One call's rules: y_t = factor_t sum_s l(S_ts) v_s, S_ts = scale_h f(q_t) . f(k_s), as in ``TileSpec``.

    degree, lowest: of the powers of S that l is made of, whose features are those of ``features.SymmetricPowers``. anchor, normalise, eps: as in ``TileSpec``.
    keeps: the state after the last key is asked for. positive: l is never negative, so that a row's sum that nearly vanishes has cancelled.
    """

    link: Formula
    degree: int
    lowest: int
    anchor: Literal["row", "count", "raw"]
    normalise: bool = False
    eps: float = 1e-12
    keeps: bool = False
    positive: bool = False

    @property
    def guards(self) -> bool:
        """Whether rows whose terms cancel are looked for: features of degree 1 have the sign of what they are made of."""
        return self.positive and self.anchor == "row" and self.degree > 1

    def dimension(self, dim: int) -> int:
        """How many features a vector of ``dim`` numbers has."""
        return sum(math.comb(dim + power - 1, power) for power in range(self.lowest, self.degree + 1))


__all__ = ["SumsSpec"]

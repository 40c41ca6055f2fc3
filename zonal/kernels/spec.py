"""What a tile kernel is told apart from tensors: the link's formulas, the anchor, who sees whom.

One kernel serves every operator whose weights are K_ts = l(S_ts) times a factor of the row, S_ts = scale_h f(q_t) . f(k_s) with
f the identity or x / max(|x|, eps):

    y_t = factor_t sum_s l(S_ts) v_s,   factor_t = 1 / sum_s l(S_ts) (row), 1 / visible keys (count), 1 (raw).
"""

from dataclasses import dataclass
from typing import Literal

from zonal.formula import Formula


@dataclass(frozen=True)
class TileSpec:
    """One call's rules. Query t stands at position t + S - T when causal, chunked or windowed, else at t.

    anchor: what the row is multiplied by. normalise: unit queries and keys, norms below ``eps`` counting as eps.
    causal: keys s < position + include_self. chunk > 0: keys s < chunk * floor(position / chunk) instead. left, right: keys from
    position - left to position + right (None = no window; right None = no limit there). Packed documents come as cu_seqlens.
    inference: no gradient will be asked for, and what backward needs is not kept.
    """

    link: Formula
    anchor: Literal["row", "count", "raw"]
    normalise: bool = False
    eps: float = 1e-12
    causal: bool = True
    include_self: bool = True
    chunk: int = 0
    left: int | None = None
    right: int | None = None
    inference: bool = False


__all__ = ["TileSpec"]

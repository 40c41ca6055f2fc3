"""Bound: the parts of an operator with numbers, for given numbers of heads."""

from dataclasses import dataclass

from torch import Tensor

from zonal.algebra.anchor import Anchor
from zonal.algebra.link import Link
from zonal.algebra.prior import Bias, Prior, Visibility
from zonal.algebra.score import Params, Score


@dataclass(frozen=True)
class Bound:
    """The parts of an operator with the current values of its parameters, for given numbers of heads.

    coefficients: the link's, (n, H or 1, 1, 1) float64.
    anchor_params: rows per query head, except names in ``anchor.kv_rows``: rows per key head.
    """

    score: Score
    link: Link
    anchor: Anchor
    priors: tuple[Prior, ...]
    heads: int
    kv_heads: int
    coefficients: Tensor
    score_params: Params
    anchor_params: Params
    log_decay: Tensor | None  # (Hkv,) float64, of a declared constant decay
    slopes: Tensor | None  # (H,)
    far: "Far | None" = None

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    def bias(self, seen: Visibility, decay: Tensor | None, key_bias: Tensor | None) -> Bias:
        """What is added to log K: decays of rows and columns, key biases, and slopes of the distance."""
        row = col = None
        if self.anchor.solves:  # its decays are no factors of the kernel
            return Bias()
        if decay is not None:
            running = expanded(decay.cumsum(-1), self.groups)
            keys = running.shape[-1]
            row, col = running[..., seen.position.clamp(0, keys - 1)] if keys else None, -running
        if key_bias is not None:
            extra = expanded(key_bias, self.groups)
            col = extra.double() if col is None else col + extra
        return Bias(row, col, self.slopes)


@dataclass(frozen=True)
class Far:
    """The far kernel of an anchor with a window (``LocalGlobal``): weight * l'(S') of pairs at a distance of the window
    or more.

    The first keys of a sequence are not in it. bound: its score and link, with the anchor Row. weight: (H or 1,).
    """

    window: int
    first: int
    bound: Bound
    weight: Tensor

    def queries(self, q: Tensor) -> Tensor:
        """Queries of the far kernel from those (B, H, T, D) that the operator's score has prepared."""
        return self.bound.score.prepare_query(q * max(q.shape[-1], 1) ** 0.25, self.bound.score_params, None)

    def keys(self, k: Tensor) -> Tensor:
        """Keys of the far kernel from those (B, Hkv, S, D) that the operator's score has prepared."""
        return self.bound.score.prepare_key(k * max(k.shape[-1], 1) ** -0.25, self.bound.score_params)

    def width(self, dim: int) -> int:
        """How many numbers a query or key of the far kernel has, from prepared ones of ``dim``."""
        return self.bound.score.width(dim)


def expanded(x: Tensor, groups: int) -> Tensor:
    """(B, Hkv, …) -> (B, H, …): each key head serves ``groups`` neighbouring query heads."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


__all__ = ["Bound", "Far", "expanded"]

"""How much data a model takes to become so good: tokens trained until the held-out loss is at most a target."""

import math
from collections.abc import Sequence


def tokens_to(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Tokens until the loss first is at most ``target``, on straight lines between the evaluations; None when it never
    is.

    curve: (tokens trained, held-out loss) of each evaluation, in order. Losses that rise and fall count from their
    first fall below the target on. Losses that are not finite are passed over.
    """
    before: tuple[int, float] | None = None
    for tokens, loss in _finite(curve):
        if loss <= target:
            if before is None:
                return float(tokens)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (tokens - before[0])
        before = (tokens, loss)
    return None


def common_target(curves: Sequence[Sequence[tuple[int, float]]]) -> float | None:
    """The lowest loss that every curve reached: the worst of their best; None where a curve has no finite loss."""
    finite = [_finite(curve) for curve in curves]
    if not finite or not all(finite):
        return None
    return max(min(loss for _, loss in curve) for curve in finite)


def _finite(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(tokens, loss) for tokens, loss in curve if math.isfinite(loss)]

"""Learning rate as a pure function of the step, so that a resumed run needs no schedule state.

    η(s) = η₀ · (s + 1) / (w + 1)                                         for s < w          (linear warm-up)
    η(s) = η₀ · (r + (1 - r) · ½ (1 + cos(π (s - w) / (n - w))))          for w ≤ s < n      (cosine to r η₀)

s = 0, 1, … counts updates made before this one, n is the number of updates, w = round(warm-up ratio · n), r the ratio
at the end. The first update already moves: its rate is η₀ / (w + 1), not 0.
"""

import math

from zonal.errors import ArgumentError


def learning_rate(step: int, *, steps: int, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Learning rate of the update that follows ``step`` finished ones; from ``steps`` on it stays at ``min_ratio ·
    peak``.

    Raises: ArgumentError for a negative step.
    """
    if step < 0:
        raise ArgumentError(f"learning_rate: step must be at least 0, got {step}.")
    warmup = round(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step >= steps:
        return peak * min_ratio
    progress = (step - warmup) / (steps - warmup)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))

"""1/y = int_0^inf e^(-s y) ds as a finite sum of exponentials, for y = 2 + eps - 2 x in [eps, 4 + eps], x in [-1, 1].

``laguerre`` gives the Gauss-Laguerre nodes of SLAY: exact near x = 0, with an error at x = 1 that falls like
(1 + eps)^(-2R) and is larger than this (0.10, not 0.06, with 2 nodes at eps = 1). ``minimax`` gives the nonnegative
nodes with the smallest maximum relative error over x: 1.0% with 5 nodes at eps = 0.01, where Laguerre needs 236.
"""

import functools
import itertools
import math
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_one_of
from zonal.errors import ArgumentError
from zonal.features.least_squares import levenberg_marquardt
from zonal.tracing import constant

Rule = Literal["laguerre", "minimax"]
_MAX_LAGUERRE = 128
_MAX_MINIMAX = 8
_EQUAL = 1e-6


class Quadrature(NamedTuple):
    """1/(2 + eps - 2x) ~ sum_r e^(log_weights_r + 2 nodes_r x). error: the largest relative error over x in [-1, 1].

    Weights as logarithms: far nodes of a small eps weigh less than floats can hold.
    """

    nodes: tuple[float, ...]
    log_weights: tuple[float, ...]
    error: float


@constant
def quadrature(rule: Rule, count: int, eps: float, tolerance: float | None = None) -> Quadrature:
    """The nodes s_r and log w_r of a rule with ``count`` nodes for the Yat kernel of ``eps``.

    Raises: ArgumentError for eps <= 0, counts out of range, a search without convergence, or an error above
    ``tolerance``, with its value.
    """
    require(
        eps > 0 and math.isfinite(eps), f"quadrature: eps must be > 0 (the kernel is unbounded at 0), received {eps}."
    )
    require_one_of("quadrature: rule", rule, get_args(Rule))
    limit = _MAX_LAGUERRE if rule == "laguerre" else _MAX_MINIMAX
    require(
        isinstance(count, int) and 1 <= count <= limit,
        f"quadrature: {rule} has from 1 to {limit} nodes, received {count}.",
    )
    with torch.device("cpu"):  # also where a model is made for its shapes alone
        found = _laguerre(count, eps) if rule == "laguerre" else _minimax(count, eps)
    if tolerance is not None and not found.error <= tolerance:
        other = "rule='minimax', " if rule == "laguerre" else ""
        raise ArgumentError(
            f"quadrature: {count} {rule} nodes at eps={eps:g} have a largest relative error of {found.error:.3g}, "
            f"{tolerance:g} is required. "
            f"Use more nodes, {other}or a larger eps."
        )
    return found


def _grid(eps: float, points: int = 4000) -> Tensor:
    """y on [eps, 4 + eps], equally spaced in its logarithm."""
    return torch.logspace(math.log10(eps), math.log10(4 + eps), points, dtype=torch.float64)


def _relative(y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """y sum_r w_r e^(-s_r y) - 1 for at = [log s, log w], and its derivative by ``at``."""
    log_s, log_w = at.chunk(2)
    terms = torch.exp(y.log()[:, None] + log_w - log_s.exp() * y[:, None])
    return terms.sum(-1) - 1, torch.cat([-terms * log_s.exp() * y[:, None], terms], -1)


@functools.lru_cache(maxsize=64)
def _laguerre(count: int, eps: float) -> Quadrature:
    t, alpha = np.polynomial.laguerre.laggauss(count)
    c = 2 + eps
    nodes, weights = torch.from_numpy(t / c), torch.from_numpy(alpha / c)
    kept = weights > 0  # the last weights of many nodes underflow
    nodes, weights = nodes[kept], weights[kept]
    y = _grid(eps)
    # the rule integrates e^(-s C) apart: sum_r w_r e^(2 s_r x) with 2x = C - y
    value = torch.exp(weights.log() + nodes * (c - y[:, None])).sum(-1)
    return Quadrature(tuple(nodes.tolist()), tuple(weights.log().tolist()), float((y * value - 1).abs().max()))


@functools.lru_cache(maxsize=64)
def _minimax(count: int, eps: float) -> Quadrature:
    """Least squares first, then Remez's exchange: at the optimum the error has 2R + 1 equal peaks of changing sign."""
    best = (torch.empty(0, dtype=torch.float64), math.inf, math.inf)
    for least, most in itertools.product((0.3, 0.1, 1.0, 0.03), (2.0, 4.0, 8.0, 16.0)):
        found = _exchange(_least_squares(count, eps, least, most), count, eps)
        best = min(best, found, key=lambda candidate: (candidate[2], candidate[1]))
        if best[2] < _EQUAL:
            break
    at, error, spread = best
    if not spread < _EQUAL:
        raise ArgumentError(
            f"quadrature: the search for {count} minimax nodes at eps={eps:g} did not converge: "
            f"its largest relative error is {error:.3g}, and the peaks of the "
            "error are not equal. Use fewer nodes, another eps, or rule='laguerre'."
        )
    order = at[:count].argsort()
    s, log_w = at[:count][order].exp(), at[count:][order]
    return Quadrature(tuple(s.tolist()), tuple((log_w - s * (2 + eps)).tolist()), error)


def _least_squares(count: int, eps: float, least: float, most: float) -> Tensor:
    """log nodes and log weights with a small mean square relative error.

    The initial nodes lie between least / (4 + eps) and most / eps.
    """
    low, high = math.log(least / (4 + eps)), math.log(most / eps)
    # the substitution s = e^u turns the integral into a sum over equal steps in u
    step = (high - low) / count
    u = low + step * (torch.arange(count, dtype=torch.float64) + 0.5)
    residual = functools.partial(_relative, _grid(eps, 400))
    return levenberg_marquardt(residual, torch.cat([u, u + math.log(step)]), steps=300, tolerance=1e-6)[0]


def _peaks(error: Tensor) -> Tensor:
    """The places of the largest |error| between changes of sign."""
    change = (error[1:].sign() != error[:-1].sign()).nonzero()[:, 0] + 1
    edges = [0, *change.tolist(), len(error)]
    return torch.tensor([a + int(error[a:b].abs().argmax()) for a, b in itertools.pairwise(edges)], dtype=torch.int64)


def _exchange(at: Tensor, count: int, eps: float) -> tuple[Tensor, float, float]:
    """(log nodes and log weights, largest error, how much its peaks differ, relative to it)."""
    y = _grid(eps, 20000)
    error = _relative(y, at)[0]
    best = (at, float(error.abs().max()), math.inf)
    for _ in range(60):
        places = _peaks(error)
        if len(places) != 2 * count + 1:
            break
        top = error[places].abs()
        spread = float((top.max() - top.min()) / top.max())
        best = (at, float(top.max()), spread)
        if spread < 1e-8:
            break
        # Newton for: error at the peaks = +-E, in the 2R numbers and E
        level, alternating = float(top.mean()), error[places].sign()
        jacobian = torch.cat([_relative(y[places], at)[1], -alternating[:, None]], -1)
        step = torch.linalg.solve(jacobian, -(error[places] - level * alternating))[:-1]
        shrink = 1.0
        while shrink > 1e-3:
            tried = at + shrink * step
            error_new = _relative(y, tried)[0]
            if len(_peaks(error_new)) == 2 * count + 1 and float(error_new.abs().max()) < float(error.abs().max()):
                break
            shrink /= 2
        else:
            break
        at, error = tried, error_new
    return best


__all__ = ["Quadrature", "Rule", "quadrature"]

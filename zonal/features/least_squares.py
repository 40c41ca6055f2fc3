"""Nonlinear least squares for a handful of numbers, in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

Residual = Callable[[Tensor], tuple[Tensor, Tensor]]


def levenberg_marquardt(
    residual: Residual, start: Tensor, steps: int = 200, tolerance: float = 1e-13
) -> tuple[Tensor, float]:
    """The parameters (p,) that minimise |r|^2 near ``start``, and |r|^2. residual: (p,) -> r (n,), dr/dp (n, p)."""
    at = start.double()
    r, jacobian = residual(at)
    cost, damping = float(r @ r), 1e-3
    for _ in range(steps):
        # one triangle for every damping tried; its own square would lose half the digits
        q, triangle = torch.linalg.qr(jacobian)
        if not bool(triangle.isfinite().all()):
            break
        size = triangle.norm(dim=0)
        size = size.clamp_min(1e-12 * float(size.max()) + 1e-100)
        target = torch.cat([q.T @ r, torch.zeros_like(at)])
        while damping < 1e12:
            damped = torch.cat([triangle, torch.diag(size * damping**0.5)])
            tried = at - torch.linalg.lstsq(damped, target[:, None]).solution[:, 0]
            r_new, jacobian_new = residual(tried)
            new = float(r_new @ r_new)
            if new < cost:
                break
            damping *= 4
        else:
            break
        small = cost - new <= tolerance * cost
        at, r, jacobian, cost, damping = tried, r_new, jacobian_new, new, max(damping / 5, 1e-14)
        if small:
            break
    return at, cost


__all__ = ["levenberg_marquardt"]

"""Polynomials on tiles: values, derivatives, and sums for the gradients of coefficients."""

import torch
from torch import Tensor

from zonal import torch_func
from zonal.tracing import recorded


def horner(x: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_k c[k] x^k for c (n, H, 1, 1); in ``out`` where it is given and nothing follows the numbers."""
    if c.shape[0] == 1:
        return c[0].expand(x.shape)
    if recorded((x, c)) or torch_func.forward() or torch_func.active():
        y = torch.addcmul(c[-2], c[-1], x)
        for k in range(c.shape[0] - 3, -1, -1):
            y = torch.addcmul(c[k], y, x)
        return y
    # two calls that vectorise are faster than one with two scalars, which does not
    *lower, second, first = c.unbind()
    y = torch.mul(x, first, out=out).add_(second)
    for lower_one in reversed(lower):
        torch.addcmul(lower_one, y, x, out=y)
    return y


def horner_derivative(x: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_k k c[k] x^(k-1); ``out`` as for ``horner``."""
    if c.shape[0] == 1:
        return torch.zeros_like(x)
    powers = torch.arange(1, c.shape[0], dtype=c.dtype, device=c.device).view(-1, 1, 1, 1)
    return horner(x, c[1:] * powers, out)


def power_sums(x: Tensor, grad: Tensor, count: int, spare: Tensor | None = None) -> Tensor:
    """sum over batch and tile of grad * x^k for k < count: (count, H, 1, 1) in float64.

    spare: a buffer of x's shape that may be overwritten.
    """
    sums, term = [grad.sum((-1, -2))], grad
    for k in range(1, count):
        term = torch.mul(term, x, out=spare) if k == 1 else term.mul_(x)
        sums.append(term.sum((-1, -2)))
    # float32 inside a tile, float64 across tiles: summing 1e7 small terms in float32 loses three digits
    return torch.stack(sums).double().sum(1).view(count, -1, 1, 1)


__all__ = ["horner", "horner_derivative", "power_sums"]

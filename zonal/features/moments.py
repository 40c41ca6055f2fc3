"""Sums over keys, S = sum_s phi(k_s) v_s^T, without ever holding the features of all keys."""

from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.features.symmetric import SymmetricPowers

# numbers of features alive at once: past this they leave the cache and fill memory
FEATURE_ELEMENTS = 1 << 22


def rows_at_once(batch: int, size: int) -> int:
    """How many tokens of ``batch`` sequences may have their ``size`` features in memory at once."""
    return max(16, FEATURE_ELEMENTS // max(1, batch * size))


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, features: SymmetricPowers) -> Tensor:  # type: ignore[override]
        ctx.features = features
        ctx.save_for_backward(k, v)
        step = rows_at_once(k[..., 0, 0].numel(), features.dimension(k.shape[-1]))
        total = k.new_zeros(*k.shape[:-2], features.dimension(k.shape[-1]), v.shape[-1])
        for s in range(0, k.shape[-2], step):
            total += features.write(k[..., s : s + step, :]).mT @ v[..., s : s + step, :]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise PathError(
                "memory: sums of features are recomputed in backward and have no second derivative. "
                "Use path='dense' where you need create_graph=True."
            )
        k, v = ctx.saved_tensors
        features: SymmetricPowers = ctx.features
        step = rows_at_once(k[..., 0, 0].numel(), features.dimension(k.shape[-1]))
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for s in range(0, k.shape[-2], step):
            part = slice(s, s + step)
            dk[..., part, :] = features.vjp(k[..., part, :], v[..., part, :] @ grad.mT)
            dv[..., part, :] = features.write(k[..., part, :]) @ grad
        return dk, dv, None


def moments(k: Tensor, v: Tensor, features: SymmetricPowers) -> Tensor:
    """sum_s phi(k_s) v_s^T: k (…, S, d), v (…, S, P) -> (…, m, P). Differentiable once; backward recomputes phi."""
    if features.trivial:
        return k.mT @ v
    if torch.compiler.is_exporting():  # a loop over pieces would fix the number of keys of a program
        return features.write(k).mT @ v
    return _Moments.apply(k, v, features)


__all__ = ["FEATURE_ELEMENTS", "moments", "rows_at_once"]

"""Tiles of a window, divided by one sum together with sums of what lies before it: tile.cpp with a merge after it.

    y_t = (sum_{s in window} e^{S_ts} v_s + a_t) / (sum_{s in window} e^{S_ts} + b_t),   [a_t, b_t] = ``beyond``.

Backward needs no kernel of its own. With the logarithm L_t of the whole divisor, the weights of the window are
e^{S_ts - L_t} and dS_ts = e^{S_ts - L_t} (dy_t . v_s - dy_t . y_t), which is what the kernel of tiles computes from y
and L in place of the window's own. The gradient of [a_t, b_t] is e^{-L_t} [dy_t, -dy_t . y_t].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.kernels import tile
from zonal.kernels.op import Body, Gradients, Op, Results, only_first
from zonal.kernels.tile import TileInputs, TileSpec

_LEAST = -80.0
"""Logarithms of sums before the window are at least this, since e^80 times them must be finite."""


class WindowInputs(NamedTuple):
    """q, k, v, scale, coefficients, key_mask, cu_seqlens: as in ``TileInputs``, for a link that is the exponential.

    beyond: (B, H, T, P + 1) float32, sums before the window of nonnegative evidence times [v, 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    coefficients: Tensor
    beyond: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def tiles(self) -> TileInputs:
        return TileInputs(*self[:5], self.key_mask, self.cu_seqlens)


def forward(inputs: WindowInputs, spec: TileSpec) -> Results:
    """(y (B, H, T, P), L (B, H, T), rest) as in the kernel of tiles. L is +inf for rows without evidence, where y = 0.

    A sum before the window that is not positive counts as none.
    """
    own, near, rest = tile.forward(inputs.tiles, spec)
    y = own.float() + rest.float() if rest.numel() else own.float()
    near = near.masked_fill(near == float("inf"), float("-inf"))
    mass = inputs.beyond[..., -1]
    some = mass > 0
    far = torch.where(some, torch.where(some, mass, 1).log().clamp_min(_LEAST), float("-inf"))
    whole = torch.logaddexp(near, far)
    whole = whole.masked_fill(whole == float("-inf"), float("inf"))
    y = y * (near - whole).exp().unsqueeze(-1)
    y += inputs.beyond[..., :-1] * torch.where(some, -whole, float("-inf")).exp().unsqueeze(-1)
    rounded = y.to(inputs.q.dtype)
    kept = not spec.inference and inputs.q.dtype != torch.float32
    return rounded, whole, (y - rounded).to(rounded.dtype) if kept else rest


def backward(
    grads: Gradients, inputs: WindowInputs, results: Results, spec: TileSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v, scale, coefficients and beyond."""
    (dy,), (y, whole, rest) = grads, results
    assert dy is not None
    found = tile.backward(grads, inputs.tiles, results, spec, asked)
    if "beyond" not in asked:
        return *found, None
    y, dy = y.float() + rest.float() if rest.numel() else y.float(), dy.float()
    some = inputs.beyond[..., -1:] > 0
    scale = torch.where(some, -whole.unsqueeze(-1), float("-inf")).exp()
    return *found, scale * torch.cat([dy, -(dy * y).sum(-1, keepdim=True)], -1)


def _shapes(inputs: WindowInputs, spec: TileSpec) -> Results:
    q, shape = inputs.q, (*inputs.q.shape[:3], inputs.v.shape[3])
    kept = q.dtype != torch.float32 and not spec.inference
    return q.new_empty(shape), q.new_empty(shape[:3], dtype=torch.float32), q.new_empty(shape if kept else 0)


local_global = Op(
    "local_global",
    WindowInputs,
    TileSpec,
    results=3,
    learned=("q", "k", "v", "scale", "coefficients", "beyond"),
    cpu=Body(forward, backward),
    shapes=_shapes,
    fixed=(1, 2),
    refusal=only_first("chunked"),
)
"""The equation above, as (y, L, rest) of ``forward``."""

__all__ = ["WindowInputs", "backward", "forward", "local_global"]

"""Tiles of a window, divided by one sum together with sums of what lies before it: tile.cpp with a merge after it.

    y_t = (sum_{s in window} e^{S_ts} v_s + a_t) / (sum_{s in window} e^{S_ts} + b_t),  [a_t, b_t] = e^level ``beyond``.

Backward needs no kernel of its own. With the logarithm L_t of the whole divisor, the weights of the window are
e^{S_ts - L_t} and dS_ts = e^{S_ts - L_t} (dy_t . v_s - dy_t . y_t), which is what the kernel of tiles computes from y
and L in place of the window's own. The gradient of beyond is e^{level_t - L_t} [dy_t, -dy_t . y_t].
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
    """q, k, v, scale, coefficients, key_mask, col: as in ``TileInputs``, for a link that is the exponential.

    beyond: (B, H, T, P + 1) float32, sums before the window of nonnegative evidence times [v, 1], relative to e^level.
    level: (B, H, T), without a gradient; None = 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    coefficients: Tensor
    beyond: Tensor
    level: Tensor | None = None
    key_mask: Tensor | None = None
    col: Tensor | None = None

    @property
    def tiles(self) -> TileInputs:
        return TileInputs(*self[:5], self.key_mask, col=self.col)

    def below(self, whole: Tensor) -> Tensor:
        """e^{level - L} (B, H, T, 1) of rows with a sum before the window, else 0."""
        rest = -whole if self.level is None else self.level - whole
        return torch.where(self.beyond[..., -1] > 0, rest, float("-inf")).exp().unsqueeze(-1)


def forward(inputs: WindowInputs, spec: TileSpec) -> Results:
    """(y (B, H, T, P), L (B, H, T), rest) as in the kernel of tiles. L is +inf for rows without evidence, where y = 0.

    A sum before the window that is not positive counts as none.
    """
    own, near, rest = tile.forward(inputs.tiles, spec)
    y = own.float() + rest.float() if rest.numel() else own.float()
    near = near.masked_fill(near == float("inf"), float("-inf"))
    mass = inputs.beyond[..., -1]
    some = mass > 0
    far = torch.where(some, mass, 1).log().clamp_min(_LEAST)
    far = torch.where(some, far if inputs.level is None else far + inputs.level, float("-inf"))
    whole = torch.logaddexp(near, far)
    whole = whole.masked_fill(whole == float("-inf"), float("inf"))
    y.mul_((near - whole).exp().unsqueeze(-1)).addcmul_(inputs.beyond[..., :-1], inputs.below(whole))
    rounded = y.to(inputs.q.dtype)
    kept = not spec.inference and inputs.q.dtype != torch.float32
    return rounded, whole, (y - rounded).to(rounded.dtype) if kept else rest


def backward(
    grads: Gradients, inputs: WindowInputs, results: Results, spec: TileSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v, scale, coefficients, beyond and col."""
    (dy,), (y, whole, rest) = grads, results
    assert dy is not None
    *found, _, dcol = tile.backward(grads, inputs.tiles, results, spec, asked)
    if "beyond" not in asked:
        return *found, None, dcol
    y, dy = y.float() + rest.float() if rest.numel() else y.float(), dy.float()
    return *found, inputs.below(whole) * torch.cat([dy, -(dy * y).sum(-1, keepdim=True)], -1), dcol


local_global = Op(
    "local_global",
    WindowInputs,
    TileSpec,
    results=3,
    learned=("q", "k", "v", "scale", "coefficients", "beyond", "col"),
    bodies={"cpu": Body(forward, backward)},
    shapes=lambda inputs, spec: tile.shapes(inputs.tiles, spec),
    fixed=(1, 2),
    refusal=only_first("chunked"),
)
"""The equation above, as (y, L, rest) of ``forward``."""

__all__ = ["WindowInputs", "backward", "forward", "local_global"]

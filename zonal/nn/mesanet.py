"""MesaNet: fading ridge regression, solved for each token by conjugate gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.algebra.solvers import conjugate_gradients
from zonal.errors import ArgumentError
from zonal.nn.fading import FadingSums, cut, uncut
from zonal.nn.fast_weights import FastWeights, Mixed, Step
from zonal.nn.initialise import Draws
from zonal.nn.norm import accumulation_dtype
from zonal.nn.solvers import solution


class MesaNet(FastWeights):
    """H_t = γ_t H_{t−1} + β_t k_t k_tᵀ, C_t = γ_t C_{t−1} + β_t k_t v_tᵀ, y_t = C_tᵀ (H_t + Λ)⁻¹ q_t.

    γ = σ(a + b) forgets and β = σ(c + d) weights a token; a and c come from W_I x. Λ = floor + softplus(l) is a
    positive diagonal per head, which does not fade. All tokens are solved at once by conjugate gradients that start at
    q / diag(H + Λ); a product with H_t is a read of a fading sum. A token sees itself. Projections and norm are those
    of ``FastWeights``, without SiLU(z), and with a convolution on q and k only.

    Args:
        dim: size of input and output.
        state: N, entries of a key.
        head_dim: P, channels per head.
        expand: channels of all heads divided by dim.
        conv: width in tokens of the convolution on q and k.
        steps: largest number of steps of conjugate gradients.
        tolerance: a token stops when its residual is at most tolerance · ‖q‖. 0: all steps.
        ridge_floor: the least entry of Λ. Entries start at 1, or at twice the floor if that is more.
        forget_bias: initial b. 4 keeps 0.98 of the past per token, 0 keeps half of it.
        norm_eps: ε of the norm.

    The derivative is that of the exact solution, by one more solve. Its accuracy depends on ``steps``.

    Cost per head: steps · T · 2 N (N + 64), and as much backward. A decoder keeps N (N + P) + conv numbers per head.

    Source: von Oswald et al. 2025, arXiv 2506.05233.

    Raises:
        ArgumentError: sizes do not fit.
    """

    convolves_values = False
    solves = True

    def __init__(
        self,
        dim: int,
        *,
        state: int = 64,
        head_dim: int = 64,
        expand: int = 1,
        conv: int = 4,
        steps: int = 30,
        tolerance: float = 0.0,
        ridge_floor: float = 0.25,
        forget_bias: float = 4.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(dim, state, head_dim, expand, conv, norm_eps, gated=False)
        if steps < 1 or tolerance < 0 or not ridge_floor > 0:
            raise ArgumentError(
                f"nn.MesaNet: required steps >= 1, tolerance >= 0 and ridge_floor > 0, received steps={steps}, "
                f"tolerance={tolerance}, ridge_floor={ridge_floor}."
            )
        self.steps, self.tolerance, self.ridge_floor, self.forget_start = steps, tolerance, ridge_floor, forget_bias
        self.forget_bias = nn.Parameter(torch.empty(self.sizes.heads))
        self.write_bias = nn.Parameter(torch.empty(self.sizes.heads))
        self.raw_ridge = nn.Parameter(torch.empty(self.sizes.heads, state))
        self.reset_parameters(Draws())

    def _reset_gates(self, draws: Draws) -> None:
        nn.init.constant_(self.forget_bias, self.forget_start)
        nn.init.zeros_(self.write_bias)
        start = max(1 - self.ridge_floor, self.ridge_floor)
        nn.init.constant_(self.raw_ridge, start + math.log(-math.expm1(-start)))  # softplus⁻¹

    def ridge(self) -> Tensor:
        """Λ (H, N), in float32 or better."""
        return self.ridge_floor + F.softplus(self.raw_ridge.to(accumulation_dtype(self.raw_ridge.dtype)))

    @torch.no_grad()
    def learned(self) -> dict[str, Any]:
        """rates: as in ``FastWeights``. ridge: the mean of Λ."""
        return {**super().learned(), "ridge": self.ridge().mean(1).tolist()}

    def _gates(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        forget, write = (bias.to(raw[0].dtype).unsqueeze(-1) for bias in (self.forget_bias, self.write_bias))
        return F.logsigmoid(raw[0] + forget), (raw[1] + write).sigmoid()

    def _recur(self, step: Step) -> Mixed:
        q, values = step.q, step.write * torch.cat([step.k, step.v], -1)
        sums = FadingSums.of(step.k, values, step.log_decay, step.state, step.size)
        y = mesa(sums, cut(q, step.size), self.ridge().to(q.dtype), self.steps, self.tolerance)
        return Mixed(uncut(y, q.shape[2]), sums.last, step.k, values)


def mesa(sums: FadingSums, q: Tensor, ridge: Tensor, steps: int, tolerance: float = 0.0) -> Tensor:
    """C_tᵀ (H_t + Λ)⁻¹ q_t for sums over keys and [β k, β v]. q is in blocks (B, H, n, C, N), ridge is (H, N); the
    result is (B, H, n, C, P).
    """
    square, rest = slice(0, q.shape[-1]), slice(q.shape[-1], None)
    ridge = ridge[:, None, None]

    def apply(x: Tensor) -> Tensor:
        return sums.read(x, square) + ridge * x

    with torch.no_grad():
        diagonal = sums.diagonal(square) + ridge
    solved = solution(apply, lambda right: conjugate_gradients(apply, right, diagonal, steps, tolerance), q)
    return sums.read(solved, rest)


__all__ = ["MesaNet", "mesa"]

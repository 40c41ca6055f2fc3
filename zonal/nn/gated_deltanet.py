"""Gated DeltaNet: a fading matrix that each token corrects towards its own value."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.nn.fading import Decays, cut, uncut
from zonal.nn.fast_weights import FastWeights, Mixed, Step
from zonal.nn.initialise import Draws
from zonal.nn.recurrence import RATES, draw_log_uniform_, draw_steps_


class GatedDeltaNet(FastWeights):
    """S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ and y_t = S_tᵀ q_t / √N, with one matrix S (N × P) per head.

    α = e^{−A softplus(a + b)} fades the matrix, and β = σ(c) corrects it: with β = 1 the value stored with k_t becomes
    v_t. The update is one step of gradient descent with rate β on ½ ‖Sᵀ k_t − v_t‖², from α_t S_{t−1}. a and c come
    from W_I x. Projections, gates and norm are those of ``FastWeights``.

    Within a block, the values that are added, u_t = β_t (v_t − α_t S_{t−1}ᵀ k_t), solve one unit triangular system
    (I + L) U = β (V − reach ⊙ K S) with L_ts = β_t e^{g_{s+1} + … + g_t} (k_t·k_s) for s < t (the WY form). S is then a
    fading sum over k and u.

    Args:
        dim: size of input and output.
        state: N, entries of a key.
        head_dim: P, channels per head.
        expand: channels of all heads divided by dim.
        conv: width in tokens of the convolution on q, k and v.
        norm_eps: ε of the norm.
        gated: whether the output is multiplied by SiLU(z).

    Cost per head: a small multiple of T (N P + 64 (N + P)). A decoder keeps N P + conv numbers per head, for any
        length.

    Source: Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464; blocks as in Yang et al. 2024, arXiv 2406.06484.

    Raises:
        ArgumentError: sizes do not fit.
    """

    def __init__(
        self,
        dim: int,
        *,
        state: int = 64,
        head_dim: int = 64,
        expand: int = 1,
        conv: int = 4,
        norm_eps: float = 1e-5,
        gated: bool = True,
    ) -> None:
        super().__init__(dim, state, head_dim, expand, conv, norm_eps, gated)
        self.step_bias = nn.Parameter(torch.empty(self.sizes.heads))
        self.log_rate = nn.Parameter(torch.empty(self.sizes.heads))
        self.reset_parameters(Draws())

    def _reset_gates(self, draws: Draws) -> None:
        draw_steps_(self.step_bias, draws)
        draw_log_uniform_(self.log_rate, draws, "log_rate", *RATES)

    def _gates(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rate, bias = (parameter.to(raw[0].dtype).unsqueeze(-1) for parameter in (self.log_rate.exp(), self.step_bias))
        return -rate * F.softplus(raw[0] + bias), raw[1].sigmoid()

    def _recur(self, step: Step) -> Mixed:
        y, state, added = delta_rule(step.q, step.k, step.v, step.write, step.log_decay, step.state, step.size)
        return Mixed(y * step.q.shape[-1] ** -0.5, state, step.k, added)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, log_decay: Tensor, state: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """S_t = e^{g_t} (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ and y_t = S_tᵀ q_t.

    Args:
        q, k: (B, H, T, N).
        v: (B, H, T, P).
        write: β (B, H, T, 1).
        log_decay: g (B, H, T), float64.
        state: S before the first token, (B, H, N, P).
        size: tokens per block. It does not change the values.

    Returns: y (B, H, T, P), S after the last token, and u (B, H, T, P).
    """
    length, decays = q.shape[2], Decays.of(log_decay, size, q.dtype)
    q, k, v, write = (cut(x, size) for x in (q, k, v, write))
    lower = (write * (k @ k.mT) * decays.near).tril(-1)
    both = torch.linalg.solve_triangular(
        lower, torch.cat([write * v, write * decays.reach * k], -1), upper=False, unitriangular=True
    )
    own, taken = both.split([v.shape[-1], k.shape[-1]], -1)
    end = (k * decays.rest).mT
    states, added = [], []
    for index in range(k.shape[2]):
        states.append(state)
        added.append(own[:, :, index] - taken[:, :, index] @ state)
        state = decays.reach[:, :, index, -1:] * state + end[:, :, index] @ added[-1]
    u = torch.stack(added, 2)
    y = decays.reach * (q @ torch.stack(states, 2)) + ((q @ k.mT) * decays.near) @ u
    return uncut(y, length), state, uncut(u, length)


__all__ = ["GatedDeltaNet", "delta_rule"]

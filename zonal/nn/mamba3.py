"""Mamba-3: linear attention with a decay, rotated keys, the trapezoidal rule, and keys that enter one token late."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.memory.ridge import last_key, previous_keys
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.memory import LayerMemory, Past
from zonal.nn.mixer import Inputs, TokenMixer
from zonal.nn.norm import RMSNorm, accumulation_dtype
from zonal.nn.recurrence import Sizes, draw_steps_, ssd


class Mamba3(TokenMixer):
    """h_t = α_t h_{t−1} + β_t U_{t−1} + γ_t U_t with U_t = x_t B_tᵀ; y_t = h_t C_t + D ⊙ x_t; out = W_O (y ⊙ SiLU(z)).

    [z, x, B, C, Δ, a, λ, θ] = W_I u; Δ = softplus(Δ + b); α = e^{−A Δ} with A = f(a), where f(a) = 1 + a for a ≥ 0 and
    1 / (1 − a) below; λ = σ(λ), γ = λ Δ, β = (1 − λ) Δ α. This is the trapezoidal rule; λ = 1 gives that of Mamba-2. B
    and C are normed and get a bias per head. Their first pairs of numbers are rotated by the running sum of Δ π
    tanh(θ), which gives a complex state.

    G_t = h_t − γ_t U_t is a fading sum over keys that enter one token late:
    G_t = α_t G_{t−1} + α_t (γ_{t−1} + (1 − λ_t) Δ_t) U_{t−1}. No weight is divided by a decay, and decays stay
    logarithms. The layer is therefore ``zonal.attention`` with the operator of Mamba-2, plus γ_t (C_t·B_t) x_t, with
    the same paths and memory. A decoder also keeps B, x and γ of the previous token, and the angles so far.

    Args:
        dim: size of input and output.
        state: N, entries of a key.
        head_dim: P, channels per head.
        expand: channels of all heads divided by dim.
        groups: number of groups of heads; the heads of a group share B and C before their biases.
        turned: share of the state that is complex, in (0, 1].
        conv: width in tokens of a convolution with SiLU on x. 0: none. The baseline of the Echo paper has 4.
        rate_floor: the least A.
        norm_eps: ε of the norms of B and C.

    Cost: that of Mamba-2, and copies of keys and values for the rotation and the delay.

    Source: Lahoti et al. 2026, arXiv 2603.15569: the form with one input and one output per head (SISO).

    Raises:
        ArgumentError: sizes do not fit.
    """

    carries = ("previous", "angle")

    def __init__(
        self,
        dim: int,
        *,
        state: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        groups: int = 1,
        turned: float = 0.5,
        conv: int = 0,
        rate_floor: float = 1e-4,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.sizes = Sizes("nn.Mamba3", dim, state, head_dim, expand, groups)
        if not 0 < turned <= 1 or int(state * turned) < 2:
            raise ArgumentError(
                f"nn.Mamba3: turned must lie in (0, 1] and leave a pair of the {state} numbers to turn, received "
                f"{turned}."
            )
        if not rate_floor > 0:
            raise ArgumentError(f"nn.Mamba3: rate_floor must be > 0, received {rate_floor}.")
        if conv < 0 or conv == 1:
            raise ArgumentError(f"nn.Mamba3: conv must be 0 (none) or a width of at least 2, received {conv}.")
        self.dim, self.pairs, self.rate_floor = dim, int(state * turned) // 2, rate_floor
        self.operator = ssd()
        inner, heads, shared = self.sizes.inner, self.sizes.heads, self.sizes.shared
        self.parts = (inner, inner, shared, shared, heads, heads, heads, self.pairs)
        self.input = nn.Linear(dim, sum(self.parts), bias=False)
        self.convolution = ShortConvolution(inner, conv, "silu") if conv else None
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.key_norm, self.query_norm = RMSNorm(state, norm_eps), RMSNorm(state, norm_eps)
        self.key_bias = nn.Parameter(torch.empty(heads, state))
        self.query_bias = nn.Parameter(torch.empty(heads, state))
        self.skip = nn.Parameter(torch.empty(heads))
        self.output = nn.Linear(inner, dim, bias=False)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights: Δ log-uniform in [0.001, 0.1]; D and the biases of B and C are 1."""
        draws.linear_(self.input, "input")
        draws.linear_(self.output, "output", output=True)
        if self.convolution is not None:
            self.convolution.reset_parameters(draws.child("convolution"))
        draw_steps_(self.step_bias, draws)
        for norm in (self.key_norm, self.query_norm):
            norm.reset_parameters()
        for parameter in (self.key_bias, self.query_bias, self.skip):
            nn.init.ones_(parameter)

    def _empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        sizes, wide = self.sizes, accumulation_dtype(dtype)
        last = torch.zeros(batch, sizes.heads, sizes.state + sizes.head_dim + 1, dtype=wide, device=device)
        angle = torch.zeros(batch, sizes.heads, self.pairs, dtype=torch.float64, device=device)
        return LayerMemory(
            sizes.empty_memory(self.operator, batch, dtype, device),
            None if self.convolution is None else self.convolution.empty_tail(batch, dtype, device),
            carried={"previous": last, "angle": angle},
        )

    @torch.no_grad()
    def learned(self) -> dict[str, Any]:
        """rates: the factor by which each head fades its state over one token with Δ = softplus(b) and A = 1."""
        return {"rates": (-F.softplus(self.step_bias)).exp().tolist()}

    def _mix(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Past | None]:
        sizes, (before, key_padding_mask, cu_seqlens, *_) = self.sizes, inputs
        gate, values, keys, queries, step, rate, share, angle = self.input(x).split(self.parts, dim=2)
        tail = None
        if self.convolution is not None:
            values, tail = self.convolution(
                values, inputs.tail, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens
            )
        # the recurrence runs in float32 or better
        dtype = accumulation_dtype(gate.dtype)
        step = F.softplus(step.to(dtype) + self.step_bias.to(dtype)).transpose(1, 2)  # (B, H, T)
        if key_padding_mask is not None:  # padding is no step in time: it fades, turns and weighs nothing
            step = step * key_padding_mask[:, None]
        log_decay = -step * _rate(rate.to(dtype)).clamp_min(self.rate_floor).transpose(1, 2)
        share = share.to(dtype).sigmoid().transpose(1, 2)
        own = share * step  # γ

        turn = self._angles(angle, step, before)
        keys = self._prepared(keys.to(dtype), self.key_norm, self.key_bias, turn)
        queries = self._prepared(queries.to(dtype), self.query_norm, self.query_bias, turn)
        values = values.to(dtype).unflatten(2, (sizes.heads, sizes.head_dim)).transpose(1, 2)

        tokens = torch.cat([keys, values, own.unsqueeze(-1)], dim=-1)
        start = tokens.new_zeros(tokens.shape[0], sizes.heads, tokens.shape[3])
        start = start if before is None else before.carried["previous"].to(dtype)
        late = previous_keys(tokens, key_padding_mask, start)
        late_keys, late_values, late_own = late.split([sizes.state, sizes.head_dim, 1], dim=-1)
        weight = log_decay.exp() * (late_own.squeeze(-1) + (1 - share) * step)
        if cu_seqlens is not None:  # nothing comes before a document
            weight = weight.index_fill(2, cu_seqlens[:-1].to(weight.device, torch.int64), 0)
        written = late_values * weight.unsqueeze(-1)
        y, absorbed = self._attend(queries, late_keys, written, inputs, log_decay=log_decay)
        y = y + (own * (queries * keys).sum(-1) + self.skip.to(dtype).unsqueeze(-1)).unsqueeze(-1) * values
        y = self.output((y.transpose(1, 2).flatten(2) * F.silu(gate.to(dtype))).to(gate.dtype))
        if before is None:
            return y, None
        last = last_key(tokens, key_padding_mask, start)
        carried = {"previous": last, "angle": turn[:, :, -1].remainder(2 * math.pi)}
        return y, inputs.after(absorbed, tail, x.shape[1], carried)

    def _angles(self, angle: Tensor, step: Tensor, before: Past | None) -> Tensor:
        """Σ_{s ≤ t} Δ_s π tanh(θ_s), (B, H, T, pairs) float64: the sums grow long, and only their differences count."""
        speed = math.pi * angle.double().tanh().unsqueeze(1)
        turn = (step.double().unsqueeze(-1) * speed).cumsum(2)
        return turn if before is None else turn + before.carried["angle"].unsqueeze(2)

    def _prepared(self, x: Tensor, norm: RMSNorm, bias: Tensor, turn: Tensor) -> Tensor:
        """B or C (B, T, groups · N) -> (B, H, T, N): normed, shifted by the head's bias, its first pairs (x_2i, x_2i+1)
        turned.
        """
        normed = norm(x.unflatten(2, (self.sizes.groups, self.sizes.state))).flatten(2)
        x = self.sizes.by_head(normed) + bias.to(x.dtype).unsqueeze(1)
        turned, rest = x.split([2 * self.pairs, self.sizes.state - 2 * self.pairs], dim=-1)
        first, second = turned.unflatten(-1, (self.pairs, 2)).unbind(-1)
        cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        both = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
        return torch.cat([both, rest], dim=-1)

    def extra_repr(self) -> str:
        return f"{self.sizes}, groups={self.sizes.groups}, pairs={self.pairs}"


def _rate(a: Tensor) -> Tensor:
    """1 + a for a ≥ 0, 1 / (1 − a) below: positive, with one derivative everywhere."""
    return torch.where(a > 0, 1 + a, 1 / (1 - a.clamp_max(0)))


__all__ = ["Mamba3"]

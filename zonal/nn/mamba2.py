"""Mamba-2 (state space duality): linear attention with a decay per token and head."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.memory import LayerMemory, Past
from zonal.nn.mixer import Inputs, TokenMixer
from zonal.nn.norm import GatedNorm, accumulation_dtype
from zonal.nn.recurrence import RATES, Sizes, draw_log_uniform_, draw_steps_, ssd
from zonal.store import unlike


class Mamba2(TokenMixer):
    """h_t = e^{−A Δ_t} h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D ⊙ x_t, out = W_O norm(y ⊙ SiLU(z)), with a state h (P
    × N) per head.

    [z, x, B, C, Δ] = W_I u. x, B and C pass a causal depthwise convolution and SiLU, and Δ = softplus(Δ + b). B and C
    are keys and queries, shared by the heads of a group; Δ x are the values and −A Δ is the log decay. The layer is
    therefore one call of ``zonal.attention``, with the same paths, and its state is a ``zonal.Memory``. The norm is
    taken over the channels of each group.

    Args:
        dim: size of input and output.
        state: N, entries of a key.
        head_dim: P, channels per head.
        expand: channels of all heads divided by dim.
        groups: number of groups of heads; the heads of a group share B and C.
        conv: width in tokens of the convolution.
        bias: use biases in the two projections.
        conv_bias: use a bias in the convolution.
        norm_eps: ε of the norm.
        step_limit: least and largest Δ. None: no limits.

    Cost per head: about 2 T N P, and a little more within blocks. A decoder keeps N P + conv numbers per head, for any
        length.

    Source: Dao and Gu 2024, arXiv 2405.21060.

    Raises:
        ArgumentError: sizes do not fit.
    """

    splits = True

    def __init__(
        self,
        dim: int,
        *,
        state: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        groups: int = 1,
        conv: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        step_limit: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self.sizes = Sizes("nn.Mamba2", dim, state, head_dim, expand, groups)
        pair = isinstance(step_limit, tuple | list) and len(step_limit) == 2
        if step_limit is not None and not (pair and 0 <= step_limit[0] < step_limit[1]):
            raise ArgumentError(
                "nn.Mamba2: step_limit must be (least, largest) with 0 <= least < largest, or None; received "
                f"{step_limit}."
            )
        self.dim, self.step_limit = dim, step_limit
        self.operator = ssd()
        inner, heads, shared = self.sizes.inner, self.sizes.heads, self.sizes.shared
        self.input = nn.Linear(dim, 2 * inner + 2 * shared + heads, bias=bias)
        self.convolution: ShortConvolution = ShortConvolution(inner + 2 * shared, conv, "silu", conv_bias)
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = GatedNorm(inner, groups, norm_eps)
        self.output = nn.Linear(inner, dim, bias=bias)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights: Δ log-uniform in [0.001, 0.1], A in [1, 16], D = 1."""
        draws.linear_(self.input, "input")
        draws.linear_(self.output, "output", output=True)
        self.convolution.reset_parameters(draws.child("convolution"))
        draw_steps_(self.step_bias, draws)
        draw_log_uniform_(self.log_rate, draws, "log_rate", *RATES)
        nn.init.ones_(self.skip)
        self.norm.reset_parameters()

    def _empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        memory = self.sizes.empty_memory(self.operator, batch, dtype, device)
        return LayerMemory(memory, self.convolution.empty_tail(batch, dtype, device))

    @torch.no_grad()
    def learned(self) -> dict[str, Any]:
        """rates: the factor by which each head fades its state over one token with Δ = softplus(b)."""
        return {"rates": (-self.log_rate.exp() * F.softplus(self.step_bias)).exp().tolist()}

    def _mix(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Past | None]:
        sizes = self.sizes
        parts = [sizes.inner, sizes.inner + 2 * sizes.shared, sizes.heads]
        gate, mixed, step = self.input(x).split(parts, dim=-1)
        (values, keys, queries), tail = self.convolution.parts(
            mixed, [sizes.inner, sizes.shared, sizes.shared], inputs.tail, heads=sizes.heads,
            key_padding_mask=inputs.key_padding_mask, cu_seqlens=inputs.cu_seqlens,
        )  # fmt: skip
        # the recurrence runs in float32 or better
        dtype = accumulation_dtype(mixed.dtype)
        values, keys, queries = values.to(dtype), keys.to(dtype), queries.to(dtype)
        step = F.softplus(step.to(dtype) + self.step_bias.to(dtype))
        if self.step_limit is not None:
            step = step.clamp(*self.step_limit)
        log_decay = -(step * self.log_rate.to(dtype).exp()).transpose(1, 2)
        # what each token counts is its Δ, however small
        key_bias = step.clamp_min(torch.finfo(dtype).tiny).log().transpose(1, 2)
        q, k, v = sizes.by_head(queries), sizes.by_head(keys), values.transpose(1, 2)
        y, absorbed = self._attend(q, k, v, inputs, log_decay=log_decay, key_bias=key_bias)
        y = self.output(self.norm(y.transpose(1, 2), gate, values=values, skip=self.skip))
        return y, inputs.after(absorbed, tail, x.shape[1])

    @torch.no_grad()
    def load_transformers(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of transformers' ``Mamba2Mixer`` (or ``Mamba2`` of mamba_ssm), under their names there.

        Raises:
            ArgumentError: weights are missing, unknown, or of another shape. The layer is then unchanged.
        """
        parameters = dict(self.named_parameters())
        own = {theirs: parameters[ours] for theirs, ours in _TRANSFORMERS.items() if ours in parameters}
        # a filter is (channels, 1, w) there, its last tap that of the token itself
        if wrong := unlike(weights, {**own, "conv1d.weight": own["conv1d.weight"].unsqueeze(1)}):
            raise ArgumentError(
                f"nn.Mamba2.load_transformers: {wrong}. Make the layer with the sizes of the other one."
            )
        for name, parameter in own.items():
            parameter.copy_(weights[name].squeeze(1).flip(1) if name == "conv1d.weight" else weights[name])

    def extra_repr(self) -> str:
        return f"{self.sizes}, groups={self.sizes.groups}"


_TRANSFORMERS = {
    "in_proj.weight": "input.weight", "in_proj.bias": "input.bias", "conv1d.weight": "convolution.weight",
    "conv1d.bias": "convolution.bias",
    "dt_bias": "step_bias", "A_log": "log_rate", "D": "skip", "norm.weight": "norm.weight",
    "out_proj.weight": "output.weight", "out_proj.bias": "output.bias",
}  # fmt: skip

__all__ = ["Mamba2"]

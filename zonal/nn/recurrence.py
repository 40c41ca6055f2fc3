"""The common parts of Mamba-2 and Mamba-3: sizes, states as fading sums, and initial steps.

Both layers are linear attention with a decay: h_t = e^{g_t} h_{t-1} + v_t k_t^T and y_t = h_t q_t. In the algebra this
is score Dot(scale=1), link Identity and anchor Raw, with the log decays g <= 0 of the call. ``zonal.attention`` runs
them by the cheapest path.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.anchor import Raw
from zonal.algebra.declaration import require_whole
from zonal.algebra.link import Identity
from zonal.algebra.operator import Operator
from zonal.algebra.score import Dot
from zonal.errors import ArgumentError
from zonal.memory import Memory
from zonal.nn.initialise import Draws

# the range of steps Δ that heads start with, uniform in the logarithm, as both papers have it
STEPS = (1e-3, 0.1)
# rates A that heads start with, uniform in the logarithm
RATES = (1.0, 16.0)


def ssd() -> Operator:
    """y_t = Σ_{s ≤ t} e^{g_{s+1} + … + g_t} (q_t·k_s) v_s, the decays g given with the call (``log_decay``)."""
    return Operator(Dot(scale=1.0), Identity(), Raw(), name="ssd")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: H = expand · dim / head_dim heads with states of state × head_dim numbers. B and C are shared
    by the heads of each of ``groups`` groups.

    Raises:
        ArgumentError: sizes do not fit; the message names the layer.
    """

    call: str
    dim: int
    state: int
    head_dim: int
    expand: int
    groups: int

    def __post_init__(self) -> None:
        for name in ("dim", "state", "head_dim", "expand", "groups"):
            require_whole(f"{self.call}: {name}", getattr(self, name))
        if self.inner % self.head_dim:
            raise ArgumentError(
                f"{self.call}: head_dim must divide expand · dim = {self.inner}, received head_dim={self.head_dim}. "
                "Give another head_dim or dim."
            )
        if self.heads % self.groups:
            raise ArgumentError(
                f"{self.call}: groups must divide the {self.heads} heads (expand · dim / head_dim), received "
                f"groups={self.groups}."
            )

    @property
    def inner(self) -> int:
        """Channels of all heads together."""
        return self.expand * self.dim

    @property
    def heads(self) -> int:
        """H."""
        return self.inner // self.head_dim

    @property
    def shared(self) -> int:
        """Entries of B per token, and of C."""
        return self.groups * self.state

    def __str__(self) -> str:
        return f"{self.dim}, state={self.state}, head_dim={self.head_dim}, heads={self.heads}"

    def by_head(self, x: Tensor) -> Tensor:
        """B or C (B, T, groups · N) -> (B, H, T, N); the heads of a group get the same numbers. One group gives
        (B, 1, T, N), which serves all heads.
        """
        grouped = x.unflatten(2, (self.groups, self.state)).transpose(1, 2)
        if self.groups == 1:
            return grouped
        return grouped.unsqueeze(2).expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2)

    def empty_memory(
        self, operator: Operator, batch: int, dtype: torch.dtype, device: torch.device, columns: int | None = None
    ) -> Memory:
        """The states of ``batch`` sequences before their first token, in float32 or better, of ``columns`` columns
        (None: P).
        """
        wide, columns = torch.promote_types(dtype, torch.float32), self.head_dim if columns is None else columns
        return Memory.empty(operator, batch, self.heads, self.state, columns, wide, device, kind="decayed")


@torch.no_grad()
def draw_log_uniform_(parameter: Tensor, draws: Draws, name: str, low: float, high: float) -> None:
    """Fill with log(u), where log(u) is uniform between log(low) and log(high)."""
    draws.uniform_(parameter, name, 0.5 * math.log(high / low))
    parameter.add_(0.5 * math.log(low * high))


@torch.no_grad()
def draw_steps_(step_bias: Tensor, draws: Draws) -> None:
    """Fill biases b so that softplus(b) is log-uniform in ``STEPS``."""
    draw_log_uniform_(step_bias, draws, "step_bias", *STEPS)
    if not step_bias.is_meta:  # torch would load its compiler to work out the shapes
        step_bias.copy_(inverse_softplus(step_bias.exp()))


def inverse_softplus(y: Tensor) -> Tensor:
    """The x with log(1 + e^x) = y, for y > 0, accurate for small y."""
    return y + torch.log(-torch.expm1(-y))


__all__ = ["RATES", "STEPS", "Sizes", "draw_log_uniform_", "draw_steps_", "inverse_softplus", "ssd"]

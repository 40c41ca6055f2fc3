"""The gated feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.initialise import Draws


class SwiGLU(nn.Module):
    """y = W_down (SiLU(W_gate x) ⊙ W_up x).

    Args:
        dim: size of input and output.
        hidden: hidden size. 8/3 · dim gives the parameters of a plain layer with hidden size 4 · dim.

    Source: Shazeer 2020, arXiv 2002.05202.

    Raises:
        ArgumentError: sizes do not fit.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        if dim < 1 or hidden < 1:
            raise ArgumentError(f"SwiGLU: required dim >= 1 and hidden >= 1, received dim={dim}, hidden={hidden}.")
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        draws.linear_(self.gate, "gate")
        draws.linear_(self.up, "up")
        draws.linear_(self.down, "down", output=True)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))

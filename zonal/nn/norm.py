"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics are kept: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """y = g ⊙ x / √(mean(x²) + ε) over the last axis, in float32 or better; y has the dtype of x.

    Args:
        dim: size of the last axis and of the gain g (starts at 1).
        eps: ε, added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        if dim < 1 or not eps > 0:
            raise ArgumentError(f"RMSNorm: required dim >= 1 and eps > 0, received dim={dim}, eps={eps}.")
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        dtype = accumulation_dtype(x.dtype)
        return F.rms_norm(x.to(dtype), (self.dim,), self.weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}"

"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.kernels.mixer import NormInputs, NormSpec, gated_norm
from zonal.nn.compiled import refusal


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """y = g ⊙ x / √(mean(x²) + ε) over the last axis, computed in float32 or better; y has the dtype of x.

    Args:
        dim: size of the last axis and of the gain g, which starts at 1.
        eps: ε, added to the mean square.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.

    Raises:
        ArgumentError: dim < 1 or eps <= 0.
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


class GatedNorm(nn.Module):
    """y = g ⊙ RMS(x ⊙ SiLU(z)), with the mean square over each of ``groups`` equal parts of the last axis, computed in
    float32 or better.

    With one group per head, in float32 on a CPU, it runs in one compiled pass, forward and backward
    (``ZONAL_KERNELS=off``: torch).

    Args:
        dim: size of the last axis and of the gain g, which starts at 1.
        groups: number of parts that are normed separately, a divisor of dim.
        eps: ε, added to the mean square.

    Raises:
        ArgumentError: sizes do not fit.
    """

    def __init__(self, dim: int, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        if dim < 1 or groups < 1 or dim % groups or not eps > 0:
            raise ArgumentError(
                f"GatedNorm: required dim >= 1, groups that divide it and eps > 0, received dim={dim}, "
                f"groups={groups}, eps={eps}."
            )
        self.dim, self.groups, self.eps = dim, groups, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor, *, values: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        """x (..., dim), or per head (..., heads, dim / heads), and gate (..., dim) -> (..., dim) in the dtype of the
        gate.

        With values (of the shape of x, per head) and skip D (heads,), the input is x + D ⊙ values.
        """
        if x.dim() == 4 and refusal(x, values, gate, skip, self.weight) is None:
            return gated_norm(NormInputs(x, values, gate, skip, self.weight), NormSpec(self.groups, self.eps))[0]
        dtype = accumulation_dtype(gate.dtype)
        x = x.to(dtype)
        if values is not None and skip is not None:
            x = x + skip.to(dtype).unsqueeze(-1) * values
        gated = x.reshape(gate.shape) * F.silu(gate.to(dtype))
        size = self.dim // self.groups
        normed = F.rms_norm(gated.unflatten(-1, (self.groups, size)), (size,), None, self.eps).flatten(-2)
        return (normed * self.weight.to(dtype)).to(gate.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, groups={self.groups}, eps={self.eps:g}"

"""Rotary position embedding."""

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.norm import accumulation_dtype


class Rotary(nn.Module):
    """Rotate each pair (x_i, x_{i+d/2}) by the angle p · base^(−2i/d) at position p.

    Pairs are split by halves, as in Llama and transformers, and not interleaved as in the paper; the two differ by a
    fixed permutation of the coordinates. ⟨rot(q, p), rot(k, s)⟩ depends only on p − s.

    Angles are computed in float64, so positions above 10⁵ stay exact; the rotation is done in float32 or better. There
    are no parameters and buffers, so ``state_dict`` and ``module.to(dtype)`` do not involve it. The last table is kept:
    layers that share one Rotary, and training steps of one length, compute it once.

    Args:
        head_dim: d, even.
        base: θ, the base of the wavelengths.

    Source: Su et al. 2021, arXiv 2104.09864.

    Raises:
        ArgumentError: head_dim is not even and positive, or base <= 1.
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ArgumentError(f"Rotary: head_dim must be even and at least 2, received {head_dim}.")
        if not base > 1:
            raise ArgumentError(f"Rotary: base must be greater than 1, received {base}.")
        self.head_dim = head_dim
        self.base = base
        self._table: tuple[tuple[int, int, torch.device, torch.dtype], Tensor, Tensor] | None = None

    def angles(self, positions: Tensor) -> Tensor:
        """positions (...) -> (..., d/2) angles in radians, float64."""
        exponent = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float64) / self.head_dim
        return positions.to(torch.float64)[..., None] * self.base**-exponent

    def _cos_sin(self, x: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(x.dtype)
        if isinstance(positions, Tensor):
            angles = self.angles(positions)
            if positions.dim() == 2:  # (B, T, d/2): one axis for the heads
                angles = angles[:, None]
            return angles.cos().to(dtype), angles.sin().to(dtype)
        key = (positions, x.shape[-2], x.device, dtype)
        if self._table is None or self._table[0] != key:
            angles = self.angles(torch.arange(positions, positions + x.shape[-2], device=x.device))
            self._table = (key, angles.cos().to(dtype), angles.sin().to(dtype))
        return self._table[1], self._table[2]

    def forward(self, x: Tensor, positions: Tensor | int = 0) -> Tensor:
        """Rotate x.

        Args:
            x: (B, H, T, d).
            positions: the position of the first token, or positions (T,) or (B, T).

        Returns: (B, H, T, d) in the dtype of x.

        Raises:
            ArgumentError: the last axis of x is not d.
        """
        if x.shape[-1] != self.head_dim:
            raise ArgumentError(f"Rotary: the last axis of x must be head_dim={self.head_dim}, received {x.shape[-1]}.")
        cos, sin = self._cos_sin(x, positions)
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base:g}"

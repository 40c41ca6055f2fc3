"""Layers of the Echo paper that are not operators: the Koopman MLP and the Clebsch-Gordan lift of queries and keys."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.initialise import Draws
from zonal.nn.linear import plain


class KoopmanMLP(nn.Module):
    """y = W_read z, where z_i = λ_i u_i over complex pairs u_i of SiLU(W_lift x), with learned λ_i = σ(a_i) e^{-iθ_i}
    inside the unit disk.

    Without the gate this equals a plain layer W SiLU(W_lift x), because W_read can absorb the rotations. It has two
    matrices where a SwiGLU has three. ``gated`` inserts σ(W_gate x) ⊙ z before W_read, which a plain layer cannot
    express. σ(a_i) starts at 0.95.

    Args:
        dim: size of input and output.
        hidden: hidden size, even. None: 64 ⌈(8/3) dim / 64⌉, as in the paper.
        gated: use the gate. The layer then has the parameters of a SwiGLU of the same size and two numbers per pair.

    Source: Echo, section 3.3.

    Raises:
        ArgumentError: sizes do not fit.
    """

    def __init__(self, dim: int, hidden: int | None = None, *, gated: bool = False) -> None:
        super().__init__()
        hidden = 64 * math.ceil(8 * dim / (3 * 64)) if hidden is None else hidden
        if dim < 1 or hidden < 2 or hidden % 2:
            raise ArgumentError(
                f"KoopmanMLP: required dim >= 1 and an even hidden >= 2, received dim={dim}, hidden={hidden}."
            )
        self.dim = dim
        self.lift = nn.Linear(dim, hidden, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False) if gated else None
        self.modulus = nn.Parameter(torch.empty(hidden // 2))
        self.angle = nn.Parameter(torch.empty(hidden // 2))
        self.read = nn.Linear(hidden, dim, bias=False)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw the weights as in a SwiGLU; set σ(a) = 0.95 and spread the angles over the circle."""
        draws.linear_(self.lift, "lift")
        if self.gate is not None:
            draws.linear_(self.gate, "gate")
        draws.linear_(self.read, "read", output=True)
        nn.init.constant_(self.modulus, 3.0)
        draws.uniform_(self.angle, "angle", math.pi)

    def eigenvalues(self) -> Tensor:
        """λ (hidden / 2,), complex, |λ| < 1."""
        return torch.polar(self.modulus.sigmoid(), -self.angle)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        u = F.silu(self.lift(x))
        radius = self.modulus.sigmoid()
        cos, sin = radius * self.angle.cos(), radius * self.angle.sin()
        few = torch.compiler.is_exporting() or x.numel() < self.dim * self.dim  # a program is for any number of tokens
        if self.gate is None and not few and plain(self.read):
            # more rows than W_read has: its columns are turned in their place, the same function
            first, second = self.read.weight.unflatten(1, (-1, 2)).unbind(-1)
            return F.linear(u, torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(1))
        first, second = u.unflatten(-1, (-1, 2)).unbind(-1)
        z = torch.stack([first * cos + second * sin, second * cos - first * sin], -1).flatten(-2)
        return self.read(z if self.gate is None else torch.sigmoid(self.gate(x)) * z)


class CGLift(nn.Module):
    """ψ(k) = [|k_j|² − μ_j ; Re k_j² ; Im k_j²] over complex pairs k_j, then z = Φ ψ(k): quadratic features of queries
    and keys.

    |k_j|² does not change when a pair is rotated, so this part of a score does not depend on rotary positions; k_j²
    rotates by twice the angle. μ is learned and starts at the mean of |k_j|². Without it all keys would share a large
    common part.

    Args:
        dim: size of queries and keys per head, even.
        rank: size of z, at most 3 dim / 2.
        mean: initial value of μ, the mean of |k_j|² over tokens.

    Source: Echo, appendix B. The centring by μ is this project's.

    Raises:
        ArgumentError: sizes do not fit.
    """

    def __init__(self, dim: int, rank: int, *, mean: float = 2.0) -> None:
        super().__init__()
        if dim < 2 or dim % 2 or rank < 1:
            raise ArgumentError(f"CGLift: required an even dim >= 2 and rank >= 1, received dim={dim}, rank={rank}.")
        if rank > 3 * dim // 2:
            raise ArgumentError(
                f"CGLift: rank must be at most 3 dim / 2 = {3 * dim // 2}, the number of features, received {rank}."
            )
        self.mean = nn.Parameter(torch.empty(dim // 2))
        self.projection = nn.Linear(3 * dim // 2, rank, bias=False)
        self.reset_parameters(Draws(), mean=mean)

    def reset_parameters(self, draws: Draws, *, mean: float = 2.0) -> None:
        """Set Φ to a semi-orthogonal matrix and μ to ``mean``."""
        draws.orthogonal_(self.projection.weight, "projection.weight", 1)
        nn.init.constant_(self.mean, mean)

    def features(self, x: Tensor) -> Tensor:
        """ψ: (..., dim) -> (..., 3 dim / 2)."""
        real, imaginary = x.chunk(2, -1)  # the pairs of Rotary
        return torch.cat(
            [real.square() + imaginary.square() - self.mean, real.square() - imaginary.square(), 2 * real * imaginary],
            -1,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> z (..., rank)."""
        return self.projection(self.features(x))

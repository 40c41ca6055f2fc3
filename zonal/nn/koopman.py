"""Layers of the Echo paper that are no operators: the Koopman MLP and the Clebsch-Gordan lift of queries and keys."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.initialise import Draws


class KoopmanMLP(nn.Module):
    """y = W_read z with z_i = λ_i u_i over complex pairs u_i of SiLU(W_lift x), λ_i = σ(a_i) e^{-iθ_i} learned and
    inside the unit disk.

    Ungated it is the plain layer W SiLU(W_lift x), for the rotations fold into W_read: two matrices where a SwiGLU has
    three, and nothing that a plain layer of that size could not learn. ``gated`` puts σ(W_gate x) ⊙ z before W_read,
    which is more than that. σ(a_i) is 0.95 at the start. Source: Echo, section 3.3.

    Args:
        dim: input and output size.
        hidden: size between, even; None = 64 ⌈(8/3) dim / 64⌉, the paper's.
        gated: the gated form, with the parameters of a SwiGLU of the same size and two numbers per pair.
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
        """Weights as in a SwiGLU, σ(a) = 0.95, angles spread over the circle."""
        draws.normal_(self.lift.weight, "lift.weight")
        if self.gate is not None:
            draws.normal_(self.gate.weight, "gate.weight")
        draws.normal_(self.read.weight, "read.weight", output=True)
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
        if self.gate is None and x.numel() >= self.dim * self.dim:
            # more rows than W_read has: its columns are turned in their place, the same function
            first, second = self.read.weight.unflatten(1, (-1, 2)).unbind(-1)
            return F.linear(u, torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(1))
        first, second = u.unflatten(-1, (-1, 2)).unbind(-1)
        z = torch.stack([first * cos + second * sin, second * cos - first * sin], -1).flatten(-2)
        return self.read(z if self.gate is None else torch.sigmoid(self.gate(x)) * z)


class CGLift(nn.Module):
    """ψ(k) = [|k_j|² − μ_j ; Re k_j² ; Im k_j²] over complex pairs k_j, then z = Φ ψ(k): queries and keys of degree
    two.

    |k_j|² does not change when a pair is rotated, so that part of a score knows no rotary positions; k_j² turns with
    twice the angle. μ is learned and starts at the mean: without it all keys share a large common part, and every
    memory seems to persist.
    Source: Echo, appendix B, with the centring that it lacks.

    Args:
        dim: size of q and k of a head, even.
        rank: size of z.
        mean: where μ starts, the mean of |k_j|² over tokens.
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
        """Φ semi-orthogonal, μ = mean."""
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

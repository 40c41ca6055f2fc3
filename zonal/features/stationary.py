"""Features of kernels of q - k: Gaussian, Laplacian, Matérn; by cosines and sines, or positive."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_one_of, require_positive, require_whole
from zonal.errors import ArgumentError
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source
from zonal.features.random import waves

Stationarity = Literal["gaussian", "laplacian", "matern"]


@dataclass(frozen=True)
class Stationary(FeatureMap):
    """phi(x) with E phi(u) . phi(v) = kappa(u - v), for vectors of any length:

    ``gaussian``   kappa(x) = exp(-|x|^2 / (2 width^2));
    ``laplacian``  kappa(x) = exp(-|x|_1 / width), with the sum of absolute values;
    ``matern``     kappa(x) = e^-r, (1 + r) e^-r or (1 + r + r^2/3) e^-r, r = sqrt(2 nu) |x| / width, nu = 1/2, 3/2,
    5/2.

    Each kernel is a mixture of Gaussians with frequencies w = z * s / width, z ~ N(0, I). The random scale s is 1 for
    the Gaussian kernel, Cauchy per coordinate for the Laplacian, and Student per draw for Matérn. A positive map is
    phi_i(x) = D^-1/2 exp(w_i . x - |s_i * x|^2 / width^2). Otherwise phi(x) = sqrt(2/D) [cos(W x), sin(W x)] with D/2
    frequencies, whose kernel values may be negative.

    size: D. width: None = sqrt(d), so that vectors of unit variance are about one width apart. orthogonal: z are
    orthogonal within blocks. learn: W is trained, and kappa is only the initial kernel. Positive maps of the Laplacian
    and Matérn kernels are poor: their heavy-tailed scales give infinite variance where u . v > 0 (Matérn, one scale for
    all coordinates) or where u_i v_i > 0 in one coordinate (Laplacian, one scale each).

    Raises: ArgumentError for unknown kernels and sizes that do not fit. Source: Rahimi and Recht 2007; positive:
    Choromanski et al. 2021, applied to each Gaussian of the mixture.
    """

    unit = False

    size: int
    kappa: Stationarity = "gaussian"
    width: float | None = None
    smoothness: float = 1.5
    orthogonal: bool = False
    learn: bool = False
    signed: bool = True

    def __post_init__(self) -> None:
        require_whole("Stationary: size", self.size, 2 if self.signed else 1, most=2**16)
        require(
            not (self.signed and self.size % 2),
            f"Stationary: a cosine and a sine for each frequency need an even size, received {self.size}.",
        )
        require_one_of("Stationary: kappa", self.kappa, get_args(Stationarity))
        require_positive("Stationary: width", self.width, optional=True)
        require_one_of("Stationary: smoothness", self.smoothness, (0.5, 1.5, 2.5))

    @property
    def learned(self) -> tuple[str, ...]:
        return ("omega",) if self.learn else ()

    @property
    def claim(self) -> Claim:
        if self.learn:
            return Claim("learned", "frequencies are trained")
        return Claim("unbiased", f"the {self.kappa} kernel as a mixture of Gaussians, sampled")

    @property
    def nonnegative(self) -> bool:
        return not self.signed

    @property
    def alike(self) -> bool:
        return not self.signed  # a cosine and a sine differ

    def dimension(self, dim: int) -> int:
        return self.size

    def flops(self, dim: int) -> int:
        return self.size * (dim + 2) if self.signed else self.size * (4 * dim + 3)

    def _width(self, dim: int) -> float:
        return math.sqrt(dim) if self.width is None else self.width

    def apart(self, u: Tensor, v: Tensor) -> Tensor:
        """kappa(u - v) on the last axis, exactly."""
        gap = (u - v) / self._width(u.shape[-1])
        if self.kappa == "laplacian":
            return (-gap.abs().sum(-1)).exp()
        square = gap.square().sum(-1)
        return (-square / 2).exp() if self.kappa == "gaussian" else self._matern(square)

    def _matern(self, square: Tensor) -> Tensor:
        """kappa of squared distances in widths. At 0, where the root has no derivative, it is the tangent, and constant
        for nu = 1/2, where there is none.
        """
        apart = square > 0
        r = math.sqrt(2 * self.smoothness) * torch.where(apart, square, 1).sqrt()
        factor = {0.5: torch.ones_like(r), 1.5: 1 + r, 2.5: 1 + r + r.square() / 3}[self.smoothness]
        slope = {0.5: 0, 1.5: 3 / 2, 2.5: 5 / 6}[self.smoothness]
        return torch.where(apart, factor * (-r).exp(), 1 - slope * square)

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        """kappa for unit vectors with u . v = x. Raises: ArgumentError for the Laplacian, which is no function of x."""
        if self.kappa == "laplacian":
            raise ArgumentError("Stationary.kernel: the Laplacian kernel is no function of q . k. Use apart(u, v).")
        square = (2 - 2 * x).clamp_min(0) / self._width(dim) ** 2
        return (-square / 2).exp() if self.kappa == "gaussian" else self._matern(square)

    def draw(self, source: Source) -> dict[str, Tensor]:
        heads, count, dim = source.heads, self.size // 2 if self.signed else self.size, source.dim
        normal = source.gaussian(count, self.orthogonal, direction="direction", length="omega")
        scale = torch.ones(heads, count, dim, dtype=torch.float64)
        if self.kappa == "laplacian":
            scale = 1 / source.normal("scale", heads, count, dim).abs()
        elif self.kappa == "matern":
            freedom = round(2 * self.smoothness)
            scale = scale * (source.normal("scale", heads, count, freedom).square().mean(-1, keepdim=True) ** -0.5)
        scale = scale / self._width(dim)
        return {"omega": normal * scale} if self.signed else {"omega": normal * scale, "square": scale.square()}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        if self.signed:
            return waves(x, buffers["omega"])
        # one exponent: the two factors apart would overflow where their product does not
        return (x @ buffers["omega"].mT - x.square() @ buffers["square"].mT - 0.5 * math.log(self.size)).exp()


__all__ = ["Stationarity", "Stationary"]

"""Random features: positive ones of e^(2 s x), Fourier, random Maclaurin, TensorSketch."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_positive, require_whole
from zonal.algebra.score import FeatureLayer
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source
from zonal.formula import Activation


@dataclass(frozen=True)
class PositiveRandom(FeatureMap):
    """phi(u) = D^-1/2 exp(sqrt(2 s) w_i . u - s |u|^2), i = 1 … D, with E phi(u) . phi(v) = e^(2 s u.v).

    This holds for vectors of any length. For unit vectors and independent w_i ~ N(0, I), the relative variance is (e^(4
    s (1 + x)) - 1)/D, which grows exponentially with s.

    draws: D. s: the scale. orthogonal: w_i are orthogonal within blocks of d, with the lengths of Gaussian vectors.
    antithetic: each w occurs with -w, so D is even. learn: w is trained; the expectation above no longer holds.

    Source: Choromanski et al. 2021; SLAY, eq. 9.
    """

    unit = False
    nonnegative = True
    alike = True

    draws: int
    s: float = 0.5
    orthogonal: bool = False
    antithetic: bool = False
    learn: bool = False

    def __post_init__(self) -> None:
        require_whole("PositiveRandom: draws", self.draws, most=2**16)
        require(
            not (self.antithetic and self.draws % 2),
            f"PositiveRandom: antithetic draws come in pairs; an even number is required, received {self.draws}.",
        )
        require(self.s >= 0 and math.isfinite(self.s), f"PositiveRandom: s must be >= 0, received {self.s}.")

    @property
    def learned(self) -> tuple[str, ...]:
        return ("omega",) if self.learn else ()

    @property
    def claim(self) -> Claim:
        if self.learn:
            return Claim("learned", "projections are trained")
        return Claim("unbiased", "the mean of exp over Gaussian projections")

    def dimension(self, dim: int) -> int:
        return self.draws

    def flops(self, dim: int) -> int:
        return self.draws * (2 * dim + 3) + 2 * dim

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return (2 * self.s * x).exp()

    def relative_variance(self, x: Tensor) -> Tensor:
        """Var(phi(u) . phi(v)) / e^(4 s x) for unit vectors and independent draws."""
        return torch.expm1(4 * self.s * (1 + x)) / self.draws

    def draw(self, source: Source) -> dict[str, Tensor]:
        omega = source.gaussian(self.draws // 2 if self.antithetic else self.draws, self.orthogonal)
        return {"omega": torch.cat([omega, -omega], 1) if self.antithetic else omega}

    def layer(self, buffers: Buffers, side: Side) -> FeatureLayer:
        offset = -0.5 * math.log(self.draws)
        features = Activation("exp", 0, self.draws, math.sqrt(2 * self.s), self.s, offset)
        return FeatureLayer((features,), buffers["omega"])

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        # one exponent: the two factors apart would overflow where their product does not
        exponent = x @ buffers["omega"].mT * math.sqrt(2 * self.s) - self.s * x.square().sum(-1, keepdim=True)
        return (exponent - 0.5 * math.log(self.draws)).exp()


@dataclass(frozen=True)
class Fourier(FeatureMap):
    """phi(x) = sqrt(2/D) [cos(W x), sin(W x)], W (D/2, d) ~ N(0, 1/width^2): random Fourier features of a Gaussian.

    E phi(u) . phi(v) = exp(-|u - v|^2 / (2 width^2)). Signed: single values may be negative. On unit vectors the kernel
    is e^(-(1 - x)/width^2).

    Raises: ArgumentError for an odd number of features. Source: Rahimi and Recht 2007.
    """

    size: int
    width: float = 1.0
    orthogonal: bool = False
    learn: bool = False

    def __post_init__(self) -> None:
        require_whole("Fourier: size", self.size, 2, most=2**16)
        require(
            self.size % 2 == 0,
            f"Fourier: a cosine and a sine for each frequency need an even size >= 2, received {self.size}.",
        )
        require_positive("Fourier: width", self.width)

    @property
    def learned(self) -> tuple[str, ...]:
        return ("omega",) if self.learn else ()

    @property
    def claim(self) -> Claim:
        if self.learn:
            return Claim("learned", "frequencies are trained")
        return Claim("unbiased", "the Fourier transform of a Gaussian, sampled")

    def dimension(self, dim: int) -> int:
        return self.size

    def flops(self, dim: int) -> int:
        return self.size * (dim + 2)

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return ((x - 1) / self.width**2).exp()

    def draw(self, source: Source) -> dict[str, Tensor]:
        return {"omega": source.gaussian(self.size // 2, self.orthogonal) / self.width}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        return waves(x, buffers["omega"])


def waves(x: Tensor, omega: Tensor) -> Tensor:
    """sqrt(1/n) [cos(W x), sin(W x)] for n frequencies. x (…, H, T, d), W (H, n, d) -> (…, H, T, 2 n)."""
    angle = x @ omega.mT
    return torch.cat([angle.cos(), angle.sin()], -1) * math.sqrt(1 / omega.shape[-2])


@dataclass(frozen=True)
class _Power(FeatureMap):
    """Base of maps with E phi(u) . phi(v) = (u . v)^degree for vectors of any length, in ``size`` features."""

    unit = False
    alike = True

    size: int
    degree: int = 2

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_whole(f"{name}: size", self.size, most=2**16)
        require_whole(f"{name}: degree", self.degree, most=6)

    def dimension(self, dim: int) -> int:
        return self.size

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return x**self.degree


@dataclass(frozen=True)
class RandomMaclaurin(_Power):
    """phi(x)_i = D^-1/2 prod_j (r_ij . x), j = 1 … degree, with random signs r. Signed.

    E phi(u) . phi(v) = (u . v)^degree. Source: Kar and Karnick 2012; SLAY, appendix C.
    """

    claim = Claim("unbiased", "products of projections on independent random signs")

    def flops(self, dim: int) -> int:
        return self.size * self.degree * (2 * dim + 1)

    def draw(self, source: Source) -> dict[str, Tensor]:
        return {"signs": source.signs("signs", source.heads, self.degree, self.size, source.dim)}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        out = x @ buffers["signs"][:, 0].mT
        for j in range(1, self.degree):
            out = out * (x @ buffers["signs"][:, j].mT)
        return out * self.size**-0.5


def count_sketch(x: Tensor, bucket: Tensor, sign: Tensor, size: int) -> Tensor:
    """Each of the d numbers of x, with a random sign, added to one of ``size`` buckets.

    x (…, H, T, d), bucket and sign (H, d) -> (…, H, T, size).
    """
    signed = x * sign.unsqueeze(-2)
    buckets = torch.zeros_like(signed[..., :1].expand(*signed.shape[:-1], size))
    return buckets.scatter_add(-1, bucket.unsqueeze(-2).expand(signed.shape), signed)


def convolve(parts: list[Tensor]) -> Tensor:
    """Circular convolution of sketches, which is the sketch of their outer product. In float32 or better."""
    size, dtype = parts[0].shape[-1], parts[0].dtype
    if not parts[0].numel():  # no vectors, which not every library of Fourier transforms takes
        return functools.reduce(torch.mul, parts)
    wide = torch.promote_types(dtype, torch.float32)
    product = torch.fft.rfft(parts[0].to(wide))
    for other in parts[1:]:
        product = product * torch.fft.rfft(other.to(wide))
    return torch.fft.irfft(product, n=size).to(dtype)


@dataclass(frozen=True)
class TensorSketch(_Power):
    """The count sketch of x ⊗ … ⊗ x, by convolution of count sketches of x. Signed.

    E phi(u) . phi(v) = (u . v)^degree exactly. Source: Pham and Pagh 2013.
    """

    claim = Claim("unbiased", "a count sketch of the tensor power")

    def flops(self, dim: int) -> int:
        return self.degree * 2 * dim + (self.degree + 1) * 5 * self.size * math.ceil(math.log2(self.size + 1)) // 2

    def draw(self, source: Source) -> dict[str, Tensor]:
        shape = (source.heads, self.degree, source.dim)
        return {"bucket": source.integers("bucket", self.size, *shape), "sign": source.signs("sign", *shape)}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        sketched = zip(buffers["bucket"].unbind(1), buffers["sign"].unbind(1), strict=True)
        return convolve([count_sketch(x, bucket, sign, self.size) for bucket, sign in sketched])


__all__ = ["Fourier", "PositiveRandom", "RandomMaclaurin", "TensorSketch", "convolve", "count_sketch", "waves"]

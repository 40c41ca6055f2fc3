"""The error of a feature map's outputs relative to its kernel, and a lower bound of the error for maps of its size."""

import math
import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from zonal.algebra import gegenbauer
from zonal.algebra.declaration import require, require_one_of
from zonal.algebra.link import Link
from zonal.features.base import Buffers, FeatureMap
from zonal.features.learned import rows

Inputs = Literal["iid", "anisotropic", "peaked"]
INPUTS: tuple[Inputs, ...] = ("iid", "anisotropic", "peaked")
Readout = Callable[[Tensor], Tensor]
_PEAK = 0.9
_DEGREES = 64
_ANGLES = 2**15  # the narrowest Yat kernel, of eps = 1e-6, is 30 steps wide
_MOST_DEGREES = _ANGLES // 4


class OutputFidelity(NamedTuple):
    """error: |y - y*| / |y*| over all rows. negative: share of visible kernel values below 0.

    unsafe: share of rows whose sum + delta is <= 0.
    """

    error: float
    negative: float
    unsafe: float


class Sample(NamedTuple):
    """Unit q, k (H, T, d) and v (H, T, P) in float64."""

    q: Tensor
    k: Tensor
    v: Tensor


def sample(kind: Inputs, heads: int, length: int, dim: int, seed: int, value_dim: int | None = None) -> Sample:
    """Queries and keys of a known distribution, and independent normal values.

    ``iid``: independent, uniform on the sphere. ``anisotropic``: the same, with the axes of a random frame, shared by
    queries and keys, scaled by 1, 1/2, …, 1/d. ``peaked``: iid keys, and each query at cosine 0.9 to a random key up to
    its own position.
    """
    require_one_of("sample: kind", kind, INPUTS)
    require(dim >= 2, f"sample: dim must be >= 2, received {dim}.")
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    q, k, v = normal(heads, length, dim), normal(heads, length, dim), normal(heads, length, value_dim or dim)
    if kind == "anisotropic":
        frame = torch.linalg.qr(normal(heads, dim, dim)).Q
        scales = 1 / torch.arange(1, dim + 1, dtype=torch.float64)
        q, k = (q * scales) @ frame, (k * scales) @ frame
    q, k = unit(q, dim=-1), unit(k, dim=-1)
    if kind == "peaked":
        place = (torch.rand(heads, length, generator=draw, dtype=torch.float64) * torch.arange(1, length + 1)).long()
        target = k.gather(1, place[..., None].expand_as(k))
        aside = unit(q - (q * target).sum(-1, keepdim=True) * target, dim=-1)
        q = _PEAK * target + math.sqrt(1 - _PEAK**2) * aside
    return Sample(q, k, v)


def kernel_value(kernel: Link, x: Tensor) -> Tensor:
    """A link with nothing learned at x of any shape."""
    require(not kernel.initial(), f"fidelity: a kernel with nothing learned is required, received {kernel}.")
    return kernel.at(x)


@torch.no_grad()
def feature_kernel(features: FeatureMap, buffers: Buffers, data: Sample) -> Tensor:
    """phi_q(q_t) . phi_k(k_s) for all pairs, (H, T, T)."""
    return features.query(data.q, buffers) @ features.key(data.k, buffers).mT


def kernel_fidelity(
    approximate: Tensor,
    data: Sample,
    kernel: Link,
    *,
    causal: bool = True,
    delta: float = 0.0,
    readout: Readout | None = None,
) -> OutputFidelity:
    """``fidelity`` of kernel values (H, T, T) from another source.

    readout: applied to both outputs (H, T, P) before they are compared.
    """
    read = readout or (lambda y: y)
    x = (data.q @ data.k.mT).clamp(-1, 1)
    wanted = read(rows(kernel_value(kernel, x), causal) @ data.v)
    got = read(rows(approximate, causal, delta) @ data.v)
    visible = torch.ones_like(approximate).tril() if causal else torch.ones_like(approximate)
    sums = (approximate * visible).sum(-1) + delta
    negative = float(((approximate < 0) & (visible > 0)).sum() / visible.sum())
    return OutputFidelity(float((got - wanted).norm() / wanted.norm()), negative, float((sums <= 0).double().mean()))


def fidelity(
    features: FeatureMap, buffers: Buffers, data: Sample, kernel: Link, *, causal: bool = True, delta: float = 0.0
) -> OutputFidelity:
    """The error of row-normalised outputs of ``features`` relative to those of ``kernel`` on the same q, k, v.

    Dense, (H, T, T): for T up to a few thousand. Nothing is clamped, so a row that a signed map spoils shows in the
    error and in ``unsafe``.
    """
    return kernel_fidelity(feature_kernel(features, buffers, data), data, kernel, causal=causal, delta=delta)


def average_error(data: Sample, kernel: Link, *, causal: bool = True, readout: Readout | None = None) -> float:
    """The error of the plain mean of all visible values, a baseline without any map."""
    return kernel_fidelity(torch.ones_like(data.q @ data.k.mT), data, kernel, causal=causal, readout=readout).error


def _angles(dim: int) -> tuple[Tensor, Tensor]:
    """``uniform_angles``, exact for polynomials of any degree below ``_ANGLES`` - dim, also in odd dimensions."""
    theta = (torch.arange(_ANGLES, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / _ANGLES)
    weight = theta.sin() ** (dim - 2)
    if dim % 2:  # then sin(theta) d theta = dx has the weights of Fejer's first rule, and the rest is a polynomial of x
        k = torch.arange(_ANGLES // 2 + 1, dtype=torch.float64, device="cpu")
        fejer = torch.fft.irfft(torch.polar(2 / (1 - 4 * k.square()), k * (math.pi / _ANGLES)), n=_ANGLES)
        weight = theta.sin() ** (dim - 3) * fejer
    return theta.cos(), weight / weight.sum()


def mercer_bound(kernel: Link, dim: int, size: int) -> float:
    """The smallest relative RMS error of the kernel over all maps of ``size`` features that do not depend on data.

    For independent uniform unit vectors, the eigenfunctions are the harmonics. The eigenvalue of degree n is E k(x)
    R_n(x) with multiplicity N_n, and the best map keeps the ``size`` largest in magnitude. The bound is on the kernel;
    errors of outputs follow it closely.

    Raises: ArgumentError for a learned kernel, dim < 2, and more features than the first 8192 degrees have harmonics.
    """
    require(
        dim >= 2 and size >= 0, f"mercer_bound: dim >= 2 and size >= 0 are required, received dim={dim}, size={size}."
    )
    x, weight = _angles(dim)
    value = kernel_value(kernel, x)
    counts: list[int] = []
    # a circle has two harmonics of each degree, so that a large map may keep far more than the first degrees
    while len(counts) < _DEGREES or (sum(counts) < size and len(counts) < _MOST_DEGREES):
        counts.append(gegenbauer.harmonic_dimension(len(counts), dim - 1))
    require(
        size <= sum(counts), f"mercer_bound: in {dim} dimensions size must be at most {sum(counts)}, received {size}."
    )
    weighted = weight * value
    total = float((weighted * value).sum())
    squares = [float((weighted * r).sum()) ** 2 for r in gegenbauer.each(x, len(counts), dim - 1)]
    # what is left is summed: 1 - kept would lose a small rest to rounding
    rest, left = max(0.0, total - sum(map(operator.mul, squares, counts))), size
    for square, count in sorted(zip(squares, counts, strict=True), reverse=True):
        taken = min(left, count)
        rest, left = rest + (count - taken) * square, left - taken
    return math.sqrt(rest / total)


__all__ = [
    "INPUTS",
    "Inputs",
    "OutputFidelity",
    "Sample",
    "average_error",
    "feature_kernel",
    "fidelity",
    "kernel_fidelity",
    "kernel_value",
    "mercer_bound",
    "sample",
]

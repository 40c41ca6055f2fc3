"""Features from landmarks: squared products with anchors, stable Nystrom features, and a low-rank square."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from zonal import device_memory
from zonal.algebra.declaration import require, require_one_of, require_whole
from zonal.algebra.link import Link, SquaredAffine
from zonal.algebra.score import FeatureLayer
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source
from zonal.features.polynomial import square
from zonal.formula import Activation

Choice = Literal["random", "orthogonal", "kmeans"]
_SQUARE = SquaredAffine(bias=0.0)
_ROUNDS = 25  # of k-means


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cluster centres of ``points`` (N, d) by cosine: (count, d) unit vectors.

    A centre without points moves to the point that is farthest from its own centre.
    """
    unit = torch.nn.functional.normalize(points, dim=-1)
    centres = unit[torch.randperm(len(unit), generator=generator)[:count]]
    for _ in range(_ROUNDS):
        nearest = (unit @ centres.T).max(-1)
        total = torch.zeros_like(centres).index_add_(0, nearest.indices, unit)
        empty = torch.bincount(nearest.indices, minlength=count) == 0
        total[empty] = unit[nearest.values.argsort()[: int(empty.sum())]]
        centres = torch.nn.functional.normalize(total, dim=-1)
    return centres


def landmarks(choice: Choice, count: int, source: Source, call: str) -> Tensor:
    """(H, count, d) unit vectors."""
    if choice == "kmeans":
        keys = source.need_keys(call, count)
        return torch.stack([k_means(rows, count, source.generator(f"kmeans{h}")) for h, rows in enumerate(keys)])
    return source.units("anchors", count, orthogonal=choice == "orthogonal")


def _check(call: str, count: int, choice: str) -> None:
    require_whole(f"{call}: count", count, most=2**16)
    require_one_of(f"{call}: choice", choice, get_args(Choice))


@dataclass(frozen=True)
class Anchors(FeatureMap):
    """phi(x)_i = P^-1/2 (x . a_i)^2 for P unit anchors: SLAY's default for the factor x^2. Never negative, and not x^2.

    With anchors uniform on the sphere phi(u) . phi(v) tends to (1 + 2 x^2)/(d (d + 2)): near x = 0 it is a constant.

    choice: ``random``, ``orthogonal`` in blocks of d, ``kmeans`` of given keys. learn: the anchors are trained.
    """

    nonnegative = True

    count: int
    choice: Choice = "random"
    learn: bool = False

    def __post_init__(self) -> None:
        _check("Anchors", self.count, self.choice)

    @property
    def learned(self) -> tuple[str, ...]:
        return ("anchors",) if self.learn else ()

    @property
    def chosen(self) -> tuple[str, ...]:
        return ("anchors",) if self.choice == "kmeans" else ()

    @property
    def claim(self) -> Claim:
        if self.learn or self.choice == "kmeans":
            return Claim("learned", "anchors follow the data")
        return Claim("biased", "tends to (1 + 2 x^2)/(d (d + 2)), where x^2 is meant")

    def dimension(self, dim: int) -> int:
        return self.count

    def flops(self, dim: int) -> int:
        return self.count * (2 * dim + 2)

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return (1 + 2 * x.square()) / (dim * (dim + 2))

    def draw(self, source: Source) -> dict[str, Tensor]:
        return {"anchors": landmarks(self.choice, self.count, source, "Anchors.prepare")}

    def layer(self, buffers: Buffers, side: Side) -> FeatureLayer:
        squares = Activation("square", 0, self.count, gain=self.count**-0.5)
        return FeatureLayer((squares,), buffers["anchors"])

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        return (x @ buffers["anchors"].mT).square() * self.count**-0.5


@dataclass(frozen=True)
class Nystrom(FeatureMap):
    """phi(x) = K(x, A) U diag(lam)^-1/2 with K(A, A) = U diag(lam) U^T: the best map in the span of landmarks A.

    Signed.

    Eigenvalues below ``cutoff`` times the largest give features of 0. Whitening with (K + ridge)^-1/2 instead would
    amplify rounding in directions that the landmarks do not distinguish. The map is exact once A spans the features of
    the kernel.

    kernel_link: any link over q . k without learned parts; x^2 by default.
    """

    claim = Claim("biased", "the projection of the kernel on its landmarks")

    count: int
    kernel_link: Link = _SQUARE
    choice: Choice = "random"
    cutoff: float = 1e-6

    def __post_init__(self) -> None:
        _check("Nystrom", self.count, self.choice)
        require(0 < self.cutoff < 1, f"Nystrom: cutoff must lie between 0 and 1, received {self.cutoff}.")
        require(
            not self.kernel_link.initial(),
            f"Nystrom: a kernel with nothing learned is required, received {self.kernel_link}.",
        )

    @property
    def unit(self) -> bool:
        return self.kernel_link.domain is not None

    @property
    def chosen(self) -> tuple[str, ...]:
        return ("anchors", "whitening") if self.choice == "kmeans" else ()

    def dimension(self, dim: int) -> int:
        return self.count

    def flops(self, dim: int) -> int:
        return self.count * (2 * dim + self.kernel_link.operations + 2 * self.count)

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return self.kernel_link.at(x)

    def draw(self, source: Source) -> dict[str, Tensor]:
        # the kernel among landmarks, its eigenvectors and the whitening, in float64
        what, size = f"{self.count} landmarks for each of {source.heads} heads", 3 * 8 * source.heads * self.count**2
        device_memory.require("Nystrom.prepare", what, size, "cpu", "Use fewer landmarks.")
        at = landmarks(self.choice, self.count, source, "Nystrom.prepare")
        lam, u = torch.linalg.eigh(self.kernel(at @ at.mT, source.dim))
        kept = lam > self.cutoff * lam[:, -1:]
        root = torch.where(kept, lam.clamp_min(1e-300), torch.inf).rsqrt()
        return {"anchors": at, "whitening": u * root.unsqueeze(-2)}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        return self.kernel(x @ buffers["anchors"].mT, x.shape[-1]) @ buffers["whitening"]


@dataclass(frozen=True)
class LowRankSquare(FeatureMap):
    """(x_P + b)^2 + (1 - |P q|^2)(1 - |P k|^2)/(d - r) with x_P = P q . P k.

    This is a squared affine kernel in r directions, plus the mean of x^2 over the rest. It is never negative on unit
    vectors. P (r, d) has orthonormal rows: ``random``, or ``pca`` for the leading directions of given keys. m = (r +
    1)(r + 2)/2 + 1, and one less for r = d, where the kernel is (x + b)^2.
    """

    claim = Claim("biased", "directions outside the projection are known by their length only")

    rank: int
    bias: float = 0.04
    choice: Literal["random", "pca"] = "random"

    def __post_init__(self) -> None:
        require_whole("LowRankSquare: rank", self.rank, most=2**16)
        require_one_of("LowRankSquare: choice", self.choice, ("random", "pca"))
        require(self.bias != 0, "LowRankSquare: bias must not be 0; features.square() is the bare square.")

    @property
    def chosen(self) -> tuple[str, ...]:
        return ("projection",) if self.choice == "pca" else ()

    @property
    def positive(self) -> bool:
        return True

    def dimension(self, dim: int) -> int:
        self._fits(dim)
        return square(self.bias).dimension(self.rank) + (self.rank < dim)

    def flops(self, dim: int) -> int:
        return 2 * self.rank * (dim + 1) + square(self.bias).flops(self.rank) + 2

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        return (x + self.bias).square()

    def _fits(self, dim: int) -> None:
        require(self.rank <= dim, f"LowRankSquare: rank must be at most the dimension {dim}, received {self.rank}.")

    def draw(self, source: Source) -> dict[str, Tensor]:
        self._fits(source.dim)
        if self.choice == "random":
            return {"projection": source.units("projection", self.rank, orthogonal=True)}
        keys = source.need_keys("LowRankSquare.prepare", self.rank)
        return {"projection": torch.linalg.eigh(keys.mT @ keys).eigenvectors.flip(-1)[..., : self.rank].mT.contiguous()}

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        inside = x @ buffers["projection"].mT
        phi = square(self.bias)(inside, NONE, side)
        if self.rank == x.shape[-1]:
            return phi
        # rounding can bring the projection of a unit vector past length one
        rest = (1 - inside.square().sum(-1, keepdim=True)).clamp_min(0)
        return torch.cat([phi, rest * (x.shape[-1] - self.rank) ** -0.5], -1)


__all__ = ["Anchors", "Choice", "LowRankSquare", "Nystrom", "k_means", "landmarks"]

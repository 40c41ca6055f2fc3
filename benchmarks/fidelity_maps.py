"""The feature maps that `zonal bench fidelity` measures, in families that differ in size, and the protocol of SLAY's
table 10.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from zonal.algebra.link import Yat
from zonal.features import (
    Anchors,
    FeatureMap,
    Fourier,
    LearnedExp,
    LowRankSquare,
    Nystrom,
    Polynomial,
    PositiveRandom,
    RandomMaclaurin,
    Slay,
    TensorSketch,
    fit_square,
    square,
    taylor_exp,
)
from zonal.features.fidelity import Sample
from zonal.features.fit import row_weights

LARGEST = 6000
SCALES = ("small", "medium", "large")


class Candidate(NamedTuple):
    """A map in a family; ``trained``: its learned parts are fitted to other data of the same kind first."""

    family: str
    label: str
    features: FeatureMap
    trained: bool = False


def _slay_factors(slay: Slay) -> Iterator[tuple[str, Slay]]:
    """The choices of the paper's ablation at one scale, each with as many features as the anchors give."""
    count = slay.draws
    product = count * count
    yield "SLAY: anchors", slay
    yield "SLAY: Laplace only", slay.laplace_only()
    yield "SLAY: Hadamard, shared", replace(slay, fusion="shared", draws=product)
    yield "SLAY: Nystrom", replace(slay, polynomial=Nystrom(count))
    yield "SLAY: TensorSketch", replace(slay, polynomial=TensorSketch(count))
    yield "SLAY: random Maclaurin", replace(slay, polynomial=RandomMaclaurin(count))
    yield (
        "SLAY: Hadamard, Maclaurin",
        replace(slay, polynomial=RandomMaclaurin(product), draws=product, fusion="hadamard"),
    )
    yield "SLAY: sketched", replace(slay, fusion="sketch", sketch_size=product)


def candidates(dim: int, eps: float, seen: Sample, learn: bool) -> Iterator[Candidate]:
    """Every map of at most 6000 features.

    ``seen``: data of the same kind as what is measured, for maps that look at it.
    """
    for found in _candidates(dim, eps, seen, learn):
        low_rank = found.features
        if isinstance(low_rank, LowRankSquare) and (
            low_rank.rank > dim or (low_rank.choice == "pca" and low_rank.rank > seen.k.shape[1])
        ):
            continue
        if found.features.dimension(dim) <= LARGEST:
            yield found


def _candidates(dim: int, eps: float, seen: Sample, learn: bool) -> Iterator[Candidate]:
    yat = Yat(eps)
    x = seen.q @ seen.k.mT
    seen_pairs = torch.ones_like(x).tril()
    for degree in (2, 4, 6):
        label = f"degree {degree}"
        yield Candidate("p(x)² + c, random angles", label, Polynomial.of(fit_square(yat, degree, dim=dim).link))
        yield Candidate(
            "p(x)² + c, own angles", label, Polynomial.of(fit_square(yat, degree, angles=x, weights=seen_pairs).link)
        )
        yield Candidate(
            "p(x)² + c, own rows",
            label,
            Polynomial.of(fit_square(yat, degree, angles=x, weights=row_weights(yat, x)).link),
        )
    yield Candidate("x² alone", "exact", square())
    for rank in sorted({max(2, dim // 4), max(2, dim // 2), (2 * dim) // 3}):
        yield Candidate("projected square, random", f"rank {rank}", LowRankSquare(rank))
        yield Candidate("projected square, PCA", f"rank {rank}", LowRankSquare(rank, choice="pca"))
    for scale in SCALES:
        for family, slay in _slay_factors(replace(Slay.preset(scale), eps=eps)):
            yield Candidate(family, scale, slay)
        slay = replace(Slay.preset(scale), eps=eps)
        paired = replace(slay, orthogonal=True, antithetic=True)
        yield Candidate("SLAY: minimax nodes", scale, replace(slay, rule="minimax"))
        yield Candidate(
            "SLAY: orthogonal", scale, replace(paired, nodes=1, polynomial=Anchors(2 * slay.draws, "orthogonal"))
        )
        if slay.draws <= seen.k.shape[1]:
            yield Candidate("SLAY: k-means anchors", scale, replace(slay, polynomial=Anchors(slay.draws, "kmeans")))
    for draws in (2, 8):
        paired = Slay(eps=eps, nodes=1, polynomial=square(), draws=draws, orthogonal=True, antithetic=True)
        yield Candidate("x² × random features", f"D = {draws}", paired)
    for count in (64, 256, 1024):
        yield Candidate("Nystrom of Yat", f"{count} random", Nystrom(count, yat))
        if count <= seen.k.shape[1]:
            yield Candidate("Nystrom of Yat, k-means", f"{count}", Nystrom(count, yat, "kmeans"))
        yield Candidate("random Fourier", f"{count}", Fourier(count))
        yield Candidate(
            "positive random, s = 1", f"{count}", PositiveRandom(count, 1.0, orthogonal=True, antithetic=True)
        )
    yield Candidate("Taylor of exp", "order 2", taylor_exp(2.0))
    if learn:
        for count in (64, 256):
            yield Candidate("learned exponentials", f"{count}", LearnedExp(count), True)
        yield Candidate(
            "SLAY: learned",
            "medium",
            replace(Slay.preset("medium"), eps=eps, polynomial=Anchors(16, learn=True), learn=True),
            True,
        )


# relative l2 that the paper prints: (T, {row: value}) by scale
TABLE_10 = {
    "small": (128, {"SLAY: Laplace only": 0.5870, "SLAY: anchors": 0.6626, "SLAY: Hadamard, shared": 0.8237,
    "SLAY: Nystrom": 22.9072, "SLAY: TensorSketch": 474075.1562, "SLAY: random Maclaurin": 2195912.75}),
    "medium": (256, {"SLAY: Laplace only": 0.5417, "SLAY: anchors": 0.5667, "SLAY: Hadamard, shared": 0.6609,
    "SLAY: Nystrom": 61.6529, "SLAY: TensorSketch": 214115.9844, "SLAY: random Maclaurin": 1715766.75}),
    "large": (512, {"SLAY: Laplace only": 0.4850, "SLAY: anchors": 0.4939, "SLAY: Hadamard, shared": 0.6793,
    "SLAY: Nystrom": 28.1970, "SLAY: TensorSketch": 461739.0312, "SLAY: random Maclaurin": 1772757.5}),
}  # fmt: skip


def table_10(scale: str, eps: float, dim: int) -> Iterator[Candidate]:
    """The rows of one block of the paper's table, and after them what the same data gives with exact polynomial
    features.
    """
    for family, slay in _slay_factors(replace(Slay.preset(scale), eps=eps)):
        if family in TABLE_10[scale][1]:
            yield Candidate(family, scale, slay)
    yield Candidate("x² alone", "exact", square())
    yield Candidate("p(x)² + c, random angles", "degree 2", Polynomial.of(fit_square(Yat(eps), 2, dim=dim).link))


__all__ = ["LARGEST", "SCALES", "TABLE_10", "Candidate", "candidates", "table_10"]

"""SLAY from plain values, and the polynomial that takes its place."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import zonal
from zonal import link, mechanisms
from zonal.errors import ArgumentError
from zonal.features import (
    Anchors,
    FeatureMap,
    Features,
    Nystrom,
    RandomMaclaurin,
    Slay,
    TensorSketch,
    fit_square,
    row_weights,
    sample,
    square,
)
from zonal.features.slay import Fusion


def features_of(operator: zonal.Operator) -> FeatureMap:
    assert isinstance(operator.score, Features)
    return operator.score.features


@pytest.mark.parametrize(
    ("polynomial", "expected"),
    [
        ("anchors", Anchors(4)),
        ("exact", square()),
        ("nystrom", Nystrom(4)),
        ("tensor_sketch", TensorSketch(4)),
        ("maclaurin", RandomMaclaurin(4)),
        ("none", None),
    ],
)
def test_every_factor(polynomial: str, expected: FeatureMap | None) -> None:
    operator = mechanisms.slay("small", 0.1, polynomial, size=4, draws=6, allow_signed=True)  # type: ignore[arg-type]
    assert features_of(operator) == Slay(eps=0.1, polynomial=expected, draws=6)


def test_scales_are_the_presets() -> None:
    for scale in ("small", "medium", "large"):
        assert features_of(mechanisms.slay(scale)) == Slay.preset(scale)
    assert features_of(mechanisms.slay(learn=True)).learned == (
        "polynomial_anchors",
        "node0_right_omega",
        "node1_right_omega",
    )
    assert features_of(mechanisms.slay(learn=True, anew=True)).learned == tuple(
        f"node{r}_{side}" for r in (0, 1) for side in ("left_anchors", "right_omega")
    )


def algorithm_1(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, drawn: dict[str, torch.Tensor], eps: float
) -> torch.Tensor:
    """The paper's algorithm 1, line by line, for one head; eq. 9 and 10, and the anchors of table 1."""
    nodes, weights = np.polynomial.laguerre.laggauss(2)
    s_r, w_r = nodes / (2 + eps), weights / (2 + eps)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))  # 1: unit norm
    anchors = drawn["polynomial_anchors"][0]
    poly = [(x @ anchors.T) ** 2 / len(anchors) ** 0.5 for x in (q, k)]  # 2: polynomial features
    psi: list[list[torch.Tensor]] = [[], []]
    for r in range(2):  # 3
        omega = drawn[f"node{r}_right_omega"][0]
        for side, x in enumerate((q, k)):
            prf = torch.exp((2 * s_r[r]) ** 0.5 * x @ omega.T - s_r[r]) / len(omega) ** 0.5  # 4: eq. 9
            psi[side].append(
                w_r[r] ** 0.5 * torch.einsum("tp,td->tpd", poly[side], prf).flatten(1)
            )  # 5: eq. 10, S the identity
    psi_q, psi_k = (torch.cat(found, 1) for found in psi)  # 7
    return psi_q @ (psi_k.T @ v) / (psi_q @ psi_k.sum(0))[:, None]  # 8


@pytest.mark.parametrize("eps", [0.01, 1.0])
def test_it_is_the_papers_algorithm(eps: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 20, 6, dtype=torch.float64).unbind(0)
    operator = mechanisms.slay("small", eps=eps)
    drawn = {name: x.double() for name, x in features_of(operator).start(6).items()}
    with torch.no_grad():
        assert torch.allclose(
            zonal.attention(q, k, v, operator), algorithm_1(q[0, 0], k[0, 0], v[0, 0], drawn, eps), rtol=1e-9
        )


@pytest.mark.parametrize("fusion", ["tensor", "hadamard", "sketch"])
def test_polynomial_features_are_made_once_or_for_each_node(fusion: Fusion) -> None:
    once = Slay(polynomial=RandomMaclaurin(8), draws=8, fusion=fusion)
    each = replace(once, anew=True)
    shared, own = once.prepare(5, 2), each.prepare(5, 2)
    assert not any("left_signs" in name for name in shared)
    assert not torch.equal(own["node0_left_signs"], own["node1_left_signs"])
    # with the same polynomial features in every node both are one map
    rest = {name: x for name, x in shared.items() if not name.startswith("polynomial_")}
    same = rest | {f"node{r}_left_signs": shared["polynomial_signs"] for r in (0, 1)}
    x = torch.randn(2, 7, 5)
    assert torch.allclose(once(x, shared), each(x, same), atol=1e-6)
    assert once.flops(5) == each.flops(5) - RandomMaclaurin(8).flops(5)


def test_wrong_names() -> None:
    with pytest.raises(ArgumentError, match=r"slay: polynomial must be 'anchors', .* or 'none', received"):
        mechanisms.slay(polynomial="cubic")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="scale"):
        mechanisms.slay("tiny")
    with pytest.raises(ArgumentError, match="eps must be > 0"):
        mechanisms.slay(eps=0.0)


def test_polynomial_of_yat() -> None:
    """It is the fit, it can be made again from its spec, and its outputs are near those of Yat in linear time."""
    operator = mechanisms.resolve("polynomial_square(degree=4, eps=1., d_qk=8)")
    assert operator.link.polynomial == pytest.approx(fit_square(link.Yat(1.0), 4, dim=8).link.polynomial, abs=1e-8)
    with pytest.raises(ArgumentError, match="both given"):
        mechanisms.polynomial_square(coefficients=(1.0,), degree=2)
    q, k, v = torch.randn(3, 1, 2, 300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)
    wanted = zonal.attention(q, k, v, mechanisms.yat(eps=1.0), causal=True)
    found = zonal.attention(q, k, v, operator, causal=True, path="chunked")
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def test_polynomial_of_data() -> None:
    """The causal rows of the data themselves: nearer to them than the fit to random vectors, of any length of theirs,
    and in the spec.
    """
    seen, data = (sample("peaked", 2, 256, 8, seed) for seed in (1, 0))
    general = mechanisms.polynomial_square(degree=4, eps=1.0, d_qk=8)
    own = mechanisms.polynomial_square(degree=4, eps=1.0, d_qk=8, fit="data", data=(3 * seen.q, seen.k))
    x = (seen.q @ seen.k.mT).clamp(-1, 1)
    wanted = fit_square(link.Yat(1.0), 4, angles=x, weights=row_weights(link.Yat(1.0), x)).link
    assert own.link.polynomial == pytest.approx(wanted.polynomial, rel=1e-6)  # type: ignore[attr-defined]
    q, k, v = (x[None] for x in data)
    yat = zonal.attention(q, k, v, mechanisms.yat(eps=1.0), causal=True)
    own_error, general_error = (
        float((zonal.attention(q, k, v, of, causal=True) - yat).norm()) for of in (own, general)
    )
    assert own_error < 0.9 * general_error
    for made in (own, general):
        again = mechanisms.resolve(made.spec)
        assert (again.link, again.qk_dim, again.spec) == (made.link, 8, made.spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 2, "fit": "data"}, "go together"),
        ({"degree": 2, "data": (torch.ones(3, 4), torch.ones(3, 4))}, "go together"),
        ({"fit": "data", "data": (torch.ones(3, 4), torch.ones(3, 4))}, "Pass degree=2, 4 or 6"),
        ({"degree": 2, "fit": "data", "data": (torch.ones(3, 4), torch.ones(4, 4))}, "of one shape"),
        ({"degree": 2, "fit": "histogram"}, "must be 'density' or 'data'"),
        ({"degree": 2, "eps": 0.0}, "eps must be > 0"),
        ({"eps": -1.0}, "eps must be > 0"),
        ({"degree": 2, "d_qk": 1}, "d_qk must be >= 2"),
        ({"degree": 3}, "degree must be 2, 4 or 6"),
    ],
)
def test_polynomials_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mechanisms.polynomial_square(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mechanisms.yat(eps=float("inf")), "eps must be > 0 .* and finite"),
        (lambda: mechanisms.slay(size=2.5), "count must be a whole number"),  # type: ignore[arg-type]
        (lambda: mechanisms.slay(nodes=2.0), "received 2.0"),  # type: ignore[arg-type]
        (lambda: mechanisms.slay(draws=3, antithetic=True), "an even number is required, received 3"),
        (lambda: mechanisms.slay(seed="a"), "seed must be a whole number"),  # type: ignore[arg-type]
        (lambda: mechanisms.slay(scale=3), "unknown scale 3"),  # type: ignore[arg-type]
        (lambda: mechanisms.hedgehog(size=7), "an even size"),
        (lambda: mechanisms.squared_affine(d_qk=0), "qk_dim must be a whole number >= 1"),
        (
            lambda: zonal.attention(*torch.full((3, 1, 1, 4, 64), 20.0).unbind(0), mechanisms.performer()),
            "the sums that rows are divided by would vanish",
        ),
    ],
)
def test_sizes_and_denominators_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()

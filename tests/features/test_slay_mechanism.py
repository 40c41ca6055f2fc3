"""SLAY from plain values, and the polynomial that takes its place."""

import pytest
import torch

import zonal
from zonal import link, mechanisms
from zonal.errors import ArgumentError
from zonal.features import Anchors, FeatureMap, Nystrom, RandomMaclaurin, Slay, TensorSketch, fit_square, square
from zonal.mechanisms.slay import slay_features


@pytest.mark.parametrize(
    ("polynomial", "expected"),
    [("anchors", Anchors(4)), ("exact", square()), ("nystrom", Nystrom(4)), ("tensor_sketch", TensorSketch(4)), ("maclaurin", RandomMaclaurin(4)), ("none", None)],
)
def test_every_factor(polynomial: str, expected: FeatureMap | None) -> None:
    found = slay_features("small", 0.1, polynomial, size=4, draws=6)  # type: ignore[arg-type]
    assert found == Slay(eps=0.1, polynomial=expected, draws=6)


def test_scales_are_the_presets() -> None:
    for scale in ("small", "medium", "large"):
        assert slay_features(scale) == Slay.preset(scale)
    assert slay_features(learn=True).learned == tuple(f"node{r}_{side}" for r in (0, 1) for side in ("left_anchors", "right_omega"))


def test_wrong_names() -> None:
    with pytest.raises(ArgumentError, match="polynomial must be one of"):
        slay_features(polynomial="cubic")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="scale"):
        slay_features("tiny")
    with pytest.raises(ArgumentError, match="eps must be > 0"):
        slay_features(eps=0.0)


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

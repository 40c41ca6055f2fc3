"""Metrics: distances by their definition, gradients where points coincide, and the dot product that kernels take them
from.
"""

import itertools
import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from matrix import DECLARED
from torch import Tensor

import zonal
from zonal.algebra.metric import (
    Euclidean,
    Fidelity,
    FisherRao,
    HilbertSchmidt,
    Hyperbolic,
    LeCam,
    Metric,
    Product,
    Riemannian,
    Sphere,
    SquaredEuclidean,
    Topological,
    from_ball,
    to_ball,
)
from zonal.algebra.score import NegativeDistance
from zonal.errors import ArgumentError

CURVED: list[Metric] = [Sphere(), Sphere(eps=0.2), Hyperbolic(), Hyperbolic(eps=0.2, scale=None)]
PRODUCTS: list[Metric] = [
    Product(),
    Product((Sphere(), Sphere(eps=0.1)), sizes=(2, 3), weights=(0.5, 2.0), normalise=False),
    Product((Euclidean(), Hyperbolic()), sizes=(4, 1), learn=False),
    Product((Euclidean(), Topological()), sizes=(None, 2)),
]
INFORMATION: list[Metric] = [FisherRao(), LeCam(), LeCam(eps=0.1), Fidelity(), Fidelity(eps=0.01)]
LIFTED: list[Metric] = [Euclidean(), Euclidean(eps=0.3), SquaredEuclidean()]
SHAPES: list[Metric] = [Topological(), Topological(eps=0.2)]
KINDS: list[Metric] = [*LIFTED, *CURVED, *INFORMATION, *SHAPES, *PRODUCTS]


def points(queries: int = 7, keys: int = 9, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, queries, 5, generator=generator, dtype=torch.float64)
    k = torch.randn(2, kv_heads, keys, 5, generator=generator, dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_()


def plain(metric: Metric, q: Tensor, k: Tensor) -> Tensor:
    """The distance as its docstring has it, from differences of each pair."""
    if isinstance(metric, Product):
        sizes = metric.parts(k.shape[-1])
        parts = zip(
            metric.factors, q.split(sizes, -1), k.split(sizes, -1), metric.weights or (1.0,) * len(sizes), strict=True
        )
        return torch.stack(
            [w * plain(f, a, b) / (f.typical(a.shape[-1]) if metric.normalise else 1) for f, a, b, w in parts]
        ).sum(0)
    if isinstance(metric, Topological):
        return matched(q.abs(), k.abs(), metric.eps)
    a, b = q[..., :, None, :], k[..., None, :, :]
    square = (a - b).square().sum(-1)
    if isinstance(metric, SquaredEuclidean):
        return square
    if isinstance(metric, Euclidean):
        return (square + metric.eps**2).sqrt() - metric.eps
    if isinstance(metric, FisherRao):
        return 2 * plain(Sphere(metric.eps), q.softmax(-1).sqrt(), k.softmax(-1).sqrt())
    if isinstance(metric, LeCam):
        p, r = a.softmax(-1), b.softmax(-1)
        return (((p - r).square() / (p + r)).sum(-1) + metric.eps**2).sqrt() - metric.eps
    u, v = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    if isinstance(metric, Fidelity):  # of pure states
        overlap = ((u * v).sum(-1).square() + metric.eps**2).sqrt() - metric.eps
        return -((overlap.square() + metric.eps) / (1 + metric.eps)).log()
    near, far = (u - v).square().sum(-1), (u + v).square().sum(-1)
    if isinstance(metric, Sphere):
        smooth = metric.eps**2
        return 2 * torch.atan2((near + smooth).sqrt(), (far + smooth).sqrt()) - 2 * math.atan(
            metric.eps / math.sqrt(4 + smooth)
        )
    assert isinstance(metric, Hyperbolic)
    scale = q.shape[-1] ** -0.5 if metric.scale is None else metric.scale
    s, t = scale * a.norm(dim=-1), scale * b.norm(dim=-1)
    delta = ((s - t) / 2).sinh().square() + s.sinh() * t.sinh() * near / 4
    return 2 * torch.asinh((delta + metric.eps**2 / 4).sqrt()) - 2 * math.asinh(metric.eps / 2)


def matched(q: Tensor, k: Tensor, eps: float) -> Tensor:
    """Wasserstein's distance of diagrams by the assignment problem: each point to a point of the other, or to its own
    place on the diagonal.
    """
    optimize = pytest.importorskip("scipy.optimize")
    n = q.shape[-1]
    found = []
    for a, b in itertools.product(q.unbind(-2), k.unbind(-2)):
        cost = a.new_zeros(*a.shape[:-1], 2 * n, 2 * n)
        cost[..., :n, :n] = (a[..., :, None] - b[..., None, :]).square()
        cost[..., :n, n:], cost[..., n:, :n] = (a.square() / 2)[..., :, None], (b.square() / 2)[..., None, :]
        sums = [one[optimize.linear_sum_assignment(one.detach().numpy())].sum() for one in cost.view(-1, 2 * n, 2 * n)]
        found.append(torch.stack(sums).view(a.shape[:-1]))
    square = torch.stack(found, -1).unflatten(-1, (q.shape[-2], k.shape[-2]))
    return (square + eps**2).sqrt() - eps


def test_every_metric_is_tested() -> None:
    # matrices are points of m^2 numbers, and otherwise Euclidean; what learns has a file of its own
    assert {type(metric) for metric in KINDS} | {HilbertSchmidt, Riemannian} == {
        kind for kind in DECLARED.values() if kind.slot == "metric"
    }


@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_distances_and_gradients(metric: Metric) -> None:
    """By autograd and by the hand-written derivative."""
    q, k = points(kv_heads=4)
    with torch.no_grad():
        q[:, :, 0] = k[:, :, 0]  # coincident
    weight = torch.randn(2, 4, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    distance = metric.pair(q, k)
    assert torch.allclose(distance, plain(metric, q, k), atol=1e-9)
    expected = torch.autograd.grad((plain(metric, q, k) * weight).sum(), (q, k))
    by_autograd = torch.autograd.grad((distance * weight).sum(), (q, k))
    by_hand = metric.pair_vjp(q.detach(), k.detach(), distance.detach(), weight)
    for a, b, c in zip(expected, by_autograd, by_hand, strict=True):
        assert torch.allclose(a, b, atol=1e-8)
        assert torch.allclose(a, c, atol=1e-8)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("metric", LIFTED, ids=str)
def test_lift_is_the_score(metric: Metric, temperature: float) -> None:
    """h(scale a(q) . b(k)) = -d / temperature, with key heads that serve two query heads each; h is the C++ text, read
    as Python.
    """
    q, k = points()
    reduction, (a, b) = metric.dot_reduction(temperature), metric.reduced(q, k)
    assert reduction is not None
    assert a.shape[-1] == b.shape[-1] == q.shape[-1] + reduction.extra
    x = reduction.scale * (a @ b.repeat_interleave(2, 1).mT)
    if reduction.formula.cpp_value:
        words = {
            "x": x,
            "c": reduction.formula.constants,
            "root": torch.sqrt,
            "most": torch.maximum,
            "zero": torch.zeros_like(x),
        }
        x = eval(reduction.formula.cpp_value.replace("V{}", "zero"), words)
    expected = NegativeDistance(metric, temperature).pair(q, k.repeat_interleave(2, 1))
    assert torch.allclose(x, expected, atol=1e-9)
    weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for got, want in zip(
        torch.autograd.grad((x * weight).sum(), (q, k)),
        torch.autograd.grad((expected * weight).sum(), (q, k)),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_a_poisoned_key_poisons_itself_alone(metric: Metric, bad: float) -> None:
    q, k = (x.detach() for x in points(kv_heads=4))
    clean = metric.pair(q, k)
    k[0, 1, 3, 2] = bad
    found = metric.pair(q, k)
    assert not torch.isfinite(found[0, 1, :, 3]).any()
    found[0, 1, :, 3] = clean[0, 1, :, 3]
    assert torch.allclose(found, clean, atol=1e-9)


@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_no_keys(metric: Metric) -> None:
    q, k = (x.detach() for x in points(kv_heads=4))
    assert metric.pair(q, k[:, :, :0]).shape == (2, 4, 7, 0)
    if metric.dot_reduction(1.0) is not None:
        assert metric.reduced(q, k[:, :, :0])[0].isfinite().all()


def test_a_metric_without_a_dot_product() -> None:
    assert Metric().dot_reduction(1.0) is None
    with pytest.raises(ArgumentError, match="eps must be > 0"):
        Euclidean(eps=0.0)


@pytest.mark.parametrize("kind", [Euclidean, Sphere, Hyperbolic, LeCam, Topological], ids=lambda kind: kind.__name__)
def test_an_eps_has_a_square_in_float32(kind: type[Metric]) -> None:
    """Where its square is 0 or infinity, distances or gradients of coincident points are NaN."""
    x = torch.randn(1, 1, 4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for eps in (1e-18, 1e9):
        distance = kind(eps=eps).pair(x, x)  # type: ignore[call-arg]
        assert distance.isfinite().all()
        assert torch.autograd.grad(distance.sum(), x)[0].isfinite().all()
    for eps in (1e-30, 1e30, float("inf")):
        with pytest.raises(ArgumentError, match=r"eps must be > 0 .* from 1e-18 to 1e\+09"):
            kind(eps=eps)  # type: ignore[call-arg]


RADII = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0)


def far_and_near(dim: int = 6) -> tuple[Tensor, Tensor]:
    """Points in float32 at all radii: in unlike directions, in like ones (a factor of 3 and 1.001 along them, and
    across), equal and opposite.
    """
    generator = torch.Generator().manual_seed(4)
    directions = F.normalize(torch.randn(4, dim, generator=generator, dtype=torch.float64), dim=-1)
    q = torch.cat([radius * directions for radius in RADII]).float()
    near = q + 1e-3 * q.norm(dim=-1, keepdim=True) * torch.randn(q.shape, generator=generator)
    return q, torch.cat(
        [q, -q, q * 1.001, q / 3, near, torch.cat([radius * directions.flip(0) for radius in RADII]).float()]
    )


@pytest.mark.parametrize(
    "metric", [Euclidean(), Sphere(), Hyperbolic(), FisherRao(), LeCam(), Topological(), Product()], ids=str
)
def test_float32_has_five_digits(metric: Metric) -> None:
    """1e-5 of the distance, or of 1 where it is smaller, at radii from 0.01 to 30."""
    q, k = far_and_near()
    exact = metric.pair(q.double(), k.double())
    assert torch.allclose(exact, plain(metric, q.double(), k.double()), rtol=1e-7, atol=1e-7)
    found = metric.pair(q, k)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= 1e-5 * exact.clamp_min(1)).all()
    # what bfloat16 holds exactly loses nothing more
    q, k = q.bfloat16().float(), k.bfloat16().float()
    exact = metric.pair(q.double(), k.double())
    assert ((metric.pair(q, k) - exact).abs() <= 1e-5 * exact.clamp_min(1)).all()


@pytest.mark.parametrize("metric", [Euclidean(), Sphere(), Hyperbolic()], ids=str)
def test_distances_in_forty_digits(metric: Metric) -> None:
    """Without eps, by the textbook: the norm, the angle, and the hyperbolic law of cosines."""
    q, k = far_and_near(3)
    found = metric.pair(q.double(), k.double())
    with mpmath.workdps(60):
        for t in range(0, q.shape[0], 5):
            for s in range(t % 3, k.shape[0], 7):
                a, b = ([mpmath.mpf(x.item()) for x in point] for point in (q[t], k[s]))
                length, width = (mpmath.sqrt(sum(x * x for x in point)) for point in (a, b))
                angle = mpmath.acos(max(-1, min(1, sum(x * y for x, y in zip(a, b, strict=True)) / (length * width))))
                if isinstance(metric, Euclidean):
                    expected = mpmath.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
                elif isinstance(metric, Sphere):
                    expected = angle
                else:
                    cosine = mpmath.cosh(length) * mpmath.cosh(width) - mpmath.sinh(length) * mpmath.sinh(
                        width
                    ) * mpmath.cos(angle)
                    expected = mpmath.acosh(max(1, cosine))
                # eps takes off its own size at most
                assert abs(found[t, s].item() - float(expected)) <= 2.1e-4 + 1e-6 * float(expected), (t, s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_gradients_are_finite_everywhere(metric: Metric, dtype: torch.dtype) -> None:
    """At coincident, opposite, zero and very far points; where points coincide the distance pulls nowhere."""
    q, k = far_and_near(5)
    zero = torch.zeros(1, 5)
    tiny, huge = torch.full((1, 5), 1e-20), torch.full((1, 5), 1e4)
    q, k = (torch.cat([x, zero, tiny, huge]).to(dtype).requires_grad_() for x in (q, k))
    distance = metric.pair(q, k)
    assert distance.isfinite().all()
    by_autograd = torch.autograd.grad(distance.sum(), (q, k))
    by_hand = metric.pair_vjp(q.detach(), k.detach(), distance.detach(), torch.ones_like(distance))
    for a, b in zip(by_autograd, by_hand, strict=True):
        assert a.isfinite().all()
        assert b.isfinite().all()
    # a point of ordinary size upon itself
    here = torch.randn(1, 5, generator=torch.Generator().manual_seed(5)).to(dtype)
    for found in metric.pair_vjp(here, here.clone(), metric.pair(here, here), torch.ones(1, 1, dtype=dtype)):
        assert found.abs().max() < 1e-3


@pytest.mark.parametrize(
    "metric", [Euclidean(), Sphere(), Hyperbolic(), FisherRao(), LeCam(), Topological(), Product()], ids=str
)
def test_what_a_metric_is(metric: Metric) -> None:
    """Zero on the diagonal, symmetric, and the triangle inequality up to eps."""
    x = (
        torch.randn(1, 40, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        * torch.logspace(-2, 1.4, 40, dtype=torch.float64)[:, None]
    )
    d = metric.pair(x, x)[0]
    assert d.diagonal().abs().max() < 1e-6
    assert torch.allclose(d, d.T, atol=1e-9)
    assert ((d[:, :, None] + d[None]) - d[:, None]).min() > -1e-3
    assert (d >= -1e-9).all()


def test_hyperbolic_in_other_coordinates() -> None:
    """Poincaré's ball through artanh; inside it is another matter than outside."""
    generator = torch.Generator().manual_seed(7)
    ball = (
        F.normalize(torch.randn(12, 4, generator=generator, dtype=torch.float64), dim=-1)
        * torch.linspace(0.05, 0.999, 12, dtype=torch.float64)[:, None]
    )
    u, v = ball[:, None], ball[None]
    gap = (u - v).square().sum(-1)
    moebius = (1 - 2 * (u * v).sum(-1) + u.square().sum(-1) * v.square().sum(-1)).sqrt()
    expected = 2 * (gap.sqrt() / moebius).atanh()
    polar = from_ball(ball)
    assert torch.allclose(Hyperbolic(eps=1e-9).pair(polar, polar), expected, atol=1e-6)
    assert torch.allclose(to_ball(polar), ball, atol=1e-12)
    assert from_ball(torch.zeros(1, 4)).eq(0).all()
    for outside in (1.0, 1.5, float("nan")):
        with pytest.raises(ArgumentError, match="inside the unit ball are required"):
            from_ball(torch.tensor([[outside, 0.0]]))
    # past the safe radius: as if at it, and no gradient outwards
    q, k = torch.tensor([[100.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 1.0]])
    d = Hyperbolic().pair(q, k)
    assert d.item() == pytest.approx(Hyperbolic().pair(torch.tensor([[40.0, 0.0]]), k).item())
    assert torch.autograd.grad(d, q)[0][0, 0].item() == pytest.approx(0, abs=1e-6)


def test_agrees_with_geoopt() -> None:
    geoopt = pytest.importorskip("geoopt")
    ball = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(8)) * 0.2
    expected = geoopt.PoincareBall(c=1.0).dist(ball[:, None], ball[None])
    polar = from_ball(ball)
    assert torch.allclose(Hyperbolic(eps=1e-9).pair(polar, polar), expected, atol=1e-6)
    unit = F.normalize(ball, dim=-1)
    apart = ~torch.eye(20, dtype=torch.bool)  # its acos is 4e-4 from a point to itself
    assert torch.allclose(
        Sphere(eps=1e-9).pair(ball, ball)[apart], geoopt.Sphere().dist(unit[:, None], unit[None])[apart], atol=1e-6
    )


def test_a_product_learns_its_weights() -> None:
    """One weight a head and factor; a closed gate is exactly zero, opens by its gradient, and never falls below."""
    metric = Product(gates=(0.0, 1.0, 0.5), weights=(2.0, 1.0, 0.25))
    operator = (
        zonal.Operator(NegativeDistance(metric), zonal.link.Exp(), zonal.anchor.Row()).for_heads(4, dim=9).double()
    )
    assert metric.parts(9) == (3, 3, 3)
    assert metric.parts(11) == (5, 3, 3)
    params = operator.bind(4, 4).score_params
    assert torch.allclose(
        metric.head_weights(params, torch.zeros((), dtype=torch.float64)),
        torch.tensor([[0.0, 1.0, 0.125]], dtype=torch.float64).expand(4, 3),
        atol=1e-7,
    )
    q, k = (torch.randn(1, 4, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    parts = [
        f.pair(a, b) / f.typical(3) for f, a, b in zip(metric.factors, q.split(3, -1), k.split(3, -1), strict=True)
    ]
    score = operator.score.pair(operator.score.prepare_query(q, params, None), k)
    assert torch.allclose(score, -parts[1] - 0.125 * parts[2], atol=1e-7)
    gate = operator.learned_parts["score_gate"]
    for sign, opens in ((1, True), (-1, False)):  # nearer where that lowers the sum, and farther
        score = operator.score.pair(operator.score.prepare_query(q, params, None), k)
        (pull,) = torch.autograd.grad(sign * score.sum(), gate)
        assert (pull[:, 0] < 0).all() if opens else pull[:, 0].eq(0).all()
        assert (pull[:, 1:] * sign < 0).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Product(()), "factors must be metrics"),
        (lambda: Product(weights=(1.0, 2.0)), "3 weights > 0 are required"),
        (lambda: Product(weights=(1.0, 2.0, 0.0)), "To switch a factor off, use a gate of 0"),
        (lambda: Product(gates=(1.0, -1.0, 0.0)), "3 gates >= 0 are required"),
        (lambda: Product(sizes=(2, 2)), "3 sizes are required"),
        (lambda: Product(sizes=(2, 2, 0)), "whole number >= 1"),
        (
            lambda: Product(sizes=(2, 2, 2)).pair(torch.zeros(1, 7), torch.zeros(1, 7)),
            "sizes \\(2, 2, 2\\) need vectors of 6 numbers, received 7",
        ),
        (lambda: Product().pair(torch.zeros(1, 2), torch.zeros(1, 2)), "3 factors need vectors of at least as many"),
        (lambda: Product((Euclidean(), Sphere()), sizes=(None, None)), "one size at most may be None"),
        (
            lambda: Product((Euclidean(), Sphere()), sizes=(None, 4)).parts(4),
            "need vectors of more than 4 numbers, received 4",
        ),
        (lambda: Sphere(eps=0.0), "eps must be > 0"),
        (lambda: Topological(eps=0.0), "eps must be > 0"),
        (lambda: Hyperbolic(eps=0.0), "eps must be > 0"),
        (lambda: Hyperbolic(scale=-1.0), "scale must be > 0 or None"),
        (lambda: Fidelity(eps=1e200), r"Fidelity: eps must be at most 1e\+09, received 1e\+200"),
        (lambda: Riemannian(eps=1e200), r"Riemannian: eps must be at most 1e\+09, received 1e\+200"),
    ],
)
def test_errors_name_what_is_required(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]


def test_matrices_are_points() -> None:
    """The Hilbert-Schmidt distance: by its definition, in tiles, and by the dot product of kernels."""
    metric = HilbertSchmidt(eps=0.01)
    q, k = (
        torch.randn(1, 2, n, 9, generator=torch.Generator().manual_seed(n), dtype=torch.float64).requires_grad_()
        for n in (5, 7)
    )
    a, b = q.unflatten(-1, (3, 3)), k.unflatten(-1, (3, 3))
    expected = (torch.linalg.matrix_norm(a[:, :, :, None] - b[:, :, None]).square() + 1e-4).sqrt() - 0.01
    d = metric.pair(q, k)
    assert torch.allclose(d, expected, atol=1e-12)
    grad = torch.randn(d.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(
        metric.pair_vjp(q.detach(), k.detach(), d.detach(), grad),
        torch.autograd.grad((expected * grad).sum(), (q, k)),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-10)
    operator = zonal.Operator(NegativeDistance(metric), zonal.link.Exp(), zonal.anchor.Row())
    v = torch.randn(1, 2, 7, 4)
    a, b = q.detach().float(), k.detach().float()
    assert torch.allclose(
        zonal.attention(a, b, v, operator, path="tiled"), zonal.attention(a, b, v, operator, path="dense"), atol=1e-5
    )


def test_distances_of_distributions() -> None:
    """Fisher-Rao by its integral along the geodesic, 2 acos of Bhattacharyya's coefficient; between sqrt(2) and 2.23
    times Le Cam's.
    """
    x = 2 * torch.randn(60, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    p = x.softmax(-1)
    coefficient = (p[:, None].sqrt() * p[None].sqrt()).sum(-1)
    apart = ~torch.eye(60, dtype=torch.bool)
    fisher, cam = FisherRao(eps=1e-7).pair(x, x), LeCam(eps=1e-7).pair(x, x)
    assert torch.allclose(fisher[apart], 2 * coefficient[apart].acos(), atol=1e-6)
    ratio = fisher[apart] / cam[apart]
    assert ratio.min() > 2**0.5 - 1e-6
    assert ratio.max() < 2.23
    # logits so far apart that probabilities underflow
    a, b = torch.tensor([[200.0, 0.0, -200.0]]), torch.tensor([[-200.0, 0.0, 200.0]])
    assert LeCam().pair(a, b).item() == pytest.approx(2**0.5, abs=2e-4)
    assert FisherRao().pair(a, b).item() == pytest.approx(math.pi, abs=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_fidelity_is_the_trace_of_roots(rank: int) -> None:
    """(tr sqrt(sqrt(rho) sigma sqrt(rho)))^2 by matrix square roots; and a gradient in tiles that autograd agrees
    with.
    """
    q, k = (torch.randn(n, 3 * rank, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (5, 6))

    def density(x: Tensor) -> Tensor:
        a = x.unflatten(-1, (3, rank))
        return a @ a.mT / x.square().sum()

    def root(matrix: Tensor) -> Tensor:
        value, vector = torch.linalg.eigh(matrix)
        return vector @ (value.clamp_min(0).sqrt()[..., None] * vector.mT)

    expected = torch.tensor(
        [[root(root(density(a)) @ density(b) @ root(density(a))).trace().square() for b in k] for a in q],
        dtype=torch.float64,
    )
    assert torch.allclose((-Fidelity(rank, eps=1e-9).pair(q, k)).exp(), expected, atol=1e-6)
    assert (
        (Fidelity(rank).pair(q.float(), k.float()) - Fidelity(rank).pair(q.double(), k.double())).abs() < 1e-5
    ).all()
    operator = zonal.Operator(NegativeDistance(Fidelity(rank)), zonal.link.Exp(), zonal.anchor.Row())
    q, k = q[None, None].requires_grad_(), k[None, None].requires_grad_()
    v = torch.randn(1, 1, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense, tiled = (
        torch.autograd.grad(zonal.attention(q, k, v, operator, path=path).sin().sum(), (q, k))
        for path in ("dense", "tiled")
    )
    assert torch.allclose(dense[0], tiled[0], atol=1e-9)
    assert torch.allclose(dense[1], tiled[1], atol=1e-9)
    with pytest.raises(ArgumentError, match="points of m x 2 numbers are required, received 5"):
        Fidelity(2).pair(torch.zeros(1, 5), torch.zeros(1, 5))

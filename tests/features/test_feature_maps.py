"""Every feature map: one interface, the kernel it claims, positivity under an adversary, gradients, buffers that are
saved.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zonal import anchor, link, store
from zonal.errors import ArgumentError, PathError
from zonal.features import (
    Anchors,
    FeatureMap,
    Fourier,
    Hadamard,
    Harmonics,
    LearnedExp,
    LowRankSquare,
    Nystrom,
    Polynomial,
    PositiveRandom,
    RandomMaclaurin,
    SharedHadamard,
    Sketched,
    Slay,
    Stationary,
    SymmetricPowers,
    TensorProduct,
    TensorSketch,
    distil,
    features_from_config,
    repeat_heads,
    square,
    taylor_exp,
)

DIM = 5
MAPS: dict[str, FeatureMap] = {
    "powers": SymmetricPowers(3),
    "polynomial": Polynomial((0.5, 0.0, -0.3, 1.0)),
    "square": square(0.2),
    "bare-square": square(),
    "taylor": taylor_exp(0.7),
    "prf": PositiveRandom(6, 0.4),
    "prf-orthogonal": PositiveRandom(7, 0.4, orthogonal=True),
    "prf-antithetic": PositiveRandom(6, 0.4, antithetic=True),
    "prf-both": PositiveRandom(12, 0.4, orthogonal=True, antithetic=True),
    "prf-learned": PositiveRandom(6, 0.4, learn=True),
    "fourier": Fourier(6, 0.8),
    "fourier-orthogonal": Fourier(6, 0.8, orthogonal=True, learn=True),
    "stationary": Stationary(6, width=0.8),
    "stationary-matern": Stationary(6, "matern", orthogonal=True),
    "stationary-learned": Stationary(6, "laplacian", learn=True),
    "stationary-positive": Stationary(5, signed=False),
    "maclaurin": RandomMaclaurin(6),
    "maclaurin-cubic": RandomMaclaurin(6, degree=3),
    "tensor-sketch": TensorSketch(7),
    "tensor-sketch-cubic": TensorSketch(8, degree=3),
    "anchors": Anchors(6),
    "anchors-orthogonal": Anchors(7, "orthogonal"),
    "anchors-learned": Anchors(6, learn=True),
    "nystrom": Nystrom(8),
    "nystrom-yat": Nystrom(8, link.Yat(1.0), "orthogonal"),
    "low-rank": LowRankSquare(3),
    "low-rank-full": LowRankSquare(DIM, bias=0.3),
    "tensor": TensorProduct(square(), PositiveRandom(4, 0.3)),
    "tensor-exact": TensorProduct(square(0.1), square(0.3)),
    "hadamard": Hadamard(RandomMaclaurin(6), PositiveRandom(6, 0.3)),
    "hadamard-unlike": Hadamard(Fourier(6), PositiveRandom(6, 0.3)),
    "hadamard-exact": Hadamard(square(), RandomMaclaurin(DIM * (DIM + 1) // 2, degree=1)),
    "shared": SharedHadamard(6, 0.3),
    "sketched": Sketched(square(), PositiveRandom(4, 0.3), 16),
    "learned": LearnedExp(6),
    "learned-exp": LearnedExp(6, "exp", shared=True),
    "slay": Slay(eps=0.5, polynomial=Anchors(4), draws=4),
    "slay-laplace": Slay(eps=0.5, polynomial=None, draws=4),
    "slay-exact": Slay(eps=1.0, nodes=3, rule="minimax", polynomial=square(), draws=4, antithetic=True),
    "slay-sketch": Slay(eps=1.0, polynomial=square(), draws=4, fusion="sketch", sketch_size=16),
    "slay-hadamard": Slay(eps=1.0, polynomial=RandomMaclaurin(4), draws=4, fusion="hadamard"),
    "slay-shared": Slay(eps=1.0, draws=4, fusion="shared"),
    "slay-learned": Slay(eps=1.0, polynomial=Anchors(4, learn=True), draws=4, learn=True),
}
every_map = pytest.mark.parametrize("features", MAPS.values(), ids=MAPS)


def units(*shape: int, seed: int = 0) -> Tensor:
    return nn.functional.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1
    )


def at_angles(*angles: float) -> tuple[Tensor, Tensor]:
    """(n, d) unit vectors with q . k = x for each angle, in no special place."""
    frame, x = torch.linalg.qr(units(DIM, 2, seed=7)).Q.T, torch.tensor(angles, dtype=torch.float64)[:, None]
    return frame[:1].expand(len(x), -1), x * frame[:1] + (1 - x * x).sqrt() * frame[1:]


@every_map
def test_one_interface(features: FeatureMap) -> None:
    """Sizes; write and both sides agree with the differentiable call; the declaration can be written down and read
    back.
    """
    buffers = features.prepare(DIM, 2, seed=3, dtype=torch.float64)
    x = units(3, 2, 4, DIM)
    for side in ("query", "key"):
        phi = features(x, buffers, side)
        assert phi.shape == (3, 2, 4, features.dimension(DIM))
    assert torch.equal(features.query(x, buffers), features(x, buffers, "query"))
    assert torch.equal(features.key(x, buffers), features(x, buffers, "key"))
    assert set(features.learned) <= set(buffers)
    assert all(value.shape[0] == 2 for value in buffers.values())
    assert features.flops(DIM) >= features.dimension(DIM)
    assert features_from_config(features.config()) == features
    assert features.trivial is False


@every_map
def test_heads_are_their_own(features: FeatureMap) -> None:
    """Row h of the buffers serves head h alone, and repeated rows serve the heads of a group."""
    buffers = features.prepare(DIM, 3, seed=3, dtype=torch.float64)
    x = units(3, 4, DIM)
    together = features(x, buffers, "key")
    for head in range(3):
        alone = features(x[head : head + 1], {name: value[head : head + 1] for name, value in buffers.items()}, "key")
        assert torch.allclose(together[head : head + 1], alone, atol=1e-14)
    grouped = features(x.repeat_interleave(2, 0), repeat_heads(buffers, 2), "key")
    assert torch.allclose(grouped, together.repeat_interleave(2, 0), atol=1e-14)


@every_map
def test_gradients(features: FeatureMap) -> None:
    """Of vectors and of all that is learned, against finite differences of phi."""
    buffers = features.prepare(DIM, 2, seed=3, dtype=torch.float64)
    x = units(2, 3, DIM)
    for side in ("query", "key"):
        grad = torch.randn(
            2, 3, features.dimension(DIM), generator=torch.Generator().manual_seed(5), dtype=torch.float64
        )
        leaves = {"": x.clone().requires_grad_(), **{n: buffers[n].clone().requires_grad_() for n in features.learned}}
        phi = features(leaves[""], {**buffers, **leaves}, side)
        found, *of_buffers = torch.autograd.grad(phi, [*leaves.values()], grad, materialize_grads=True)

        def at(moved: Tensor, values: dict[str, Tensor], side: str = side, grad: Tensor = grad) -> float:
            return float((features(moved, values, side) * grad).sum())  # type: ignore[arg-type]

        step = 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        assert float((found * step).sum()) == pytest.approx(
            (at(x + step, buffers) - at(x - step, buffers)) / 2, rel=1e-5, abs=1e-12
        )
        for name, value in zip(features.learned, of_buffers, strict=True):
            step = 1e-6 * torch.randn(value.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
            slope = (
                at(x, {**buffers, name: buffers[name] + step}) - at(x, {**buffers, name: buffers[name] - step})
            ) / 2
            assert float((value * step).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-12)


@every_map
def test_seeds(features: FeatureMap, tmp_path: Path) -> None:
    """One seed gives one set of buffers for every type; another seed gives others; a file gives the same features
    back.
    """
    first, again, other = (features.prepare(DIM, 2, seed=s, dtype=torch.float64) for s in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    # what is drawn differs; a function of the declaration alone would be left out
    assert not first or any(not torch.equal(first[name], other[name]) for name in first)
    single = features.prepare(DIM, 2, seed=3)
    assert all(
        torch.equal(single[name], value.float() if value.is_floating_point() else value)
        for name, value in first.items()
    )
    store.save_tensors(tmp_path / "map.safetensors", first, {"kind": "map", "features": features.config()})
    loaded, header = store.load_tensors(tmp_path / "map.safetensors", "map")
    x = units(2, 4, DIM)
    assert torch.equal(features_from_config(header["features"]).key(x, loaded), features.key(x, first))


def test_buffers_are_a_modules_state() -> None:
    """Registered under their names, they come back with load_state_dict."""

    class Holder(nn.Module):
        def __init__(self, features: FeatureMap, seed: int) -> None:
            super().__init__()
            for name, value in features.prepare(DIM, 2, seed=seed).items():
                if name in features.learned:
                    self.register_parameter(name, nn.Parameter(value))
                else:
                    self.register_buffer(name, value)

    for features in MAPS.values():
        one, two = Holder(features, 0), Holder(features, 1)
        two.load_state_dict(one.state_dict())
        x = units(2, 3, DIM).float()
        assert torch.equal(features.key(x, two.state_dict()), features.key(x, one.state_dict()))
        assert {name for name, _ in one.named_parameters()} == set(features.learned)


def products(features: FeatureMap, q: Tensor, k: Tensor, count: int, seed: int = 0) -> Tensor:
    """phi_q(q) . phi_k(k) of ``count`` independent draws, (count, n) for n pairs. A head is a draw."""
    buffers = features.prepare(q.shape[-1], count, seed=seed, dtype=torch.float64)
    return (features.query(q, buffers) * features.key(k, buffers)).sum(-1).expand(count, -1)


def z_scores(features: FeatureMap, wanted: dict[float, float], count: int = 20000) -> dict[float, float]:
    """By how many standard errors the mean over draws misses what is wanted at each angle."""
    got = products(features, *at_angles(*wanted), count)
    errors = got.mean(0) - torch.tensor([*wanted.values()], dtype=torch.float64)
    # an exact zero has no spread of its own
    return dict(zip(wanted, (errors / (got.std(0) / count**0.5 + 1e-14)).tolist(), strict=True))


ANGLES = (-0.7, 0.0, 0.4, 0.8)
# the expectation of anchors drawn from the sphere is the kernel they are said to tend to, whatever it is meant for
SAMPLED = [
    name
    for name, of in MAPS.items()
    if of.claim.kind == "unbiased" or name in ("anchors", "anchors-orthogonal", "slay")
]


@pytest.mark.parametrize("name", SAMPLED)
def test_unbiased(name: str) -> None:
    """The mean over 20000 draws lies within 4.5 standard errors of the kernel, at four angles."""
    features = MAPS[name]
    wanted = {x: float(features.kernel(torch.tensor(x, dtype=torch.float64), DIM)) for x in ANGLES}
    for x, score in z_scores(features, wanted).items():
        assert abs(score) < 4.5, (name, x)


@pytest.mark.parametrize(
    ("features", "x", "not_wanted"),
    [
        (Anchors(6), 0.4, 0.16),  # x^2 is what the paper means by them
        (SharedHadamard(6, 0.3), 0.4, 0.16 * math.exp(0.6 * 0.4)),
        (PositiveRandom(6, 0.4), 0.4, math.exp(0.8 * 0.4) * 1.05),
        (TensorSketch(7), 0.4, 0.18),
    ],
    ids=["anchors", "shared", "prf", "tensor-sketch"],
)
def test_the_test_of_bias_can_fail(features: FeatureMap, x: float, not_wanted: float) -> None:
    assert abs(z_scores(features, {x: not_wanted})[x]) > 4.5


@pytest.mark.parametrize(
    "features",
    [
        Hadamard(Fourier(6), Fourier(6)),
        Hadamard(Stationary(6), Fourier(6, 0.7)),
        Hadamard(Slay(eps=0.5, polynomial=None, draws=4), Slay(eps=0.5, polynomial=None, draws=4)),
        Hadamard(TensorProduct(square(), Fourier(2)), Fourier(2 * square().dimension(DIM))),
        Hadamard(square(), square()),
    ],
    ids=["fourier", "stationary", "slay", "tensor", "exact"],
)
def test_features_that_differ_by_index_make_a_product_biased(features: FeatureMap) -> None:
    assert features.claim.kind == "biased"
    wanted = features.kernel(torch.tensor(-0.7, dtype=torch.float64), DIM)
    assert abs(z_scores(features, {-0.7: float(wanted)})[-0.7]) > 4.5


@pytest.mark.parametrize("name", [name for name, of in MAPS.items() if of.claim.kind == "exact"])
def test_exact(name: str) -> None:
    features = MAPS[name]
    q, k = units(1, 50, DIM), units(1, 50, DIM, seed=1)
    if not features.unit:
        q = q * 1.7
    buffers = features.prepare(DIM, dtype=torch.float64)
    got = features.query(q, buffers) @ features.key(k, buffers).mT
    assert torch.allclose(got, features.kernel(q @ k.mT, DIM), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kernel",
    [
        link.SquaredAffine(0.3),
        link.PolynomialSquare((0.1, -0.4, 0.8), floor=0.05),
        link.Identity(),
        link.Gegenbauer((3.0,), 5),
    ],
    ids=repr,
)
def test_polynomial_links(kernel: link.Link) -> None:
    features = Polynomial.of(kernel)
    q, k = units(1, 30, DIM), units(1, 30, DIM, seed=1)
    c = kernel.coefficients(kernel.initial())
    wanted = kernel.value((q @ k.mT)[None], c)[0]
    assert torch.allclose(features.query(q) @ features.key(k).mT, wanted, atol=1e-12)
    assert features.positive == (kernel.positive or bool(wanted.min() > 0.01))


def test_exact_in_the_end() -> None:
    """Landmarks that span the square, and a projection of full rank, leave nothing out; a whitening without a cutoff
    would lose digits.
    """
    q, k = units(1, 40, DIM), units(1, 40, DIM, seed=1)
    x = q @ k.mT
    for features, wanted in ((Nystrom(60), x.square()), (LowRankSquare(DIM, bias=0.3), (x + 0.3).square())):
        buffers = features.prepare(DIM, dtype=torch.float64)
        assert torch.allclose(features.query(q, buffers) @ features.key(k, buffers).mT, wanted, atol=1e-10)


def test_nystrom_is_exact_on_its_landmarks() -> None:
    features = Nystrom(8, link.Yat(1.0))
    buffers = features.prepare(DIM, dtype=torch.float64)
    at = buffers["anchors"]
    assert torch.allclose(
        features.query(at, buffers) @ features.key(at, buffers).mT, features.kernel(at @ at.mT, DIM), atol=1e-9
    )


def test_low_rank_square_is_its_formula() -> None:
    features = LowRankSquare(3, bias=0.1)
    buffers = features.prepare(DIM, 2, dtype=torch.float64)
    q, k, p = units(2, 9, DIM), units(2, 9, DIM, seed=1), buffers["projection"]
    assert torch.allclose(p @ p.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), atol=1e-12)
    inside = (q @ p.mT) @ (k @ p.mT).mT
    rest = (1 - (q @ p.mT).square().sum(-1))[..., None] * (1 - (k @ p.mT).square().sum(-1))[..., None, :]
    assert torch.allclose(
        features.query(q, buffers) @ features.key(k, buffers).mT, (inside + 0.1).square() + rest / 2, atol=1e-12
    )
    assert features.dimension(DIM) == 4 * 5 // 2 + 1


def worst(features: FeatureMap, dim: int = DIM) -> float:
    """The least phi_q . phi_k found by descent from 64 pairs, with special pairs among them, relative to the largest;
    or the first that is negative beyond rounding.
    """
    buffers = features.prepare(dim, 1, seed=2, dtype=torch.float64)
    q, k = units(1, 64, dim), units(1, 64, dim, seed=1)
    q[:, 0], k[:, 0] = k[:, 1], -k[:, 1]
    q[:, 2:7], k[:, 2:7] = torch.eye(dim, dtype=torch.float64)[:5], torch.eye(dim, dtype=torch.float64).roll(1, 0)[:5]
    length = 1.0 if features.unit else 1.7
    low, high, rate = math.inf, 0.0, 0.3
    for step in range(150):
        q, k = (nn.functional.normalize(x.detach(), dim=-1).requires_grad_() for x in (q, k))
        value = (features.query(length * q, buffers) * features.key(k, buffers)).sum(-1)
        low, high = min(low, float(value.detach().min())), max(high, float(value.detach().abs().max()))
        if low < -1e-9 * high:
            break
        dq, dk = torch.autograd.grad((value / value.detach().abs().clamp_min(1e-3 * high)).sum(), (q, k))
        q, k = (x - rate * (1 - step / 150) * nn.functional.normalize(dx, dim=-1) for x, dx in ((q, dq), (k, dk)))
    return low / high


@every_map
def test_positivity(features: FeatureMap) -> None:
    """What is said to be positive stays so under an adversary, and the same adversary makes what is said to be signed
    negative.
    """
    found = worst(features)
    if features.nonnegative:
        buffers = features.prepare(DIM, 1, dtype=torch.bfloat16)
        assert bool((features.key(units(1, 64, DIM).bfloat16(), buffers) >= 0).all())
    if features.positive:
        assert found >= -1e-12
    else:
        # fifteen numbers span the square: eight landmarks project it, and the rest may still be positive by luck
        assert found < -1e-9 or isinstance(features, Nystrom)


def test_nystrom_can_be_negative() -> None:
    assert worst(Nystrom(4)) < -1e-9


@pytest.mark.parametrize(
    "name",
    ["maclaurin", "tensor-sketch", "fourier", "nystrom", "sketched", "slay-sketch", "slay-hadamard", "polynomial"],
)
def test_signed_maps_are_refused_under_a_sum(name: str) -> None:
    features = MAPS[name]
    with pytest.raises(PathError, match="grow without bound"):
        features.check("attention", anchor.Row())
    features.check("attention", anchor.Row(allow_signed=True))
    features.check("attention", anchor.Count())
    features.check("attention", anchor.Raw())


@every_map
def test_positive_maps_serve_every_anchor(features: FeatureMap) -> None:
    assert (features.refusal(anchor.Row()) is None) == features.positive
    assert features.nonnegative <= features.positive


@pytest.mark.parametrize("x", [-0.5, 0.0, 0.5])
def test_variance_of_positive_features(x: float) -> None:
    """(e^(4 s (1 + x)) - 1)/D; pairs of opposite draws have less of it near x = -1 and orthogonal ones near 0."""
    features = PositiveRandom(8, 0.3)
    got = products(features, *at_angles(x), 40000)
    relative = float(got.var() / math.exp(0.6 * x) ** 2)
    assert relative == pytest.approx(float(features.relative_variance(torch.tensor(x))), rel=0.15)
    both = products(PositiveRandom(8, 0.3, orthogonal=True, antithetic=True), *at_angles(x), 40000)
    assert float(both.var() / got.var()) < 0.7


def test_orthogonal_draws_are_orthogonal() -> None:
    for name, value in PositiveRandom(7, 0.4, orthogonal=True).prepare(DIM, 2, dtype=torch.float64).items():
        assert name == "omega"
        block = value[:, :DIM] @ value[:, :DIM].mT
        assert torch.allclose(block, torch.diag_embed(block.diagonal(dim1=-2, dim2=-1)), atol=1e-12)
    pairs = PositiveRandom(6, 0.4, antithetic=True).prepare(DIM)["omega"]
    assert torch.equal(pairs[:, :3], -pairs[:, 3:])


def test_landmarks_from_keys() -> None:
    """k-means finds clusters, PCA finds the plane that keys lie in."""
    centres = torch.eye(DIM, dtype=torch.float64)[:3]
    keys = nn.functional.normalize(
        centres.repeat(40, 1)
        + 0.05 * torch.randn(120, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        dim=-1,
    )
    found = Anchors(3, "kmeans").prepare(DIM, 2, dtype=torch.float64, keys=keys)["anchors"]
    assert torch.allclose((found @ centres.T).max(1).values, torch.ones(2, 3, dtype=torch.float64), atol=0.01)
    plane = torch.cat([units(2, 50, 3), torch.zeros(2, 50, 2, dtype=torch.float64)], -1)
    projection = LowRankSquare(3, choice="pca").prepare(DIM, 2, dtype=torch.float64, keys=plane)["projection"]
    assert torch.allclose((plane @ projection.mT).norm(dim=-1), torch.ones(2, 50, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize(
    ("features", "gain"),
    [
        (LearnedExp(16), 0.8),
        (PositiveRandom(16, 0.4, learn=True), 0.8),
        (Anchors(16, learn=True), 0.9999),  # squares of products cannot come much nearer
        (Slay(eps=1.0, polynomial=Anchors(4, learn=True), draws=4, learn=True), 0.8),
    ],
)
def test_learning(features: FeatureMap, gain: float) -> None:
    """Rows come closer to those of the kernel, on keys that were not seen too."""
    target = link.Yat(1.0)

    def kernel(x: Tensor) -> Tensor:
        return target.value(x, target.coefficients({}))

    def missed(buffers: dict[str, Tensor]) -> float:
        q, k = units(1, 1, 64, 3, seed=8), units(1, 1, 64, 3, seed=9)
        got, wanted = features.query(q, buffers) @ features.key(k, buffers).mT, kernel(q @ k.mT)
        got, wanted = got / got.sum(-1, keepdim=True), wanted / wanted.sum(-1, keepdim=True)
        return float((got - wanted).norm() / wanted.norm())

    start = features.prepare(3, 1, dtype=torch.float64)
    trained = distil(features, start, units(4, 1, 64, 3), units(4, 1, 64, 3, seed=1), kernel, causal=False, steps=150)
    assert missed(trained) < gain * missed(start)
    assert set(trained) == set(start)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("shape", [(1, 2, 0, DIM), (0, 2, 3, DIM)])
def test_no_tokens_and_no_sequences(name: str, shape: tuple[int, ...]) -> None:
    features, x = MAPS[name], torch.zeros(shape, requires_grad=True)
    phi = features(x, features.prepare(DIM, 2, keys=units(9, DIM)))
    assert phi.shape == (*shape[:-1], features.dimension(DIM))
    (slope,) = torch.autograd.grad(phi.sum(), x)
    assert slope.shape == shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_distil_trains_without_gradients_around_it(mode) -> None:
    features = LearnedExp(8)
    with mode():
        start, q = features.prepare(3, dtype=torch.float64), units(1, 1, 8, 3)
        found = distil(features, start, q, q, torch.exp, steps=2)
    assert not torch.equal(found["key_weight"], start["key_weight"])


def test_nothing_to_learn() -> None:
    with pytest.raises(ArgumentError, match="nothing to learn"):
        distil(square(), {}, units(1, 1, 4, 3), units(1, 1, 4, 3), torch.exp)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slay(eps=0.0), "eps must be > 0"),
        (lambda: Slay(eps=-1.0), "eps must be > 0"),
        (lambda: Slay(nodes=0), "from 1 to 128 nodes"),
        (lambda: Slay(nodes=2, tolerance=0.01), "relative error of 0.97"),
        (lambda: Slay(fusion="mean"), "fusion must be 'tensor'"),  # type: ignore[arg-type]
        (lambda: Slay(fusion="shared", learn=True), "independent draws"),
        (lambda: Slay.preset("huge"), "small"),
        (
            lambda: Slay(fusion="shared").laplace_only(),
            "laplace_only: fusion 'tensor' .* 'shared' with Anchors",
        ),
        (lambda: Slay(fusion="sketch").laplace_only(), "received 'sketch' with Anchors"),
        (lambda: Slay(polynomial=TensorSketch(8)).laplace_only(), "received 'tensor' with TensorSketch"),
        (lambda: PositiveRandom(0), "draws must be a whole number >= 1"),
        (lambda: PositiveRandom(5, antithetic=True), "even number"),
        (lambda: PositiveRandom(4, -1.0), "s must be >= 0"),
        (lambda: Fourier(5), "even size"),
        (lambda: Fourier(4, 0.0), "width must be > 0"),
        (lambda: RandomMaclaurin(4, degree=7), "degree must be a whole number of at most 6"),
        (lambda: TensorSketch(4, degree=2.0), "degree must be a whole number"),  # type: ignore[arg-type]
        (lambda: Harmonics(2.0), "degree must be a whole number"),  # type: ignore[arg-type]
        (lambda: Anchors(4).prepare(5.0), "dim must be a whole number"),  # type: ignore[arg-type]
        (lambda: Anchors(1, "kmeans").prepare(2, keys=torch.tensor([[1.0, math.nan]])), "finite keys are required"),
        (lambda: TensorSketch(0), "size must be a whole number >= 1"),
        (lambda: Anchors(0), "count must be a whole number >= 1"),
        (lambda: Anchors(4, "grid"), "choice must be 'random'"),  # type: ignore[arg-type]
        (lambda: Nystrom(4, cutoff=0.0), "cutoff must lie between"),
        (lambda: Nystrom(4, link.SquaredAffine(learn_bias=True)), "nothing learned"),
        (lambda: LowRankSquare(0), "rank must be a whole number >= 1"),
        (lambda: LowRankSquare(6).prepare(DIM), "at most the dimension 5"),
        (lambda: LearnedExp(3), "even size"),
        (lambda: LearnedExp(4).kernel(torch.zeros(1), 3), "claim no kernel"),
        (lambda: Sketched(square(), square(), 0), "size must be a whole number >= 1"),
        (lambda: Hadamard(Anchors(4), PositiveRandom(5)).prepare(DIM), "equal size"),
        (lambda: Polynomial((1.0,)), "2 to 7 coefficients"),
        (lambda: Polynomial((1.0, math.nan)), "finite"),
        (lambda: taylor_exp(order=8), "taylor_exp: order must be a whole number of at most 6"),
        (lambda: taylor_exp(order=0), "taylor_exp: order must be a whole number >= 1"),
        (lambda: taylor_exp(1e80, 4), "taylor_exp: scale must lie between"),
        (lambda: taylor_exp(0.0), "taylor_exp: scale must lie between"),
        (lambda: Polynomial.of(link.Exp()), "no polynomial"),
        (lambda: Polynomial.of(link.Gegenbauer((2.0, 3.0))), "one row"),
        (lambda: Anchors(4, "kmeans").prepare(DIM), "at least 4 keys per head are required, received none"),
        (lambda: LowRankSquare(3, choice="pca").prepare(DIM, keys=units(2, DIM)), "received 2"),
        (lambda: Anchors(4).prepare(DIM, 2, keys=units(3, 9, DIM)), "keys must be"),
        (lambda: Anchors(4).prepare(0), "dim must be a whole number >= 1"),
        (lambda: Anchors(4).prepare(DIM, dtype=torch.int64), "floating type"),
        (lambda: features_from_config({"type": "Anchor", "count": 4}), "Did you mean 'Anchors'"),
    ],
)
def test_bad_input(make: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("scale", "size"), [("small", 128), ("medium", 512), ("large", 2048)])
def test_presets_are_the_papers(scale: str, size: int) -> None:
    features = Slay.preset(scale)
    assert features.dimension(64) == size == features.laplace_only().dimension(64)
    assert features.nodes == 2
    assert features.rule == "laguerre"
    assert features.positive
    assert features.claim.kind == "biased"


@pytest.mark.parametrize(
    ("features", "known"),
    [
        (Slay(eps=0.5, polynomial=square()), True),
        (Slay(eps=0.5, polynomial=TensorSketch(4)), True),
        (Slay(eps=0.5, polynomial=None), True),
        (Slay(eps=0.5), False),
        (Slay(eps=0.5, polynomial=Nystrom(4)), False),
        (Slay(eps=0.5, polynomial=square(), learn=True), False),
        (Slay(eps=0.5, fusion="shared"), False),
    ],
)
def test_slay_claims_an_error_only_for_its_own_kernel(features: Slay, known: bool) -> None:
    """Elsewhere the error of the quadrature is not that of the whole map, and stands in the text alone."""
    error = features.rule_used.error
    assert features.claim.error == (error if known else None)
    assert f"the quadrature itself is off by {error:.3g} at most" in features.claim.text

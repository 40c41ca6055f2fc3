"""The learned metric tensor: the energy of straight ways by its integral, its constant case, bounds, gradients, and
where it stands in an operator.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.algebra.metric import Euclidean, Product, Riemannian
from zonal.algebra.operator import Operator
from zonal.algebra.score import NegativeDistance
from zonal.errors import ArgumentError
from zonal.nn import Attention

DIM = 5


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def learned(
    units: int = 4, heads: int = 1, scale: float = 1.0, **options: float
) -> tuple[Riemannian, dict[str, Tensor]]:
    """A metric and numbers off its start. scale: how fast the tensor changes."""
    metric = Riemannian(units, size=DIM, heads=heads, **options)  # type: ignore[arg-type]
    params = {name: value.double() for name, value in metric.initial().items()}
    return metric, {
        "unit": scale * (params["unit"] + 0.3 * draw(*params["unit"].shape, seed=3)),
        "direction": params["direction"],
    }


def distance(metric: Riemannian, params: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Of points (T, D) and (S, D), for one head."""
    return metric.pair(metric.query(a[None, None], params), metric.key(b[None, None], params))[0, 0]


def energy(metric: Riemannian, params: dict[str, Tensor], a: Tensor, b: Tensor, nodes: int = 60) -> Tensor:
    """int_0^1 D^T g(a + s D) D ds by Gauss and Legendre's rule, from the tensor itself."""
    gap = b[None] - a[:, None]
    total = torch.zeros(gap.shape[:2], dtype=torch.float64)
    for place, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        point = (a[:, None] + (place + 1) / 2 * gap).flatten(0, 1)[None, None]
        tensor = metric.tensor(point, params)[0, 0].unflatten(0, gap.shape[:2])
        total += weight / 2 * torch.einsum("tsi,tsij,tsj->ts", gap, tensor, gap)
    return total


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 5.0])
def test_the_energy_of_the_straight_way(scale: float) -> None:
    """By quadrature, where the tensor hardly changes and where it changes fast."""
    metric, params = learned(scale=scale, eps=1e-6)
    a, b = draw(6, DIM, seed=1), draw(7, DIM, seed=2, scale=2.0)
    b[0] = a[0]
    found = distance(metric, params, a, b)
    assert torch.allclose((found + 1e-6).square(), energy(metric, params, a, b) + 1e-12, rtol=1e-8, atol=1e-10)
    assert found[0, 0] == 0
    assert torch.allclose(found, distance(metric, params, b, a).T, atol=1e-12)


def test_a_constant_tensor_is_mahalanobis() -> None:
    metric, params = learned(eps=1e-9)
    params["unit"] = torch.cat([torch.zeros(1, 4, DIM, dtype=torch.float64), draw(1, 4, 1, seed=5)], -1)
    tensor = metric.tensor(draw(1, 1, 1, DIM), params)[0, 0, 0]
    a, b = draw(6, DIM, seed=1), draw(7, DIM, seed=2)
    gap = b[None] - a[:, None]
    assert torch.allclose(
        distance(metric, params, a, b), torch.einsum("tsi,ij,tsj->ts", gap, tensor, gap).sqrt(), atol=1e-8
    )


def test_bounds() -> None:
    """g is positive definite; its least and largest eigenvalues bound the distance, and the straight way bounds the
    geodesic from above.
    """
    metric, params = learned(scale=3.0, eps=1e-9)
    a, b = draw(8, DIM, seed=1), draw(9, DIM, seed=2)
    assert torch.linalg.eigvalsh(metric.tensor(draw(1, 1, 50, DIM, scale=10.0), params)).min() >= metric.floor - 1e-9
    found, straight = distance(metric, params, a, b), (b[None] - a[:, None]).norm(dim=-1)
    most = metric.floor + torch.linalg.matrix_norm(params["direction"][0], 2) ** 2
    assert (found >= metric.floor**0.5 * straight - 1e-8).all()
    assert (found <= most**0.5 * straight + 1e-8).all()
    # the energy of a way of ten straight pieces between the same ends, relaxed
    start, end, steps = a[0], b[0], 10
    inner = (start + torch.arange(1, steps)[:, None] / steps * (end - start)).requires_grad_()
    lowest = []
    for _ in range(300):
        way = torch.cat([start[None], inner, end[None]])
        total = steps * (distance(metric, params, way[:-1], way[1:]).diagonal() + 1e-9).square().sum()
        lowest.append(total.item())
        (pull,) = torch.autograd.grad(total, inner)
        inner = (inner - 0.002 * pull).detach().requires_grad_()
    assert lowest[0] == pytest.approx(found[0, 0].item() ** 2, rel=1e-3)  # the pieces of the straight way
    assert lowest[-1] < 0.999 * lowest[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    """By hand and by autograd, at coincident, near, far and zero points; all finite, and none where points coincide."""
    metric, params = learned()
    a = torch.cat([draw(5, DIM, seed=1), torch.zeros(1, DIM), 1e3 * draw(1, DIM, seed=4)])
    b = torch.cat([a + 1e-4 * draw(7, DIM, seed=6), a, draw(3, DIM, seed=2)])
    params = {name: value.to(dtype) for name, value in params.items()}
    q, k = (metric.query(x.to(dtype)[None, None], params).detach().requires_grad_() for x in (a, b))
    found = metric.pair(q, k)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(8), dtype=dtype)
    by_autograd = torch.autograd.grad((found * weight).sum(), (q, k))
    by_hand = metric.pair_vjp(q.detach(), k.detach(), found.detach(), weight)
    for one, other in zip(by_autograd, by_hand, strict=True):
        assert one.isfinite().all()
        assert torch.allclose(
            one, other, rtol=1e-4 if dtype == torch.float32 else 1e-8, atol=1e-3 if dtype == torch.float32 else 1e-8
        )
    here = metric.query(a[:1].to(dtype)[None, None], params).detach()
    for pull in metric.pair_vjp(here, here.clone(), metric.pair(here, here), torch.ones(1, 1, 1, 1, dtype=dtype)):
        assert pull.eq(0).all()


def test_float32_has_five_digits() -> None:
    """Of the distance, or of the points' size where it is smaller, at radii from 0.01 to 30."""
    metric, params = learned()
    a = torch.cat(
        [
            radius * torch.nn.functional.normalize(draw(4, DIM, seed=1), dim=-1)
            for radius in (0.01, 0.1, 1.0, 3.0, 10.0, 30.0)
        ]
    ).float()
    b = torch.cat([a, -a, 1.001 * a, a + 1e-3 * draw(24, DIM, seed=2).float(), a.flip(0)])
    exact = distance(metric, params, a.double(), b.double())
    single = {name: value.float() for name, value in params.items()}
    exact_of_single = distance(metric, {name: value.double() for name, value in single.items()}, a.double(), b.double())
    found = distance(metric, single, a, b)
    assert found.dtype == torch.float32
    size = torch.maximum(exact, a.norm(dim=-1)[:, None].double()).clamp_min(1)
    assert ((found - exact_of_single).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_key_poisons_itself_alone(bad: float) -> None:
    metric, params = learned()
    a, b = draw(6, DIM, seed=1), draw(7, DIM, seed=2)
    clean = distance(metric, params, a, b)
    b[3, 2] = bad
    found = distance(metric, params, a, b)
    assert not found[:, 3].isfinite().any()
    found[:, 3] = clean[:, 3]
    assert torch.allclose(found, clean, atol=1e-12)
    assert distance(metric, params, a, b[:0]).shape == (6, 0)


def test_units_are_learned_a_key_head() -> None:
    """Four query heads over two of keys: outputs and all gradients in tiles are those of the definition, and a
    decoder's are the whole's.
    """
    operator = m.rewa_riemannian(units=3, temperature=0.7).for_heads(4, 2, dim=DIM).double()
    with torch.no_grad():
        for value in operator.parameters():
            value.add_(0.3 * draw(*value.shape, seed=7))
    assert {name: tuple(value.shape) for name, value in operator.learned_parts.items()} == {
        "score_unit": (2, 3, DIM + 1),
        "score_direction": (2, 3, DIM),
    }
    q, k, v = (
        draw(2, heads, 19, size, seed=i).requires_grad_()
        for i, (heads, size) in enumerate([(4, DIM), (2, DIM), (2, 3)])
    )
    wanted, grads = None, []
    for path in ("dense", "tiled"):
        y = zonal.attention(q, k, v, operator, causal=True, path=path)
        wanted = y.detach() if wanted is None else wanted
        assert torch.allclose(y, wanted, atol=1e-12)
        grads.append(torch.autograd.grad(y.sin().sum(), (q, k, v, *operator.parameters())))
    for one, other in zip(*grads, strict=True):
        assert one.abs().max() > 1e-4
        assert torch.allclose(one, other, atol=1e-10)
    with torch.no_grad():
        first, memory = zonal.attention(
            q[:, :, :11], k[:, :, :11], v[:, :, :11], operator, causal=True, return_memory=True
        )
        assert isinstance(memory, zonal.Memory)
        rest, _ = zonal.attention(q[:, :, 11:], k[:, :, 11:], v[:, :, 11:], operator, causal=True, memory=memory)
    assert torch.allclose(torch.cat([first, rest], 2), wanted, atol=1e-12)  # type: ignore[arg-type]
    again = Operator.from_config(operator.config()).double()
    again.load_state_dict(operator.state_dict())
    assert torch.equal(zonal.attention(q, k, v, again, causal=True), zonal.attention(q, k, v, operator, causal=True))


def test_it_learns_the_metric_of_a_teacher() -> None:
    """Distances of another tensor, fitted better than any constant one can."""
    teacher, params = learned(units=2, scale=3.0)
    a = draw(40, DIM, seed=1)
    target = distance(teacher, params, a, a)
    student, start = learned(units=6)
    best = {}
    for name, trained in (("constant", ("direction",)), ("learned", ("unit", "direction"))):
        values = {key: value.clone() for key, value in start.items()}
        if name == "constant":
            values["unit"].zero_()
        for key in trained:
            values[key].requires_grad_()
        optimiser = torch.optim.Adam([values[key] for key in trained], lr=0.03)
        for _ in range(120):
            loss = (distance(student, values, a, a) - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        best[name] = loss.item()
    assert best["learned"] < 0.5 * best["constant"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Riemannian(units=0), "units must be a whole number >= 1"),
        (lambda: Riemannian(floor=0.0), "floor must lie between 0 and 1"),
        (lambda: Riemannian(eps=0.0), "eps must be > 0"),
        (lambda: Riemannian(size=4).sized(5, 1), "points of 4 numbers are required, received 5"),
        (
            lambda: Product((Euclidean(), Riemannian())),
            "without numbers of their own to learn are required, received Riemannian",
        ),
        (lambda: NegativeDistance(Riemannian(), dot=1.0), "Leave dot out"),
        (
            lambda: Attention(48, 4, "rewa_riemannian(units=2)").operator.for_heads(4, dim=13),
            "points of 12 numbers are required, received 13",
        ),
    ],
)
def test_errors_name_what_is_required(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]


def test_the_planner_knows_what_a_unit_costs() -> None:
    """More units, more deaths: longer estimates on every path, and none for what is a dot product."""

    def seconds(operator: Operator, path: str) -> float:
        plan = zonal.explain(operator, (1, 4, 512, 16), causal=True).plan
        return next(estimate.seconds for estimate in plan.estimates if estimate.path == path)

    for path in ("dense", "tiled", "streaming"):
        few, many = (seconds(m.rewa_riemannian(units=units), path) for units in (2, 32))
        assert many > 1.05 * few
        few, many = (seconds(m.rewa_topological(neighbours=n), path) for n in (1, 8))
        assert many > 1.05 * few
    assert m.rewa_categorical().score.passes(16) == 0

"""Features of kernels of q - k: unbiased for vectors of any length, in either form; and softmax over them."""

import math

import pytest
import torch
from scipy.special import gamma, kv
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.features import Stationary
from zonal.nn import Attention

KAPPAS = {
    "gaussian": Stationary(2, width=1.3),
    "gaussian-orthogonal": Stationary(8, orthogonal=True),
    "laplacian": Stationary(2, "laplacian", width=2.0),
    "matern-1/2": Stationary(2, "matern", smoothness=0.5),
    "matern-3/2": Stationary(2, "matern", width=0.8),
    "matern-5/2": Stationary(8, "matern", smoothness=2.5, orthogonal=True),
}


def pair(distance: float) -> tuple[Tensor, Tensor]:
    """Two points of five numbers, not of unit length, that far apart; with a dot product below zero, where positive
    features have a variance.
    """
    direction = torch.tensor([0.5, -0.1, 0.7, 0.2, -0.4], dtype=torch.float64)
    direction = direction / direction.norm() * distance / 2
    return direction * 1.1, direction * -0.9


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", KAPPAS)
def test_the_mean_is_the_kernel(name: str, signed: bool) -> None:
    """Over 4000 heads, each with draws of its own, within 4.5 standard errors."""
    declared = KAPPAS[name].config()
    features = Stationary(
        **{key: value for key, value in declared.items() if key not in ("type", "signed")}, signed=signed
    )
    buffers = features.prepare(5, 4000, dtype=torch.float64)
    for distance in (0.3, 1.0, 2.5):
        u, v = pair(distance)
        phi = [features(x.expand(4000, 1, 5), buffers)[:, 0] for x in (u, v)]
        found = (phi[0] * phi[1]).sum(-1)
        assert signed or bool((phi[0] >= 0).all())
        error = found.std().item() / math.sqrt(4000)
        assert abs(found.mean().item() - features.apart(u, v).item()) < 4.5 * error, (name, distance)
        if distance == 0.3:  # where the kernel is far from zero, the comparison can fail
            assert abs(found.mean().item() - 1.3 * features.apart(u, v).item()) > 4.5 * error


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5])
def test_matern_by_bessel_functions(smoothness: float) -> None:
    features = Stationary(2, "matern", width=0.7, smoothness=smoothness)
    for distance in (0.1, 0.5, 2.0):
        u, v = pair(distance)
        r = math.sqrt(2 * smoothness) * distance / 0.7
        assert features.apart(u, v).item() == pytest.approx(
            2 ** (1 - smoothness) / gamma(smoothness) * r**smoothness * kv(smoothness, r), rel=1e-9
        )


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5])
def test_matern_at_coincident_points(smoothness: float) -> None:
    """Value and slopes of the limit; nu = 1/2 has a kink there, and the slope 0."""
    features = Stationary(2, "matern", width=0.7, smoothness=smoothness)
    u = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(features.apart(u, u.detach()), u)
    assert features.apart(u, u).item() == 1
    assert slope.tolist() == [0, 0, 0]
    x = torch.ones((), dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(features.kernel(x, 3), x)
    near = (1 - features.kernel(torch.tensor(1 - 1e-9, dtype=torch.float64), 3).item()) / 1e-9
    assert slope.item() == (0 if smoothness == 0.5 else pytest.approx(near, rel=1e-3))


def test_softmax_over_features() -> None:
    """exp(phi . phi / tau) by its parts, and the temperature of the score alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    operator = m.rewa_functional(size=16, temperature=0.3, dim=6)
    features = operator.score.features  # type: ignore[attr-defined]
    buffers = {"omega": operator.fixed_parts.get_buffer("score_omega").double()}
    weights = (features(q, buffers) @ features(k, buffers).mT / 0.3).softmax(-1)
    for path in ("dense", "tiled"):
        assert torch.allclose(zonal.attention(q, k, v, operator, path=path), weights @ v, atol=1e-10)
    among = operator.score.as_query(features(k, buffers), {}) @ features(k, buffers).mT
    assert torch.allclose(among.diagonal(dim1=-2, dim2=-1), torch.full((1, 2, 9), 1 / 0.3, dtype=torch.float64))


def test_layers_draw_and_learn() -> None:
    layer = Attention(32, 4, m.rewa_functional(size=12, learn=True), kv_heads=2)
    assert layer.operator.learned_parts["score_omega"].shape == (2, 6, 8)
    linear = Attention(32, 4, m.rewa_functional(size=12, form="linear"))
    x = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(1))
    for each in (layer, linear):
        y = each(x)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
        first, memory = each(x[:, :5], return_memory=True)
        rest, _ = each(x[:, 5:], memory)
        assert torch.allclose(torch.cat([first, rest], 1), y, atol=1e-5)
    assert layer.operator.learned_parts["score_omega"].grad.abs().max() > 0
    # constant, where the other grows
    memories = [linear(x[:, :n], return_memory=True)[1].memory.nbytes for n in (5, 13)]
    assert memories[0] == memories[1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Stationary(5), "an even size, received 5"),
        (lambda: Stationary(4, "cauchy"), "kappa must be 'gaussian', 'laplacian' or 'matern'"),  # type: ignore[arg-type]
        (lambda: Stationary(4, width=0.0), "width must be > 0 or None"),
        (lambda: Stationary(4, "matern", smoothness=1.0), "smoothness must be 0.5, 1.5 or 2.5"),
        (lambda: Stationary(4, "laplacian").kernel(torch.zeros(1), 3), "no function of q . k"),
        (lambda: m.rewa_functional(form="dense"), "form must be 'softmax' or 'linear'"),  # type: ignore[arg-type]
        (lambda: m.rewa_functional(temperature=0.0), "temperature must be > 0"),
    ],
)
def test_errors_say_what_there_is(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]

"""Kernel ridge beyond the matrix: harmonics, kernels that are refused, weights that learn under a memory, keys of
zeros, the planner's choice, a compiled call.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import zonal
from zonal import Operator, anchor, link, metric, score
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.features import Harmonics
from zonal.memory import Memory


@pytest.mark.parametrize(("dim", "degree"), [(2, 3), (3, 6), (5, 4), (16, 2)])
def test_harmonics_are_exact(dim: int, degree: int) -> None:
    torch.manual_seed(0)
    q, k = normalize(torch.randn(2, 9, dim, dtype=torch.float64), dim=-1)
    features = Harmonics(degree)
    assert features(q).shape[-1] == features.dimension(dim)
    torch.testing.assert_close(features(q) @ features(k).T, features.kernel(q @ k.T, dim), rtol=0, atol=1e-13)
    assert (features(torch.zeros(dim)) == 0).all()


REFUSED = {
    "weights of any sign": (m.sko(), "negative weight"),
    "too many numbers": (m.kernel_ridge(kernel="sko(manifold_dim=3)"), "use manifold_dim >= 5"),
    "a learned bias": (m.squared_affine(learn_bias=True), "learn_bias"),
    "a negative bias": (m.squared_affine(bias=-0.1), "use bias >= 0"),
    "a negative power": (m.polynomial_square(coefficients=(-0.1, 1.0)), "negative power"),
    "learned powers": (m.polynomial_square(learn=True), "learn=False"),
    "waves": (m.rewa_oscillatory(), "Oscillatory"),
    "a bare distance": (Operator(score.NegativeDistance(), link.Identity(), anchor.Raw()), "bare distance"),
    "a distance of no negative type": (m.rewa_riemannian(), "Riemannian"),
    "an unsymmetric kernel": (m.rewa_operator(), "symmetric"),
    "weights by query": (m.rewa(adaptive=True), "adaptive"),
    "a negative scale": (Operator(score.Dot(scale=-1.0), link.Exp(), anchor.Raw()), "scale > 0"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("solving", [anchor.Ridge(eps=0.5), anchor.Koopman(power=1)], ids=lambda a: type(a).__name__)
def test_kernels_that_need_not_be_positive_definite_are_refused(name: str, solving: anchor.Anchor) -> None:
    operator, why = REFUSED[name]
    q, k, v = torch.randn(3, 1, 1, 5, 6).unbind(0)
    with pytest.raises(ArgumentError, match=f"positive definite.*{why}"):
        zonal.attention(q, k, v, operator.replace(anchor=solving))


@pytest.mark.parametrize(
    "kernel",
    [metric.Euclidean(), metric.Sphere(), metric.Hyperbolic(), metric.Product()],
    ids=lambda k: type(k).__name__,
)
def test_distances_of_negative_type_are_not(kernel: metric.Metric) -> None:
    Operator(score.NegativeDistance(kernel), link.Exp(), anchor.Ridge()).check("test")
    with pytest.raises(ArgumentError, match=r"kernel_ridge: .*learn_bias"):
        m.kernel_ridge(kernel="squared_affine(learn_bias=True)")


@pytest.mark.parametrize("kernel", ["sko", "squared_affine"])
def test_a_memory_follows_what_is_learned(kernel: str) -> None:
    """Sums hold features alone: weights that change after tokens were absorbed count for all of them."""
    torch.manual_seed(1)
    operator = m.kernel_ridge(kernel=kernel, power=1).double()
    q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64).unbind(0)
    memory = Memory.empty(operator, 1, 2, 4, 4, torch.float64).absorb(k[:, :, :11], v[:, :, :11])
    with torch.no_grad():
        before = memory.read(q[:, :, 11:])
        for value in operator.parameters():
            value.add_(0.5)
        expected = zonal.attention(q, k, v, operator, causal=True, path="dense")[:, :, 11:]
        torch.testing.assert_close(memory.read(q[:, :, 11:]), expected, rtol=1e-9, atol=1e-9)
    assert (before - expected).abs().max() > 1e-3


def test_keys_of_zeros_take_no_part() -> None:
    torch.manual_seed(2)
    k, v = torch.randn(2, 1, 1, 20, 6, dtype=torch.float64).unbind(0)
    k[:, :, 3] = 0
    found = []
    for path in ("dense", "chunked", "streaming"):
        keys = k.clone().requires_grad_()
        y = zonal.attention(keys, keys, v, m.kernel_ridge(), causal=True, path=path)
        (gradient,) = torch.autograd.grad(y.square().sum(), keys)
        assert (y[:, :, 3] == 0).all()
        assert (gradient[:, :, 3] == 0).all()
        found.append((y.detach(), gradient))
    for pair in found[1:]:
        torch.testing.assert_close(pair, found[0], rtol=1e-9, atol=1e-9)


def test_the_planner_takes_features_where_they_are_few() -> None:
    def path(tokens: int, dim: int) -> str:
        return zonal.explain(m.kernel_ridge(), (1, 2, tokens, dim), causal=True).path

    assert path(4096, 8) == "chunked"
    assert path(64, 32) == "dense"
    told = zonal.explain(m.kernel_ridge(kernel="yat"), (1, 2, 256, 8), causal=True)
    assert told.memory_kind == "keys"
    assert "exact features" in told.plan.refused["chunked"]
    wide = zonal.explain(m.kernel_ridge(), (1, 2, 256, 64), causal=True)
    assert "2144 features" in wide.plan.refused["chunked"]


def test_a_decoder_in_float32_by_the_kernel() -> None:
    torch.manual_seed(3)
    operator = m.kernel_ridge(power=1)
    q, k, v = torch.randn(3, 1, 2, 30, 6).unbind(0)
    with torch.no_grad():
        expected = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")
        memory, rows = Memory.empty(operator, 1, 2, 6, 6), []
        for start, stop in ((0, 20), *((t, t + 1) for t in range(20, 30))):
            found = zonal.attention(
                q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], operator, causal=True, memory=memory
            )
            assert isinstance(found, tuple)
            memory = found[1]
            rows.append(found[0])
    torch.testing.assert_close(torch.cat(rows, 2).double(), expected, rtol=1e-3, atol=1e-4)


def test_a_compiled_call_is_the_same() -> None:
    torch.manual_seed(4)
    operator = m.kernel_ridge()
    q, k, v = torch.randn(3, 1, 1, 24, 5).unbind(0)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), zonal.attention(q, k, v, operator, causal=True, path="chunked"))

"""Operators as witnesses: what the score is, that it is a dot product with a key bias, and what the paper says of it."""

import math

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.algebra.score import OperatorPath
from zonal.errors import ArgumentError
from zonal.nn import Attention


def matrices(size: int = 3, heads: int = 4, kv_heads: int = 2, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dim = size**2 if rank is None else rank * (2 * size + 1)
    q, k, v = (torch.randn(2, h, 9, n, generator=generator, dtype=torch.float64) for h, n in ((heads, dim), (kv_heads, dim), (kv_heads, 5)))
    return q.requires_grad_(), k.requires_grad_(), v


def score_of(operator: zonal.Operator, q: Tensor, k: Tensor) -> Tensor:
    params, score = operator.bind(q.shape[1], k.shape[1]).score_params, operator.score
    return score.pair(score.prepare_query(q, params, None), score.prepare_key(k, params).repeat_interleave(q.shape[1] // k.shape[1], 1))


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_the_distance_of_operators(rank: int | None) -> None:
    """-|A - B|^2 / tau for every pair, as a dot product of vectors two numbers longer."""
    q, k, _ = matrices(rank=rank)
    operator = m.rewa_operator(rank=rank, temperature=0.7)

    def whole(x: Tensor) -> Tensor:
        if rank is None:
            return x.unflatten(-1, (3, 3))
        u, s, v = x[..., : 3 * rank].unflatten(-1, (3, rank)), x[..., 3 * rank : 4 * rank], x[..., 4 * rank :].unflatten(-1, (3, rank))
        return torch.einsum("...ir,...r,...jr->...ij", u, s, v)

    a, b = whole(q), whole(k).repeat_interleave(2, 1)
    expected = -(a[:, :, :, None] - b[:, :, None]).square().sum((-1, -2)) / 0.7
    assert torch.allclose(score_of(operator, q, k), expected, atol=1e-12)
    assert operator.tags.bilinear
    assert operator.score.width(q.shape[-1]) == 11


def test_it_is_a_dot_product_with_a_key_bias() -> None:
    """softmax((2 <A, B> - |B|^2) / tau), the row's own |A|^2 falling out; at the temperature 2m the product is that of softmax attention."""
    q, k, v = matrices()
    bias = -k.square().sum(-1) / 6
    expected = zonal.attention(q, k, v, m.softmax(), causal=True, key_bias=bias)
    for path in ("dense", "tiled"):
        got = zonal.attention(q, k, v, m.rewa_operator(), causal=True, path=path)
        assert torch.allclose(got, expected, atol=1e-12)
    assert zonal.explain(m.rewa_operator(), (1, 8, 4096, 36), causal=True).path == "tiled"
    # as the metric has it
    metric = zonal.Operator(zonal.score.NegativeDistance(zonal.metric.SquaredEuclidean(), 6.0), zonal.link.Exp(), zonal.anchor.Row())
    assert torch.allclose(zonal.attention(q, k, v, metric, causal=True), expected, atol=1e-12)


def test_a_path_of_relations() -> None:
    """<A R_1 R_2, B> / (m tau), with the relations of each key head; orthogonal at the start, and they learn."""
    q, k, v = matrices()
    operator = m.rewa_operator(relations=2, temperature=0.5).for_heads(4, 2, dim=9).double()
    relation = operator.learned_parts["score_relation"]
    assert relation.shape == (2, 2, 3, 3)
    assert torch.allclose(relation @ relation.mT, torch.eye(3, dtype=torch.float64).expand(2, 2, 3, 3), atol=1e-6)
    walk = (relation[:, 0] @ relation[:, 1]).repeat_interleave(2, 0)
    a, b = q.unflatten(-1, (3, 3)), k.unflatten(-1, (3, 3)).repeat_interleave(2, 1)
    expected = torch.einsum("bhtij,hjk,bhsik->bhts", a, walk, b) / (3 * 0.5)
    assert torch.allclose(score_of(operator, q, k), expected, atol=1e-12)
    grads = [torch.autograd.grad(zonal.attention(q, k, v, operator, causal=True, path=path).sin().sum(), (q, k, relation)) for path in ("dense", "tiled")]
    for one, other in zip(*grads, strict=True):
        assert other.abs().max() > 1e-4
        assert torch.allclose(one, other, atol=1e-10)


def test_layers_give_what_it_needs() -> None:
    layer = Attention(48, 4, "rewa_operator(relations=1, size=4)", kv_heads=2)
    assert layer.qk_dim == 16
    assert layer.operator.learned_parts["score_relation"].shape == (2, 1, 4, 4)
    open_size = Attention(36, 4, "rewa_operator(relations=1)")
    assert open_size.operator.learned_parts["score_relation"].shape == (4, 1, 3, 3)
    x = torch.randn(2, 11, 36)
    y = open_size(x)
    assert isinstance(y, Tensor)
    y.sum().backward()
    first, memory = open_size(x[:, :6], return_memory=True)
    rest, _ = open_size(x[:, 6:], memory)
    assert torch.allclose(torch.cat([first, rest], 1), y, atol=1e-5)
    # a bare call takes the start that the seed gives
    q, k, v = matrices()
    assert torch.equal(zonal.attention(q, k, v, m.rewa_operator(relations=1, seed=3)), zonal.attention(q, k, v, m.rewa_operator(relations=1, seed=3)))
    assert Attention(36, 4, "rewa_operator(shared_witness=True)").query is not Attention(36, 4, "rewa_operator").query


def test_the_bound_on_transitivity() -> None:
    """|<A_x, A_z> - <A_y* A_x, A_y* A_z>| <= |A_x| |I - A_y A_y*| |A_z| (Hilbert-Schmidt; the last in the operator norm); the paper's is broken by a unitary A_y."""
    generator = torch.Generator().manual_seed(2)
    x, y, z = (torch.randn(2000, 4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    unitary = torch.linalg.qr(y[0])[0]

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-1, -2))

    far = (torch.eye(4, dtype=torch.float64) - y @ y.mT).flatten(1).norm(dim=1)
    bound = x.flatten(1).norm(dim=1) * far * torch.linalg.matrix_norm(z, 2)
    assert ((product(x, z) - product(y.mT @ x, y.mT @ z)).abs() <= bound + 1e-9).all()
    assert (product(x, z) - product(x @ unitary, unitary @ z)).abs().max() > 5
    assert (torch.eye(4, dtype=torch.float64) - unitary @ unitary.T).norm() < 1e-12


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Attention(40, 4, "rewa_operator"), "vectors of m\\^2 numbers are required, received 10. In a layer, set qk_dim"),
        (lambda: Attention(36, 4, "rewa_operator(rank=2)"), "vectors of 2 \\(2m \\+ 1\\) numbers are required, received 9"),
        (lambda: Attention(36, 4, "rewa_operator(size=2)", qk_dim=9), "with m = 2 are required, received 9"),
        (lambda: OperatorPath(rank=0), "rank must be a whole number >= 1"),
        (lambda: OperatorPath(relations=-1), "relations must be a whole number >= 0"),
        (lambda: OperatorPath(temperature=0.0), "temperature must be > 0 or None"),
        (lambda: zonal.metric.HilbertSchmidt().pair(torch.zeros(1, 5), torch.zeros(1, 5)), "points of m\\^2 numbers are required, received 5"),
    ],
)
def test_errors_say_what_fits(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]


def test_temperature_of_none() -> None:
    q, k, _ = matrices()
    assert torch.allclose(score_of(m.rewa_operator(), q, k), score_of(m.rewa_operator(temperature=6.0), q, k))
    assert math.isclose(score_of(m.rewa_operator(relations=1), q, k).std().item(), score_of(m.rewa_operator(relations=1, temperature=1.0), q, k).std().item())

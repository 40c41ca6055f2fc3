"""Operators as witnesses: what the score is, that it is a dot product with a key bias, and what the paper says of
it.
"""

import math

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.algebra.score import OperatorPath
from zonal.errors import ArgumentError
from zonal.nn import Attention


def matrices(
    size: int = 3, heads: int = 4, kv_heads: int = 2, rank: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dim = size**2 if rank is None else rank * (2 * size + 1)
    q, k, v = (
        torch.randn(2, h, 9, n, generator=generator, dtype=torch.float64)
        for h, n in ((heads, dim), (kv_heads, dim), (kv_heads, 5))
    )
    return q.requires_grad_(), k.requires_grad_(), v


def score_of(operator: zonal.Operator, q: Tensor, k: Tensor) -> Tensor:
    params, score = operator.bind(q.shape[1], k.shape[1]).score_params, operator.score
    return score.pair(
        score.prepare_query(q, params, None),
        score.prepare_key(k, params).repeat_interleave(q.shape[1] // k.shape[1], 1),
    )


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_the_distance_of_operators(rank: int | None) -> None:
    """-|A - B|^2 / tau for every pair, as a dot product of vectors two numbers longer."""
    q, k, _ = matrices(rank=rank)
    operator = m.rewa_operator(rank=rank, temperature=0.7)

    def whole(x: Tensor) -> Tensor:
        if rank is None:
            return x.unflatten(-1, (3, 3))
        u, s, v = (
            x[..., : 3 * rank].unflatten(-1, (3, rank)),
            x[..., 3 * rank : 4 * rank],
            x[..., 4 * rank :].unflatten(-1, (3, rank)),
        )
        return torch.einsum("...ir,...r,...jr->...ij", u, s, v)

    a, b = whole(q), whole(k).repeat_interleave(2, 1)
    expected = -(a[:, :, :, None] - b[:, :, None]).square().sum((-1, -2)) / 0.7
    assert torch.allclose(score_of(operator, q, k), expected, atol=1e-12)
    assert operator.tags.bilinear
    assert operator.score.width(q.shape[-1]) == 11


def test_it_is_a_dot_product_with_a_key_bias() -> None:
    """softmax((2 <A, B> - |B|^2) / tau), the row's own |A|^2 falling out; at the temperature 2m the product is that of
    softmax attention.
    """
    q, k, v = matrices()
    bias = -k.square().sum(-1) / 6
    expected = zonal.attention(q, k, v, m.softmax(), causal=True, key_bias=bias)
    for path in ("dense", "tiled"):
        got = zonal.attention(q, k, v, m.rewa_operator(), causal=True, path=path)
        assert torch.allclose(got, expected, atol=1e-12)
    assert zonal.explain(m.rewa_operator(), (1, 8, 4096, 36), causal=True).path == "tiled"
    # as the metric has it
    metric = zonal.Operator(
        zonal.score.NegativeDistance(zonal.metric.SquaredEuclidean(), 6.0), zonal.link.Exp(), zonal.anchor.Row()
    )
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
    grads = [
        torch.autograd.grad(zonal.attention(q, k, v, operator, causal=True, path=path).sin().sum(), (q, k, relation))
        for path in ("dense", "tiled")
    ]
    for one, other in zip(*grads, strict=True):
        assert other.abs().max() > 1e-4
        assert torch.allclose(one, other, atol=1e-10)


def test_a_fixed_path_is_softmax_attention() -> None:
    """<A R_1 R_2, B> is linear in A: softmax attention of queries q' = A R_1 R_2, and of a layer whose projection holds
    the relations.
    """
    q, k, v = matrices()
    operator = m.rewa_operator(relations=2, temperature=0.5).for_heads(4, 2, dim=9).double()
    relation = operator.learned_parts["score_relation"].detach()
    walk = (relation[:, 0] @ relation[:, 1]).repeat_interleave(2, 0)
    folded = (q.unflatten(-1, (3, 3)) @ walk[:, None]).flatten(-2)
    expected = zonal.attention(folded, k, v, m.softmax(scale=1 / (3 * 0.5)), causal=True)
    for path in ("dense", "tiled"):
        assert (zonal.attention(q, k, v, operator, causal=True, path=path) - expected).abs().max() < 1e-12

    torch.manual_seed(0)
    layer = Attention(36, 4, "rewa_operator(relations=2, size=3)").double()
    plain = Attention(36, 4, m.softmax(scale=1 / 3), qk_dim=9).double()
    relation = layer.operator.learned_parts["score_relation"].detach()
    plain.load_state_dict(
        {name: value for name, value in layer.state_dict().items() if not name.startswith("operator.")}
    )
    with torch.no_grad():  # rows of the projection: head, row of A, column of A
        rows = plain.query.weight.view(4, 3, 3, 36)
        rows.copy_(torch.einsum("hacx,hcd->hadx", rows.clone(), relation[:, 0] @ relation[:, 1]))
    x = torch.randn(2, 11, 36, dtype=torch.float64)
    assert (plain(x) - layer(x)).abs().max() < 1e-12


def linear_misfit(score: OperatorPath, params: dict[str, Tensor]) -> float:
    """How much of prepared queries the best linear map of the queries leaves over, relative."""
    q = torch.randn(1, 1, 400, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    prepared = score.prepare_query(q, params, None)[0, 0]
    fitted = q[0, 0] @ torch.linalg.lstsq(q[0, 0], prepared).solution
    return ((prepared - fitted).norm() / prepared.norm()).item()


def test_a_path_that_each_query_chooses() -> None:
    """R_i(A) = p_i0 I + sum_j p_ij R_j with p_i = softmax_j <G_ij, A>, written out; parts of each key head, gradients
    by all of them.
    """
    q, k, v = matrices()
    operator = m.rewa_operator(relations=2, choices=3, temperature=0.5).for_heads(4, 2, dim=9).double()
    relation, gate = (operator.learned_parts[f"score_{name}"] for name in ("relation", "gate"))
    assert relation.shape == (2, 3, 3, 3)
    assert gate.shape == (2, 2, 4, 3, 3)
    expected = torch.zeros(2, 4, 9, 9, dtype=torch.float64)
    for batch, head, t in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(9)).tolist():
        a = walked = q[batch, head, t].view(3, 3)
        for step in range(2):
            p = torch.stack([(gate[head // 2, step, j] * a).sum() for j in range(4)]).softmax(0)
            walked = walked @ (
                p[0] * torch.eye(3, dtype=torch.float64) + sum(p[j + 1] * relation[head // 2, j] for j in range(3))
            )
        expected[batch, head, t] = torch.stack([(walked * b.view(3, 3)).sum() for b in k[batch, head // 2]]) / (3 * 0.5)
    assert torch.allclose(score_of(operator, q, k), expected, atol=1e-12)
    asked = (q, k, relation, gate)
    grads = [
        torch.autograd.grad(zonal.attention(q, k, v, operator, causal=True, path=path).sin().sum(), asked)
        for path in ("dense", "tiled")
    ]
    for one, other in zip(*grads, strict=True):
        assert other.abs().max() > 1e-4
        assert torch.allclose(one, other, atol=1e-10)
    # with one relation that is certain, and none, it is the fixed path and the plain product
    with torch.no_grad():
        gate.zero_()
        expected = ((torch.eye(3) + relation.sum(1)) / 4).matrix_power(2).repeat_interleave(2, 0)
    a, b = q.unflatten(-1, (3, 3)), k.unflatten(-1, (3, 3)).repeat_interleave(2, 1)
    assert torch.allclose(
        score_of(operator, q, k), torch.einsum("bhtij,hjk,bhsik->bhts", a, expected, b) / 1.5, atol=1e-12
    )


def test_no_linear_map_of_the_query_is_a_chosen_path() -> None:
    """The best linear map leaves nothing of a fixed path, and at least 15% of a chosen one; the path of half a query is
    not half of its path.
    """
    for choices in (None, 1, 3):
        score = OperatorPath(size=3, relations=2, choices=choices)
        params = {name: value.double() for name, value in score.initial().items()}
        assert linear_misfit(score, params) < 1e-12 if choices is None else 0.15 < linear_misfit(score, params) < 1
        q = matrices()[0][:, :1]
        half, whole = (score.prepare_query(x, params, None) for x in (q / 2, q))
        assert (2 * half - whole).norm() < 1e-12 if choices is None else (2 * half - whole).norm() > 0.05 * whole.norm()


def test_layers_give_what_it_needs() -> None:
    layer = Attention(48, 4, "rewa_operator(relations=1, size=4)", kv_heads=2)
    assert layer.qk_dim == 16
    assert layer.operator.learned_parts["score_relation"].shape == (2, 1, 4, 4)
    for spec, count in (("rewa_operator(relations=1)", 1), ("rewa_operator(relations=2, choices=5)", 5)):
        open_size = Attention(36, 4, spec)
        assert open_size.operator.learned_parts["score_relation"].shape == (4, count, 3, 3)
        x = torch.randn(2, 11, 36)
        y = open_size(x)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in open_size.operator.parameters())
        first, memory = open_size(x[:, :6], return_memory=True)
        rest, _ = open_size(x[:, 6:], memory)
        assert torch.allclose(torch.cat([first, rest], 1), y, atol=1e-5)
    # a bare call takes the start that the seed gives
    q, k, v = matrices()
    assert torch.equal(
        zonal.attention(q, k, v, m.rewa_operator(relations=1, seed=3)),
        zonal.attention(q, k, v, m.rewa_operator(relations=1, seed=3)),
    )
    assert Attention(36, 4, "rewa_operator(shared_witness=True)").query is not Attention(36, 4, "rewa_operator").query


def test_the_bound_on_transitivity() -> None:
    """|<A_x, A_z> - <A_y* A_x, A_y* A_z>| <= |A_x| |I - A_y A_y*| |A_z| (Hilbert-Schmidt; the last in the operator
    norm); the paper's is broken by a unitary A_y.
    """
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
        (
            lambda: Attention(40, 4, "rewa_operator"),
            "vectors of m\\^2 numbers are required, received 10. In a layer, set qk_dim",
        ),
        (
            lambda: Attention(36, 4, "rewa_operator(rank=2)"),
            "vectors of 2 \\(2m \\+ 1\\) numbers are required, received 9",
        ),
        (lambda: Attention(36, 4, "rewa_operator(size=2)", qk_dim=9), "with m = 2 are required, received 9"),
        (lambda: OperatorPath(rank=0), "rank must be a whole number >= 1"),
        (lambda: OperatorPath(relations=-1), "relations must be a whole number >= 0"),
        (lambda: OperatorPath(choices=2), "choices=2 needs relations >= 1, the steps of a path, received relations=0"),
        (lambda: OperatorPath(relations=1, choices=0), "choices must be a whole number >= 1, received 0"),
        (lambda: OperatorPath(temperature=0.0), "temperature must be > 0 or None"),
        (
            lambda: zonal.metric.HilbertSchmidt().pair(torch.zeros(1, 5), torch.zeros(1, 5)),
            "points of m\\^2 numbers are required, received 5",
        ),
    ],
)
def test_errors_say_what_fits(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]


def test_temperature_of_none() -> None:
    q, k, _ = matrices()
    assert torch.allclose(score_of(m.rewa_operator(), q, k), score_of(m.rewa_operator(temperature=6.0), q, k))
    assert math.isclose(
        score_of(m.rewa_operator(relations=1), q, k).std().item(),
        score_of(m.rewa_operator(relations=1, temperature=1.0), q, k).std().item(),
    )

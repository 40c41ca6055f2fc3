"""What nobody should ask of attention by distance and its relatives, on every path: empty, degenerate, extreme and
poisoned input, forward and backward.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Operator, anchor
from zonal import mechanisms as m
from zonal.algebra.hashing import LSH
from zonal.errors import ArgumentError
from zonal.execution import plan
from zonal.execution.call import prepare
from zonal.nn import Attention, Mixture

OPERATORS: dict[str, Callable[[], Operator]] = {
    "rewa": m.rewa,
    "plane": lambda: m.rewa(gates=(1.0, 0.0, 0.0)),
    "sphere": lambda: m.rewa(gates=(0.0, 1.0, 0.0)),
    "hyperbolic": lambda: m.rewa(gates=(0.0, 0.0, 1.0)),
    "shut": lambda: m.rewa(gates=(0.0, 0.0, 0.0)),
    "cold": lambda: m.rewa(temperature=0.01),
    "dot": lambda: m.rewa(dot=0.3),
    "adaptive": lambda: m.rewa(adaptive=True),
    "oscillatory": lambda: m.rewa_oscillatory(amplitudes=(1.0, -0.5), decays=(0.5, 0.2), frequencies=(3.0, 5.0)),
    "functional": lambda: m.rewa_functional(size=8),
    "functional, linear": lambda: m.rewa_functional(size=8, form="linear"),
    "operator": m.rewa_operator,
    "operator, relations": lambda: m.rewa_operator(relations=2),
    "operator, choices": lambda: m.rewa_operator(relations=2, choices=3),
    "operator, rank": lambda: m.rewa_operator(rank=1),
    "riemannian": lambda: m.rewa_riemannian(units=3),
    "topological": lambda: m.rewa_topological(neighbours=2),
    "categorical": lambda: m.rewa_categorical(relation=True),
    "top": lambda: m.rewa().replace(anchor=anchor.TopK(50)),
    "searched": lambda: m.rewa().replace(anchor=anchor.TopK(50, LSH(tables=2, reach=4, window=3))),
}
DIM, TOKENS = 9, 6  # nine numbers are a 3 x 3 matrix, and a 4 x 1 matrix's factors
# exponentials of minus a length squared are 0 in float32 there, which is refused in words
SHORT = ("functional, linear",)
# cubes of such numbers leave float32
CUBIC = ("operator, rank",)


def draw(tokens: int = TOKENS, keys: int = TOKENS, batch: int = 2, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(batch, 2, n, width, generator=generator) for n, width in ((tokens, dim), (keys, dim), (keys, 3))
    )
    return q, k, v


def paths(operator: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[str]:
    refused = plan.choose(prepare(operator, q, k, v, causal=causal)).refused
    # a memory of nothing cannot be made, and says so
    return [
        path
        for path in plan.PATHS
        if path not in refused and not (path == "streaming" and 0 in (q.shape[0], v.shape[3]))
    ]


def run(
    operator: Operator, q: Tensor, k: Tensor, v: Tensor, path: str, causal: bool = True, mask: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    y = zonal.attention(leaves[0], leaves[1], leaves[2], operator, causal=causal, key_padding_mask=mask, path=path)
    found = torch.autograd.grad(y.float().square().sum(), [*leaves, *operator.parameters()], allow_unused=True)
    return y.detach(), [g for g in found if g is not None]


def finite(operator: Operator, q: Tensor, k: Tensor, v: Tensor, what: str, mask: Tensor | None = None) -> None:
    for causal in (True, False):
        able = paths(operator, q, k, v, causal)
        assert "dense" in able, what
        for path in able:
            y, gradients = run(operator, q, k, v, path, causal, mask)
            assert y.shape == (*q.shape[:3], v.shape[3]), (what, path)
            assert y.dtype == q.dtype, (what, path)
            assert all(torch.isfinite(x).all() for x in (y, *gradients)), f"{what}, path {path}, causal={causal}"


@pytest.mark.parametrize("name", OPERATORS)
def test_empty_and_short(name: str) -> None:
    operator = OPERATORS[name]()
    for tokens, keys, batch in ((0, 5, 1), (5, 0, 1), (0, 0, 1), (5, 5, 0), (1, 1, 1)):
        finite(operator, *draw(tokens, keys, batch), f"{tokens} queries, {keys} keys, batch of {batch}")


@pytest.mark.parametrize("name", OPERATORS)
def test_points_that_coincide_oppose_or_have_no_direction(name: str) -> None:
    operator, (q, k, v) = OPERATORS[name](), draw()
    for what, a, b in (
        ("zeros", 0 * q, 0 * k),
        ("keys of zeros", q, 0 * k),
        ("one point", k, k),
        ("opposite points", -k, k),
        ("one of all", q[:1, :1, :1].expand_as(q), q[:1, :1, :1].expand_as(q)),
    ):
        finite(operator, a, b, v, what)
    finite(operator, q, k, v, "all forbidden", torch.zeros(2, TOKENS, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "scale"),
    # cubes of 1e10 leave float32
    [(name, scale) for scale in (1e-20, 1e4, 1e10) for name in OPERATORS if name not in CUBIC or scale <= 1e4],
)
def test_small_and_large(name: str, scale: float) -> None:
    operator, (q, k, v) = OPERATORS[name](), draw()
    if name in SHORT and scale > 1:
        with pytest.raises(ArgumentError, match="all features Stationary of some vector are 0 in float32"):
            zonal.attention(q * scale, k * scale, v, operator, causal=True)
        return
    finite(operator, q * scale, k * scale, v, f"times {scale:g}")


@pytest.mark.parametrize("name", OPERATORS)
def test_types_and_strides(name: str) -> None:
    operator, (q, k, v) = OPERATORS[name](), draw()
    for dtype in (torch.bfloat16, torch.float16):
        finite(operator, q.to(dtype), k.to(dtype), v.to(dtype), str(dtype))
    strided = [x.repeat_interleave(2, -1)[..., ::2].transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for path in paths(operator, q, k, v, True):
        expected, got = run(operator, q, k, v, path), run(operator, strided[0], strided[1], strided[2], path)
        assert torch.allclose(got[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_not_finite_stays_where_it_is(name: str, bad: float) -> None:
    """A key poisons the queries that see it, a query itself; neither reaches anything else, nor does a key behind
    padding. (An infinite product may be -inf: forbidden.)
    """
    operator, (q, k, v) = OPERATORS[name](), draw()
    key, query, padding = k.clone(), q.clone(), torch.ones(2, TOKENS, dtype=torch.bool)
    key[:, :, 3], query[:, :, 3], padding[:, 3] = bad, bad, False
    for path in paths(operator, q, k, v, True):
        y = zonal.attention(q, key, v, operator, causal=True, path=path)
        assert torch.isfinite(y[:, :, :3]).all(), path
        assert math.isinf(bad) or not torch.isfinite(y[:, :, 3:]).any(), path
        assert torch.isfinite(
            zonal.attention(q, key, v, operator, causal=True, key_padding_mask=padding, path=path)
        ).all(), path
        y = zonal.attention(query, k, v, operator, causal=True, path=path)
        assert torch.isfinite(y[:, :, [0, 1, 2, 4, 5]]).all(), path


@pytest.mark.parametrize(
    ("make", "dim", "words"),
    [
        (m.rewa, 2, r"3 factors need vectors of at least as many numbers, received 2\."),
        (
            lambda: m.rewa(adaptive=True),
            4,
            r"3 factors need vectors of at least as many numbers after 3 that weigh the factors, received 4\.",
        ),
        (
            lambda: m.rewa(parts=(2, 2, 2), adaptive=True),
            8,
            r"sizes \(2, 2, 2\) need vectors of 6 numbers after 3 that weigh the factors, received 8\.",
        ),
        (m.rewa_operator, 2, r"vectors of m\^2 numbers are required, received 2"),
        (lambda: m.rewa_topological(neighbours=4), 4, r"need vectors of more than 4 numbers, received 4"),
        (m.rewa_functional, 0, r"dim must be a whole number >= 1, received 0"),
    ],
)
def test_sizes_that_do_not_divide(make: Callable[[], Operator], dim: int, words: str) -> None:
    q, k, v = draw(dim=dim)
    with pytest.raises(ArgumentError, match=words):
        zonal.attention(q, k, v, make())


def test_large_scores_keep_finite_gradients() -> None:
    """A logarithm of 1e9 is rounded by more than what exp can take: no weight that backward makes again exceeds 1."""
    q, k, v = draw()
    for operator in (m.softmax(), m.rewa(), m.rewa().replace(anchor=anchor.TopK(2, LSH(window=TOKENS)))):
        finite(operator, 3e4 * q, 3e4 * k, v, operator.name)


def test_mixtures() -> None:
    torch.manual_seed(0)
    parts = [
        Attention(12, 2, m.rewa(parts=(2, 2, 2))),
        Attention(12, 2, m.rewa_operator(size=2)),
        Attention(12, 2, m.softmax()),
    ]
    layer, x = Mixture(parts), torch.randn(2, 5, 12)
    for what, given, mask in (
        ("no sequences", x[:0], None), ("zeros", 0 * x, None), ("large", 1e8 * x, None),
        ("all padding", x, torch.zeros(2, 5, dtype=torch.bool)), ("strided", x.mT.contiguous().mT, None),
    ):  # fmt: skip
        given = given.detach().requires_grad_()
        y = layer(given, key_padding_mask=mask)
        assert isinstance(y, Tensor)
        assert y.shape == given.shape
        found = torch.autograd.grad(y.square().sum(), [given, *layer.parameters()], allow_unused=True)
        assert all(torch.isfinite(g).all() for g in (y, *found) if g is not None), what
    with pytest.raises(
        ArgumentError, match=r"nn\.Mixture: x must be \(batch, tokens >= 1, 12\), received \(2, 0, 12\)"
    ):
        layer(x[:, :0])
    half = layer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert isinstance(half, Tensor)
    assert half.dtype == torch.bfloat16
    assert torch.isfinite(half).all()

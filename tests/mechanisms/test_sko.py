"""SKO: degrees of any number of heads, the sphere of the head, weights that learn in units of their size, arguments of
the wrong type.
"""

import pytest
import torch

import zonal
from zonal import mechanisms as m
from zonal.algebra import gegenbauer
from zonal.algebra.link import Gegenbauer
from zonal.errors import ArgumentError
from zonal.nn import Attention


def degrees_of(operator: zonal.Operator) -> tuple[float, ...]:
    assert isinstance(operator.link, Gegenbauer)
    return operator.link.degrees


def tokens(heads: int, dim: int = 6, count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(
        3, 2, heads, count, dim, generator=torch.Generator().manual_seed(heads), dtype=torch.float64
    ).unbind(0)
    return q, k, v


@pytest.mark.parametrize(
    ("heads", "spread"),
    [
        (1, (5.0,)),
        (2, (3.0, 5.0)),
        (3, (3.0, 4.0, 5.0)),
        (4, (2.0, 3.0, 4.0, 5.0)),
        (6, (2.0, 3.0, 3.0, 4.0, 5.0, 5.0)),
        (8, (2.0, 3.0, 4.0, 5.0)),
    ],
)
def test_degrees_are_spread_over_any_number_of_heads(heads: int, spread: tuple[float, ...]) -> None:
    """A layer's operator says which head has which degree; a call of the bare operator computes the same."""
    bare = m.sko()
    layer = Attention(6 * heads, heads, "sko", causal=True)
    assert degrees_of(layer.operator) == spread
    assert f"degrees={spread}" in repr(layer.operator)
    rows = layer.operator.learned_parts["link_weight"]
    assert rows.shape == (heads, 6)
    q, k, v = tokens(heads)
    y = zonal.attention(q, k, v, bare, causal=True)
    assert torch.allclose(y, zonal.attention(q, k, v, bare.for_heads(heads), causal=True), atol=1e-6)
    for head in range(heads):
        alone = zonal.attention(
            *(x[:, head : head + 1] for x in (q, k, v)), m.sko(degrees=(spread[head % len(spread)],)), causal=True
        )
        assert torch.allclose(y[:, head : head + 1], alone, atol=1e-6)


def test_explain_says_the_degrees_of_the_heads() -> None:
    text = str(zonal.explain(m.sko(), (1, 3, 64, 16), causal=True))
    assert (
        "evidence is a polynomial in the cosine, of degree 3, 4, 5 (by head, in turn) (degrees=(3.0, 4.0, 5.0))" in text
    )
    assert "of degree 2, 3, 4, 5 (by head, in turn)" in str(zonal.explain(m.sko(), (1, 8, 64, 16), causal=True))
    assert "in the cosine, of degree 5 (degrees=(5.0,))" in str(zonal.explain(m.sko(), (1, 1, 64, 16), causal=True))


def test_fewer_degrees_have_fewer_weights() -> None:
    operator = m.sko(degrees=(5.0, 2.0))
    one = operator.for_heads(1)
    assert degrees_of(one) == (2.0,)
    assert one.learned_parts["link_weight"].shape == (1, 3)
    q, k, v = tokens(1)
    assert torch.allclose(zonal.attention(q, k, v, operator), zonal.attention(q, k, v, one), atol=1e-12)


def test_the_sphere_of_the_head() -> None:
    """manifold_dim="head": unit vectors of D numbers lie on a sphere of dimension D - 1; in layers, bare calls and
    memories.
    """
    for dim in (6, 16):
        q, k, v = tokens(4, dim)
        open_, given = m.sko(manifold_dim="head"), m.sko(manifold_dim=dim - 1)
        assert torch.equal(zonal.attention(q, k, v, open_, causal=True), zonal.attention(q, k, v, given, causal=True))
        assert not torch.equal(
            zonal.attention(q, k, v, open_, causal=True), zonal.attention(q, k, v, m.sko(), causal=True)
        )
        layer = Attention(4 * dim, 4, m.sko(manifold_dim="head"))
        assert isinstance(layer.operator.link, Gegenbauer)
        assert layer.operator.link.manifold_dim == dim - 1
    _, memory = zonal.attention(q, k, v, open_, causal=True, return_memory=True)
    more, _ = zonal.attention(q, k, v, open_, causal=True, memory=memory, return_memory=True)
    whole = zonal.attention(q, *(torch.cat([x, x], 2) for x in (k, v)), given, causal=True)
    assert torch.allclose(more, whole, atol=1e-12)
    weight = open_.learned_parts["link_weight"]
    (grad,) = torch.autograd.grad(zonal.attention(q, k, v, open_, causal=True).square().sum(), weight)
    assert grad.abs().max() > 0
    with pytest.raises(ArgumentError, match="needs the size of a head"):
        open_.learned()
    squares = m.kernel_ridge(kernel="sko(manifold_dim='head')")
    assert zonal.attention(q, k, v, squares, causal=True).isfinite().all()


def test_weights_of_the_theory_learn_in_units_of_their_size() -> None:
    """w_k = N_k u_k with u learned: it starts at h(k / n), the kernel is that of the theory, and 50 steps of AdamW
    leave u near 1.
    """
    torch.manual_seed(0)
    layer = Attention(32, 2, m.sko(degrees=(4.0, 5.0), init="reproducing", manifold_dim="head"))
    parameter = layer.operator.learned_parts["link_weight"]
    expected = torch.tensor([[gegenbauer.low_pass(k / n) for k in range(6)] for n in (4.0, 5.0)])
    assert torch.allclose(parameter, expected)
    link = layer.operator.link
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    found = link.value(x.expand(1, 2, 1, 101), layer.operator.bind(2, 2).coefficients)[0, :, 0]
    basis = torch.stack(gegenbauer.basis(x, 6, 15))
    sizes = torch.tensor([gegenbauer.harmonic_dimension(k, 15) for k in range(6)], dtype=torch.float64)
    assert torch.allclose(found, (expected.double() * sizes) @ basis, rtol=1e-6)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    tokens_, target = torch.randn(4, 24, 32), torch.randn(4, 24, 32)
    losses = []
    for _ in range(50):
        loss = (layer(tokens_) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert parameter.abs().max() < 2
    assert (parameter - expected).abs().max(0).values.min() > 1e-3  # each degree learns, that which starts at 0 too


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"degrees": 3.0},
            r"degrees must be a tuple of one or more numbers from 0 to 64, such as \(3.0,\), received 3.0",
        ),
        ({"degrees": ("a",)}, "degrees must be a tuple .* received \\('a',\\)"),
        ({"degrees": {2: 3}}, "degrees must be a tuple"),
        ({"degrees": ()}, "degrees must be a tuple"),
        ({"degrees": (True,)}, "degrees must be a tuple"),
        ({"degrees": (float("nan"),)}, "degrees must be a tuple"),
        ({"manifold_dim": 2.5}, "manifold_dim must be 'head' or a whole number >= 1 \\(1 = Chebyshev\\), received 2.5"),
        ({"manifold_dim": "heads"}, "manifold_dim must be 'head' or a whole number >= 1 .* received 'heads'"),
        ({"manifold_dim": True}, "manifold_dim must be"),
        ({"init": "one"}, "init must be 'ones' or 'reproducing', received 'one'"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_in_one_line(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        m.sko(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)

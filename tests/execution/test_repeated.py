"""Calls that run as they ran before: the same bits, and the usual way again as soon as anything has changed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import zonal
from zonal import mechanisms as m
from zonal.execution import repeated
from zonal.kernels import native as native_kernels

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="needs a C++ compiler")


def draw(tokens=200, dim=8, heads=4, kv_heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, h, tokens, dim, generator=generator) for h in (heads, kv_heads, kv_heads))


@pytest.fixture
def seen(monkeypatch):
    """Whether each call was run again, in order."""
    found = []
    again = repeated.again

    def watched(*arguments):
        y = again(*arguments)
        found.append(y is not None)
        return y

    monkeypatch.setattr(repeated, "again", watched)
    return found


@pytest.mark.parametrize("path", ["chunked", "auto"])
@pytest.mark.parametrize(
    "make",
    [m.squared_affine, m.polynomial_square, lambda: m.sko(degrees=(2.0,)), lambda: m.ska(power=(0, 1)), m.ridge],
    ids=["sq", "polynomial", "sko", "ska", "ridge"],
)
@torch.no_grad()
def test_same_bits(make, path, seen):
    operator, (q, k, v) = make(), draw(900)
    first = zonal.attention(q, k, v, operator, causal=True, path=path)
    for scale in (1.0, 2.0):
        q2, k2, v2 = (x * scale for x in draw(900, seed=1))
        got = zonal.attention(q2, k2, v2, operator, causal=True, path=path)
        expected = zonal.attention(q2, k2, v2, make(), causal=True, path=path)
        assert torch.equal(got, expected)
        assert not torch.equal(got, first)
    kept = path == "chunked" or id(operator) in repeated._kept  # the planner may think another path cheaper
    assert seen == [False, kept, False, kept, False]


def changed_weights(operator, q, k, v):
    with torch.no_grad():
        next(operator.parameters()).mul_(1.5)
    return {}


def other_shape(operator, q, k, v):
    return {"q": q[:, :, 1:]}


def gradients(operator, q, k, v):
    return {"q": q.clone().requires_grad_()}


def other_type(operator, q, k, v):
    return {"q": q.double(), "k": k.double(), "v": v.double()}


def with_mask(operator, q, k, v):
    return {"key_padding_mask": torch.arange(k.shape[2]).expand(2, -1) < 150}


def both_ways(operator, q, k, v):
    return {"causal": False}


@pytest.mark.parametrize(
    "change",
    [changed_weights, other_shape, gradients, other_type, with_mask, both_ways],
    ids=lambda change: change.__name__,
)
def test_what_changed_is_seen(change, seen):
    operator, (q, k, v) = m.sko(degrees=(2.0,)), draw()
    with torch.no_grad():
        for _ in range(2):
            zonal.attention(q, k, v, operator, causal=True, path="chunked")
    assert seen == [False, True]
    call = {"q": q, "k": k, "v": v, "operator": operator, "causal": True} | change(operator, q, k, v)
    with torch.set_grad_enabled(change is gradients):
        got = zonal.attention(**call, path="chunked")
        expected = zonal.attention(**call, path="dense")
    assert not any(seen[2:])
    assert got.requires_grad == (change is gradients)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_switched_off_and_looked_at(seen, monkeypatch):
    operator, (q, k, v) = m.squared_affine(), draw()
    for _ in range(2):
        zonal.attention(q, k, v, operator, causal=True, path="chunked")
    with FlopCounterMode(display=False):
        zonal.attention(q, k, v, operator, causal=True, path="chunked")
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    zonal.attention(q, k, v, operator, causal=True, path="chunked")
    assert seen == [False, True, False, False]


def test_learned_operator_is_not_cut_off(seen):
    """Queries without gradients do not mean that nobody asks for the operator's."""
    operator, (q, k, v) = m.sko(degrees=(2.0,)), draw()
    with torch.no_grad():
        zonal.attention(q, k, v, operator, causal=True, path="chunked")
    y = zonal.attention(q, k, v, operator, causal=True, path="chunked")
    assert y.requires_grad
    assert seen == [False, False]


def test_written_through_data(seen):
    """What is written through ``.data`` changes no version; it is seen all the same."""
    operator, (q, k, v) = m.ska(power=1), draw()
    with torch.no_grad():
        before = [zonal.attention(q, k, v, operator, causal=True, path="chunked") for _ in range(2)][1]
        operator.learned_parts["anchor_raw_ridge"].data.add_(2.0)
        after, expected = (zonal.attention(q, k, v, operator, causal=True, path=path) for path in ("chunked", "dense"))
    assert seen == [False, True, False]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


@torch.no_grad()
def test_steps_see_it_too():
    """A decoder's steps over ridge statistics, whose scale and inverse follow from what was learned."""
    operator, (q, k, v) = m.ska(power=1), draw()
    empty = zonal.Memory.empty(operator, 2, 2, 8, 8)

    def step(memory):
        return zonal.attention(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], operator, causal=True, memory=memory)

    first, _ = step(empty.absorb(k[:, :, :-1], v[:, :, :-1]))
    for name in ("anchor_raw_ridge", "anchor_eta"):
        operator.learned_parts[name].data.add_(1.0)
        got, _ = step(empty.absorb(k[:, :, :-1], v[:, :, :-1]))
        expected = zonal.attention(q, k, v, operator, causal=True, path="dense")[:, :, -1:]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        assert (got - first).abs().max() > 2e-3


class Halved(torch.nn.Module):
    def forward(self, x):
        return x / 2


@torch.no_grad()
def test_a_parametrized_operator_is_not_kept(seen):
    """What its parameters are computed from is out of sight."""
    operator, (q, k, v) = m.sko(degrees=(2.0,)), draw()
    torch.nn.utils.parametrize.register_parametrization(operator.learned_parts, "link_weight", Halved())
    ridge = m.ska(power=1)
    torch.nn.utils.parametrize.register_parametrization(ridge.learned_parts, "anchor_eta", Halved())
    torch.nn.utils.parametrize.register_parametrization(ridge.learned_parts, "anchor_gate", Halved())
    torch.nn.utils.parametrize.register_parametrization(ridge.learned_parts, "anchor_raw_ridge", Halved())
    memory = zonal.Memory.empty(ridge, 2, 2, 8, 8).absorb(k[:, :, :-1], v[:, :, :-1])

    def answers():
        y = (
            zonal.attention(q, k, v, operator, causal=True, path="chunked"),
            zonal.attention(q, k, v, ridge, causal=True, path="chunked"),
        )
        return *y, zonal.attention(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], ridge, causal=True, memory=memory)[0]

    before = [answers() for _ in range(2)][1]
    for parts, name in (
        (operator.learned_parts, "link_weight"),
        (ridge.learned_parts, "anchor_eta"),
        (ridge.learned_parts, "anchor_raw_ridge"),
    ):
        parts.parametrizations[name].original.add_(1.0)
    after = answers()
    whole = [zonal.attention(q, k, v, each, causal=True, path="dense") for each in (operator, ridge)]
    for got, old, expected in zip(after, before, (*whole, whole[1][:, :, -1:]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
        assert (got - old).abs().max() > 2e-3


@torch.no_grad()
def test_long_calls_are_not_kept(seen):
    operator, (q, k, v) = m.squared_affine(), draw(tokens=(1 << 14) + 1, dim=2, heads=1, kv_heads=1)
    for _ in range(2):
        zonal.attention(q, k, v, operator, causal=True, path="chunked")
    assert seen == [False, False]

"""Ridge and Koopman memories against scikit-learn, against what they promise to recall, and over borders."""

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.memory import Memory, RidgeStatistics, Tokens


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def test_power_zero_is_kernel_ridge_regression() -> None:
    from sklearn.kernel_ridge import KernelRidge

    operator = m.ridge(eps=0.3, key_limit=None, learn_ridge=False).double()
    k, v, q = draw(1, 1, 40, 6), draw(1, 1, 40, 4, seed=1), draw(1, 1, 7, 6, seed=2)
    expected = KernelRidge(alpha=0.3, kernel="linear").fit(k[0, 0].numpy(), v[0, 0].numpy()).predict(q[0, 0].numpy())
    got = Memory.empty(operator, 1, 1, 6, 4, torch.float64).absorb(k, v).read(q)[0, 0]
    assert torch.allclose(got, torch.from_numpy(expected), atol=1e-12)


@pytest.mark.parametrize("power", [0, 1, 2, 3])
def test_power_looks_ahead(power: int) -> None:
    """With at most r distinct keys and a small ridge, the query for key t gets the value stored ``power`` steps
    later.
    """
    r = 16
    operator = m.ska(power=power, eps=1e-9, key_limit=None).double()
    operator.learned_parts["anchor_eta"].data.fill_(1.0)
    if power:
        operator.learned_parts["anchor_gate"].data.fill_(-60.0)  # gamma = 1
    k, v = unit(draw(1, 1, r, r)), draw(1, 1, r, 5, seed=1)
    read = Memory.empty(operator, 1, 1, r, 5, torch.float64).absorb(k, v).read(k)
    assert torch.allclose(read[:, :, : r - power], v[:, :, power:], atol=1e-4)


def test_one_step_is_a_contraction() -> None:
    """|L^-1 M L^-T| < 1 whatever the keys: spectral normalisation has nothing to do."""
    for seed in range(20):
        k = draw(1, 1, 30, 8, seed=seed) * 10.0 ** (seed % 5 - 2)
        if seed % 3 == 0:
            k = k[:, :, :1].expand_as(k).contiguous()  # the same key again and again: the extreme case
        memory = Memory.empty(m.ska(power=1, key_limit=None).double(), 1, 1, 8, 8, torch.float64).absorb(k, k)
        assert isinstance(memory, RidgeStatistics)
        assert memory.shift is not None
        lower = torch.linalg.cholesky(
            memory.gram[0, 0] + 1e-6 * k.square().sum(-1).max() * torch.eye(8, dtype=torch.float64)
        )
        step = torch.linalg.solve_triangular(lower, memory.shift[0, 0], upper=False)
        step = torch.linalg.solve_triangular(lower, step.mT, upper=False).mT
        assert torch.linalg.matrix_norm(step, 2) < 1


def spans(power: int, *lengths: int) -> list[Memory]:
    operator = m.ska(power=power).double()
    return [
        Memory.empty(operator, 2, 2, 6, 4, torch.float64).absorb(
            draw(2, 2, n, 6, seed=n), draw(2, 2, n, 4, seed=n + 50)
        )
        for n in lengths
    ]


def same(a: Memory, b: Memory) -> None:
    q = draw(2, 2, 3, 6, seed=99)
    assert a.count == b.count
    assert torch.allclose(a.read(q), b.read(q), atol=1e-9)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_taking_out_any_merged_span(power: int) -> None:
    """Borders that merge made are known, so a span in the middle goes too, and its neighbours then follow each
    other.
    """
    a, b, c, d = spans(power, 5, 7, 3, 9)
    whole = a.merge(b).merge(c.merge(d))
    same(whole.subtract(b), a.merge(c).merge(d))
    same(whole.subtract(c), a.merge(b).merge(d))
    same(whole.subtract(b).subtract(c), a.merge(d))
    same(whole.subtract(b.merge(c)), a.merge(d))
    same(whole.subtract(a).subtract(d), b.merge(c))
    same(whole.subtract(d).subtract(a).subtract(c), b)
    empty = whole.subtract(whole)
    assert empty.count == 0
    assert empty.read(draw(2, 2, 1, 6)).abs().max() < 1e-9
    same(empty.merge(a), a)


def test_unknown_borders_are_refused_where_they_matter() -> None:
    for power in (0, 1):
        a, b = spans(power, 5, 7)
        more = (draw(2, 2, 7, 6, seed=7), draw(2, 2, 7, 4, seed=57))
        absorbed = a.absorb(*more)  # absorb leaves no border
        if power == 0:
            same(absorbed.subtract(a), b)
        else:
            with pytest.raises(ArgumentError, match="border of these tokens is unknown"):
                absorbed.subtract(a)


def test_the_inverse_is_only_derived() -> None:
    """Updating it token by token, making it again and never having read give the same."""
    operator = m.ska(power=1).double()
    k, v, q = draw(1, 2, 50, 8), draw(1, 2, 50, 4, seed=1), draw(1, 2, 2, 8, seed=2)
    with torch.no_grad():
        read, unread = (Memory.empty(operator, 1, 2, 8, 4, torch.float64) for _ in range(2))
        for start, stop in ((0, 1), (1, 4), (4, 5), (5, 40), (40, 41), (41, 44), (44, 47), (47, 50)):
            read = read.absorb(k[:, :, start:stop], v[:, :, start:stop])
            read.read(q)
            unread = unread.absorb(k[:, :, start:stop], v[:, :, start:stop])
        assert isinstance(read, RidgeStatistics)
        assert read.inverse is not None
        assert read.inverse.age > 0
        assert isinstance(unread, RidgeStatistics)
        assert unread.inverse is None
    assert torch.allclose(read.read(q), unread.read(q), atol=1e-11)


@pytest.mark.parametrize("kind", ["spread", "three directions", "one key"])
@pytest.mark.parametrize("power", [0, 1])
def test_a_long_single_precision_stream(power: int, kind: str) -> None:
    """5000 single steps of float32 tokens, along few directions too: rounding of the tokens is all that is lost.

    With sums in float32 the last case loses every digit after 1e4 steps, and positive definiteness soon after.
    """
    r, tokens = 16, 5000
    operator = m.ska(power=power)
    directions = {
        "spread": draw(1, 1, r, r) * torch.logspace(0, -3, r, dtype=torch.float64)[:, None],
        "three directions": draw(1, 1, 3, r),
        "one key": draw(1, 1, 1, r),
    }
    k = draw(1, 1, tokens, directions[kind].shape[2], seed=3) @ directions[kind] + 1e-4 * draw(1, 1, tokens, r, seed=4)
    k, v = unit(k).float(), draw(1, 1, tokens, 4, seed=1).float()
    q = torch.cat([k[:, :, -4:], unit(draw(1, 1, 4, r, seed=2)).float()], 2)
    with torch.no_grad():
        stream = Memory.empty(operator, 1, 1, r, 4)
        for t in range(tokens):
            stream.read(q[:, :, :1])  # keeps an inverse, which each token then updates
            stream = stream.extended(Tokens(k[:, :, t : t + 1], v[:, :, t : t + 1]))
        assert isinstance(stream, RidgeStatistics)
        assert stream.inverse is not None
        assert stream.inverse.age > 0
        y = stream.read(q).double()
        exact = (
            Memory.empty(m.ska(power=power).double(), 1, 1, r, 4, torch.float64)
            .absorb(k.double(), v.double())
            .read(q.double())
        )
    assert ((y - exact).abs().amax(-1) / exact.abs().amax(-1)).max() < 1e-5


@pytest.mark.parametrize("power", [0, 2])
@pytest.mark.parametrize("known", [0, 9])
@torch.no_grad()
def test_what_steps_leave_is_what_absorbing_leaves(power: int, known: int) -> None:
    """However many of the last tokens stay beside the sums, whoever looks in between, and whatever else went on from
    the same memory.
    """
    operator, r, tokens = m.ska(power=power), 6, 40
    q, k, v = (
        draw(2, 4, tokens, r, seed=1).float(),
        draw(2, 2, tokens, r, seed=2).float(),
        draw(2, 2, tokens, 5, seed=3).float(),
    )
    memory = start = (
        Memory.empty(operator, 2, 2, r, 5).absorb(k[:, :, :known], v[:, :, :known])
        if known
        else Memory.empty(operator, 2, 2, r, 5)
    )
    other = start
    for t in range(known, tokens):
        other = memory.absorb(-k[:, :, t : t + 1], v[:, :, t : t + 1])
        zonal.attention(
            -q[:, :, t : t + 1], -k[:, :, t : t + 1], v[:, :, t : t + 1], operator, causal=True, memory=memory
        )
        _, memory = zonal.attention(
            q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], operator, causal=True, memory=memory
        )
        if t % 7 == 0:
            absorbed = Memory.empty(operator, 2, 2, r, 5).absorb(k[:, :, : t + 1], v[:, :, : t + 1])
            for name, x in absorbed.tensors().items():
                assert torch.allclose(memory.tensors()[name], x, rtol=1e-5, atol=1e-6), (
                    t,
                    name,
                )  # keys of one token are shortened in float64
            assert torch.allclose(memory.read(q), absorbed.read(q), atol=1e-6)
    assert memory.count == tokens == other.count
    held = memory.fork()
    held.absorb_(k, v)  # in place: what steps left is of the tokens before
    _, after = zonal.attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], operator, causal=True, memory=held)
    assert isinstance(after, RidgeStatistics)
    assert isinstance(held, RidgeStatistics)
    z = after.gram - held.gram
    assert torch.allclose(
        z.diagonal(dim1=-2, dim2=-1).sum(-1), k[:, :, 0].double().square().sum(-1).clamp(max=1), atol=1e-6
    )


def test_a_ridge_that_is_written_through_data_is_seen() -> None:
    """Writes through .data change no version counter, of a plain tensor in a parameter's place either."""
    operator = m.ridge().double()
    k, v, q = unit(draw(1, 1, 9, 4)), draw(1, 1, 9, 3, seed=1), draw(1, 1, 2, 4, seed=2)
    memory = Memory.empty(operator, 1, 1, 4, 3, torch.float64).absorb(k, v)

    class Read(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator = operator

        def forward(self) -> Tensor:
            return memory.read(q)

    (name,) = dict(Read().named_parameters())
    given = torch.full((1,), -2.0, dtype=torch.float64)
    for value in (-2.0, 4.0):
        given.data.fill_(value)
        found = torch.func.functional_call(Read(), {name: given}, ())
        operator.learned_parts["anchor_raw_ridge"].data.fill_(value)
        fresh = Memory.empty(operator, 1, 1, 4, 3, torch.float64).absorb(k, v).read(q)
        assert torch.allclose(found, fresh, atol=1e-12)

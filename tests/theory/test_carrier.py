"""Carriers and pushforward: the order of refinement, functoriality and where it ends, what merging does to conditionals
and to values.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zonal
from zonal.errors import ArgumentError
from zonal.theory.carrier import Buckets, Factor, LogSumExp, Max, Sum, Tokens, pushforward, reanchored

AGGREGATIONS = [Sum(), LogSumExp(0.3), LogSumExp(2.5), Max()]
by_name = pytest.mark.parametrize("by", AGGREGATIONS, ids=str)


def onto(fine, size, seed):
    """A random map onto ``size`` buckets."""
    generator = torch.Generator().manual_seed(seed)
    to = torch.cat([torch.arange(size), torch.randint(size, (fine - size,), generator=generator)])
    return Factor(to[torch.randperm(fine, generator=generator)], size)


def kernel(queries=7, keys=9, seed=0, forbidden=0.3):
    """log K (2, 3, T, S) in float64 with some pairs forbidden, and every row with an allowed one."""
    generator = torch.Generator().manual_seed(seed)
    log = 3 * torch.randn(2, 3, queries, keys, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 3, queries, keys, generator=generator) < forbidden
    mask[..., 0] = False
    return log.masked_fill(mask, float("-inf"))


def same(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def rows(log_kernel):
    """The row-conditional, as its logarithm; an empty row stays empty."""
    return log_kernel - log_kernel.logsumexp(-1, keepdim=True).clamp_min(-1e300)


def by_hand(log_kernel, queries, keys, temperature):
    """The p-norm over allowed pairs, bucket by bucket."""
    out = torch.full((*log_kernel.shape[:-2], queries.size, keys.size), float("-inf"), dtype=torch.float64)
    for a in range(queries.size):
        for b in range(keys.size):
            block = log_kernel[..., queries.to == a, :][..., keys.to == b].flatten(-2)
            out[..., a, b] = (
                block.amax(-1) if temperature is None else temperature * (block / temperature).logsumexp(-1)
            )
    return out


# --- carriers -------------------------------------------------------------------------------------------------------


def test_tokens_are_the_finest_and_names_do_not_matter():
    tokens, pairs, renamed, other = (
        Tokens(6),
        Buckets(torch.tensor([0, 0, 1, 1, 2, 2])),
        Buckets(torch.tensor([2, 2, 0, 0, 1, 1])),
        Buckets(torch.tensor([0, 1, 1, 2, 2, 0])),
    )
    everything = Buckets(torch.zeros(6, dtype=torch.int64))
    for carrier in (pairs, renamed, other, everything):
        assert tokens.refines(carrier)
        assert carrier.refines(everything)
        assert torch.equal(tokens.factor(carrier).to, carrier.labels)
    assert pairs.same(renamed)
    assert not pairs.refines(other)
    assert not other.refines(pairs)
    assert not pairs.refines(tokens)
    assert torch.equal(pairs.factor(renamed).to, torch.tensor([2, 0, 1]))
    assert (tokens.records, tokens.size, pairs.size, everything.size) == (6, 6, 3, 1)
    assert not pairs.refines(Tokens(5))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.data())
def test_factor_maps_compose(middle, data):
    """A chain of carriers: the map onto the coarsest is the composition, and each label follows from the finer one."""
    last, seed = data.draw(st.integers(1, middle)), data.draw(st.integers(0, 1000))
    first = Buckets(onto(middle + 5, middle, seed).to)
    f = onto(middle, last, seed + 1)
    second = first.coarsened(f)
    assert first.refines(second)
    assert second.same(first) == (last == middle)
    assert torch.equal(first.factor(second).to, f.to)
    assert torch.equal(Tokens(middle + 5).factor(second).to, first.map.then(f).to)
    g = onto(last, 1, seed)
    assert torch.equal(f.then(g).to, g.to[f.to])
    assert torch.equal(Factor.identity(middle).then(f).to, f.to)
    assert torch.equal(f.then(Factor.identity(last)).to, f.to)


def test_rows_have_maps_of_their_own():
    labels = torch.tensor([[0, 0, 1], [1, 0, 1]])
    carrier = Buckets(labels)
    values = torch.arange(12.0, dtype=torch.float64).view(2, 3, 2)
    merged = carrier.map.merged(values, torch.tensor([[1.0, 3.0, 1.0], [1.0, 1.0, 0.0]]))
    same(merged, torch.tensor([[[1.5, 2.5], [4.0, 5.0]], [[8.0, 9.0], [6.0, 7.0]]], dtype=torch.float64))
    assert torch.equal(carrier.map.pulled(merged)[1], merged[1][labels[1]])
    assert torch.equal(carrier.map.masses(), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    assert Tokens(3).refines(carrier)
    assert carrier.refines(Buckets(torch.zeros(2, 3, dtype=torch.int64)))
    # without any mass all members count alike, and nothing is divided by zero
    same(carrier.map.merged(values, torch.zeros(2, 3))[0, 0], torch.tensor([1.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Factor(torch.tensor([0, 2]), 3),
            "not surjective.*none is sent to bucket 1. Number the buckets that occur without gaps",
        ),
        (lambda: Buckets(torch.tensor([[0, 1, 2], [0, 0, 2]])), "not surjective.*none is sent to bucket 1"),
        (lambda: Factor(torch.tensor([0, 3]), 2), r"must lie in 0 … 1, received 0 … 3"),
        (lambda: Factor(torch.tensor([0, -1]), 2), r"received -1 … 0"),
        (lambda: Factor(torch.tensor([0.0, 1.0]), 2), "whole numbers .* received torch.float32"),
        (lambda: Buckets(torch.zeros(0, dtype=torch.int64)), "n >= 1 are required"),
        (lambda: Buckets(torch.tensor([0.0, math.nan])), "Buckets: whole numbers .* received torch.float32"),
        (lambda: Buckets(torch.zeros(2, dtype=torch.complex64)), "Buckets: whole numbers .* received torch.complex64"),
        (lambda: Tokens(0), "Tokens: count must be a whole number >= 1"),
        (lambda: Factor.identity(3).then(Factor.identity(2)), "a map of 3 buckets is required, received one of 2"),
        (
            lambda: Buckets(torch.tensor([0, 0, 1])).factor(Tokens(3)),
            "bucket 0 of this carrier has records that the other one keeps apart",
        ),
        (lambda: Tokens(3).factor(Tokens(4)), "carriers of the same records are required, received 3 and 4"),
        (lambda: LogSumExp(0.0), "For the limit 0 use Max"),
        (lambda: pushforward(kernel(), Factor.identity(7), Factor.identity(8)), r"log K \(..., 7, 8\) is required"),
        (
            lambda: reanchored(kernel(), Factor.identity(7), Factor.identity(9), zonal.anchor.Ridge()),
            "anchor Ridge needs more than the kernel of queries and keys",
        ),
        (
            lambda: reanchored(kernel()[0], Factor.identity(7), Factor.identity(9), zonal.anchor.Row()),
            "log K .batch, heads, T, S. is required",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


# --- pushforward ----------------------------------------------------------------------------------------------------


@by_name
def test_pushforward_by_hand(by):
    log, f, g = kernel(), onto(7, 3, 1), onto(9, 4, 2)
    same(
        pushforward(log, f, g, by), by_hand(log, f, g, None if isinstance(by, Max) else getattr(by, "temperature", 1.0))
    )


@by_name
@pytest.mark.parametrize("seed", range(5))
def test_functoriality(by, seed):
    """Identities change nothing; along composed maps it is the composition; what is allowed is pushed along."""
    log, f, g = kernel(seed=seed, forbidden=0.7), onto(7, 4, seed), onto(9, 5, seed + 1)
    further, onward = onto(4, 2, seed + 2), onto(5, 2, seed + 3)
    same(pushforward(log, Factor.identity(7), Factor.identity(9), by), log)
    step = pushforward(log, f, g, by)
    same(pushforward(step, further, onward, by), pushforward(log, f.then(further), g.then(onward), by))
    same(pushforward(pushforward(log, f, Factor.identity(9), by), Factor.identity(4), g, by), step)
    allowed = pushforward(torch.where(log.isneginf(), float("-inf"), 0.0), f, g, Max())
    assert torch.equal(step.isneginf(), allowed.isneginf())


def test_a_mean_of_means_is_no_mean():
    """Averages are functorial only when each is weighed by its mass: the counter-example, and the repair."""
    values, f, g = (
        torch.tensor([[0.0], [0.0], [0.0], [8.0]], dtype=torch.float64),
        Factor(torch.tensor([0, 0, 0, 1]), 2),
        Factor(torch.tensor([0, 0]), 1),
    )
    ones = torch.ones(4, dtype=torch.float64)
    direct = f.then(g).merged(values, ones)
    assert float(g.merged(f.merged(values, ones), torch.ones(2))) == 4.0
    assert float(direct) == 2.0
    same(g.merged(f.merged(values, ones), f.masses(ones)), direct)


@by_name
def test_gradients(by):
    """Finite everywhere, forbidden pairs and wholly forbidden buckets included, and those of finite differences."""
    log, f, g = kernel(4, 5, forbidden=0.0)[:1, :1].requires_grad_(), onto(4, 2, 1), onto(5, 3, 2)
    assert torch.autograd.gradcheck(lambda x: pushforward(x, f, g, by), (log,))
    closed = kernel(4, 5, forbidden=1.0).requires_grad_()
    out = pushforward(closed, f, g, by)
    assert out.isneginf().any()
    out.masked_fill(out.isneginf(), 0.0).sum().backward()
    assert closed.grad.isfinite().all()


def test_numbers_beyond_the_range_of_exp():
    log = kernel(forbidden=0.2) - 900
    f, g = onto(7, 2, 0), onto(9, 3, 0)
    same(pushforward(log, f, g) + 900, pushforward(log + 900, f, g))
    same(pushforward(log * 30, f, g, LogSumExp(1e-3)), pushforward(log * 30, f, g, Max()), 1e-6)


def test_means_of_short_types_are_summed_in_float32():
    """In float16 the sum 0 + 1 + ... + 999 overflows."""
    together = Factor(torch.zeros(1000, dtype=torch.int64), 1)
    merged = together.merged(torch.arange(1000.0)[:, None].half(), torch.ones(1000, dtype=torch.float16))
    assert merged.dtype == torch.float16
    assert abs(float(merged) - 499.5) <= 0.25


@pytest.mark.parametrize("seed", range(3))
def test_merged_keys_commute_with_conditionals(seed):
    log, g, same_queries = kernel(seed=seed), onto(9, 4, seed), Factor.identity(7)
    same(rows(pushforward(log, same_queries, g)), pushforward(rows(log), same_queries, g))


def test_larger_norms_do_not_commute_with_conditionals():
    """Three equal keys, two of them merged: by sums they keep two thirds of the row, by the largest they do not."""
    log, g, one = torch.zeros(1, 1, 1, 3, dtype=torch.float64), Factor(torch.tensor([0, 0, 1]), 2), Factor.identity(1)
    wanted = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    same(rows(pushforward(log, one, g)).exp()[0, 0, 0], wanted)
    same(rows(pushforward(log, one, g, Max())).exp()[0, 0, 0], torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
def test_merged_queries_average_conditionals_by_row_sums(seed):
    log, f, same_keys = kernel(seed=seed), onto(7, 3, seed), Factor.identity(9)
    mass, conditional = log.logsumexp(-1).exp(), rows(log).exp()
    pushed = rows(pushforward(log, f, same_keys)).exp()
    same(pushed, f.merged(conditional, mass))
    # counter-example: the plain mean is another conditional
    assert (pushed - f.merged(conditional, torch.ones_like(mass))).abs().max() > 0.1


def test_anchoring_again_after_each_step():
    """For maps of keys it is anchoring once; for maps of queries it is not, unless the rows that meet have equal
    sums.
    """
    row, log = zonal.anchor.Row(), kernel(forbidden=0.2)
    f, further, g, onward = onto(7, 4, 0), onto(4, 2, 1), onto(9, 5, 2), onto(5, 2, 3)
    queries, keys = Factor.identity(7), Factor.identity(9)
    once = reanchored(log, queries, g.then(onward), row)
    same(once, reanchored(reanchored(log, queries, g, row).log(), queries, onward, row))
    by_query = reanchored(log, f.then(further), keys, row)
    assert (by_query - reanchored(reanchored(log, f, keys, row).log(), further, keys, row)).abs().max() > 0.05
    # from rows of equal sums, raw evidence stays additive: Raw is functorial for both
    raw = zonal.anchor.Raw()
    same(
        reanchored(log, f.then(further), g.then(onward), raw),
        reanchored(reanchored(log, f, g, raw).log(), further, onward, raw),
    )
    same(reanchored(log, queries, keys, row), log.softmax(-1))


def balanced(log_kernel, mu, nu):
    """The plan with marginals mu and nu, by scaling rows and columns in turn."""
    for _ in range(3000):
        log_kernel = log_kernel - log_kernel.logsumexp(-1, keepdim=True) + mu.log()[..., None]
        log_kernel = log_kernel - log_kernel.logsumexp(-2, keepdim=True) + nu.log()[..., None, :]
    return log_kernel


def test_plans_on_a_coarser_carrier():
    """A plan pushed along is the plan of what was pushed, of the pushed marginals; but not the plan of the pushed
    kernel (counter-example).
    """
    log, f, g = kernel(6, 6, forbidden=0.0)[0, 0], onto(6, 3, 0), onto(6, 2, 1)
    mu = nu = torch.full((6,), 1 / 6, dtype=torch.float64)
    coarse = f.masses(mu), g.masses(nu)
    pushed = pushforward(balanced(log, mu, nu), f, g)
    same(pushed.exp().sum(-1), coarse[0], 1e-10)
    same(pushed.exp().sum(-2), coarse[1], 1e-10)
    same(balanced(pushed, *coarse), pushed, 1e-9)
    assert (balanced(pushforward(log, f, g), *coarse) - pushed).exp().sub(1).abs().max() > 0.1
    # where scores differ between buckets alone, up to fields of rows and columns, both agree
    alike = f.pulled(g.pulled(kernel(3, 2, forbidden=0.0)[0, 0].mT).mT)
    same(balanced(pushforward(alike, f, g), *coarse), pushforward(balanced(alike, mu, nu), f, g), 1e-9)


def test_what_mean_values_leave_out():
    """y_t with mean values misses the covariance of weights and values within buckets: 0 for equal keys, and large
    without them.
    """
    generator = torch.Generator().manual_seed(0)
    log, g, one = kernel(forbidden=0.0)[0, 0], onto(9, 4, 0), Factor.identity(7)
    values = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    exact, mass = log.softmax(-1) @ values, torch.ones(9, dtype=torch.float64)
    coarse = pushforward(log, one, g).softmax(-1)
    weights = log.softmax(-1)
    mean_weight = g.pulled(g.merged(weights.mT, mass)).mT
    spread = (weights - mean_weight) @ (values - g.pulled(g.merged(values, mass)))
    same(coarse @ g.merged(values, mass) + spread, exact)
    assert spread.abs().max() > 0.1
    # means of each row's own are exact
    own = torch.stack([g.merged(values, row) for row in weights])
    same((coarse[:, None] @ own)[:, 0], exact)
    equal = g.pulled(kernel(7, 4, forbidden=0.0)[0, 0].mT).mT
    same(pushforward(equal, one, g).softmax(-1) @ g.merged(values, mass), equal.softmax(-1) @ values)

"""Theorems of the algebra that no one part has: the link that composition forces, and what mixtures of conditionals and of plans are. docs/theorems.md lists all."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import OPERATORS, randomised
from torch import Tensor

from zonal import link, probe

quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(2, 7), st.lists(st.integers(2, 6), min_size=2, max_size=4))
LINKS = {type(make().link): name for name, make in reversed(OPERATORS.items())}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uncomposed(value: Tensor, first: Tensor, second: Tensor, nothing: Tensor) -> float:
    """By how much l(w + w') l(0) differs from l(w) l(w'), relative to the largest."""
    apart, size = (x.detach().abs().max() for x in (value * nothing - first * second, first * second))
    return float(apart / size)


@pytest.mark.parametrize("kind", LINKS, ids=lambda kind: kind.__name__)
def test_no_other_link_composes(kind: type[link.Link]) -> None:
    """Evidence of joined works is the product of their evidence under the exponential, and under none of the other links."""
    bound = randomised(OPERATORS[LINKS[kind]]()).bind(4, 4)
    first, second = (x.expand(1, 4, 40, 40) for x in (torch.linspace(0.05, 0.5, 40, dtype=torch.float64)[:, None], torch.linspace(-0.4, 0.45, 40, dtype=torch.float64)))
    values = (bound.link.value(x, bound.coefficients) for x in (first + second, first, second, torch.zeros_like(first)))
    off = uncomposed(*values)
    assert off < 1e-12 if kind is link.Exp else off > 1e-2


def test_a_decreasing_positive_link_need_not_compose() -> None:
    """1 / (1 + w) is positive, measurable and decreasing, and is off by 0.09: positivity does not force the exponential, composition does."""
    w = torch.linspace(0, 2, 50, dtype=torch.float64)
    first, second = torch.meshgrid(w, w, indexing="ij")
    assert uncomposed(1 / (1 + first + second), 1 / (1 + first), 1 / (1 + second), torch.ones(1).double()) > 0.08


@quick
@given(seed=seeds, slope=st.floats(-3, 3))
def test_composition_leaves_the_slope_alone(seed: int, slope: float) -> None:
    """Sign and size of the slope are free; and what composes is known everywhere from its value at one: l(k / 2^n) = l(1)^(k / 2^n)."""
    w = drawn(seed, 30)
    first, second = torch.meshgrid(w, w, indexing="ij")
    assert uncomposed((slope * (first + second)).exp(), (slope * first).exp(), (slope * second).exp(), torch.ones(1).double()) < 1e-12
    dyadic = torch.arange(-16, 17, dtype=torch.float64) / 8
    assert torch.allclose((slope * dyadic).exp(), torch.tensor(math.exp(slope)).double() ** dyadic)


@quick
@given(seed=seeds, size=sizes)
def test_mixtures_of_conditionals_are_conditionals(seed: int, size: tuple[int, list[int]]) -> None:
    """Gates a query that sum to one: rows of the mixture over all branches' keys are distributions, and its update is the gated sum of theirs (Proposition 5.2)."""
    queries, keys = size
    kernels = [drawn(seed + place, queries, count) for place, count in enumerate(keys)]
    gates = drawn(seed - 1, queries, len(keys)).softmax(-1)
    conditionals = [probe.Rows().observe(kernel).log.exp() for kernel in kernels]
    mixture = torch.cat([gates[:, place, None] * conditional for place, conditional in enumerate(conditionals)], 1)
    assert (mixture >= 0).all()
    assert torch.allclose(mixture.sum(-1), torch.ones(queries).double())
    values = [drawn(seed + 10 + place, count, 3) for place, count in enumerate(keys)]
    updates = torch.stack([conditional @ value for conditional, value in zip(conditionals, values, strict=True)])
    assert torch.allclose(mixture @ torch.cat(values), torch.einsum("tb,btp->tp", gates, updates))
    # and it is the row-conditional of one kernel: that of each branch less its row mass, with log gates added
    joined = torch.cat([probe.Rows().observe(kernel).log + gates[:, place, None].log() for place, kernel in enumerate(kernels)], 1)
    assert torch.allclose(joined.softmax(-1), mixture)


def test_a_mixture_of_balanced_plans_need_not_be_balanced() -> None:
    """Gates that differ by query change what keys receive; with one gate a branch, of sum one over plans of the same keys, marginals stay."""
    plans = torch.stack([probe.EntropicPlan().observe(2 * drawn(seed, 6, 5)).log.exp() for seed in (0, 1)])
    nu = torch.full((5,), 0.2, dtype=torch.float64)
    by_query = drawn(2, 2, 6).softmax(0)
    mixed = (by_query[..., None] * plans).sum(0)
    assert torch.allclose(mixed.sum(1), torch.full((6,), 1 / 6).double())
    assert (mixed.sum(0) - nu).abs().max() > 0.01
    constant = (torch.tensor([0.3, 0.7]).double()[:, None, None] * plans).sum(0)
    assert torch.allclose(constant.sum(0), nu)

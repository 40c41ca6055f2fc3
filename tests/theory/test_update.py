"""Updates: what mixtures of conditionals and of plans are, plans and their conditionals, and feed-forward layers on the
± hidden units.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zonal
from zonal.errors import ArgumentError
from zonal.theory import update
from zonal.theory.carrier import Factor
from zonal.theory.update import Conditional, PlanUpdate, columns, feed_forward, mixed, signed

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def same(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=50, deadline=None)
@given(sizes, st.integers(1, 4), st.integers(0, 10_000))
def test_a_gated_mixture_of_conditionals_is_one(keys, rows, seed):
    """Proposition 5.2: on the disjoint union of the carriers, with the values joined."""
    parts = [Conditional(numbers(2, rows, count, seed=seed + index).softmax(-1)) for index, count in enumerate(keys)]
    values = [numbers(2, count, 3, seed=seed + 10 + index) for index, count in enumerate(keys)]
    gate = numbers(2, rows, len(keys), seed=seed + 20).softmax(-1)
    found = mixed(gate, parts)
    assert type(found) is Conditional  # so that its rows were checked to sum to 1
    assert found.weights.shape[-1] == sum(keys)
    same(
        found(torch.cat(values, -2)),
        sum(gate[..., k, None] * part(v) for k, (part, v) in enumerate(zip(parts, values, strict=True))),
    )
    # again, of mixtures
    assert type(mixed(torch.full((rows, 2), 0.5, dtype=torch.float64), [found, found])) is Conditional


@settings(max_examples=50, deadline=None)
@given(sizes, st.integers(1, 4), st.integers(0, 10_000))
def test_a_gated_mixture_of_plans_is_one(keys, rows, seed):
    """Proposition 5.3: for any nonnegative gate, of sum 1 or not, and parts of which some are conditionals."""
    parts = [PlanUpdate(numbers(rows, count, seed=seed + index).exp()) for index, count in enumerate(keys)]
    parts[0] = parts[0].conditional() if len(keys) > 1 else parts[0]
    values = [numbers(count, 3, seed=seed + 10 + index) for index, count in enumerate(keys)]
    gate = numbers(rows, len(keys), seed=seed + 20).relu()
    found = mixed(gate, parts)
    assert type(found) is PlanUpdate
    same(
        found(torch.cat(values, -2)),
        sum(gate[:, k, None] * part(v) for k, (part, v) in enumerate(zip(parts, values, strict=True))),
    )
    same(found.masses, sum(gate[:, k] * part.masses for k, part in enumerate(parts)))


def test_parts_that_share_their_values_are_one_conditional_on_their_keys():
    """The disjoint union is pushed along onto the one set of keys."""
    parts = [Conditional(numbers(4, 6, seed=index).softmax(-1)) for index in range(3)]
    values, gate = numbers(6, 2, seed=7), numbers(4, 3, seed=8).softmax(-1)
    union = mixed(gate, parts)
    onto = Factor(torch.arange(6).repeat(3), 6)
    gathered = Conditional(onto.total(union.weights.mT).mT)
    same(gathered.weights, sum(gate[:, k, None] * part.weights for k, part in enumerate(parts)))
    same(gathered(values), union(onto.pulled(values)))


def test_a_plan_is_its_masses_times_its_conditional():
    plan, values = PlanUpdate(numbers(3, 5, 4, seed=0).exp()), numbers(4, 2, seed=1)
    same(plan(values), plan.masses[..., None] * plan.conditional()(values))
    by_row = numbers(3, 5, 4, 2, seed=2)
    same(plan(by_row), torch.einsum("bts,btsp->btp", plan.weights, by_row))


@pytest.mark.parametrize(
    ("activation", "layer"), [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("silu", nn.SiLU()), ("tanh", nn.Tanh())]
)
def test_a_feed_forward_layer_is_a_plan_on_its_hidden_units(activation, layer):
    """Theorem 5.1, gradients included."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 11), layer, nn.Linear(11, 5)).double()
    lift, _, read = mlp
    assert isinstance(lift, nn.Linear)
    assert isinstance(read, nn.Linear)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    plan = feed_forward(x, lift.weight, activation, lift.bias)
    found = plan(columns(read.weight)) + read.bias
    assert plan.weights.shape == (2, 7, 22)
    same(found, mlp(x))
    leaves = [x, *mlp.parameters()]
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (found, mlp(x))), strict=True):
        same(one, other)
    if activation != "relu":  # some unit is negative, so that both halves are used
        assert plan.weights[..., 11:].max() > 0


def test_hidden_units_at_zero_keep_their_slope():
    hidden = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    read = numbers(2, 3, seed=0)
    (slope,) = torch.autograd.grad(signed(hidden)(columns(read)).sum(), hidden)
    same(slope[0], read.sum(0))


def test_gated_layers_are_plans_of_their_hidden_units():
    torch.manual_seed(0)
    mlp = zonal.nn.SwiGLU(6, 8).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    hidden = torch.nn.functional.silu(mlp.gate(x)) * mlp.up(x)
    same(signed(hidden)(columns(mlp.down.weight)), mlp(x))
    # and so a conditional of fixed experts, times what all of them weigh: a dense mixture of experts
    plan = signed(hidden)
    same(plan.masses[..., None] * plan.conditional()(columns(mlp.down.weight)), mlp(x))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PlanUpdate(torch.tensor([[1.0, -0.1]])), "must be finite and >= 0, received -0.1 … 1"),
        (lambda: PlanUpdate(torch.tensor([[1.0, float("inf")]])), "must be finite"),
        (lambda: PlanUpdate(torch.ones(3)), r"\(\.\.\., T, S\)"),
        (lambda: Conditional(torch.tensor([[0.5, 0.4]])), "must sum to 1, received sums up to 0.1 away"),
        (lambda: Conditional(torch.full((1, 256), 1 / 512, dtype=torch.bfloat16)), "must sum to 1, received"),
        (lambda: Conditional(torch.full((1, 4096), 1 / 8192, dtype=torch.float16)), "must sum to 1, received"),
        (lambda: Conditional(torch.zeros(2, 0)), "must sum to 1, received sums up to 1 away"),
        (lambda: PlanUpdate(torch.tensor([[0.0, 0.0], [1.0, 1.0]])).conditional(), "received 1 without"),
        (
            lambda: mixed(torch.ones(2, 2) / 2, [Conditional(torch.ones(2, 1))]),
            r"a gate \(\.\.\., T, 1\) is required, a column a part, received \(2, 2\)",
        ),
        (
            lambda: mixed(torch.ones(2, 1) / 2, [Conditional(torch.ones(2, 1))]),
            "of conditionals, rows of the gate must sum to 1",
        ),
        (lambda: mixed(-torch.ones(2, 1), [PlanUpdate(torch.ones(2, 1))]), "gate must be >= 0, received -1"),
        (lambda: mixed(torch.ones(2, 0), []), "is required"),
        (lambda: mixed(torch.ones(2, 1), [PlanUpdate(torch.ones(3, 1))]), r"as many rows .* received 2 and \[3\]"),
        (lambda: PlanUpdate(torch.ones(2, 3))(torch.ones(4, 5)), r"values \(\.\.\., 3, P\) are required"),
        (lambda: PlanUpdate([[1.0]]), "weights must be a torch.Tensor"),  # type: ignore[arg-type]
        (
            lambda: feed_forward(torch.ones(1, 2), torch.ones(3, 2), "softplus"),
            "unknown activation 'softplus'.*gelu, relu, silu, tanh",
        ),
    ],
)
def test_what_is_no_update_by_weights_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_the_public_name():
    assert zonal.update is update

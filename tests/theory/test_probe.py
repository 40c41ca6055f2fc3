"""Probes, their gauge, centred representatives and normal forms: the theorems as properties, and where the paper's
statement is false, the counter-example.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zonal import probe
from zonal.errors import ArgumentError

quick = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(2, 9), st.integers(2, 9))


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masked(seed: int, size: tuple[int, int], scale: float = 1.0) -> Tensor:
    """Scores with a random mask that joins all rows and columns in one part: a full first row and column, and about
    half of the rest.
    """
    scores = drawn(seed, *size, scale=scale)
    forbidden = torch.rand(size, generator=torch.Generator().manual_seed(seed + 1)) < 0.5
    forbidden[0], forbidden[:, 0] = False, False
    return scores.masked_fill(forbidden, -math.inf)


def inside(x: Tensor) -> Tensor:
    return x.masked_fill(x.isneginf(), 0)


PROBES = {
    "rows": probe.Rows(),
    "balanced": probe.EntropicPlan(),
    "columns soft": probe.EntropicPlan(rho=(None, 0.7)),
    "rows soft": probe.EntropicPlan(rho=(2.0, None)),
    "both soft": probe.EntropicPlan(rho=(1.0, 0.5)),
}


@pytest.mark.parametrize("name", PROBES)
@quick
@given(seed=seeds, size=sizes)
def test_each_probe_is_blind_to_its_scalings_and_to_no_other(name: str, seed: int, size: tuple[int, int]) -> None:
    """Left scalings leave the row-conditional, both sides a balanced plan, and only a constrained side an unbalanced
    one; and the witness is the scaling.
    """
    seen, log_kernel = PROBES[name], drawn(seed, *size)
    left, right = drawn(seed + 1, size[0]), drawn(seed + 2, size[1])
    for a, b, blind in ((left, None, seen.left), (None, right, seen.right)):
        other = log_kernel + (a[:, None] if a is not None else b)  # type: ignore[operator]
        found = probe.equivalent(log_kernel, other, seen)
        assert found.holds == blind
        if blind:
            assert torch.allclose(log_kernel + found.left[:, None] + found.right, other, atol=1e-9)
        else:
            assert found.error > 1e-6


@quick
@given(seed=seeds, size=sizes)
def test_equal_conditionals_mean_a_row_scaling(seed: int, size: tuple[int, int]) -> None:
    """The converse, on any support: K' is rebuilt from its conditionals with other row masses, and the witness gives
    those back.
    """
    log_kernel, mass = masked(seed, size), drawn(seed + 2, size[0])
    other = log_kernel.log_softmax(-1) + mass[:, None]
    found = probe.equivalent(log_kernel, other, probe.Rows())
    assert found.holds
    assert torch.allclose(found.left, mass - log_kernel.logsumexp(-1))


def test_a_gauge_is_exact_where_the_kernel_underflows() -> None:
    log_kernel = drawn(0, 5, 6) - 800
    assert not log_kernel.exp().any()
    assert probe.equivalent(log_kernel, log_kernel + 800, probe.Rows()).holds
    assert probe.equivalent(log_kernel, log_kernel + 800, probe.EntropicPlan()).holds


def test_large_and_small_kernels_are_compared_as_others() -> None:
    log_kernel = drawn(0, 5, 6)
    log_kernel[1], log_kernel[2, 3] = -math.inf, -math.inf
    for offset in (-1e5, -800.0, 0.0, 800.0):
        moved = log_kernel + offset
        assert probe.equivalent(moved, moved, probe.Kernel())[:2] == (True, 0.0)
        apart = probe.equivalent(moved, moved - 100, probe.Kernel())
        assert (apart.holds, apart.error) == (False, 1.0)
        assert probe.equivalent(moved, moved + math.log(2), probe.Kernel()).error == pytest.approx(0.5)
        other = moved.masked_fill(log_kernel == log_kernel[0, 0], -math.inf)
        share = float(log_kernel[0].softmax(-1)[0])
        assert probe.equivalent(moved, other, probe.Kernel()).error == pytest.approx(share)
        assert not probe.divergence(moved, moved, probe.Kernel()).any()
    assert probe.equivalent(torch.zeros(3, 0), torch.zeros(3, 0), probe.Rows())[:2] == (True, 0.0)


@quick
@given(seed=seeds, size=sizes)
def test_a_plan_is_optimal(seed: int, size: tuple[int, int]) -> None:
    """Against its objective: the marginals hold, and no plan of the same marginals near it is closer to K (for
    penalties: none at all).
    """
    log_kernel, mu = drawn(seed, *size), drawn(seed + 1, size[0]).softmax(0)
    nu = drawn(seed + 2, size[1]).softmax(0)
    kernel, generator = log_kernel.exp(), torch.Generator().manual_seed(seed)

    def closeness(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log() - a + b).sum()

    plan = probe.EntropicPlan(mu, nu).observe(log_kernel).log.exp()
    assert torch.allclose(plan.sum(1), mu, atol=1e-10)
    assert torch.allclose(plan.sum(0), nu, atol=1e-10)
    noise = 0.3 * plan.min() * torch.rand(size, generator=generator, dtype=torch.float64)
    noise = noise - noise.mean(0) - noise.mean(1, keepdim=True) + noise.mean()
    assert closeness(plan + noise, kernel) >= closeness(plan, kernel)
    soft = probe.EntropicPlan(mu, nu, rho=(2.0, 0.5), reference="kernel").observe(log_kernel).log.exp()

    def cost(p: Tensor) -> Tensor:
        return closeness(p, kernel) + 2 * closeness(p.sum(1), mu) + 0.5 * closeness(p.sum(0), nu)

    assert cost(soft * (0.1 * torch.randn(size, generator=generator, dtype=torch.float64)).exp()) >= cost(soft)


@quick
@given(seed=seeds, size=sizes)
def test_a_plan_whose_columns_are_free_is_the_conditional(seed: int, size: tuple[int, int]) -> None:
    log_kernel, mu = masked(seed, size), drawn(seed + 1, size[0]).softmax(0)
    plan = probe.EntropicPlan(mu, rho=(None, 0.0)).observe(log_kernel).log.exp()
    assert torch.allclose(plan, mu[:, None] * log_kernel.softmax(-1))


@quick
@given(seed=seeds, size=sizes)
def test_plans_induce_conditionals(seed: int, size: tuple[int, int]) -> None:
    """U_P v = mu U_kappa v with kappa = P / mu (Lemma 2.3)."""
    mu, values = drawn(seed + 1, size[0]).softmax(0), drawn(seed + 2, size[1], 3)
    seen = probe.EntropicPlan(mu).observe(drawn(seed, *size)).log
    assert torch.allclose(seen.exp() @ values, mu[:, None] * (seen.softmax(-1) @ values))


def test_a_causal_balanced_plan_is_the_diagonal() -> None:
    """With uniform marginals it is I / N, reached in the limit alone: more and more scalings leave less beside the
    diagonal, and no number of them settles.
    """
    log_kernel = drawn(0, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    beside = []
    for iterations in (30, 300, 3000):
        left, right = torch.zeros(6).double(), torch.zeros(6).double()
        for _ in range(iterations):
            left = -math.log(6) - (log_kernel + right).logsumexp(-1)
            right = -math.log(6) - (log_kernel + left[:, None]).logsumexp(-2)
        plan = (log_kernel + left[:, None] + right).exp()
        beside.append(float(plan.tril(-1).sum()))
    assert beside[0] > 5 * beside[1] > 25 * beside[2]
    with pytest.raises(ArgumentError, match="only a limit reaches"):
        probe.EntropicPlan(iterations=500).observe(log_kernel)


def test_column_constraints_leak_the_future() -> None:
    """A change of the last query moves earlier rows of a causal plan by as much as its columns are drawn to their
    marginals; with free columns not at all.
    """
    causal = torch.ones(6, 6).tril().bool()
    first = drawn(0, 6, 6).masked_fill(~causal, -math.inf)
    second = first.clone()
    second[-1] = drawn(1, 6)
    moved = {}
    for penalty in (0.0, 0.5, 2.0):
        plans = [
            probe.EntropicPlan(rho=(None, penalty)).observe(log_kernel).log.softmax(-1)[:-1]
            for log_kernel in (first, second)
        ]
        moved[penalty] = float((plans[0] - plans[1]).abs().max())
    assert moved[0.0] == 0
    assert moved[2.0] > moved[0.5] > 0.01
    leaks = [inside(probe.centred(scores).interaction)[:-1] for scores in (first, second)]
    assert (leaks[0] - leaks[1]).abs().max() > 0.01
    kept = [inside(probe.centred(scores, "row").interaction)[:-1] for scores in (first, second)]
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("by", ["row", "column", "both"])
@quick
@given(seed=seeds, size=sizes, mask=st.booleans(), weigh=st.booleans())
def test_centred_scores_are_the_representatives(
    by: probe.By, seed: int, size: tuple[int, int], mask: bool, weigh: bool
) -> None:
    """Weighted sums vanish; unary fields go; the parts add up; and the representative of the representative is itself,
    so it is the only one.
    """
    scores = masked(seed, size) if mask else drawn(seed, *size)
    weight = drawn(seed + 3, *size).exp() if weigh else None
    fields = probe.centred(scores, by, weight)
    weighed = inside(fields.interaction) * (torch.ones(size) if weight is None else weight)
    if by != "column":
        assert weighed.sum(1).abs().max() < 1e-9
    if by != "row":
        assert weighed.sum(0).abs().max() < 1e-9
    rows, columns = drawn(seed + 4, size[0]), drawn(seed + 5, size[1])
    moved = scores + (rows[:, None] if by != "column" else 0) + (columns if by != "row" else 0)
    assert torch.allclose(inside(probe.centred(moved, by, weight).interaction), inside(fields.interaction), atol=1e-9)
    assert torch.allclose(inside(fields.interaction + fields.rows[:, None] + fields.columns), inside(scores))
    again = probe.centred(fields.interaction, by, weight)
    assert max(float(again.rows.abs().max()), float(again.columns.abs().max())) < 1e-9


@pytest.mark.parametrize("size", [(2, 2), (5, 2), (3, 4)])
def test_weighted_scores_of_few_tokens_are_centred(size: tuple[int, int]) -> None:
    """Of some hundred thousand weights, those for which a vanishing eigenvalue is all rounding, too."""
    scores, weight = drawn(0, 100_000, *size), drawn(1, 100_000, *size).exp()
    weighed = probe.centred(scores, "both", weight).interaction * weight
    assert max(float(weighed.sum(axis).abs().max()) for axis in (-1, -2)) < 1e-9


def test_naive_double_centring_under_a_mask_keeps_some_gauge() -> None:
    """Counter-example: taking restricted row means, column means and the grand mean away is not invariant once pairs
    are forbidden.
    """

    def naive(scores: Tensor) -> Tensor:
        allowed = ~scores.isneginf()
        filled = inside(scores)
        rows, columns = filled.sum(1) / allowed.sum(1), filled.sum(0) / allowed.sum(0)
        return (filled - rows[:, None] - columns + filled.sum() / allowed.sum()).masked_fill(~allowed, 0)

    scores, fields = masked(0, (7, 8)), drawn(1, 7)[:, None] + drawn(2, 8)
    assert (naive(scores + fields) - naive(scores)).abs().max() > 0.1
    full = drawn(0, 7, 8)
    assert torch.allclose(naive(full + fields), naive(full))


def test_centring_holds_in_every_part_of_a_mask() -> None:
    """Two documents: no allowed pair joins them, and each has a constant of its own, which is the rows'."""
    scores = torch.block_diag(drawn(0, 3, 4), drawn(1, 4, 3))
    scores = scores.masked_fill(torch.block_diag(torch.ones(3, 4), torch.ones(4, 3)) == 0, -math.inf)
    fields = probe.centred(scores)
    alone = probe.centred(scores[:3, :4])
    assert torch.allclose(fields.interaction[:3, :4], alone.interaction)
    assert torch.allclose(fields.rows[:3], alone.rows)
    assert fields.columns[:4].sum().abs() < 1e-9
    assert fields.columns[4:].sum().abs() < 1e-9


@quick
@given(seed=seeds, size=sizes)
def test_conditionals_depend_on_the_row_quotient_alone(seed: int, size: tuple[int, int]) -> None:
    """softmax(S) = softmax(S^row) = softmax(columns + interaction) (Corollary 4.2, Remark 4.6)."""
    scores = masked(seed, size)
    fields = probe.centred(scores)
    expected = scores.softmax(-1)
    assert torch.allclose(probe.centred(scores, "row").interaction.softmax(-1), expected)
    assert torch.allclose((fields.columns + fields.interaction).softmax(-1), expected)


@quick
@given(seed=seeds, size=sizes, mask=st.booleans())
def test_energies_are_shares_of_one_whole(seed: int, size: tuple[int, int], mask: bool) -> None:
    scores = masked(seed, size) if mask else drawn(seed, *size)
    found = probe.energies(scores)
    allowed = scores[~scores.isneginf()]
    assert torch.isclose(found.total, (allowed - allowed.mean()).square().sum())
    assert min(found.gauge, found.columns, found.interaction) > -1e-9
    rows, columns = drawn(seed + 1, size[0]), drawn(seed + 2, size[1])
    unary = probe.energies((rows[:, None] + columns).expand(size))
    assert unary.interaction < 1e-9
    assert torch.isclose(unary.gauge, size[1] * (rows - rows.mean()).square().sum())


@quick
@given(seed=seeds, size=sizes, data=st.data())
def test_the_normal_form_is_the_best_of_its_rank(seed: int, size: tuple[int, int], data: st.DataObject) -> None:
    """Eckart and Young: what is missed is the tail of the spectrum, and no other fields and factors of the rank miss
    less.
    """
    rank = data.draw(st.integers(1, min(size)))
    scores = drawn(seed, *size)
    form = probe.normal_form(scores, rank)
    assert form.best
    spectrum = torch.linalg.svdvals(probe.centred(scores).interaction)
    missed = (scores - form.scores).square().sum()
    assert torch.isclose(missed, spectrum[rank:].square().sum(), atol=1e-9)
    assert torch.isclose(form.explained, 1 - spectrum[rank:].square().sum() / spectrum.square().sum())
    for step in range(5):
        factors = drawn(seed + 10 + step, size[0], rank), drawn(seed + 20 + step, size[1], rank)
        other = form.scores + 0.1 * (
            drawn(seed + step, size[0])[:, None] + factors[0] @ form.keys.mT + form.queries @ factors[1].mT
        )
        assert (scores - other - 0.01 * factors[0] @ factors[1].mT).square().sum() >= missed - 1e-9


def test_rank_one_more_of_the_row_centred_score_may_fit_better() -> None:
    """The paper's normal form (column field and rank r) is not the best use of as many numbers: rank r + 1 of S^row
    contains it.
    """
    scores = drawn(3, 12, 12, scale=2.0)
    rank = 3
    form = probe.normal_form(scores, rank)
    tail = torch.linalg.svdvals(probe.centred(scores, "row").interaction)[rank + 1 :].square().sum()
    assert tail < (scores - form.scores).square().sum()


@quick
@given(seed=seeds, size=sizes, data=st.data())
def test_under_a_mask_a_form_is_fitted_and_not_called_the_best(
    seed: int, size: tuple[int, int], data: st.DataObject
) -> None:
    """It misses no more than the decomposition with zeros at forbidden pairs, from which it starts, nor than after
    fewer sweeps.
    """
    scores = masked(seed, size)
    rank = data.draw(st.integers(1, min(size)))
    target, allowed = inside(probe.centred(scores).interaction), ~scores.isneginf()
    form = probe.normal_form(scores, rank)
    assert form.best == bool(allowed.all())
    u, s, vh = torch.linalg.svd(target)
    zeros = u[:, :rank] * s[:rank] @ vh[:rank]
    missed = [
        (target - made)[allowed].square().sum()
        for made in (zeros, *(f.queries @ f.keys.mT for f in (probe.normal_form(scores, rank, sweeps=1), form)))
    ]
    assert missed[0] + 1e-9 >= missed[1] >= missed[2] - 1e-9
    if target.norm() > 1e-6:
        assert torch.isclose(form.explained, 1 - missed[2] / target.square().sum(), atol=1e-9)


def test_the_best_scores_are_not_the_best_weights() -> None:
    """The refinement starts from the Frobenius-optimal form, lessens the KL of rows by much, and fits the scores
    worse.
    """
    scores = drawn(0, 12, 12, scale=3.0)
    form = probe.normal_form(scores, 2)
    better = probe.refined(form, scores)
    before, after = (probe.divergence(scores, x.scores).mean() for x in (form, better))
    assert after < 0.6 * before
    assert better.explained < form.explained
    assert torch.equal(better.rows, form.rows)


@quick
@given(seed=seeds, size=sizes)
def test_a_refinement_is_never_worse(seed: int, size: tuple[int, int]) -> None:
    scores = torch.stack([masked(seed, size), masked(seed + 1, size)])
    form = probe.normal_form(scores, 1)
    better = probe.refined(form, scores, steps=3)
    after, before = (probe.divergence(scores, x.scores).mean(-1) for x in (better, form))
    assert (after <= before + 1e-15).all()  # a divergence of 0 is known to rounding


def test_a_refinement_leaves_the_graph_of_its_scores_alone() -> None:
    layer = torch.nn.Linear(4, 5, dtype=torch.float64)
    scores = layer(drawn(0, 6, 4))
    plain = probe.refined(probe.normal_form(scores.detach(), 2), scores.detach(), steps=3)
    better = probe.refined(probe.normal_form(scores, 2), scores, steps=3)
    assert layer.weight.grad is None
    assert not better.scores.requires_grad
    with torch.inference_mode():
        inferred = probe.refined(probe.normal_form(scores.clone(), 2), scores.clone(), steps=3)
    assert torch.equal(better.scores, plain.scores)
    assert torch.equal(inferred.scores, plain.scores)


@pytest.mark.parametrize("seen", [probe.Rows(), probe.Kernel()])
def test_no_rows_are_observed_as_none(seen: probe.Probe) -> None:
    none = torch.zeros(2, 0, 3)
    assert seen.observe(none).right.shape == (2, 3)
    assert probe.divergence(none, none, seen).shape == (2, 0)


def test_divergence_is_that_of_rows() -> None:
    first, second = masked(0, (6, 7)), drawn(1, 6, 7)
    model = second.masked_fill(first.isneginf(), -math.inf).log_softmax(-1)
    expected = torch.nn.functional.kl_div(inside(model), first.softmax(-1), reduction="none").sum(-1)
    assert torch.allclose(probe.divergence(first, second), expected)
    first[2] = -math.inf
    assert probe.divergence(first, second)[2] == 0


def test_divergence_of_kernels_that_overflow() -> None:
    first = drawn(0, 3, 4)
    first[0] += 800
    second = first.clone().requires_grad_()
    (slope,) = torch.autograd.grad(probe.divergence(first, second, probe.Kernel()).sum(), second)
    assert not slope.any()
    for other in (first + 1, first - 1):
        with pytest.raises(ArgumentError, match=r"divergence: kernels that fit into float64 .* received larger ones"):
            probe.divergence(first, other, probe.Kernel())
        assert torch.allclose(probe.divergence(first, other), torch.zeros(3, dtype=torch.float64))
    # a pair that only the other forbids is infinitely far, also where its weight is 0 in float64
    first = torch.tensor([[0.0, -800.0], [0.0, 0.0]], dtype=torch.float64)
    other = torch.tensor([[0.0, -math.inf], [0.0, 0.0]], dtype=torch.float64)
    assert probe.divergence(first, other).tolist() == [math.inf, 0]


def test_chart_freedom() -> None:
    """(q G, k G^-T) is the same interaction for any invertible G (Remark 4.8)."""
    form, g = probe.normal_form(drawn(0, 6, 7), 3), drawn(1, 3, 3)
    assert torch.allclose((form.queries @ g) @ (form.keys @ torch.linalg.inv(g).mT).mT, form.queries @ form.keys.mT)


def test_batches_are_their_parts() -> None:
    scores = torch.stack([masked(0, (5, 6)), masked(1, (5, 6))])
    form = probe.normal_form(scores, 2)
    fields, plan = probe.centred(scores), probe.EntropicPlan(rho=(None, 0.5)).observe(scores)
    for index in range(2):
        assert torch.allclose(inside(fields.interaction[index]), inside(probe.centred(scores[index]).interaction))
        assert torch.allclose(form.explained[index], probe.normal_form(scores[index], 2).explained, atol=1e-4)
        assert torch.allclose(
            plan.log.exp()[index], probe.EntropicPlan(rho=(None, 0.5)).observe(scores[index]).log.exp()
        )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: probe.Rows().observe(torch.full((3, 3), math.nan)), "with NaN or infinity"),
        (lambda: probe.Rows().observe(torch.zeros(3, 3, dtype=torch.int64)), "received torch.int64"),
        (lambda: probe.EntropicPlan(rho=(-1.0, None)), "rho must be two finite numbers >= 0, or None"),
        (lambda: probe.EntropicPlan(rho=(math.inf, 1.0)), "rho must be two finite numbers"),
        (lambda: probe.EntropicPlan(tolerance=0.0), "tolerance must be > 0"),
        (
            lambda: probe.EntropicPlan(rows=torch.ones(2)).observe(torch.zeros(3, 3)),
            "rows must be 3 finite numbers > 0",
        ),
        (
            lambda: probe.EntropicPlan(rows=torch.ones(3)).observe(torch.zeros(3, 3)),
            "one sum for a balanced plan, received 3 and 1",
        ),
        (
            lambda: probe.EntropicPlan().observe(torch.zeros(3, 3).index_fill(0, torch.tensor(1), -math.inf)),
            "row 1 has none",
        ),
        (
            lambda: probe.EntropicPlan().observe(torch.zeros(3, 3).index_fill(1, torch.tensor(2), -math.inf)),
            "column 2 has none",
        ),
        (lambda: probe.equivalent(torch.zeros(3, 3), torch.zeros(3, 4), probe.Rows()), "one shape are required"),
        (lambda: probe.equivalent(torch.zeros(3), torch.zeros(3), "rows"), "a probe such as probe.Rows"),  # type: ignore[arg-type]
        (lambda: probe.centred(torch.zeros(3, 3), "rows"), "'row', 'column' or 'both'"),  # type: ignore[arg-type]
        (lambda: probe.centred(torch.zeros(3, 3), weight=torch.zeros(3, 3)), "weights must be finite and > 0"),
        (
            lambda: probe.centred(torch.zeros(3, 3), weight=torch.ones(2, 2)),
            r"shape of the scores, \(3, 3\), or broadcast",
        ),
        (lambda: probe.energies(torch.zeros(0, 3)), r"at least one row and one column .* received \(0, 3\)"),
        (
            lambda: probe.Kernel(torch.ones(5)).observe(torch.zeros(3, 3)),
            r"3 finite numbers, .* received shape \(5,\)\.",
        ),
        (lambda: probe.Kernel(torch.ones(3, 1)).observe(torch.zeros(3, 3)), r"received shape \(3, 1\)\."),
        (lambda: probe.Kernel(torch.full((3,), math.nan)).observe(torch.zeros(3, 3)), "with NaN or infinity"),
        (
            lambda: probe.divergence(torch.zeros(3, 3), torch.zeros(3, 4)),
            "divergence: kernels of one shape are required",
        ),
        (lambda: probe.divergence(torch.zeros(3, 3), torch.zeros(1, 3)), r"received \(3, 3\) and \(1, 3\)"),
        (
            lambda: probe.refined(probe.normal_form(torch.eye(4), 1), torch.zeros(3, 3)),
            r"refined: kernels of one shape are required, received \(3, 3\) and \(4, 4\)",
        ),
        (lambda: probe.normal_form(torch.zeros(3, 4), 4), r"at most min\(T, S\), received 4"),
        (lambda: probe.normal_form(torch.zeros(3, 4), 0), "rank must be a whole number >= 1"),
    ],
)
def test_mistakes_say_what_to_do(call: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()  # type: ignore[operator]

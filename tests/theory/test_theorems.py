"""Theorems of the algebra that no one part has: the link that composition forces, and what mixtures of conditionals and
of plans are, which potentials and completions there are. docs/theorems.md, docs/osets.md and docs/carriers.md list all.
"""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import OPERATORS, randomised
from torch import Tensor

import zonal
from zonal import link, probe
from zonal import mechanisms as m
from zonal.evaluation.potential import circulation, hodge
from zonal.theory.oset import OSet, Reporter, Verdict
from zonal.theory.update import Conditional, PlanUpdate, mixed

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
    """Evidence of joined works is the product of their evidence under the exponential, and under none of the other
    links.
    """
    bound = randomised(OPERATORS[LINKS[kind]]()).bind(4, 4)
    first, second = (
        x.expand(1, 4, 40, 40)
        for x in (
            torch.linspace(0.05, 0.5, 40, dtype=torch.float64)[:, None],
            torch.linspace(-0.4, 0.45, 40, dtype=torch.float64),
        )
    )
    values = (bound.link.value(x, bound.coefficients) for x in (first + second, first, second, torch.zeros_like(first)))
    off = uncomposed(*values)
    assert off < 1e-12 if kind is link.Exp else off > 1e-2


def test_a_decreasing_positive_link_need_not_compose() -> None:
    """1 / (1 + w) is positive, measurable and decreasing, and is off by 0.09: positivity does not force the
    exponential, composition does.
    """
    w = torch.linspace(0, 2, 50, dtype=torch.float64)
    first, second = torch.meshgrid(w, w, indexing="ij")
    assert uncomposed(1 / (1 + first + second), 1 / (1 + first), 1 / (1 + second), torch.ones(1).double()) > 0.08


@quick
@given(seed=seeds, slope=st.floats(-3, 3))
def test_composition_leaves_the_slope_alone(seed: int, slope: float) -> None:
    """Sign and size of the slope are free: the library's exponential composes with any, and a slope of the scores is a
    scale of the call, of either sign.
    """
    bound = OPERATORS[LINKS[link.Exp]]().bind(1, 1)
    w = drawn(seed, 30)
    first, second = (x.expand(1, 1, 30, 30) for x in torch.meshgrid(w, w, indexing="ij"))
    values = (
        bound.link.value(slope * x, bound.coefficients)
        for x in (first + second, first, second, torch.zeros_like(first))
    )
    assert uncomposed(*values) < 1e-12
    q, k, v = drawn(seed + 1, 3, 1, 1, 6, 4).unbind(0)
    y = zonal.attention(q, k, v, m.softmax(), scale=slope, path="dense")
    assert torch.allclose(y, zonal.attention(slope * q, k, v, m.softmax(), scale=1.0, path="dense"))
    assert torch.allclose(y, (slope * q @ k.mT).softmax(-1) @ v)


def test_an_allowed_pair_may_have_no_evidence() -> None:
    """The kernel of Yat is 0 at a right angle: an allowed row whose keys all stand so has no mass, no conditional, and
    reads 0.
    """
    q, k = torch.eye(4, dtype=torch.float64)[None, None, :1], torch.eye(4, dtype=torch.float64)[None, None, 1:]
    v = drawn(0, 1, 1, 3, 2)
    for operator, mass in ((m.yat(), False), (m.softmax(), True)):
        bound = operator.double().bind(1, 4)
        score = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
        assert bool((bound.link.value(score, bound.coefficients) > 0).all()) == mass
        assert bool(zonal.attention(q, k, v, operator).any()) == mass


@quick
@given(seed=seeds, size=sizes)
def test_mixtures_of_conditionals_are_conditionals(seed: int, size: tuple[int, list[int]]) -> None:
    """Of one kernel: that of each branch less its row mass, with the logarithms of the gates (Proposition 5.2)."""
    queries, keys = size
    logs = [probe.Rows().observe(drawn(seed + place, queries, count)).log for place, count in enumerate(keys)]
    gates = drawn(seed - 1, queries, len(keys)).softmax(-1)
    joined = torch.cat([log + gates[:, place, None].log() for place, log in enumerate(logs)], 1)
    mixture = mixed(gates, [Conditional(log.exp()) for log in logs])
    assert isinstance(mixture, Conditional)
    assert torch.allclose(joined.softmax(-1), mixture.weights)


def test_a_mixture_of_balanced_plans_need_not_be_balanced() -> None:
    """Gates that differ by query change what keys receive; with one gate a branch, of sum one over plans of the same
    keys, marginals stay.
    """
    plans = torch.stack([probe.EntropicPlan().observe(2 * drawn(seed, 6, 5)).log.exp() for seed in (0, 1)])
    nu = torch.full((5,), 0.2, dtype=torch.float64)
    by_query = drawn(2, 2, 6).softmax(0)
    mixed = (by_query[..., None] * plans).sum(0)
    assert torch.allclose(mixed.sum(1), torch.full((6,), 1 / 6).double())
    assert (mixed.sum(0) - nu).abs().max() > 0.01
    constant = (torch.tensor([0.3, 0.7]).double()[:, None, None] * plans).sum(0)
    assert torch.allclose(constant.sum(0), nu)


@quick
@given(seed=seeds)
def test_heads_are_attentions_side_by_side(seed: int) -> None:
    """What heads read together is what each reads alone, whatever the others hold (corollary 4.4)."""
    q, k, v = drawn(seed, 3, 2, 3, 5, 4).unbind(0)
    for operator in (m.softmax(), m.ska(power=1).double(), m.linear()):
        together = zonal.attention(q, k, v, operator, causal=True)
        alone = torch.cat(
            [zonal.attention(q[:, [head]], k[:, [head]], v[:, [head]], operator, causal=True) for head in range(3)], 1
        )
        assert torch.allclose(together, alone)


@quick
@given(seed=seeds)
def test_a_residual_is_a_mixture_with_the_identity(seed: int) -> None:
    """x + y is the mixture, with gates of 1, of the identity's kernel on the tokens themselves and attention's on its
    keys; with gates of sum 1 it is a conditional (corollary 5.2).
    """
    x, values, scores = drawn(seed, 6, 3), drawn(seed + 1, 5, 3), drawn(seed + 2, 6, 5)
    itself, attention = Conditional(torch.eye(6, dtype=torch.float64)), Conditional(scores.softmax(-1))
    everything = torch.cat([x, values])
    summed = mixed(torch.ones(6, 2).double(), [PlanUpdate(itself.weights), PlanUpdate(attention.weights)])
    assert torch.allclose(summed(everything), x + scores.softmax(-1) @ values)
    gates = drawn(seed + 3, 6, 2).softmax(-1)
    joined = mixed(gates, [itself, attention])
    assert isinstance(joined, Conditional)
    assert torch.allclose(joined(everything), gates[:, :1] * x + gates[:, 1:] * (scores.softmax(-1) @ values))


# moves among three kernels; the middle one changes the probe
MOVES = [(0, 1), (1, 2), (0, 2)]


def efforts(target: Tensor, kernels: list[Tensor], probes: list[probe.Probe]) -> Tensor:
    """What each move changes in the distance from a target, as the probe of the move sees it."""
    return torch.stack(
        [
            sum_of(target, kernels[b], seen) - sum_of(target, kernels[a], seen)
            for (a, b), seen in zip(MOVES, probes, strict=True)
        ]
    )


def sum_of(target: Tensor, kernel: Tensor, seen: probe.Probe) -> Tensor:
    return probe.divergence(target, kernel, seen).sum()


@quick
@given(seed=seeds)
def test_one_probe_has_a_potential_and_moves_that_change_it_need_not(seed: int) -> None:
    """Within a regime the efforts of moves are differences of one objective.

    Where a move changes the probe they need not be: for these kernels no potential gives them, so none falls along
    every move that is accepted (remarks 6.2 and 6.3).
    """
    target, *kernels = drawn(seed, 4, 4, 5).unbind(0)
    within = efforts(target, kernels, [probe.Rows()] * 3)
    assert hodge(3, MOVES, within).share < 1e-20
    across = efforts(target, kernels, [probe.Rows(), probe.EntropicPlan(), probe.Rows()])
    circulating = across[0] + across[1] - across[2]
    assert abs(float(hodge(3, MOVES, across).curl[0]) - float(circulating) / 3) < 1e-9
    assert abs(float(circulating)) > 1e-9


@quick
@given(seed=seeds)
def test_cycle_sums_are_what_gauges_leave(seed: int) -> None:
    """A vertex potential changes no cycle sum, and two forms with equal cycle sums differ by one (lemma C.1 and theorem
    C.4).
    """
    edges = [(0, 1), (1, 2), (0, 2), (2, 3), (0, 3)]
    form, potential = drawn(seed, 5), drawn(seed + 1, 4)
    shifted = form + torch.stack([potential[b] - potential[a] for a, b in edges])
    sums = [[cycle.total.mean for cycle in circulation(4, edges, each[:, None]).cycles] for each in (form, shifted)]
    assert sums[0] == pytest.approx(sums[1])
    first, second = hodge(4, edges, form), hodge(4, edges, shifted)
    assert torch.allclose(first.circulation, second.circulation)
    assert torch.allclose(second.gradient - first.gradient, shifted - form)


STAGES, HISTORIES = (0, 1, 2), ((0, 1), (0, 2))
WAYS = [(False, False, False), (False, False, True), (False, True, False), (False, True, True), (True, True, True)]
"""In which of the stages, of which 0 is continued by 1 and by 2, a stable family may accept a record."""


def family(way: tuple[bool, ...]) -> OSet[int]:
    return OSet(lambda stage: torch.tensor([way[stage]]))


def completes(reporter: Reporter[int], subject: OSet[int]) -> bool:
    """Whether a report is stable, decided at every stage, and right."""
    stable = all(side.withdrawn(history) is None for side in (reporter.yes, reporter.no) for history in HISTORIES)
    decided = all(bool((reporter.report(stage) != Verdict.UNDECIDED).all()) for stage in STAGES)
    return stable and decided and reporter.consistent(subject, STAGES)


def test_only_constant_families_have_a_completion() -> None:
    """The paper says that no family has a stable two-valued completion, or a procedure that decides it (theorems 3.2,
    B.1, B.2).

    All reports of all families on three stages: one that never changes has both, and what is derived from "none"
    (theorems C.1, C.2) would hold of it, too; a family that grows has none.
    """
    for way in WAYS:
        subject = family(way)
        assert subject.withdrawn(HISTORIES[0]) is None
        completions = [
            (yes, no) for yes in WAYS for no in WAYS if completes(Reporter(family(yes), family(no)), subject)
        ]
        constant = len(set(way)) == 1
        assert completions == ([(way, tuple(not accepted for accepted in way))] if constant else [])


# the paper's numbered lemmas, theorems, propositions and corollaries
NUMBERED = {
    "lemma": ("2.1", "2.2", "2.3", "4.1", "4.2", "4.3", "A.1", "B.1", "C.1"),
    "theorem": (
        "2.1", "3.1", "3.2", "3.3", "4.1", "4.2", "5.1", "5.2", "A.1", "A.2",
        *(f"B.{number}" for number in range(1, 8)), *(f"C.{number}" for number in range(1, 5)),
    ),
    "proposition": ("2.1", "3.1", "5.1", "5.2", "5.3", *(f"A.{number}" for number in range(1, 10))),
    "corollary": ("3.1", "3.2", "3.3", "3.4", "4.1", "4.2", "4.3", "4.4", "5.1", "5.2", "5.3", "5.4", "B.1", "B.2",
    "C.1"),
}  # fmt: skip
KINDS = {"lemmas": "lemma", "theorems": "theorem", "propositions": "proposition", "corollaries": "corollary"}


def listed(text: str) -> set[tuple[str, str]]:
    """(kind, number) of every statement that a text names, ranges included."""
    found: set[tuple[str, str]] = set()
    number = r"[2-5A-C]\.\d"
    for kind, numbers in re.findall(
        rf"(?i)\b(lemmas?|theorems?|propositions?|corollary|corollaries) ({number}(?:(?:, | and | to ){number})*)", text
    ):
        name = KINDS.get(kind.lower(), kind.lower())
        for first, last in re.findall(rf"({number})(?: to ({number}))?", numbers):
            found |= {(name, f"{first[:2]}{place}") for place in range(int(first[2]), int((last or first)[2]) + 1)}
    return found


def test_every_numbered_statement_has_its_row() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "theorems.md").read_text(encoding="utf-8")
    texts = [page, *((docs / f"{name}.md").read_text(encoding="utf-8") for name in ("osets", "carriers"))]
    lines = [line for text in texts for line in text.splitlines()]
    rows = "\n".join(line.split("|")[1] for line in lines if line.startswith("| "))
    unchecked = page.split("## Not checked")[1].split("## ")[0]
    wanted = {(kind, number) for kind, numbers in NUMBERED.items() for number in numbers}
    assert wanted == listed(rows) | listed(unchecked)
    assert not listed(rows) & listed(unchecked)
    assert listed("Lemmas 4.1, 4.2; propositions A.3 to A.5 and corollary 3.2") == {
        ("lemma", "4.1"), ("lemma", "4.2"), ("proposition", "A.3"), ("proposition", "A.4"), ("proposition", "A.5"),
        ("corollary", "3.2")
    }  # fmt: skip

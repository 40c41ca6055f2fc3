"""Plans: POT as the oracle, the gradient through the fixed point against finite differences and all steps unrolled,
constraints, memory, errors; hierarchies.
"""

import dataclasses
import itertools
import subprocess
import sys
from typing import Literal

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import zonal
from zonal import Memory, anchor, prior, probe
from zonal import mechanisms as m
from zonal.algebra.anchor import PlanAnchor, plan
from zonal.errors import ArgumentError, ConvergenceError, NonFiniteError, PathError
from zonal.execution.call import prepare
from zonal.execution.paths import transport
from zonal.kernels import native as native_kernels

RULES: dict[str, PlanAnchor] = {
    "balanced": anchor.Plan(tolerance=1e-13),
    "unbalanced": anchor.UnbalancedPlan(tolerance=1e-13, rho=(1.0, 0.5)),
    "half": anchor.UnbalancedPlan(tolerance=1e-13, rho=(None, 2.0)),
    "near the kernel": anchor.UnbalancedPlan(tolerance=1e-13, rho=(1.0, 0.5), reference="kernel"),
    "bounded": anchor.BoundedPlan(tolerance=1e-13, low=0.6, high=1.3),
}


def draw(
    queries: int = 11, keys: int = 7, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, queries, dim), (1, heads, keys, dim), (1, heads, keys, 3))
    return tuple(
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )  # type: ignore[return-value]


def masses(queries: int = 11, keys: int = 7, heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        (0.2 + torch.rand(1, heads, n, generator=generator, dtype=torch.float64)).requires_grad_()
        for n in (queries, keys)
    )  # type: ignore[return-value]


def plan_of(q: Tensor, k: Tensor, operator: zonal.Operator, path: str, **given: Tensor) -> Tensor:
    """W (B, H, T, S): what the identity as values returns."""
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return zonal.attention(q, k, eye, operator, path=path, **given)  # type: ignore[return-value]


@torch.no_grad()
@pytest.mark.parametrize("path", ["dense", "tiled"])
@pytest.mark.parametrize("name", ["balanced", "unbalanced", "near the kernel"])
def test_plans_are_those_of_pot(name: str, path: str) -> None:
    q, k, _ = draw()
    mu, nu = masses()
    weights = plan_of(q, k, m.softmax().replace(anchor=RULES[name]), path, query_mass=mu, key_mass=nu)
    for head in range(2):
        a, b = (x[0, head].numpy() / x[0, head].sum().item() for x in (mu, nu))
        cost = -(q[0, head] @ k[0, head].T / 2).numpy()
        if name == "balanced":
            expected = ot.bregman.sinkhorn_log(a, b, cost, 1.0, numItermax=10_000, stopThr=1e-15)
        else:
            reference = None if name == "unbalanced" else np.ones_like(cost)  # None: that of the masses
            expected = ot.unbalanced.sinkhorn_unbalanced(
                a, b, cost, 1.0, (1.0, 0.5), c=reference, numItermax=10_000, stopThr=1e-15
            )
        assert np.abs(weights[0, head].numpy() * a[:, None] - expected).max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("rho", [(1.0, 0.5), (None, 2.0), (0.3, None), (None, None), (0.0, 1.0), (None, 0.0)])
@pytest.mark.parametrize("reference", ["masses", "kernel"])
def test_the_plan_of_the_probe_is_that_of_the_anchor(
    rho: tuple[float | None, float | None], reference: Literal["masses", "kernel"]
) -> None:
    """One definition: ``probe.EntropicPlan`` on log K, and W of ``anchor.UnbalancedPlan`` on q and k, dense and tiled,
    with a key that is padding.
    """
    q, k, _ = draw()
    mu, nu = masses()
    there = torch.arange(k.shape[2]) != 1
    nu = nu * there
    rule = anchor.UnbalancedPlan(tolerance=1e-13, rho=rho, reference=reference)
    given = {"query_mass": mu, "key_mass": nu, "key_padding_mask": there[None]}
    dense, tiled = (plan_of(q, k, m.softmax().replace(anchor=rule), path, **given) for path in ("dense", "tiled"))
    assert (dense - tiled).abs().max() < 1e-11 * dense.abs().max()
    for head in range(2):
        a, b = (x / x.sum() for x in (mu[0, head], nu[0, head, there]))
        seen = probe.EntropicPlan(a, b, rho, reference).observe((q[0, head] @ k[0, head, there].T) / q.shape[-1] ** 0.5)
        assert ((dense[0, head][:, there] * a[:, None]) - seen.log.exp()).abs().max() < 1e-11 * seen.log.exp().max()
        assert not dense[0, head, :, 1].any()


@torch.no_grad()
def test_the_mass_of_a_plan_near_the_kernel_grows_with_the_tokens() -> None:
    """What the two references differ in: every token given twice leaves the mass of the one as it is, and not that of
    the other.
    """
    log_kernel = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    twice = log_kernel.repeat(2, 2)
    for reference, grows in (("masses", False), ("kernel", True)):
        once, again = (
            probe.EntropicPlan(rho=(1.0, 0.5), reference=reference).observe(each).log.exp().sum()
            for each in (log_kernel, twice)
        )  # type: ignore[arg-type]
        assert bool(again > 1.2 * once) is grows
        assert grows or torch.isclose(once, again)


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_those_of_all_steps_and_of_differences(name: str) -> None:
    """Tiles and the definition, each through its fixed point, against backward through every iteration and against
    finite differences; all inputs.
    """
    leaves = [*draw(5, 4, 1), *masses(5, 4, 1)]
    bias = torch.randn(1, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    implicit = m.softmax().replace(anchor=RULES[name])
    unrolled = m.softmax().replace(anchor=dataclasses.replace(RULES[name], gradient="unrolled"))

    def run(operator: zonal.Operator, path: str) -> tuple[Tensor, ...]:
        q, k, v, mu, nu = leaves
        y = zonal.attention(q, k, v, operator, query_mass=mu, key_mass=nu, key_bias=bias, path=path)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)  # type: ignore[union-attr]
        return (y, *torch.autograd.grad((y * weight).sum(), [*leaves, bias]))  # type: ignore[operator]

    exact = run(unrolled, "dense")
    for path in ("dense", "tiled"):
        for a, b in zip(run(implicit, path), exact, strict=True):
            assert (a - b).abs().max() < 1e-9
    with pytest.raises(PathError, match="gradient='implicit'"):
        run(unrolled, "tiled")
    y = zonal.attention(*leaves[:3], implicit, path="dense")
    assert isinstance(y, Tensor)
    (first,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(PathError, match=r"no second derivative.*gradient='unrolled'"):
        torch.autograd.grad(first.square().sum(), leaves[0])

    def tiled(q: Tensor, k: Tensor, v: Tensor, mu: Tensor, nu: Tensor, bias: Tensor) -> Tensor:
        return zonal.attention(q, k, v, implicit, query_mass=mu, key_mass=nu, key_bias=bias, path="tiled")  # type: ignore[return-value]

    assert torch.autograd.gradcheck(tiled, (*leaves, bias), eps=1e-5, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", RULES)
def test_compiled_passes_equal_the_definition(name: str) -> None:
    """In float32 with heads that share keys, a window, and documents: outputs and gradients to rounding."""
    lax = dataclasses.replace(RULES[name], tolerance=1e-6)
    for priors, edges in (((), None), (prior.Window(30, 45), None), ((), torch.tensor([0, 1, 40, 93]))):
        exact, single = (m.softmax(prior=priors).replace(anchor=rule) for rule in (RULES[name], lax))
        q, _, _ = draw(93, 93, 4, 16)
        _, k, v = draw(93, 93, 2, 16, seed=1)
        found = []
        for operator, dtype, path in ((exact, torch.float64, "dense"), (single, torch.float32, "tiled")):
            tensors = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            assert (
                dtype == torch.float64
                or transport.refusal(prepare(operator, *tensors, causal=False, cu_seqlens=edges)) is None
            )
            y = zonal.attention(*tensors, operator, cu_seqlens=edges, path=path)
            found.append([y, *torch.autograd.grad(y.square().sum(), tensors)])  # type: ignore[union-attr]
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() < 1e-5 * (1 + a.abs().max())


@torch.no_grad()
def test_sums_are_what_is_asked_for() -> None:
    q, k, _ = draw(40, 30)
    q = 3 * q
    softmax = plan_of(q, k, m.softmax(), "tiled").mean(2) * 30
    assert softmax.max() > 1.5
    assert softmax.min() < 0.5
    balanced, bounded = (
        plan_of(q, k, m.softmax().replace(anchor=rule), "tiled")
        for rule in (RULES["balanced"], anchor.BoundedPlan(tolerance=1e-12, low=0.5, high=1.5))
    )
    assert torch.allclose(balanced.mean(2) * 30, torch.ones(1, 2, 30, dtype=torch.float64), atol=1e-11)
    share = bounded.mean(2) * 30
    assert share.max() < 1.5 + 1e-10
    assert share.min() > 0.5 - 1e-10
    assert ((share > 0.5 + 1e-6) & (share < 1.5 - 1e-6)).any()
    for weights in (balanced, bounded):
        assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 40, dtype=torch.float64), atol=1e-12)
    # keys inside the range keep their odds among themselves, row by row
    wide = plan_of(q, k, m.softmax().replace(anchor=anchor.BoundedPlan(tolerance=1e-12, low=0.0, high=30.0)), "tiled")
    assert torch.allclose(wide, plan_of(q, k, m.softmax(), "tiled"), atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["sinkhorn(rho=(None, 0.0))", "sinkhorn(bounds=(0.0, 1000000.0))"])
def test_masses_of_keys_that_bind_nothing_are_biases(spec: str) -> None:
    q, k, v = draw()
    mass = torch.rand(k.shape[:3], dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
    y = zonal.attention(q, k, v, spec, key_mass=mass)
    assert torch.allclose(y, zonal.attention(q, k, v, "softmax", key_bias=mass.log()), atol=1e-10)


@torch.no_grad()
def test_gauges() -> None:
    """A balanced plan sees neither key biases nor longer keys' common part; softmax attention is the plan without a
    wish for keys.
    """
    q, k, v = draw()
    bias = 3 * torch.randn(1, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    balanced = m.softmax().replace(anchor=RULES["balanced"])
    for path in ("dense", "tiled"):
        assert torch.allclose(
            zonal.attention(q, k, v, balanced, key_bias=bias, path=path), zonal.attention(q, k, v, balanced), atol=1e-10
        )
        free = m.softmax().replace(anchor=anchor.UnbalancedPlan(rho=(None, 0.0)))
        assert torch.allclose(
            zonal.attention(q, k, v, free, path=path), zonal.attention(q, k, v, m.softmax()), atol=1e-12
        )
        near = m.softmax().replace(anchor=anchor.UnbalancedPlan(tolerance=1e-10, rho=(1e5, 1e5)))
        assert torch.allclose(zonal.attention(q, k, v, near, path=path), zonal.attention(q, k, v, balanced), atol=1e-4)


@torch.no_grad()
def test_warm_start_and_acceleration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Potentials that are nearly right take few iterations; slow problems take far fewer than plain steps do, and end
    at the same plan.
    """
    q, k, v = draw(60, 60, 1, 8)
    operator = m.sinkhorn(scale=2.0, tolerance=1e-9)
    cold = zonal.potentials(q, k, operator)
    warm = zonal.potentials(q, k + 1e-6, operator, start=cold)
    assert cold.error <= 1e-9
    assert warm.iterations < cold.iterations / 2
    assert torch.allclose(zonal.attention(q, k, v, operator, start=cold), zonal.attention(q, k, v, operator), atol=1e-6)
    y = zonal.attention(q, k, v, operator)
    monkeypatch.setattr(plan._Mixing, "next", lambda self, at, new, error: new)
    slow = m.sinkhorn(scale=2.0, tolerance=1e-9, limit=20_000)
    assert cold.iterations < zonal.potentials(q, k, slow).iterations / 3
    assert torch.allclose(y, zonal.attention(q, k, v, slow), atol=1e-6)  # type: ignore[arg-type]


def test_padding_changes_nothing() -> None:
    """Padded tokens neither give nor receive, whatever is in them; what is left is the plan of the shorter text."""
    q, k, v = (x.detach() for x in draw(9, 9))
    real = torch.arange(9)[None] < 6
    for name, rule in RULES.items():
        operator = m.softmax().replace(anchor=rule)
        short = zonal.attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], operator)
        for path in ("dense", "tiled"):
            for filler in (0.0, 1e4, float("nan")):
                tensors = [torch.where(real[:, None, :, None], x, filler) for x in (q, k, v.nan_to_num())]
                tensors[2] = tensors[2].nan_to_num()
                if path == "dense" and filler != filler:
                    tensors[0] = tensors[0].nan_to_num()
                mass = real[:, None].expand(-1, 2, -1).double()
                y = zonal.attention(*tensors, operator, key_padding_mask=real, query_mass=mass, path=path)
                assert torch.allclose(y[:, :, :6], short, atol=1e-9), (name, path, filler)  # type: ignore[index]
                assert (y[:, :, 6:] == 0).all()  # type: ignore[index]


_GROWTH = """
import resource, sys, torch, zonal
from zonal import mechanisms as m
def run(n):
    q, k, v = (torch.randn(1, 1, n, 32).requires_grad_() for _ in range(3))
    zonal.attention(q, k, v, m.sinkhorn(), path="tiled").sum().backward()
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(4000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_no_plan_is_kept() -> None:
    """4000 queries and keys, forward and backward, in less than half of the memory of one plan."""
    grown = subprocess.run([sys.executable, "-c", _GROWTH], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 4000 * 4000 * 4 / 1024 / 2


def test_suite_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient without the fixed point's part is another one."""
    q, k, v = draw()
    operator = m.softmax().replace(anchor=RULES["balanced"])
    exact = torch.autograd.grad(zonal.attention(q, k, v, operator, path="dense").square().sum(), q)[0]  # type: ignore[union-attr]
    y = zonal.attention(q, k, v, operator, path="tiled")
    monkeypatch.setattr(transport, "conjugate_gradients", lambda apply, wanted, *_: 0 * wanted)
    monkeypatch.setattr(transport, "_UNSOLVED", float("inf"))
    wrong = torch.autograd.grad(y.square().sum(), q)[0]  # type: ignore[union-attr]
    assert (wrong - exact).abs().max() > 1e-3


def bad(operator: zonal.Operator | None = None, **given: object) -> object:
    q, k, v = draw(6, 6)
    return zonal.attention(q, k, v, m.sinkhorn() if operator is None else operator, **given)  # type: ignore[call-overload]


def test_causal_plans_leak_and_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"must not be causal.*leaks the future.*plan is the identity"):
        bad(causal=True)
    for rule in (prior.Causal(), prior.ChunkCausal(2), prior.Decay()):
        with pytest.raises(ArgumentError, match=f"prior {type(rule).__name__}.*leaks the future"):
            bad(m.sinkhorn(prior=rule))
    with pytest.raises(ArgumentError, match=r"nn\.Attention.*causal=True leaks the future.*causal=False"):
        zonal.nn.Attention(8, 2, "sinkhorn")
    # a hierarchy limits nothing that a key receives
    for causal in (lambda: bad(m.hierarchical(), causal=True), lambda: zonal.nn.Attention(8, 2, "hierarchical")):
        with pytest.raises(ArgumentError, match="leaks the future: the queries of a block share their weights"):
            causal()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bad(query_mass=torch.ones(1, 2, 5)), r"query_mass must be floating point of shape \(1, 2, 6\)"),
        (lambda: bad(key_mass=-torch.ones(1, 2, 6)), "key_mass must be finite and >= 0"),
        (lambda: bad(key_mass=torch.full((1, 2, 6), float("nan"))), "key_mass must be finite"),
        (lambda: bad(key_mass=torch.ones(1, 2, 6), key_padding_mask=torch.arange(6)[None] < 4),
        "positive for keys that are seen by no query"),
        (lambda: bad(query_mass=torch.ones(1, 2, 6), key_padding_mask=torch.zeros(1, 6, dtype=torch.bool)),
        "positive for queries that see no key"),
        (lambda: bad(m.softmax(), key_mass=torch.ones(1, 2, 6)), r"has anchor Row. Use m.sinkhorn\(\)"),
        (lambda: bad(m.softmax(), start=zonal.potentials(*draw(6, 6)[:2], m.sinkhorn())),
        "start is for anchors that make a plan"),
        (lambda: bad(start=zonal.potentials(*draw(6, 5)[:2], m.sinkhorn())), "start.key must be finite potentials"),
        (lambda: bad(m.yat().replace(anchor=anchor.Plan())), r"use link.Exp\(\)"),
        (lambda: bad(return_memory=True), "reads all queries together"),
        (lambda: Memory.empty(m.sinkhorn(), 1, 1, 4, 4), "reads all queries together"),
        (lambda: zonal.potentials(*draw()[:2], m.softmax()), "makes no plan"),
        (lambda: m.sinkhorn(rho=(1.0, 1.0), bounds=(0.0, 2.0)), "rho .* or bounds"),
        (lambda: m.sinkhorn(rho=(-1.0, 1.0)), "two numbers >= 0"),
        (lambda: m.sinkhorn(bounds=(0.5, 0.9)), "low <= 1 <= high"),
        (lambda: m.sinkhorn(tolerance=0.0), "tolerance .* must be > 0"),
        (lambda: m.hierarchical(sizes=()), "at least one number"),
        (lambda: m.hierarchical(sizes=(1,)), "whole number >= 2"),
        (lambda: zonal.attention(*draw(6, 5), m.hierarchical()), "6 queries and 5 keys"),
        (lambda: bad(m.softmax(prior=prior.Window(2)).replace(anchor=anchor.Hierarchical())), "drop the Window prior"),
    ],
)  # fmt: skip
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_masses_that_no_plan_has(path: str) -> None:
    """A window that lets one query alone reach a key with much mass: an error that says what would do, and a plan where
    it is done.
    """
    q, k, v = draw(6, 6)
    window, mass = prior.Window(0, 0), torch.tensor([1.0, 1, 1, 1, 1, 7]).expand(1, 2, 6)
    with pytest.raises(ConvergenceError, match=r"limit=50 iterations.*query_mass, key_mass.*UnbalancedPlan"):
        zonal.attention(q, k, v, m.sinkhorn(limit=50, prior=window), key_mass=mass, path=path)
    kept = m.sinkhorn(limit=50, on_limit="keep", prior=window)
    assert torch.isfinite(zonal.attention(q, k, v, kept, key_mass=mass, path=path)).all()  # type: ignore[arg-type]
    zonal.attention(q, k, v, m.sinkhorn(rho=(1.0, 1.0), prior=window), key_mass=mass, path=path)
    zonal.attention(q, k, v, m.sinkhorn(prior=window), query_mass=mass, key_mass=mass, path=path)


@pytest.mark.parametrize("name", ["sinkhorn", "hyperbolic_transport"])
@pytest.mark.parametrize("kind", ["", "rho=(1.0, 1.0), ", "bounds=(0.9, 1.1), "])
def test_a_plan_that_is_not_quite_found_is_kept_where_that_is_asked(name: str, kind: str) -> None:
    q, k, v = (8 * x.detach() for x in draw(6, 6))
    with pytest.raises(ConvergenceError, match="on_limit='keep'"):
        zonal.attention(q, k, v, m.resolve(f"{name}({kind}limit=1, tolerance=1e-9)"))
    kept = zonal.attention(q, k, v, m.resolve(f"{name}({kind}limit=1, tolerance=1e-9, on_limit='keep')"))
    assert torch.isfinite(kept).all()


def test_scores_that_are_no_numbers() -> None:
    q, k, v = (x.detach() for x in draw(6, 6))
    k[0, 0, 2, 1] = float("nan")
    for path in ("dense", "tiled"):
        with pytest.raises(NonFiniteError, match="scores hold NaN"):
            zonal.attention(q, k, v, m.sinkhorn(), path=path)


# --- hierarchies ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3, 2)])
def test_hierarchy_is_the_closest_conditional(sizes: tuple[int, ...]) -> None:
    """Among conditionals with the ties of the tree: any step along them makes sum_t KL(W_t | softmax_t) larger, and
    none is sharper.
    """
    q, k, _ = draw(9, 9, 1)
    weights = plan_of(q, k, m.hierarchical(sizes), "tiled")[0, 0]
    softmax = plan_of(q, k, m.softmax(), "dense")[0, 0]
    spans = anchor.Hierarchical(sizes).spans(9)
    # the number of each pair's tie: pairs of one are alike
    place = torch.arange(9)
    tie = 1000 * place[:, None] + place[None]
    for child, parent in itertools.pairwise(spans):
        node = place // child
        apart = (node[:, None] != node[None]) & ((place // parent)[:, None] == (place // parent)[None])
        tie = torch.where(apart, -(100 * child + 10 * node[:, None] + node[None]) * 1000, tie)
    _, label = tie.unique(return_inverse=True)
    basis = torch.nn.functional.one_hot(label).double().permute(2, 0, 1)
    assert torch.allclose(
        torch.einsum("nts,ts->n", basis, weights)[label] / basis.sum((1, 2))[label], weights, atol=1e-12
    )
    # directions along the ties whose rows sum to zero
    rows = basis.sum(-1).T  # (t, n)
    _, _, right = torch.linalg.svd(rows)
    free = torch.einsum("mn,nts->mts", right[torch.linalg.matrix_rank(rows) :], basis)
    slope = ((weights / softmax).log() + 1)[None] * free
    assert slope.sum((1, 2)).abs().max() < 1e-10  # KL is convex: a point without slope is the least one
    assert torch.allclose(weights.sum(-1), torch.ones(9, dtype=torch.float64))


def test_hierarchy_of_one_block_is_softmax() -> None:
    q, k, v = draw(9, 9)
    assert torch.allclose(
        zonal.attention(q, k, v, m.hierarchical((16,)), path="tiled"), zonal.attention(q, k, v, m.softmax()), atol=1e-12
    )


def test_hierarchy_needs_scores_of_means() -> None:
    q, k, v = draw(9, 9)
    operator = m.rewa(parts=(2, 1, 1)).replace(anchor=anchor.Hierarchical((3,)))
    with pytest.raises(PathError, match=r"not the mean score.*path='dense'"):
        zonal.attention(q, k, v, operator, path="tiled")
    assert torch.isfinite(zonal.attention(q, k, v, operator)).all()  # type: ignore[arg-type]


ALONE: dict[str, tuple[int, int, dict[str, Tensor]]] = {
    "one key": (5, 1, {}),
    "one key that is no padding": (5, 3, {"key_padding_mask": torch.tensor([[True, False, False]])}),
    "one key a document": (4, 4, {"cu_seqlens": torch.tensor([0, 1, 2, 3, 4])}),
    "one key a document that is no padding": (
        7, 7, {"cu_seqlens": torch.tensor([0, 2, 5, 7]),
        "key_padding_mask": torch.tensor([[True, False, False, True, False, False, True]])}
    ),
}  # fmt: skip
"""Queries, keys, and what leaves each query one of them."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize(
    "spec", ["sinkhorn", "hyperbolic_transport", "sinkhorn(bounds=(0.5, 1.5))", "sinkhorn(rho=(None, 0.5))"]
)
def test_queries_with_one_key_have_finite_gradients(spec: str, case: str, biased: bool) -> None:
    """The system of the gradient is singular there, for one key gets all; tiles give what the definition gives, and
    nothing to scores that decide nothing.
    """
    queries, keys, given = ALONE[case]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 6, generator=generator, dtype=torch.float64) for n in (queries, keys, keys))
    bias = (
        torch.randn(1, 2, keys, generator=generator, dtype=torch.float64)
        if biased
        else torch.zeros(1, 2, keys, dtype=torch.float64)
    )
    found = {}
    for path, dtype in (("dense", torch.float64), ("tiled", torch.float64), ("tiled", torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, bias)]
        y = zonal.attention(*leaves[:3], m.resolve(spec).to(dtype), key_bias=leaves[3], path=path, **given)  # type: ignore[arg-type]
        grads = torch.autograd.grad(y.square().sum(), leaves)  # type: ignore[union-attr]
        assert all(grad.isfinite().all() for grad in grads)
        found[path, dtype] = grads
    exact = found["dense", torch.float64]
    for (_, dtype), grads in found.items():
        for one, other in zip(exact, grads, strict=True):
            assert (one - other).abs().max() < (1e-9 if dtype == torch.float64 else 1e-5) * (1 + one.abs().max())


@pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
def test_the_kernel_makes_the_passes_of_a_dot_product() -> None:
    page = zonal.explain(m.sinkhorn(), (1, 4, 600, 16))
    assert str(page.plan.routes[0]) == "tiled, C++ plan"


def test_a_plan_that_is_nearly_a_permutation_keeps_its_digits() -> None:
    """Its system of potentials is zero up to rounding, which once was inverted: outputs of 1e24 where gradients were
    asked for.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64), dim=-1)
    q = (24 * (keys + 0.05 * torch.randn(keys.shape, generator=generator, dtype=torch.float64))).requires_grad_()
    v = torch.randn(6, 1, 4, 3, generator=generator, dtype=torch.float64)
    operator = m.sinkhorn(tolerance=1e-13)
    y = zonal.attention(q, 12 * keys, v, operator, path="dense")
    assert torch.allclose(y, zonal.attention(q.detach(), 12 * keys, v, operator, path="dense"), atol=1e-9)
    assert torch.autograd.grad(y.sum(), q)[0].abs().max() < 1e-9

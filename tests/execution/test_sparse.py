"""The sparse path: hash laws, candidates, and what is kept of them, by torch in float64 and by the compiled kernel,
against the dense definition.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from matrix import CASES, Case, Inputs, inputs, randomised
from torch import Tensor

import zonal
from zonal import Operator, anchor, link, metric, prior, score
from zonal import mechanisms as m
from zonal.algebra import definition
from zonal.algebra.hashing import LSH
from zonal.errors import ArgumentError, PathError
from zonal.execution import plan
from zonal.execution.call import Call, prepare
from zonal.execution.machine import TYPICAL_CPU
from zonal.execution.paths import candidates, sparse
from zonal.execution.paths.coverage import coverage, measured
from zonal.features import hashing
from zonal.kernels import native as native_kernels
from zonal.kernels.build import BuildError
from zonal.kernels.op import encode
from zonal.kernels.sparse import SparseInputs, SparseSpec
from zonal.kernels.sparse import sparse as kernel

BODIES = (
    "torch",
    pytest.param(
        "kernel", marks=pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
    ),
)
# of torch in float64, and of the kernel in float32 against float64
TOLERANCE = {"torch": 1e-9, "kernel": 3e-5}
FEW = LSH(tables=3, bits=2, reach=4, window=3)
ALL = LSH(tables=1, bits=1, window=64)  # a window that has every key

SCORES: dict[str, Callable[[], Operator]] = {
    "softmax": m.softmax,
    "cosine": m.cosine,
    "euclidean": lambda: Operator(score.NegativeDistance(temperature=0.7), link.Exp()),
    "squared": lambda: Operator(score.NegativeDistance(metric.SquaredEuclidean(), 3.0), link.Exp()),
    "sphere": lambda: Operator(score.NegativeDistance(metric.Sphere(), 0.3), link.Exp()),
    "hyperbolic": lambda: Operator(score.NegativeDistance(metric.Hyperbolic(), 0.5), link.Exp()),
    "rewa": lambda: m.rewa(weights=(1.0, 2.0, 0.5), gates=(1.0, 0.5, 0.3), temperature=0.3),
    "adaptive": lambda: Operator(
        score.NegativeDistance(metric.Product((metric.Euclidean(), metric.Hyperbolic(scale=None)), adaptive=True), 0.5),
        link.Exp(),
    ),
    "operator": lambda: m.rewa_operator(rank=1, temperature=20.0),
}


def with_top(name: str, search: LSH, k: int = 4) -> Operator:
    return randomised(SCORES[name]().replace(anchor=anchor.TopK(k, search)))


def typed(operator: Operator, data: Inputs, body: str) -> tuple[Operator, Inputs]:
    """In float32 for the kernel."""
    return (operator, data.to(torch.float64)) if body == "torch" else (operator.float(), data.to(torch.float32))


def call_of(operator: Operator, data: Inputs) -> Call:
    return prepare(
        operator,
        data.q,
        data.k,
        data.v,
        causal=data.causal,
        key_padding_mask=data.key_padding_mask,
        cu_seqlens=data.cu_seqlens,
    )


def gradients(y: Tensor, data: Inputs, operator: Operator) -> list[Tensor]:
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    leaves = [data.q, data.k, data.v, *operator.parameters()]
    found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def same(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        if b.numel():
            error = (a.double() - b).abs().max().item()
            assert error <= tolerance * (1 + b.abs().max().item()), (
                f"item {index} (0 = output, then gradients) is off by {error:.3g}"
            )


def met_of(call: Call, search: LSH) -> Tensor:
    """bool (B, H, T, S): which keys are candidates, by brute force from the codes alone."""
    seen = call.visibility
    sized = search.sized(call.k.shape[2], hashing.spaces(call.bound.score))
    made = (hashing.functions(call.bound.score, sized, x, call.k.shape[3]) for x in (call.q, call.k))
    asked, held = (hashing.codes(functions, sized.tables) for functions in made)
    held = call.expand(held)
    met = torch.zeros(*call.q.shape[:3], call.k.shape[2], dtype=torch.bool)
    for b, h, t, table in (
        (b, h, t, i)
        for b in range(met.shape[0])
        for h in range(met.shape[1])
        for t in range(met.shape[2])
        for i in range(asked.shape[2])
    ):
        real = [
            s for s in range(int(seen.lo[t]), int(seen.hi[t]))
            if held[b, h, table, s] == asked[b, h, table, t] and (seen.key_mask is None or seen.key_mask[b, s])
        ]  # fmt: skip
        reach = search.window if table == 0 else search.reach
        own = sum(s <= seen.position[t] for s in real)
        end = min(max(own - (reach + 1) // 2, 0) + reach, len(real))
        met[b, h, t, real[max(end - reach, 0) : end]] = True
    return met


def on_candidates(operator: Operator, data: Inputs, search: LSH) -> Tensor:
    """The dense definition with all but the candidates forbidden."""
    call = call_of(operator, data)
    log_kernel = definition.kernel(call.bound, call.coefficients, call.q, call.expand(call.k)).masked_fill(
        ~met_of(call, search), float("-inf")
    )
    top = call.bound.anchor
    assert isinstance(top, anchor.TopK)
    kept = log_kernel.masked_fill(log_kernel < top.least(log_kernel), float("-inf"))
    whole = kept.logsumexp(-1, keepdim=True)
    return torch.where(whole > float("-inf"), kept - whole, float("-inf")).exp() @ call.expand(call.v)


SMALL = {name: case for name, case in CASES.items() if not case.key_bias}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("case_name", SMALL)
@pytest.mark.parametrize("name", ["softmax", "rewa"])
def test_equals_the_definition_where_every_key_is_met(name: str, case_name: str, body: str) -> None:
    exact = inputs(SMALL[case_name])
    operator = with_top(name, ALL)
    expected = exact.run(operator, "dense")
    wanted = [expected, *gradients(expected, exact, operator)]
    operator, data = typed(operator, exact, body)
    got = data.run(operator, "sparse")
    same([got, *gradients(got, data, operator)], wanted, TOLERANCE[body])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("case_name", ["causal-gqa-odd", "random-padding", "packed", "bidirectional"])
@pytest.mark.parametrize("name", SCORES)
def test_rows_are_those_of_their_candidates(name: str, case_name: str, body: str) -> None:
    """Outputs and gradients against the definition on the same keys, those that the codes' own words allow."""
    exact = inputs(replace(SMALL[case_name], key_dim=11, value_dim=9))  # eleven numbers are a 5 x 1 matrix's factors
    operator = with_top(name, FEW, 3)
    expected = on_candidates(operator, exact, FEW)
    wanted = [expected, *gradients(torch.nan_to_num(expected), exact, operator)]
    operator, data = typed(operator, exact, body)
    got = data.run(operator, "sparse")
    same([got, *gradients(got, data, operator)], wanted, TOLERANCE[body])


def test_a_lost_candidate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a body that forgets one key of each query is caught."""
    original = candidates.keys_of

    def forgetful(found: object, span: slice, reach: int) -> tuple[Tensor, Tensor]:
        key, fresh = original(found, span, reach)  # type: ignore[arg-type]
        return key, fresh & (fresh.cumsum(-1) != 2)

    monkeypatch.setattr(sparse, "keys_of", forgetful)
    data = inputs(SMALL["causal"])
    operator = with_top("softmax", ALL)
    with pytest.raises(AssertionError, match="is off by"):
        same([data.run(operator, "sparse")], [data.run(operator, "dense")], TOLERANCE["torch"])


@pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("case_name", SMALL)
def test_the_kernel_finds_the_same_places_as_torch(case_name: str) -> None:
    operator = with_top("softmax", FEW).float()
    call = call_of(operator, inputs(SMALL[case_name]).to(torch.float32))
    ours, theirs = (candidates.candidates(call, native) for native in (True, False))
    for name in ("start", "stop", "walk"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    if call.visibility.key_mask is None:  # in what order padding stands at the end is nobody's concern
        assert torch.equal(ours.order, theirs.order)


def test_simhash_law() -> None:
    """One sign agrees with probability 1 - angle / pi, b of them with its b-th power."""
    search = LSH(tables=4000, bits=2)
    for angle in (0.2, 1.0, 2.5):
        x = torch.tensor(
            [[1.0, 0.0, 0.0], [torch.cos(torch.tensor(angle)).item(), torch.sin(torch.tensor(angle)).item(), 0.0]]
        )
        (agree,) = hashing.cells(hashing.simhash(x, search, 0), search.tables)
        assert (agree[0] == agree[1]).double().mean().item() == pytest.approx((1 - angle / torch.pi) ** 2, abs=0.03)


def test_grid_law() -> None:
    """Cells agree with probability prod_k (1 - |D_k| / r)_+ over their offsets, D_k the difference of the projections:
    the mean over tables.
    """
    search = LSH(tables=4000, projections=2, width=1.5)
    x = torch.zeros(2, 6)
    for apart in (0.3, 1.0, 3.0):
        x[1] = apart * torch.tensor([1.0, -0.5, 0.2, 0.0, 0.7, 0.1])
        cells = torch.stack(hashing.cells(hashing.grid(x, search, 3), search.tables), -1)
        gap = (x[1] @ hashing.drawn(6, 4000, 2, 3).directions / 6**0.5).unflatten(-1, (4000, 2)).abs()
        law = (1 - gap / search.width).clamp_min(0).prod(-1).mean().item()
        assert (cells[0] == cells[1]).all(-1).double().mean().item() == pytest.approx(law, abs=0.03)


def test_hyperbolic_points_share_cells_by_radius_and_direction() -> None:
    operator = Operator(score.NegativeDistance(metric.Hyperbolic()), link.Exp())
    x = torch.tensor([[1.0, 0.0], [1.0, 0.001], [3.5, 0.0], [-1.0, 0.0]])[None, None]
    codes = hashing.codes(hashing.functions(operator.score, LSH(tables=500, bits=6, width=2.0), x, 2), 500)[0, 0, 1:]
    agree = [(codes[:, 0] == codes[:, i]).double().mean().item() for i in range(1, 4)]
    assert agree[0] > 0.98
    assert agree[1] < 0.02  # 2.5 apart, of cells of 2
    assert agree[2] < 0.05


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", ["softmax", "rewa"])
def test_later_tokens_change_nothing(name: str, body: str) -> None:
    """Candidates included: what a query meets does not depend on later queries, keys or values, however large."""
    operator, data = typed(
        with_top(name, LSH(tables=3, reach=4, window=2)), inputs(Case(queries=40, keys=40, key_dim=7)), body
    )
    with torch.no_grad():
        before = data.run(operator, "sparse")
        for x in (data.q, data.k, data.v):
            x[:, :, 23:] = 50 * torch.randn(x[:, :, 23:].shape, dtype=x.dtype)
        after = data.run(operator, "sparse")
    assert torch.equal(before[:, :, :23], after[:, :, :23])
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    "native",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
        ),
    ],
)
def test_self_and_window_are_always_met(native: bool) -> None:
    search = LSH(tables=1, bits=16, reach=1, window=5)
    operator = m.softmax().replace(anchor=anchor.TopK(2, search))
    q, k, v = torch.randn(3, 1, 2, 50, 6).unbind(0)
    call = prepare(operator, q, k, v, causal=True)
    key, fresh = candidates.keys_of(candidates.candidates(call, native), slice(None), 5)
    met = torch.zeros(1, 2, 50, 50).scatter_add_(-1, key, fresh.float()) > 0
    back = torch.arange(50)[:, None] - torch.arange(50)
    assert met[..., (back >= 0) & (back < 5)].all()
    assert not met[..., back < 0].any()


def clustered(tokens: int, clusters: int, noise: float = 0.3, heads: int = 2, dim: int = 32) -> tuple[Tensor, Tensor]:
    """Queries and keys around common centres, in no order."""
    generator = torch.Generator().manual_seed(0)
    centre = 1.5 * torch.randn(1, heads, clusters, dim, generator=generator)
    base = centre.gather(2, torch.randint(clusters, (1, heads, tokens, 1), generator=generator).expand(-1, -1, -1, dim))
    return base + noise * torch.randn(base.shape, generator=generator), base + noise * torch.randn(
        base.shape, generator=generator
    )


@pytest.mark.parametrize("name", ["softmax", "rewa"])
def test_clusters_are_found_and_noise_is_not(name: str) -> None:
    operator = (m.softmax() if name == "softmax" else m.rewa(temperature=0.05)).replace(anchor=anchor.TopK(64, LSH()))
    q, k = clustered(2048, 32)
    found = measured(operator, q, k, causal=True, rows=64)
    assert found.mass > 0.93
    assert found.mass <= found.exact_mass + 1e-6
    assert found.met < found.seen / 2
    lost = measured(operator, torch.randn(1, 2, 2048, 32), torch.randn(1, 2, 2048, 32), causal=True, rows=64)
    assert lost.mass < found.mass - 0.2
    assert 0 < lost.recall < 0.9


def test_coverage_counts() -> None:
    log_kernel = torch.tensor([[0.0, 1.0, 2.0, 3.0], [float("-inf")] * 4])
    met = torch.tensor([[True, False, True, True], [True] * 4])
    rows = coverage(log_kernel, met, 2)
    weight = log_kernel[0].double().softmax(-1)
    assert {name: x.tolist() for name, x in rows.items() if name not in ("mass", "exact_mass")} == {
        "recall": [1.0],
        "met": [3.0],
        "seen": [4.0],
    }
    assert rows["mass"].item() == pytest.approx((weight[2] + weight[3]).item())
    assert coverage(log_kernel, ~met, 2)["recall"].tolist() == [0.0]
    assert coverage(log_kernel[0], met[0], 2)["met"].tolist() == [3.0]  # one row without axes before it
    with pytest.raises(ArgumentError, match=r"coverage: log_kernel and a bool met of one shape"):
        coverage(log_kernel, met[:1], 2)


def test_explain_measures_a_sample() -> None:
    operator = m.softmax().replace(anchor=anchor.TopK(64, LSH()))
    q, k = clustered(512, 8)
    made = zonal.explain(operator, q.shape, causal=True, sample=(q, k))
    assert made.coverage is not None
    assert "of the attention mass" in str(made)
    assert "approximation [search]" in str(made)
    assert made.to_dict()["coverage"]["rows"] == 512
    flat = zonal.explain(operator, q.shape, causal=True, scale=0.0, sample=(q, k))
    assert flat.coverage is not None
    assert flat.coverage.mass < 0.9 * made.coverage.mass
    apart = zonal.explain(operator, q.shape, causal=True, packed=range(0, 513, 8), sample=(q, k))
    assert apart.coverage is not None
    assert apart.coverage.seen < 8
    with pytest.raises(ArgumentError, match="has no sparse path to measure"):
        zonal.explain(m.softmax(), q.shape, sample=(q, k))
    with pytest.raises(ArgumentError, match="sample must have the call's shapes"):
        zonal.explain(operator, q.shape, causal=True, sample=(q[:, :, :64], k))


def test_the_seed_decides() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 8).unbind(0)
    runs = [
        zonal.attention(
            q,
            k,
            v,
            m.softmax().replace(anchor=anchor.TopK(8, LSH(tables=2, reach=8, window=4, seed=seed))),
            path="sparse",
        )
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("body", BODIES)
def test_more_keys_asked_for_than_there_are(body: str) -> None:
    """k past S keeps every visible key, which is Row."""
    data = inputs(CASES["causal"])
    expected = data.run(randomised(m.softmax()), "dense")
    operator, data = typed(with_top("softmax", ALL, 1000), data, body)
    same([data.run(operator, path) for path in ("dense", "tiled", "sparse")], [expected] * 3, TOLERANCE[body])


@pytest.mark.parametrize("body", BODIES)
def test_equal_keys_are_all_kept_and_smooth(body: str) -> None:
    """Ties of the k-th largest stay, at coincident points and at the origin as elsewhere."""
    for name in ("softmax", "rewa", "hyperbolic", "sphere"):
        operator, data = typed(with_top(name, ALL, 2), inputs(Case(key_dim=6)), body)
        with torch.no_grad():
            data.k.copy_(data.k[:, :, :1].expand_as(data.k).clone())
            data.q.copy_(data.k)
            data.k[:, 1] = data.q[:, 1] = 0
        y = data.run(operator, "sparse")
        same([y], [(data.v.cumsum(2) / torch.arange(1, 18)[:, None]).detach()], 1e-5)
        assert all(torch.isfinite(g).all() for g in gradients(y, data, operator))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("apart", [1e-2, 1e-3, 1e-4])
def test_nearly_opposite_directions_keep_their_gradient(apart: float, body: str) -> None:
    """Of a distance whose slope by the squared gap grows without end there."""
    dtype = torch.float32 if body == "kernel" else torch.float64
    angles = torch.tensor([0.3, 1.0, 2.0, 0.7 + torch.pi - apart], dtype=torch.float64)
    keys, query = torch.stack([angles.cos(), angles.sin()], -1), torch.tensor([0.7, 0.7], dtype=torch.float64)
    query = torch.stack([query[:1].cos(), query[:1].sin()], -1)
    found = []
    for path, kind in (("dense", torch.float64), ("sparse", dtype)):
        operator = Operator(score.NegativeDistance(metric.Sphere(), 1.0), link.Exp(), anchor.TopK(10, ALL)).to(kind)
        q, k = ((query, keys)[i].to(dtype).to(kind)[None, None].requires_grad_() for i in range(2))
        y = zonal.attention(q, k, torch.arange(4.0, dtype=kind)[None, None, :, None], operator, path=path)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), (q, k))])
    same(found[1], found[0], TOLERANCE[body])


@pytest.mark.parametrize("body", BODIES)
def test_keys_that_are_not_numbers_spoil_no_earlier_row(body: str) -> None:
    operator, data = typed(
        with_top("softmax", LSH(tables=2, reach=4, window=3)), inputs(Case(queries=30, keys=30)), body
    )
    with torch.no_grad():
        clean = data.run(operator, "sparse")
        for bad in (float("nan"), float("inf")):
            data.k[:, :, 20] = bad
            y = data.run(operator, "sparse")
            assert torch.equal(y[:, :, :20], clean[:, :, :20])
            if bad != bad:
                assert y[:, :, 20:23].isnan().all()  # it is in their window, as every path has it


@pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
def test_bfloat16() -> None:
    operator = m.softmax().replace(anchor=anchor.TopK(6, ALL))
    data = inputs(Case(kv_heads=2, queries=33, keys=33, key_dim=16, value_dim=16)).to(torch.bfloat16)
    y = data.run(operator, "sparse")
    assert y.dtype == torch.bfloat16
    expected = data.to(torch.float64).run(operator, "dense")
    assert (y.double() - expected).abs().max() < 0.02
    assert all(g.dtype == torch.bfloat16 and torch.isfinite(g).all() for g in gradients(y, data, operator)[:3])


def test_after_a_memory() -> None:
    operator = m.softmax().replace(anchor=anchor.TopK(5, ALL))
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    whole = zonal.attention(q, k, v, operator, causal=True, path="dense")
    _, memory = zonal.attention(q[:, :, :25], k[:, :, :25], v[:, :, :25], operator, causal=True, return_memory=True)
    y, after = zonal.attention(
        q[:, :, 25:], k[:, :, 25:], v[:, :, 25:], operator, causal=True, memory=memory, path="sparse"
    )
    assert torch.allclose(y, whole[:, :, 25:], atol=1e-5)
    assert after.count == 40


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (m.softmax(), r"anchor Row weighs every key"),
        (
            m.softmax().replace(anchor=anchor.TopK(4)),
            r"declares no search.*Use path='dense' or path='tiled' or path='streaming', or path='auto'",
        ),
        (m.yat().replace(anchor=anchor.TopK(4, LSH())), r"link Yat may be large at far keys"),
        (m.softmax(prior=prior.ALiBi()).replace(anchor=anchor.TopK(4, LSH())), r"log priors"),
        (m.rewa(dot=0.1).replace(anchor=anchor.TopK(4, LSH())), r"a distance beside a dot product has no hash family"),
        (
            Operator(score.NegativeDistance(metric.FisherRao()), link.Exp(), anchor.TopK(4, LSH())),
            r"metric FisherRao has no hash family",
        ),
    ],
)
def test_refusals(operator: Operator, message: str) -> None:
    q = torch.randn(1, 2, 9, 9)
    with pytest.raises(PathError, match=r"path 'sparse' cannot run .*" + message):
        zonal.attention(q, q, q, operator, causal=True, path="sparse")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: anchor.TopK(0), "TopK: k must be a whole number >= 1"),
        (lambda: anchor.TopK(4, search=8), "TopK: search must be a search"),  # type: ignore[arg-type]
        (lambda: LSH(tables=0), "hashing.LSH: tables must be a whole number >= 1"),
        (lambda: LSH(bits=17), "bits must be at most 16"),
        (lambda: LSH(projections=5), "projections must be at most 4"),
        (lambda: LSH(width=0.0), r"width \(of a cell\) must be > 0"),
        (lambda: LSH(window=0), "window must be a whole number >= 1"),
    ],
)
def test_bad_declarations(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_declaration_is_written_and_read() -> None:
    operator = m.cosine().replace(anchor=anchor.TopK(7, LSH(tables=3, bits=5)))
    assert Operator.from_config(operator.config()).anchor == operator.anchor


def test_signed_kernels_are_refused() -> None:
    x = torch.randn(1, 1, 4, 4)
    with pytest.raises(ArgumentError, match="anchor TopK divides by a sum"):
        zonal.attention(x, x, x, m.linear().replace(score=score.Dot(), anchor=anchor.TopK(2)))


def test_the_planner_takes_it_where_tokens_are_many() -> None:
    """Only a declared search may be chosen, and only where it is cheaper."""
    operator = m.softmax().replace(anchor=anchor.TopK(256, LSH()))
    paths = {}
    for tokens in (128, 32768):
        q = torch.empty(1, 4, tokens, 64, device="meta")
        call = prepare(operator.to("meta"), q, q, q, causal=True)
        paths[tokens] = plan.choose(call, machine=TYPICAL_CPU, available=1 << 33).path
    assert paths[32768] == "sparse"
    assert paths[128] != "sparse"


def test_no_second_derivative() -> None:
    q = torch.randn(1, 1, 8, 4, requires_grad=True)
    for dtype in (torch.float32, torch.float64):
        x = q.to(dtype)
        y = zonal.attention(x, x, x, m.softmax().replace(anchor=anchor.TopK(2, ALL)), causal=True, path="sparse")
        with pytest.raises(PathError, match="path 'sparse' makes its forward pass again"):
            torch.autograd.grad(y.sum(), q, create_graph=True)


@pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("name", ["softmax", "rewa"])
def test_opcheck(name: str) -> None:
    operator = with_top(name, FEW).float()
    call = call_of(operator, inputs(Case(kv_heads=2, key_dim=7)).to(torch.float32))
    q, k, factors = sparse.points(call.bound.score, call.q.detach(), call.k.detach())
    found = candidates.candidates(call, native=True)
    tokens = (x.detach().requires_grad_() for x in (q, k, call.v))
    given = *SparseInputs(*tokens, *found), encode(SparseSpec(factors, 4))
    torch.library.opcheck(kernel.operator, given)


def test_without_the_kernel_torch_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = m.softmax().replace(anchor=anchor.TopK(3, FEW))
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind(0)
    expected = zonal.attention(q, k, v, operator, path="sparse")

    def broken(*_: object) -> Tensor:
        raise BuildError("build: no compiler today.")

    monkeypatch.setattr(sparse, "kernel", broken)
    with pytest.warns(UserWarning, match="torch's gathers run in place of the compiled kernel"):
        y = zonal.attention(q, k, v, operator, path="sparse")
    assert torch.allclose(y, expected, atol=1e-5)
    monkeypatch.setenv("ZONAL_KERNELS", "off")
    assert torch.allclose(zonal.attention(q, k, v, operator, path="sparse"), expected, atol=1e-5)
    assert zonal.explain(operator, q.shape).candidates == "torch, for the environment says ZONAL_KERNELS=off"


def test_compiled_by_torch() -> None:
    """The graph breaks where candidates are sought; what runs is the same."""
    operator = m.softmax().replace(anchor=anchor.TopK(3, FEW))
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind(0)
    run = torch.compile(lambda q: zonal.attention(q, k, v, operator, causal=True, path="sparse"), backend="eager")
    assert torch.equal(run(q), zonal.attention(q, k, v, operator, causal=True, path="sparse"))

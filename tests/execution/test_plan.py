"""The planner: its choice, its estimates against what really happens, and what it refuses."""

import inspect
import re
from dataclasses import replace

import pytest
import torch
from live_memory import LiveMemory
from matrix import CASES, OPERATORS, fitted, inputs

import zonal
from zonal import Operator, anchor, prior
from zonal import mechanisms as m
from zonal.errors import ArgumentError, PathError
from zonal.execution import plan, work
from zonal.execution import routes as table
from zonal.execution.call import Call, Held, prepare, resumed
from zonal.execution.machine import TYPICAL_CPU
from zonal.execution.paths import distance, tile
from zonal.execution.routes import ROUTES
from zonal.execution.shape import Shape, shape_of
from zonal.execution.work import Work
from zonal.kernels import native as native_kernels
from zonal.kernels.build import BuildError
from zonal.memory import Memory

GB = 1 << 30


def call_of(
    operator: Operator, queries: int, keys: int | None = None, *, batch: int = 1, heads: int = 2, kv_heads: int = 2,
    dim: int = 16,
    causal: bool = True, gradients: bool = False,
) -> Call:  # fmt: skip
    operator.requires_grad_(gradients)
    keys = queries if keys is None else keys
    q = torch.randn(batch, heads, queries, dim, requires_grad=gradients)
    k, v = (torch.randn(batch, kv_heads, keys, dim, requires_grad=gradients) for _ in range(2))
    return prepare(operator, q, k, v, causal=causal)


def chosen(
    operator: Operator,
    queries: int,
    keys: int | None = None,
    *,
    causal: bool = True,
    available: int = 64 * GB,
    heads: int = 2,
) -> str:
    return plan.choose(
        call_of(operator, queries, keys, causal=causal, heads=heads, kv_heads=heads),
        machine=TYPICAL_CPU,
        available=available,
    ).path


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def torch_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The borders below are those of torch's own paths; the compiled kernel, where there is one, moves them."""
    if "kernel" not in request.node.name:
        monkeypatch.setenv(native_kernels.VARIABLE, "off")


def test_short_is_dense_and_long_is_tiled() -> None:
    assert chosen(m.softmax(), 16) == "dense"
    assert chosen(m.softmax(), 2048) == "tiled"
    assert chosen(m.yat(), 16) == "dense"
    assert chosen(m.yat(), 2048) == "tiled"


def test_finite_features_are_carried_when_long() -> None:
    assert chosen(m.linear(), 2048) == "chunked"
    assert chosen(m.squared_affine(), 8192) == "chunked"
    assert chosen(m.ska(power=0), 1024) == "chunked"
    assert chosen(m.retention(), 2048) == "chunked"


def test_one_query_over_many_keys_is_one_row() -> None:
    """A single row of scores is less work than any state over all the keys."""
    assert chosen(m.softmax(), 1, 4096) == "dense"
    assert chosen(m.squared_affine(), 1, 4096) == "dense"


def test_choice_is_the_least_estimate() -> None:
    made = plan.choose(call_of(m.squared_affine(), 700), machine=TYPICAL_CPU, available=64 * GB)
    seconds = [estimate.seconds for estimate in made.estimates]
    assert seconds == sorted(seconds)
    assert made.path == made.estimates[0].path
    assert made.estimates[1].path in made.reason


def test_same_input_same_plan() -> None:
    first, second = (plan.choose(call_of(m.linear(), 512), machine=TYPICAL_CPU) for _ in range(2))
    assert first == second


def test_choice_follows_the_machine() -> None:
    """A machine on which calls cost much takes few of them, one on which memory is slow moves little."""
    call = call_of(m.softmax(), 200)
    assert plan.choose(call, machine=replace(TYPICAL_CPU, call=1e-3)).path == "dense"
    assert plan.choose(call, machine=replace(TYPICAL_CPU, call=1e-9, bandwidth=1e9)).path == "tiled"


def test_attention_takes_the_planned_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """``path="auto"`` runs what ``choose`` says."""
    q = torch.randn(1, 2, 40, 8)
    for path in ("dense", "tiled"):
        seen = []
        route = next(route for route in ROUTES if route.path == path)
        route = replace(route, run=lambda call, path=path, seen=seen: (seen.append(path) or call.v, None))
        made = plan.Choice((route,), unranked="because")
        monkeypatch.setitem(inspect.unwrap(zonal.attention).__globals__, "choose", lambda call, path, made=made: made)
        zonal.attention(q, q, q, m.softmax(), causal=True)
        assert seen == [path]


def test_a_refusal_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each path, and of each route of those that can run the call."""
    asked = []

    def counted(name, refuse):
        return lambda call: asked.append(name) or refuse(call)

    monkeypatch.setattr(table, "PATHS", {path: counted(path, refuse) for path, refuse in table.PATHS.items()})
    monkeypatch.setattr(
        table, "ROUTES", tuple(replace(route, refuse=counted(str(route), route.refuse)) for route in ROUTES)
    )
    q = torch.randn(1, 2, 40, 8)
    for operator in (m.softmax(), m.ska(power=1), m.linear()):
        asked.clear()
        zonal.attention(q, q, q, operator, causal=True)
        assert len(asked) == len(set(asked))
        asked.clear()
        zonal.attention(q, q, q, operator, causal=True, path="dense")
        assert asked == ["dense", "dense, torch"]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_with_the_number() -> None:
    call = call_of(m.softmax(), 600)
    full = plan.choose(call, machine=TYPICAL_CPU, available=64 * GB)
    dense = next(estimate for estimate in full.estimates if estimate.path == "dense")
    made = plan.choose(call, machine=TYPICAL_CPU, available=dense.peak_bytes - 1)
    assert f"{dense.peak_bytes:,} bytes" in made.refused["dense"]
    assert f"{dense.peak_bytes - 1:,} are available" in made.refused["dense"]
    assert made.path == "tiled"
    assert "dense" not in plan.choose(call, machine=TYPICAL_CPU, available=dense.peak_bytes).refused


def test_nothing_fits_takes_the_least_and_says_so() -> None:
    made = plan.choose(call_of(m.softmax(), 600), machine=TYPICAL_CPU, available=10)
    assert made.path == min(made.estimates, key=lambda estimate: estimate.peak_bytes).path
    assert "no path fits in the 10 bytes" in made.reason
    assert made.path not in made.refused


def test_free_memory_is_asked_only_when_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("zonal.device_memory.free", lambda device: asked.append(device) or 1 << 20)
    assert plan.choose(call_of(m.softmax(), 64), machine=TYPICAL_CPU).path == "dense"
    assert not asked
    made = plan.choose(call_of(m.softmax(), 600), machine=replace(TYPICAL_CPU, memory_bytes=1 << 27))
    assert asked
    assert "1,048,576 are available" in made.refused["dense"]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "causal", "path", "why"),
    [
        (m.softmax(), True, "chunked", "no finite feature map"),
        (m.ska(power=1), True, "tiled", "solves with the kernel among keys"),
        (m.linear(), False, "streaming", "every query waits for the last key"),
        (m.linear().replace(prior=prior.Window(4)), True, "chunked", "does not keep positions"),
        (m.yat().replace(anchor=anchor.Ridge()), True, "chunked", "not the plain product"),
    ],
)
def test_impossible_paths_are_refused_with_the_reason(operator: Operator, causal: bool, path: str, why: str) -> None:
    call = call_of(operator, 20, causal=causal)
    made = plan.choose(call, machine=TYPICAL_CPU)
    assert why in made.refused[path]
    assert made.path not in made.refused
    with pytest.raises(PathError, match=why) as caught:
        plan.choose(call, path)
    text = str(caught.value)
    assert f"path '{path}'" in text
    allowed = [other for other in plan.PATHS if f"path='{other}'" in text]
    assert allowed == [other for other in plan.PATHS if other not in made.refused]
    for other in allowed:
        plan.choose(call, other)


@pytest.mark.parametrize("path", ["auto", "dense"])
def test_only_what_is_mapped_is_to_be_folded(path: str) -> None:
    """Dropout after a memory of sums was refused with advice on torch.func, which was not at work."""
    x = torch.randn(1, 2, 4, 5)
    memory = Memory.empty(m.linear(), 1, 2, 5, 5).absorb(x, x)
    with pytest.raises(PathError, match="has only sums") as caught:
        zonal.attention(x, x, x, memory.operator, causal=True, memory=memory, dropout=0.1, path=path)
    assert "torch.func" not in str(caught.value)
    assert ("set dropout to 0" in str(caught.value).lower()) == (path == "auto")


def test_unknown_path() -> None:
    with pytest.raises(ArgumentError, match="Did you mean 'tiled'"):
        plan.choose(call_of(m.softmax(), 4), "tilde")


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("name", OPERATORS)
def test_refusals_are_those_of_the_paths(name: str, case_name: str) -> None:
    """What the planner refuses fails when forced, and what it offers runs."""
    operator = OPERATORS[name]().double()
    case = fitted(operator, CASES[case_name])
    data = inputs(case)
    call = prepare(
        operator,
        data.q,
        data.k,
        data.v,
        causal=data.causal,
        key_padding_mask=data.key_padding_mask,
        cu_seqlens=data.cu_seqlens,
        key_bias=data.key_bias,
    )
    made = plan.choose(call, machine=TYPICAL_CPU)
    assert made.estimates
    assert {estimate.path for estimate in made.estimates} | set(made.refused) == set(plan.PATHS)
    for path in plan.PATHS:
        if path in made.refused:
            with pytest.raises(PathError, match=re.escape(made.refused[path])):
                data.run(operator, path)
        else:
            data.run(operator, path)


# -- memories --------------------------------------------------------------------------------------------------------


def after(call: Call, memory: Memory) -> Call:
    return resumed(call, memory)


def filled(operator: Operator, tokens: int, kind: str | None = None) -> Memory:
    memory = Memory.empty(operator, 1, 2, 16, 16, kind=kind)
    return memory.absorb(torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 16))


def test_a_token_after_a_memory_streams() -> None:
    for operator in (m.softmax(), m.squared_affine(), m.ska(power=1), m.retention()):
        made = plan.choose(after(call_of(operator, 1), filled(operator, 2000)), machine=TYPICAL_CPU)
        assert made.path == "streaming", operator.name


def test_sums_refuse_paths_that_need_keys() -> None:
    operator = m.squared_affine()
    made = plan.choose(after(call_of(operator, 300), filled(operator, 50)), machine=TYPICAL_CPU)
    assert set(made.refused) == {"dense", "tiled", "sparse"}
    assert "kind='keys'" in made.refused["dense"]
    assert made.path == "chunked"


def test_kept_keys_refuse_sums() -> None:
    operator = m.squared_affine()
    made = plan.choose(after(call_of(operator, 300), filled(operator, 50, "keys")), machine=TYPICAL_CPU)
    assert set(made.refused) == {"chunked", "sparse"}


def test_a_longer_past_costs_more_where_keys_are_kept() -> None:
    operator = m.softmax()
    short, long = (
        plan.choose(after(call_of(operator, 1), filled(operator, n)), machine=TYPICAL_CPU).estimates[0]
        for n in (64, 4096)
    )
    assert long.seconds > short.seconds
    operator = m.linear()
    short, long = (
        plan.choose(after(call_of(operator, 1), filled(operator, n)), machine=TYPICAL_CPU).estimates[0]
        for n in (64, 4096)
    )
    assert long == short


# -- the estimates ---------------------------------------------------------------------------------------------------

MEASURED = [
    ("softmax", {"queries": 512, "heads": 4, "kv_heads": 4}, "dense tiled"),
    ("softmax", {"queries": 300, "batch": 2, "heads": 4, "gradients": True}, "dense tiled"),
    ("sko", {"queries": 300, "batch": 2, "heads": 4, "gradients": True}, "dense tiled"),
    ("squared_affine", {"queries": 512, "heads": 4}, "dense tiled chunked"),
    ("squared_affine", {"queries": 1, "keys": 700}, "dense tiled chunked streaming"),
    ("squared_affine", {"queries": 600, "gradients": True}, "dense tiled chunked"),
    ("linear", {"queries": 256, "causal": False, "gradients": True}, "dense tiled chunked"),
    ("linear", {"queries": 40, "gradients": True}, "dense tiled chunked streaming"),
    ("yat", {"queries": 300, "gradients": True}, "dense tiled"),
    ("retention", {"queries": 700, "gradients": True}, "dense tiled chunked"),
    ("ska(power=0)", {"queries": 256, "heads": 4}, "dense chunked"),
    ("ska(power=1)", {"queries": 200, "gradients": True}, "dense chunked"),
    ("ska(power=1)", {"queries": 1, "keys": 700}, "dense chunked streaming"),
    ("ridge(chunk=16)", {"queries": 200, "causal": False, "gradients": True}, "dense chunked"),
]


@pytest.mark.parametrize(
    ("spec", "shape", "path"),
    [(spec, shape, path) for spec, shape, paths in MEASURED for path in paths.split()],
    ids=lambda x: x if isinstance(x, str) else "-".join(str(v) for v in x.values()),
)
def test_estimates_are_near_what_happens(spec: str, shape: dict, path: str) -> None:
    """Peak memory, which decides what fits, within a factor of two and a half; torch calls within three."""
    call = call_of(m.resolve(spec), **shape)
    route = plan.choose(call, path).routes[0]
    found = plan.estimated(route, shape_of(call), TYPICAL_CPU)
    call.tokens  # noqa: B018 - what the score prepares is no path's own
    with LiveMemory() as live:
        y = route.run(call)[0]
        if call.recorded:
            torch.autograd.grad(
                y.square().sum(), [x for x in (call.q, call.k, call.v) if x.requires_grad], allow_unused=True
            )
    assert live.peak / 2.5 < found.peak_bytes < live.peak * 2.5
    assert live.calls / 3 < found.calls < live.calls * 3


def best(operator: Operator, changes: dict) -> dict[str, Work]:
    """What each route of a call does."""
    call = call_of(operator, **{"queries": 160, "batch": 1, "heads": 2, "kv_heads": 2, "dim": 16, **changes})
    return {str(route): route.work(shape_of(call)) for route in table.asked(call).routes}


@pytest.mark.parametrize("spec", ["softmax", "sko", "squared_affine", "linear", "ska(power=1)", "retention"])
def test_longer_costs_more(spec: str) -> None:
    """The work of every route grows with the number of tokens, the batch, the heads and gradients."""
    operator = m.resolve(spec)
    small = best(operator, {})
    for change in ({"queries": 640}, {"batch": 3}, {"heads": 4, "kv_heads": 4}, {"gradients": True}):
        big = best(operator, change)
        for route in small.keys() & big.keys():
            assert big[route].multiply_adds > small[route].multiply_adds, (route, change)
            assert big[route].bytes > small[route].bytes, (route, change)
            assert big[route].peak_bytes > small[route].peak_bytes, (route, change)


def test_causality_halves_tiles_and_not_the_dense_path() -> None:
    tied, free = (shape_of(call_of(m.softmax(), 4096, causal=causal)) for causal in (True, False))
    assert work.dense(tied).multiply_adds == work.dense(free).multiply_adds
    assert 0.5 < work.tiles(tied).multiply_adds / work.tiles(free).multiply_adds < 0.55


def test_a_window_bounds_the_tiles() -> None:
    whole, near = (shape_of(call_of(m.softmax(prior=p), 4096)) for p in ((), prior.Window(100)))
    assert work.tiles(near).multiply_adds < 0.2 * work.tiles(whole).multiply_adds


def test_double_precision_costs_more() -> None:
    single = shape_of(call_of(m.softmax(), 1000, heads=16, kv_heads=16))
    double = single._replace(itemsize=8)
    for path in ("dense", "tiled"):
        route = next(route for route in ROUTES if str(route) == f"{path}, torch")
        a, b = (plan.estimated(route, shape, TYPICAL_CPU) for shape in (single, double))
        assert b.seconds > 1.3 * a.seconds
        assert b.peak_bytes == pytest.approx(2 * a.peak_bytes, rel=0.05)


def test_dense_solve_is_a_sixth_of_a_cube() -> None:
    """For one head and long sequences the dual ridge costs S^3/6 multiply-adds for the factor, S^2 T for two solves."""
    s = shape_of(call_of(m.ridge(), 2000, heads=1, kv_heads=1, dim=4))
    assert work.dense(s).multiply_adds == pytest.approx((1 / 6 + 1) * 2000**3, rel=0.02)


@pytest.mark.parametrize("case_name", [name for name, case in CASES.items() if not case.key_bias])
@pytest.mark.parametrize("name", ["softmax", "softmax-window", "softmax-strict", "ridge", "sko-chunk"])
def test_pairs_are_counted(name: str, case_name: str) -> None:
    """About as many pairs as the mask itself allows, where these are many."""
    case = CASES[case_name]
    data = inputs(case)
    call = prepare(
        OPERATORS[name]().double(),
        data.q,
        data.k,
        data.v,
        causal=data.causal,
        cu_seqlens=data.cu_seqlens,
    )
    allowed = float((call.visibility.hi - call.visibility.lo).clamp_min(0).sum())
    slack = case.queries * (1 if call.chunk is None else call.chunk) + 2
    assert abs(shape_of(call).pairs - allowed) <= max(slack, 0.5 * allowed)


def test_planning_asks_torch_nothing() -> None:
    """A choice needs no call of torch but questions about documents, and no memory."""
    call = call_of(m.softmax(), 16)
    with LiveMemory() as live:
        plan.choose(call, machine=TYPICAL_CPU)
    assert live.calls <= 4
    assert live.peak <= 64


def test_a_million_tokens_are_planned() -> None:
    """Long calls are planned from rules; nothing of their size is made."""
    q = torch.empty(1, 2, 1 << 20, 16, device="meta")
    call = prepare(m.squared_affine().to("meta"), q, q, q, causal=True)
    made = plan.choose(call, machine=TYPICAL_CPU, available=64 * GB)
    assert made.path == "chunked"
    assert "dense" in made.refused


def test_a_shape_reads_in_words() -> None:
    call = replace(call_of(m.softmax(), 1, heads=4, dim=8), held=Held("keys", 7))
    assert str(shape_of(call)) == "B=1 H=4 (kv 2) T=1 S=1 D=8 P=8 after 7 tokens"


@pytest.mark.parametrize("operator", [m.squared_affine(), m.ska(power=1)])
def test_no_sequences_have_a_plan_of_the_kernel(operator: Operator) -> None:
    for gradients in (False, True):
        call = call_of(operator, 5, batch=0, gradients=gradients)
        assert plan.choose(call, machine=TYPICAL_CPU, available=GB).estimates


def test_distances_in_the_kernel_cost_by_their_kind() -> None:
    """A sphere is dearer than a plane, a hyperbolic space dearer still, and the three more than each; measured: 1.0,
    1.3, 1.3 and 1.6 at 48 numbers.
    """
    calls = [
        call_of(m.rewa(gates=None, parts=parts), 1024, dim=48)
        for parts in ((48, 0, 0), (0, 48, 0), (0, 0, 48), (16, 16, 16))
    ]
    if distance.refusal(calls[0]) is not None:
        pytest.skip("no compiled kernel on this machine")
    done = [work.distances(shape_of(call)).multiply_adds for call in calls]
    assert done == sorted(done)
    assert 1.1 < done[-1] / done[0] < 2


def test_the_kernel_moves_the_border() -> None:
    """Compiled tiles beat the dense path from shorter sequences on, and a long row of features too."""
    if tile.refusal(call_of(m.yat(), 16)) is not None:
        pytest.skip("no compiled kernel on this machine")
    assert chosen(m.yat(), 64, heads=8) == "tiled"
    assert chosen(m.linear(), 8192) == "chunked"
    shape: Shape = shape_of(call_of(m.yat(), 512, gradients=True))
    kernel, torch_ = work.compiled_tiles(shape), work.tiles(shape)
    assert kernel.bytes < torch_.bytes
    assert kernel.peak_bytes < torch_.peak_bytes
    # forward two products, backward five
    assert 3 < kernel.multiply_adds / work.compiled_tiles(shape._replace(gradients=False)).multiply_adds < 4


def test_the_next_route_runs_where_a_kernel_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning that names both, and the same result."""
    call = call_of(m.softmax(), 40)
    torch_ = next(route for route in ROUTES if str(route) == "tiled, torch")

    def broken(call: Call) -> table.Result:
        raise BuildError("no room")

    kernel = replace(torch_, name="C++", run=broken)
    with pytest.warns(UserWarning, match=r"torch's tiles run in place of the compiled kernel.*no room"):
        y = plan.run(plan.Choice((kernel, torch_)), call)[0]
    assert torch.equal(y, torch_.run(call)[0])

"""The compiled kernel for sums over features: against the float64 definition, its limits, and torch's machinery."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from kernels import general
from kernels.general import everything, sample
from kernels.sums_cases import KINDS, assert_as_good
from matrix import CASES, PAIRED, Case, Inputs, fitted, inputs, randomised

import zonal
from zonal import Operator, prior
from zonal import mechanisms as m
from zonal.execution.call import Call, Held, empty_memory, prepare, resumed
from zonal.execution.paths import sums as sums_path
from zonal.execution.paths import tile as tile_path
from zonal.execution.paths.chunked import refusal
from zonal.execution.shape import shape_of
from zonal.execution.work import compiled_sums
from zonal.features import SymmetricPowers
from zonal.kernels import native as native_kernels
from zonal.kernels import sums as sums_kernel
from zonal.kernels.op import encode
from zonal.kernels.sums import SumsSpec, sums
from zonal.models import ModelConfig

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

# long enough for the state to be read, and for blocks that are not whole
LARGE = {
    "causal 333": Case(queries=333, keys=333, key_dim=6, value_dim=7),
    "one head 500": Case(batch=1, heads=1, kv_heads=1, queries=500, keys=500, key_dim=5, value_dim=20),
    "d 32": Case(batch=1, heads=2, kv_heads=2, queries=1500, keys=1500, key_dim=32, value_dim=32),
    "queries of a quarter": Case(heads=8, kv_heads=2, queries=290, keys=290, key_dim=4, value_dim=16),
    "late queries": Case(queries=100, keys=555, key_dim=5, value_dim=33, kv_heads=2),
    "early queries": Case(queries=400, keys=300, key_dim=5, value_dim=17),
    "bidirectional": Case(queries=270, keys=410, key_dim=5, value_dim=15, causal=False),
    "left padding": Case(padding="left", queries=350, keys=350, key_dim=4, value_dim=11),
    "random padding": Case(padding="random", queries=350, keys=350, key_dim=4, value_dim=11, kv_heads=1),
    "documents": Case(batch=1, packed=(0, 1, 40, 300, 311, 650), queries=650, keys=650, key_dim=4, value_dim=8),
    "key bias": Case(key_bias=True, padding="random", queries=310, keys=310, key_dim=4, value_dim=9, kv_heads=2),
    "strided": Case(strided=True, queries=300, keys=300, key_dim=8, value_dim=12),
}
# features of higher powers grow fast with the dimension, and a dense reference in float64 takes its time
HEAVY = {"sko-3", "degree-6", "sko", "polynomial_square"}


def call_of(operator: Operator, data: Inputs) -> Call:
    return data.call(operator)


# what the kernel must run, on every input that fits but for heads with too many features
NAMES = (
    "linear", "retention", "sko", "sko-fractional", "sko-reproducing", "squared_affine", "polynomial_square", "slay",
    "performer", "hedgehog",
    "rewa_functional-linear", "sko-chunk", "squared_affine-count", "squared_affine-raw", "squared_affine-strict",
    "squared_affine-chunk", "sko-1", "sko-3",
    "degree-6", "squared_affine-decay", "squared_affine-decay-count", "identity-count", "linear-relu",
)  # fmt: skip
# these meet every input, the others share them out between them
EVERY = (
    "linear",
    "retention",
    "sko-fractional",
    "squared_affine",
    "squared_affine-chunk",
    "squared_affine-decay-count",
    "identity-count",
)
SHARES = 4


def selected() -> dict[str, tuple[str, Case]]:
    """By name: an operator, and an input that the kernel must run."""
    found: dict[str, tuple[str, Case]] = {}
    rows = {**PAIRED, **{row: CASES[row] for row in ("no-keys", "no-queries")}, **LARGE}
    for place, name in enumerate(NAMES):
        operator, seen = KINDS[name](), set()
        for number, (row, case) in enumerate(rows.items()):
            case = fitted(operator, case)
            # a query that sees one key of nearly no weight has a gradient of zero, from large terms that cancel
            cancels = name.startswith("squared_affine") and (
                case.keys == 1 or (name == "squared_affine-strict" and row in PAIRED)
            )
            if (
                case not in seen
                and not cancels
                and not (name in HEAVY and row == "d 32")
                and (name in EVERY or number % SHARES == place % SHARES)
            ):
                seen.add(case)
                found[f"{name}/{row}"] = name, case
    return found


SELECTED = selected()


def test_the_table_says_all() -> None:
    """No other operator is run."""
    for name in set(KINDS) - set(NAMES):
        operator = KINDS[name]().float()
        call = call_of(operator, inputs(fitted(operator, CASES["causal"])).to(torch.float32))
        assert refusal(call) is not None or operator.tags.solves or sums_path.refusal(call) is not None, (
            f"the kernel now runs {name}, too: add it to the table"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("selection", SELECTED)
def test_kernel_equals_definition(selection: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and every gradient, with at most twice the error of the dense path in the same precision."""
    name, case = SELECTED[selection]
    operator = randomised(KINDS[name]()).float()
    data = inputs(case).to(dtype)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    truth = everything(double, exact, "dense")
    called: list[str] = []
    original = sums_path._run
    monkeypatch.setattr(sums_path, "_run", lambda *given: called.append("kernel") or original(*given))
    got = everything(operator, data, "chunked")
    assert called[:1] == ["kernel"]
    assert_as_good(got, everything(operator, data, "dense"), truth, dtype)


def test_every_polynomial_link_is_met() -> None:
    """The test above runs each of them, and most of its long cases read the state."""
    assert {type(KINDS[name]().link).__name__ for name in NAMES} == {
        "Gegenbauer",
        "Identity",
        "PolynomialSquare",
        "SquaredAffine",
    }


@pytest.mark.parametrize(
    ("degree", "lowest", "dim"),
    [(1, 1, 5), (1, 0, 3), (2, 0, 1), (2, 0, 2), (2, 0, 6), (2, 0, 7), (3, 0, 4), (4, 0, 5), (5, 0, 3), (6, 0, 3)],
)
def test_features_are_those_of_memories(degree: int, lowest: int, dim: int) -> None:
    """The kernel's products, weighted and put in place, are SymmetricPowers' features; runs are what they say."""
    table = sums_kernel.tables(degree, lowest, dim)
    x = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low = [torch.ones((), dtype=torch.float64), *x]
    for a, b in list(zip(table.low_left.tolist(), table.low_right.tolist(), strict=True))[dim + 1 :]:
        low.append(low[a] * low[b])
    rows = torch.stack(low)
    found = torch.empty(table.left.shape[0], dtype=torch.float64)
    found[table.place.long()] = rows[table.left.long()] * rows[table.right.long()] * table.squares.double().sqrt()
    assert torch.allclose(found, SymmetricPowers(degree, lowest)(x), rtol=1e-13)
    assert torch.allclose(table.roots.double().square(), table.squares.double(), rtol=1e-6)
    assert (table.left.diff() >= 0).all()
    for a, end in enumerate(table.run_end.tolist()):
        assert (table.left[a:end] == table.left[a]).all()
        assert (table.right[a:end] == table.right[a] + torch.arange(end - a)).all()


# -- its limits ------------------------------------------------------------------------------------------------------


run = functools.partial(general.run, path="chunked")


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_stays_where_it_is(where: str) -> None:
    """A NaN key poisons the queries that see it, a NaN query itself, and nothing else."""
    q, k, v = (x.detach().clone() for x in sample(300))
    (q if where == "q" else k)[0, 1, 130] = float("nan")
    bad = torch.isnan(zonal.attention(q, k, v, m.squared_affine(), causal=True, path="chunked")).any(-1)
    expected = torch.zeros_like(bad)
    expected[0, 1, slice(130, 131) if where == "q" else slice(130, None)] = True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_again(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        operator, tensors = (
            m.squared_affine(learn_bias=True).replace(prior=prior.Decay((0.99,))),
            sample(heads=4, dim=8),
        )
        first = run(operator, tensors)
        assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(operator, tensors), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["squared_affine", "sko-3", "identity-count"])
def test_few_heads_are_split_over_values(name: str) -> None:
    """One head on five threads: each has columns of the values, and their parts of dq and dk make the same gradient."""
    operator = randomised(KINDS[name]()).float()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 1, 400, dim, generator=generator).requires_grad_() for dim in (5, 5, 43)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            found.append(run(operator, tensors))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-5 * (1 + b.abs().max())


def test_wrong_tables_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: one feature's weight off by a thousandth changes what comes from the state."""
    operator, tensors = m.squared_affine(), [x.detach() for x in sample(300)]
    good = zonal.attention(*tensors, operator, causal=True, path="chunked")
    original = sums_kernel.tables

    def broken(degree: int, lowest: int, dim: int) -> sums_kernel.Tables:
        table = original(degree, lowest, dim)
        squares = table.squares.clone()
        squares[-1] *= 1.001
        return table._replace(squares=squares)

    monkeypatch.setattr(sums_kernel, "tables", broken)
    bad = zonal.attention(*tensors, operator, causal=True, path="chunked")
    assert torch.equal(good[:, :, :64], bad[:, :, :64])
    assert (good - bad).abs().max() > 1e-5


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = sample(20)
    call = prepare(m.squared_affine(), q, k, v, causal=True)
    assert sums_path.refusal(call) is None
    for kind in ("features", "decayed"):
        assert sums_path.refusal(replace(call, held=Held(kind, 7))) is None
    assert "'keys'" in str(sums_path.refusal(replace(call, held=Held("keys", 7))))
    assert sums_path.refusal(prepare(m.retention(), q, k, v, causal=True)) is None
    assert "ALiBi" in str(
        sums_path.refusal(prepare(m.squared_affine().replace(prior=prior.ALiBi()), q, k, v, causal=True))
    )
    chunks = prepare(KINDS["squared_affine-chunk"](), q, k, v, causal=True)
    assert sums_path.refusal(resumed(chunks, empty_memory(chunks))) is None
    assert "float64" in str(
        sums_path.refusal(prepare(m.squared_affine(), q.double(), k.double(), v.double(), causal=True))
    )
    page = zonal.explain(m.squared_affine(), (1, 8, 4096, 32), causal=True)
    assert page.sums == "a compiled kernel"
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert "ZONAL_KERNELS=off" in str(sums_path.refusal(call))
    assert "ZONAL_KERNELS=off" in zonal.explain(m.squared_affine(), (1, 8, 4096, 32), causal=True).sums


# -- torch's machinery -----------------------------------------------------------------------------------------------


def arguments(learned: bool = True, fading: bool = False) -> tuple:
    operator, (q, k, v) = m.squared_affine(learn_bias=True), sample(23)
    call = prepare(operator, q, k, v, causal=True)
    code = tile_path.code_of(operator.link)
    assert code is not None
    spec = SumsSpec(code, 2, 0, "row", True, keeps=True, positive=True, learned=1)
    coefficients = torch.full((2, 1), 0.1).requires_grad_(learned)
    monomials = torch.tensor([[0.01, 0.2, 1.0]]).repeat(2, 1).requires_grad_(learned)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :3] = False
    state = torch.randn(2, 2, 15, 5, generator=torch.Generator().manual_seed(2)).abs().requires_grad_(learned)
    scale = torch.full((2,), 0.7, requires_grad=learned)
    seen = call.visibility
    decay = (
        (-0.1 * mask[:, None] * torch.rand(2, 2, 23, dtype=torch.float64)).requires_grad_(learned) if fading else None
    )
    bias = torch.rand(2, 2, 23).requires_grad_(learned) if fading else None
    before = torch.ones(2, dtype=torch.float64)
    return (
        q,
        k,
        v,
        scale,
        coefficients,
        monomials,
        state,
        before,
        decay,
        bias,
        mask,
        seen.lo,
        seen.hi,
        None,
        encode(spec),
    )


def test_opcheck() -> None:
    torch.library.opcheck(sums.operator, arguments())
    torch.library.opcheck(sums.operator, arguments(learned=False))
    torch.library.opcheck(sums.operator, arguments(fading=True))


def test_second_derivatives_are_refused() -> None:
    general.check_second_derivatives(m.squared_affine(), sample(20), "chunked")


def test_checkpointing_autocast_and_inference_mode() -> None:
    general.check_modes(m.squared_affine(learn_bias=True), sample(), "chunked")


def test_a_call_compiles_without_a_break() -> None:
    operator, tensors = m.squared_affine(learn_bias=True), sample(150)
    compiled = torch.compile(run, fullgraph=False, backend="aot_eager")
    attended = torch.compile(
        lambda *x: zonal.attention(*x, operator, causal=True, path="chunked"), fullgraph=True, backend="aot_eager"
    )
    assert torch.allclose(attended(*tensors), run(operator, tensors)[0], atol=1e-6)
    for a, b in zip(run(operator, tensors), compiled(operator, tensors), strict=True):
        assert (a - b).abs().max() < 1e-5 * (1 + b.abs().max())


def test_a_training_step_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tile kernel refused a traced model takes this one."""
    monkeypatch.setattr(tile_path, "refusal", lambda call: "asked for")
    general.check_compiled_training_step(ModelConfig(50, 32, ("sq", "sq"), 2, conv=4, rotary=True), 140)


# -- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case_name", ["causal 333", "queries of a quarter", "bidirectional", "left padding"])
def test_the_planner_counts_what_the_kernel_does(case_name: str) -> None:
    """Never more than all pairs, and never less than to take the keys in or to meet a block of them."""
    shape = shape_of(call_of(m.squared_affine(), inputs(LARGE[case_name]).to(torch.float32)))._replace(gradients=False)
    pair, done = shape.dim + shape.width, compiled_sums(shape).multiply_adds
    assert done <= shape.batch * shape.heads * (shape.pairs + 16 * shape.queries) * pair
    assert done > shape.batch * shape.kv_heads * shape.queries * pair


def test_long_sequences_cost_twice_as_much_when_twice_as_long() -> None:
    times = [
        next(
            e.seconds
            for e in zonal.explain(m.squared_affine(), (1, 8, n, 16), causal=True).plan.estimates
            if e.path == "chunked"
        )
        for n in (8192, 16384, 32768)
    ]
    assert 1.9 < times[1] / times[0] < 2.05
    assert 1.9 < times[2] / times[1] < 2.05

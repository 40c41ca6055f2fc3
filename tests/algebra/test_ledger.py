"""The ledger: every mechanism has one, and what it says to follow does: each theorem that it names is checked on the
numbers of the operator that names it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from matrix import DECLARED, OPERATORS, Case, inputs, randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, hashing, ledger, link, mechanisms, prior, probe, score
from zonal.algebra import definition
from zonal.algebra.declaration import Declaration, Derived, Move
from zonal.algebra.prior import Bias
from zonal.execution.call import Call, prepare
from zonal.execution.paths import dense
from zonal.features import Features, SymmetricPowers

CASE = Case(batch=1, queries=12, keys=12)
MORE: dict[str, Callable[[], Operator]] = {
    "signed row": lambda: Operator(score.Dot(), link.Identity(), anchor.Row(allow_signed=True)),
    "exact features": lambda: Operator(Features(SymmetricPowers(2), dim=5), link.Identity(), anchor.Count()),
    "searched": lambda: mechanisms.softmax().replace(anchor=anchor.TopK(3, search=hashing.LSH())),
}
ALL = {**OPERATORS, **MORE}


def called(operator: Operator, case: Case = CASE, seed: int = 0, **changes: Tensor) -> Call:
    """A call on random inputs in float64, some of them given."""
    data = inputs(case, seed)
    causal = case.causal and not operator.tags.couples
    with torch.no_grad():
        return prepare(
            operator,
            changes.get("q", data.q),
            changes.get("k", data.k),
            data.v,
            causal=causal,
            key_padding_mask=data.key_padding_mask,
        )


def visible(call: Call) -> Tensor:
    mask = call.visibility.tile(0, call.q.shape[2], 0, call.k.shape[2], torch.device("cpu"))
    return torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask


def tilted(call: Call, row: Tensor | float = 0.0, col: Tensor | float = 0.0) -> Tensor:
    """The weights with numbers of rows (1, H, T) and of columns (1, H, S) added to log K."""
    own, none = call.bias, torch.zeros(1, 4, 12, dtype=torch.float64)
    row, col = (none + x if had is None else had + x for x, had in ((row, own.row), (col, own.col)))
    return definition.weights(
        call.bound, call.coefficients, call.q, call.expand(call.k), call.visibility, Bias(row, col, own.slope),
        call.log_decay, call.marginals,
    )  # fmt: skip


def scaled(call: Call, factor: Tensor) -> Tensor:
    """The weights with K multiplied by factors of the rows (H, T)."""
    return tilted(call, row=factor.log())


def whole(operator: Operator) -> tuple[Operator, Case]:
    """The operator without masks and positions, and a case where all sees all."""
    return operator.replace(prior=()).double(), dataclasses.replace(CASE, causal=False)


def draw(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


# --- one function a theorem ---


def support(operator: Operator) -> None:
    call = called(operator, dataclasses.replace(CASE, padding="left"))
    weights = dense.weights(call)
    assert not weights.masked_fill(visible(call), 0).any()
    assert weights.any()


def exponential_link(operator: Operator) -> None:
    x, y, c = draw(4, 6, 7), draw(4, 6, 7, seed=6), operator.bind(4, 4).coefficients
    assert near(operator.link.value(x + y, c), operator.link.value(x, c) * operator.link.value(y, c))


def linear_link(operator: Operator) -> None:
    x, y, c = draw(4, 6, 7), draw(4, 6, 7, seed=6), operator.bind(4, 4).coefficients
    assert near(operator.link.value(x + y, c), operator.link.value(x, c) + operator.link.value(y, c))


def moments(operator: Operator) -> None:
    """K is a polynomial of the degree along every line of prepared queries: so one whose coefficients, sums over keys,
    are finitely many.
    """
    call, degree = called(operator), operator.tags.degree
    assert degree is not None
    nodes = 0.5 * torch.cos(math.pi * torch.arange(degree + 2) / (degree + 1)).double()
    q, step = call.q / 2, draw(*call.q.shape)
    step = step / step.norm(dim=-1, keepdim=True) * q.norm(dim=-1, keepdim=True)
    values = torch.stack(
        [definition.kernel(call.bound, call.coefficients, q + t * step, call.expand(call.k)) for t in nodes]
    )
    powers = torch.cos(torch.arange(degree + 1) * torch.acos(2 * nodes[:, None]))  # Chebyshev's, well conditioned
    fitted = powers @ torch.linalg.lstsq(powers, values.flatten(1)).solution
    assert near(fitted, values.flatten(1))


def sums_before_the_window(operator: Operator) -> None:
    """A memory without the keys before the window answers as the definition does with all of them."""
    given = inputs(CASE)
    memory = Memory.empty(operator, 1, CASE.kv_heads, CASE.key_dim, CASE.value_dim, torch.float64)
    with torch.no_grad():
        memory = memory.absorb(given.k, given.v)
        assert memory.tensors()["k"].shape[2] == operator.tags.window < CASE.keys
        whole = zonal.attention(given.q, given.k, given.v, operator, causal=True, path="dense")
        assert near(memory.read(given.q[:, :, -1:]), whole[:, :, -1:])


def square_features(operator: Operator) -> None:
    call = called(operator, dataclasses.replace(CASE, queries=40, keys=40, causal=False))
    kernel = definition.kernel(call.bound, call.coefficients, call.q, call.expand(call.k))
    dim = call.q.shape[-1]
    assert (kernel >= 0).all()
    assert int(torch.linalg.matrix_rank(kernel).max()) <= (dim + 1) * (dim + 2) // 2 < 40


def bounded_link(operator: Operator) -> None:
    kind, bound = operator.link, operator.bind(4, 4)
    c = bound.coefficients
    x = torch.linspace(-1 if kind.domain else -9, 1 if kind.domain else 0, 501, dtype=torch.float64).expand(1, 4, 1, -1)
    value = kind.value(x, c)
    low, high = torch.zeros(1), torch.full((1,), math.inf)
    if isinstance(kind, link.Yat):
        high = torch.full((1,), 1 / kind.eps)
        assert near(value[..., -1], high.double())
    elif isinstance(kind, link.PolynomialSquare):
        low = torch.full((1,), kind.floor)
    else:
        assert isinstance(kind, link.Oscillatory)
        total = c.chunk(3)[0].abs().sum(0)
        low, high = (-total).exp(), total.exp()
    assert (value >= low - 1e-9).all()
    assert (value <= high + 1e-9).all()


def low_rank(operator: Operator) -> None:
    call = called(operator)
    paired = operator.score.pair(call.q, call.expand(call.k))
    assert near(paired, call.q @ call.expand(call.k).mT)
    assert call.q.shape[-1] == operator.score.width(CASE.key_dim)
    assert int(torch.linalg.matrix_rank(paired).max()) <= call.q.shape[-1]


def no_norms(operator: Operator) -> None:
    data, longer = inputs(CASE), draw(1, 4, 12, 1).exp()
    one = called(operator)
    other = called(operator, q=data.q * longer, k=data.k * longer.flip(2))
    pair, same = operator.score.pair(one.q, one.k), operator.score.pair(other.q, other.k)
    assert near(pair, same)
    itself = called(operator, q=data.k)
    assert (pair.abs() <= operator.score.pair(itself.q, itself.k).diagonal(dim1=-2, dim2=-1)[..., None, :] + 1e-9).all()


def nearest(operator: Operator) -> None:
    data = inputs(CASE)
    call = called(operator, q=data.k)
    found = operator.score.pair(call.q, call.k)
    assert (found <= 1e-9).all()
    assert (found <= found.diagonal(dim1=-2, dim2=-1)[..., None] + 1e-6).all()


def key_bias(operator: Operator) -> None:
    """2 <A, B> - |B|^2 over the temperature, and a constant a row."""
    kind, data = operator.score, inputs(CASE)
    assert isinstance(kind, score.OperatorPath)
    size, params = kind.matrix_size(CASE.key_dim), operator.bind(4, 4).score_params
    a, b = (kind.prepare_key(x, params)[..., : size**2] for x in (data.q, data.k))
    call = called(operator)
    rest = operator.score.pair(call.q, call.k) - (2 * a @ b.mT - b.square().sum(-1)[..., None, :]) / (
        kind.temperature or 2 * size
    )
    assert near(rest, rest[..., :1].expand_as(rest))


def turns_compose(operator: Operator) -> None:
    assert isinstance(operator.score, score.Categorical)
    frame = operator.score.frames(inputs(CASE).k[0, 0])
    turn = torch.einsum("tba,sbc->tsac", frame, frame)
    assert near(torch.einsum("tsab,subc->tsuac", turn, turn), turn[:, None].expand(12, 12, 12, *turn.shape[2:]))


def exact_features(operator: Operator) -> None:
    assert isinstance(operator.score, Features)
    data, call = inputs(CASE), called(operator)
    q, k = (x / x.norm(dim=-1, keepdim=True) if operator.score.features.unit else x for x in (data.q, data.k))
    assert near(operator.score.pair(call.q, call.k), operator.score.features.kernel(q @ k.mT, CASE.key_dim))


def no_leak(operator: Operator) -> None:
    data = inputs(dataclasses.replace(CASE, causal=False))
    q, k, v = (x.detach().clone().index_fill_(2, torch.arange(8, 12), 0.3) for x in (data.q, data.k, data.v))
    before, after = (
        zonal.attention(data.q, data.k, data.v, operator, path="dense"),
        zonal.attention(q, k, v, operator, path="dense"),
    )
    assert torch.equal(before[:, :, :8], after[:, :, :8])
    assert not torch.equal(before, after)


def reach(operator: Operator) -> None:
    window = next(p for p in operator.prior if isinstance(p, prior.Window))
    seen = visible(called(operator, dataclasses.replace(CASE, queries=40, keys=40)))[0, 0] | torch.eye(
        40, dtype=torch.bool
    )
    t = torch.arange(40)
    reached = torch.eye(40, dtype=torch.bool)
    for layers in range(1, 5):
        reached = (reached.long() @ seen.long()) > 0
        far = int((t[:, None] - t)[reached].max())
        assert far == layers * window.left


def separable_prior(operator: Operator) -> None:
    part = next(p for p in operator.prior if isinstance(p, prior.Decay | prior.ALiBi))
    call = called(mechanisms.softmax(prior=part).double())
    bias = call.bias.tile(0, 12, 0, 12, call.visibility.position, torch.float64)
    assert bias is not None
    fields = probe.centred(bias.masked_fill(~visible(call), -math.inf))
    assert fields.interaction[fields.interaction.isfinite()].abs().max() < 1e-9
    assert fields.columns.abs().max() > 1e-3


def row_gauge(operator: Operator) -> None:
    call = called(operator)
    assert near(scaled(call, draw(4, 12).exp()), dense.weights(call))


def column_gauge(operator: Operator) -> None:
    call = called(operator)
    assert near(tilted(call, col=draw(1, 4, 12)), dense.weights(call))


def plan_sums(operator: Operator) -> None:
    weights = dense.weights(called(operator))
    assert near(weights.sum(-1), torch.ones(1, 4, 12).double())
    assert near(weights.sum(-2), torch.ones(1, 4, 12).double())


def held_sums(operator: Operator) -> None:
    assert isinstance(operator.anchor, anchor.BoundedPlan)
    weights = dense.weights(called(operator))
    assert near(weights.sum(-1), torch.ones(1, 4, 12).double())
    received = weights.sum(-2)
    assert (received >= operator.anchor.low - 1e-9).all()
    assert (received <= operator.anchor.high + 1e-9).all()


def row_gauge_of_blocks(operator: Operator) -> None:
    assert isinstance(operator.anchor, anchor.Hierarchical)
    call, size = called(operator), operator.anchor.sizes[0]
    factor = draw(4, -(-12 // size)).exp().repeat_interleave(size, 1)[:, :12]
    assert near(scaled(call, factor), dense.weights(call))


def tied_blocks(operator: Operator) -> None:
    assert isinstance(operator.anchor, anchor.Hierarchical)
    weights, size = dense.weights(called(operator)), operator.anchor.sizes[0]
    blocks = weights.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # (1, H, blocks, size, blocks, size)
    far = blocks.transpose(-3, -2)[:, :, ~torch.eye(12 // size, dtype=torch.bool)].flatten(-2)
    assert near(far, far.mean(-1, keepdim=True).expand_as(far))


def no_gauge(operator: Operator) -> None:
    call, factor = called(operator), draw(4, 12).exp()
    assert near(scaled(call, factor), factor[..., None] * dense.weights(call))
    assert not near(scaled(call, factor), dense.weights(call), 1e-3)


def means_of_values(operator: Operator) -> None:
    weights = dense.weights(called(operator))
    mass = weights.sum(-1)
    assert (weights >= 0).all()
    assert (((mass - 1).abs() < 1e-9) | (mass == 0)).all()
    assert (mass > 0).sum() >= 4 * 11


def few_keys(operator: Operator) -> None:
    assert isinstance(operator.anchor, anchor.TopK)
    seen = visible(called(operator)).sum(-1).clamp_max(operator.anchor.k)
    assert ((dense.weights(called(operator)) > 0).sum(-1) == seen).all()


def repeated_keys(operator: Operator) -> None:
    bare, case = whole(operator)
    data = inputs(case)
    once, twice = (
        zonal.attention(data.q, k, v, bare, path="dense")
        for k, v in ((data.k, data.v), (data.k.repeat(1, 1, 2, 1), data.v.repeat(1, 1, 2, 1)))
    )
    assert near(twice, once)


def added_keys(operator: Operator) -> None:
    bare, case = whole(operator)
    data = inputs(case)
    parts = [
        zonal.attention(data.q, data.k[:, :, s], data.v[:, :, s], bare, path="dense")
        for s in (slice(0, 5), slice(5, 12))
    ]
    assert near(parts[0] + parts[1], zonal.attention(data.q, data.k, data.v, bare, path="dense"))


def normal_equations(operator: Operator) -> None:
    """What W (K_kk) leaves of K_qk on visible keys is a positive multiple of W, row by row: the ridge."""
    call = called(operator)
    kernel = definition.kernel(call.bound, call.coefficients, call.q, call.expand(call.k))
    among = definition.kernel(
        call.bound, call.coefficients, call.bound.score.as_query(call.k, call.bound.score_params), call.k
    )
    kernel, among = (x.exp() if call.tags.log_space else x for x in (kernel, among))
    weights = dense.weights(call)
    left = (kernel - weights @ call.expand(among)).masked_fill(~visible(call), 0)
    ridge = (left * weights).sum(-1, keepdim=True) / weights.square().sum(-1, keepdim=True).clamp_min(1e-30)
    assert near(left, ridge * weights)
    some = visible(call).any(-1).expand(1, 4, 12)
    assert (ridge[..., 0][some] > 1e-6).all()
    assert (weights < 0).any()


def primal_sums(operator: Operator) -> None:
    """With a plain product, and a polynomial of cosines, a memory whose size does not grow gives what the definition
    gives.
    """
    assert isinstance(operator.anchor, anchor.Ridge)
    steady = tuple(p for p in operator.prior if not isinstance(p, prior.Window))
    kinds: list[tuple[score.Score, link.Link, tuple[prior.Prior, ...]]] = [
        (score.Dot(scale=1.0), link.Identity(), steady)
    ]
    if not operator.anchor.by_query:
        kinds.append(
            (score.Cosine(), link.SquaredAffine(0.3), tuple(p for p in steady if not isinstance(p, prior.Decay)))
        )
    for how, evidence, priors in kinds:
        sums = operator.replace(score=how, link=evidence, prior=priors).for_heads(4).double()
        data = inputs(CASE)
        memory = Memory.empty(sums, 1, 4, CASE.key_dim, CASE.value_dim, torch.float64)
        assert memory.kind in ("ridge", "compact", "fading")
        y, memory = zonal.attention(data.q, data.k, data.v, sums, causal=True, memory=memory)
        assert isinstance(memory, Memory)
        assert near(y, zonal.attention(data.q, data.k, data.v, sums, causal=True, path="dense"), 1e-7)
        assert memory.bytes_at(10**3) == memory.bytes_at(10**6)


def definite_kernel(operator: Operator) -> None:
    """Among more keys than there are harmonics, K has no eigenvalue below zero."""
    call = called(operator, dataclasses.replace(CASE, queries=40, keys=40))
    among = definition.kernel(
        call.bound, call.coefficients, call.bound.score.as_query(call.k, call.bound.score_params), call.k
    )
    values = torch.linalg.eigvalsh(among)
    assert (values > -1e-12 * values[..., -1:]).all()


def shift(operator: Operator) -> None:
    """With hardly a ridge, weights on keys at right angles stand where the head's power says."""
    assert isinstance(operator.anchor, anchor.Koopman)
    powers = operator.anchor.powers(4)
    exact = dataclasses.replace(
        operator.anchor, eps=1e-9, mode="constant", learn_ridge=False, relative=0.0, spectral_norm="none"
    )
    bare = operator.replace(anchor=exact, prior=()).double()
    keys = torch.eye(6, dtype=torch.float64).expand(1, 4, 6, 6)
    with torch.no_grad():
        weights = dense.weights(prepare(bare, keys, keys, keys, causal=False))
    for head, power in enumerate(powers):
        assert near(weights[0, head], torch.eye(6, dtype=torch.float64).roll(power, 1).triu(power), 1e-6)


def contraction(operator: Operator) -> None:
    """The step S^(1/2) D S^(1/2), which has the singular values of L^-1 M L^-T, with hardly a ridge."""
    assert isinstance(operator.anchor, anchor.Koopman)
    call = called(operator, dataclasses.replace(CASE, queries=30, keys=30))
    among = definition.kernel(
        call.bound, call.coefficients, call.bound.score.as_query(call.k, call.bound.score_params), call.k
    )
    among = among.exp() if call.tags.log_space else among
    values, vectors = torch.linalg.eigh(among)
    values = values.clamp_min(0)
    root = vectors * (values / (values + 1e-3)).sqrt()[..., None, :] @ vectors.mT
    step = root[..., :, 1:] @ root[..., :-1, :]
    assert (torch.linalg.matrix_norm(step, 2) < 1).all()


CHECKS: dict[str, Callable[[Operator], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        support, exponential_link, linear_link, moments, sums_before_the_window, square_features,
        bounded_link, low_rank, no_norms, nearest,
        key_bias, turns_compose, exact_features, no_leak,
        reach, separable_prior, row_gauge, column_gauge, plan_sums, held_sums, row_gauge_of_blocks, tied_blocks,
        no_gauge, means_of_values, few_keys, repeated_keys, added_keys, normal_equations, primal_sums, definite_kernel,
        shift, contraction,
    )
}  # fmt: skip
# operators that lack what a theorem says, so that its check is known to be able to fail
LACKING: dict[str, Callable[[], Operator]] = {
    "exponential link": lambda: mechanisms.yat(eps=0.1),
    "linear link": lambda: mechanisms.yat(eps=0.1),
    "square features": lambda: mechanisms.yat(eps=0.1),
    "low rank": lambda: Operator(score.NegativeDistance(), link.Exp(), anchor.Row()),
    "no norms": mechanisms.softmax,
    "nearest": mechanisms.softmax,
    "no leak": mechanisms.softmax,
    "row gauge": lambda: mechanisms.softmax().replace(anchor=anchor.Count()),
    "column gauge": mechanisms.softmax,
    "plan sums": mechanisms.softmax,
    "no gauge": mechanisms.softmax,
    "means of values": lambda: MORE["signed row"](),
    "repeated keys": lambda: mechanisms.softmax().replace(anchor=anchor.Raw()),
    "added keys": mechanisms.softmax,
    "normal equations": lambda: mechanisms.ska(power=1),
    "definite kernel": lambda: Operator(score.NegativeDistance(), link.Identity(), anchor.Count()),
}


def derived(operator: Operator) -> list[Derived]:
    return [each for move in operator.moves() for each in move.derives]


@pytest.mark.parametrize("name", ALL)
def test_every_operator_has_a_whole_ledger(name: str) -> None:
    """A closure first, what link, score and anchor assume and each prior, a quotient and a section of it; in the order
    of the tree.
    """
    operator = ALL[name]()
    moves = operator.moves()
    for slot, part in (
        ("score", operator.score),
        ("link", operator.link),
        ("anchor", operator.anchor),
        *(("prior", p) for p in operator.prior),
    ):
        assert part.moves(), f"{type(part).__name__} has no ledger: give its class moves()"
        assert all(move.slot in (slot, "search") for move in part.moves())
        first = part.moves()[0]
        settings = next(
            move.settings
            for move in moves
            if (move.slot, move.name) == (first.slot, first.name) and move.assumes == first.assumes
        )
        assert settings == part.settings()
    assert moves[0].step == "closure"
    assert {"restriction", "quotient", "section"} <= {move.step for move in moves}
    assert moves == ledger.ordered(moves)
    names = {(move.slot, move.name) for move in moves}
    assert names >= {
        (move.slot, move.name)
        for part in (operator.score, operator.link, operator.anchor, *operator.prior)
        for move in part.moves()
    }


def lines(operator: Operator) -> tuple[str, ...]:
    return tuple(move.line for move in operator.moves())


def test_unlike_operators_have_unlike_ledgers() -> None:
    """Over all mechanisms, all rows of the matrix, and the settings of some: a ledger is that of one declaration."""
    specs = (
        *mechanisms.names(), "rewa(gates=(1.0, 1.0, 1.0))", "rewa(gates=(0.0, 1.0, 1.0))", "rewa(adaptive=True)",
        "rewa(weights=(1.0, 2.0, 1.0))", "rewa(parts=(4, 0, 4))",
        "rewa(parts=(4, 4, 0))", "rewa(eps=0.1)", "rewa(dot=1.0)", "rewa(temperature=2.0)", "rewa(shared_witness=True)",
        "rewa_topological(neighbours=5)", "rewa_riemannian(units=3)",
        "rewa_operator(relations=2)", "rewa_operator(relations=2, choices=3)", "rewa_categorical(transport=True)",
        "sko(degrees=(5.0,))", "sko(manifold_dim=5)", "yat(eps=0.1)",
        "squared_affine(learn_bias=True)", "softmax(scale=1.0)", "cosine(temperature=1.0)", "ridge(eps=0.5)",
        "ridge(relative=0.1)", "ska(power=0)", "ska(power=1)", "ska(power=(0, 1))",
        "kernel_ridge(power=1)", "performer(draws=12)", "sinkhorn(rho=(1.0, 0.5))", "sinkhorn(rho=(1.0, None))",
        "sinkhorn(bounds=(0.5, 2.0))", "retention(rates=(0.5,))", "hierarchical(sizes=(4, 2))",
    )  # fmt: skip
    known = {**{name: make() for name, make in ALL.items()}, **{spec: mechanisms.resolve(spec) for spec in specs}}
    parts = {name: (operator.score, operator.link, operator.anchor, operator.prior) for name, operator in known.items()}
    found = {name: lines(operator) for name, operator in known.items()}
    alike = [(a, b) for a, b in itertools.combinations(known, 2) if (found[a] == found[b]) != (parts[a] == parts[b])]
    assert not alike


def test_the_geometries_of_a_product_stand_in_its_ledger() -> None:
    names = {
        spec: [move.name for move in mechanisms.resolve(spec).moves()]
        for spec in ("rewa", "rewa_topological", "rewa(gates=(0.0, 1.0, 2.0))", "rewa(adaptive=True)")
    }
    assert "Euclidean + Sphere + Hyperbolic distance" in names["rewa"]
    assert "Euclidean + Topological distance" in names["rewa_topological"]
    assert ("gates" in names["rewa(gates=(0.0, 1.0, 2.0))"], "gates" in names["rewa"]) == (True, False)
    assert "weights a query" in names["rewa(adaptive=True)"]
    assert "weights per head" in names["rewa"]
    told = "\n".join(lines(mechanisms.resolve("rewa(gates=(0.0, 1.0, 2.0))")))
    assert "each distance has a factor >= 0 per head, initially 0, 1, 2" in told


@pytest.mark.parametrize("name", mechanisms.names())
def test_every_mechanism_is_in_the_tree(name: str) -> None:
    tree = ledger.tree({each: mechanisms.resolve(each).moves() for each in mechanisms.names()})
    assert sum(name in line.split("= ")[-1].split(", ") for line in tree.splitlines() if "= " in line) == 1


def test_every_declared_part_says_what_it_assumes() -> None:
    """A new slot value without a ledger fails here, even when no row of the matrix has it.

    Metrics and feature maps are parts of scores, which say so for them.
    """
    silent = [
        name
        for name, kind in DECLARED.items()
        if kind.moves is Declaration.moves and kind.slot not in ("metric", "features")
    ]
    assert not silent, f"without moves(): {', '.join(silent)}"


@pytest.mark.parametrize("name", ALL)
def test_what_is_derived_holds(name: str) -> None:
    operator = randomised(ALL[name]())
    for each in derived(operator):
        if each.theorem:
            assert each.theorem in CHECKS, f"the ledger of {name} names a theorem that is not checked here: {each}"
            CHECKS[each.theorem](operator)


def test_every_check_is_of_some_ledger() -> None:
    assert set(CHECKS) == {each.theorem for name in ALL for each in derived(ALL[name]()) if each.theorem}


@pytest.mark.parametrize("theorem", LACKING)
def test_checks_can_fail(theorem: str) -> None:
    operator = randomised(LACKING[theorem]())
    assert theorem not in {each.theorem for each in derived(operator)}
    with pytest.raises(AssertionError):
        CHECKS[theorem](operator)


def test_a_part_without_a_ledger_stands_in_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Silent(link.Link):
        def value(self, x: Tensor, c: Tensor) -> Tensor:
            return 1 + x.square()

    text = ledger.text(Operator(score.Cosine(), Silent(), anchor.Row()).moves())
    assert "[link] Silent: it does not say what it assumes" in text
    assert "no finite sum over keys is exact" in text


def test_softmax_is_what_the_paper_derives() -> None:
    """Prune W forces the exponential, the row probe has the row gauge, and a low rank makes dot products."""
    follows = {move.name: [each.theorem for each in move.derives] for move in mechanisms.softmax().moves()}
    assert follows["Prune W"][0] == "exponential link"
    assert follows["row probe"] == ["row gauge"]
    assert follows["low rank"] == ["low rank"]
    assert list(follows) == ["tokens", "Prune W", "row probe", "rows of sum one", "low rank"]


def test_text_and_tree() -> None:
    moves = [
        Move("closure", "carrier", "tokens", "a"),
        Move("restriction", "link", "Prune W", "b", (Derived("", "hence c"),)),
        Move("section", "anchor", "rows", "d", (Derived("", "hence e"),)),
    ]
    assert ledger.text(moves).splitlines() == [
        ledger.ROOT, "├─ closure [carrier] tokens: a", "├─ restriction [link] Prune W: b", "│     hence c",
        "└─ section [anchor] rows: d", "      hence e",
    ]  # fmt: skip
    named = [dataclasses.replace(moves[1], settings=f"eps={eps}") for eps in (1, 2)]
    assert ledger.text([named[0]]).splitlines()[1] == "└─ restriction [link] Prune W: b (eps=1)"
    assert ledger.tree({"x": [named[0]], "y": [named[1]]}).splitlines()[1::2] == [
        "├─ restriction: Prune W (eps=1)",
        "└─ restriction: Prune W (eps=2)",
    ]
    other = [moves[0], dataclasses.replace(moves[1], derives=()), dataclasses.replace(moves[2], assumes="f")]
    assert ledger.tree({"x": moves, "y": other, "z": moves, "short": moves[:1]}).splitlines() == [
        ledger.ROOT, "└─ closure: tokens", "   ├─ restriction: Prune W", "   │  ├─ section: rows", "   │  │  └─ = x, z",
        "   │  └─ section: rows", "   │     └─ = y", "   └─ = short",
    ]  # fmt: skip

"""The compiled kernel for attention by distance: against the float64 definition, where points are near, far and
opposite, and what surrounds it.
"""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from kernels import general
from kernels.general import everything
from matrix import CASES, Case, inputs, randomised
from torch import Tensor

import zonal
from zonal import Operator, anchor, link, metric, prior, score
from zonal import mechanisms as m
from zonal.execution.call import prepare
from zonal.execution.paths import distance as distance_path
from zonal.formula import FORMULAS
from zonal.kernels import build
from zonal.kernels import native as native_kernels
from zonal.kernels.abi import Arguments
from zonal.kernels.distance import DistanceInputs, DistanceSpec, backward, distance, forward
from zonal.kernels.op import decode, encode
from zonal.kernels.tile import TileSpec
from zonal.models import CausalLM, ModelConfig

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

_PARTS = (metric.Hyperbolic(scale=0.4), metric.Sphere(eps=1e-3), metric.SquaredEuclidean(), metric.Euclidean())


def by(kind: metric.Metric, temperature: float = 1.0, **parts: object) -> Operator:
    return Operator(score.NegativeDistance(kind, temperature), link.Exp(), anchor.Row()).replace(**parts)


KINDS: dict[str, Callable[[], Operator]] = {
    "plane": lambda: by(metric.Euclidean(), 0.5),
    "squared": lambda: by(metric.SquaredEuclidean(), 20.0),
    "sphere": lambda: by(metric.Sphere(), 0.3),
    "hyperbolic": lambda: by(metric.Hyperbolic(scale=None), 0.4),
    "matrices": lambda: by(metric.HilbertSchmidt(), 2.0),
    "rewa": lambda: m.rewa(temperature=0.4),
    "rewa-gates-dot": lambda: m.rewa(gates=(0.0, 0.5, 1.0), temperature=0.5, dot=0.4),
    "rewa-adaptive": lambda: m.rewa(parts=(1, 0, 2), adaptive=True, temperature=0.3),
    "rewa_oscillatory": lambda: m.rewa_oscillatory((1.0, -0.5), (0.5, 0.2), (3.0, -5.0)),
    "oscillatory-fixed": lambda: by(metric.Euclidean(), link=link.Oscillatory(learn=False)),
    "other-order": lambda: by(metric.Product(_PARTS, learn=False, weights=(0.5, 1.0, 2.0, 1.0))),
    "plain-sum": lambda: by(metric.Product(_PARTS[1:3], normalise=False, gates=(1.0, 0.5)), 20.0),
    "count": lambda: by(metric.Product(), anchor=anchor.Count()),
    "raw": lambda: by(metric.Product(), anchor=anchor.Raw()),
    "window": lambda: m.rewa(prior=prior.Window(20)),
    "window-two-sided": lambda: m.rewa(prior=prior.Window(6, 9)),
    "chunk": lambda: m.rewa(prior=prior.ChunkCausal(5)),
    "strict": lambda: m.rewa(prior=prior.Causal(include_self=False)),
}
LARGE = {
    "causal 127": Case(queries=127, keys=127, key_dim=24, value_dim=24),
    "one head 331": Case(batch=1, heads=1, kv_heads=1, queries=331, keys=331, key_dim=9, value_dim=5),
    "d 97, P 80": Case(batch=1, heads=2, kv_heads=1, queries=67, keys=101, key_dim=97, value_dim=80),
    "d 256": Case(batch=1, heads=1, kv_heads=1, queries=50, keys=50, key_dim=256, value_dim=256),
    "random padding": Case(padding="random", queries=150, keys=150, key_dim=9, value_dim=11, kv_heads=1),
    "documents": Case(batch=1, packed=(0, 1, 40, 107, 190), queries=190, keys=190, key_dim=9, value_dim=8),
    "strided": Case(strided=True, queries=120, keys=120, key_dim=16, value_dim=12),
}


def fitting(name: str, case: Case) -> bool:
    """Whether the points are some that the metric takes."""
    size = case.key_dim - 2 * (name == "rewa-adaptive")
    return {"matrices": size in (9, 16, 256), "rewa-adaptive": size == 3, "other-order": size >= 4}.get(
        name, size >= 3
    ) and not case.key_bias


# some distances with every input, every distance with some inputs
EVERY, SOME = (
    ("plane", "rewa-gates-dot", "rewa_oscillatory"),
    ("causal-gqa-odd", "bidirectional", "left-padding", "packed", "documents", "d 256"),
)
PAIRS = [
    (name, case)
    for name in KINDS
    for case in ({**CASES, **LARGE} if name in EVERY else SOME)
    if fitting(name, {**CASES, **LARGE}[case])
]


def close(got: list[Tensor], truth: list[Tensor], eps: float = 2e-5) -> None:
    for index, (a, t) in enumerate(zip(got, truth, strict=True)):
        assert torch.isfinite(a).all()
        if t.numel():
            error, size = (a.double() - t).abs().max().item(), max(1.0, t.abs().max().item())
            assert error <= eps * size, f"item {index}: error {error:.3g}, size {size:.3g}"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kernel was asked for."""
    calls: list[str] = []
    original = Arguments.run
    monkeypatch.setattr(
        Arguments, "run", lambda call, function: calls.append(function.__name__) or original(call, function)
    )
    return calls


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_kernel_equals_definition(name: str, case: str, ran: list[str]) -> None:
    operator = randomised(KINDS[name]()).float()
    data = inputs({**CASES, **LARGE}[case]).to(torch.float32)
    truth = everything(copy.deepcopy(operator).double(), data.to(torch.float64), "dense")
    close(everything(operator, data, "tiled"), truth)
    assert ran == ["zonal_distance_forward", "zonal_distance_backward"]


@pytest.mark.parametrize("name", ["rewa", "rewa-gates-dot", "rewa_oscillatory"])
def test_bfloat16(name: str, ran: list[str]) -> None:
    """Computed in float32: what is rounded is the result."""
    operator = randomised(KINDS[name]()).float()
    data = inputs(LARGE["causal 127"]).to(torch.bfloat16)
    got = everything(operator, data, "tiled")
    assert all(x.dtype == torch.bfloat16 for x in got[:4])
    close(
        got,
        everything(copy.deepcopy(operator).double(), data.to(torch.float64), "dense"),
        eps=2 * torch.finfo(torch.bfloat16).eps,
    )
    assert len(ran) == 2


# -- near, far, opposite ---------------------------------------------------------------------------------------------


def distances(kind: metric.Metric, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d(q_i, k_i) by the kernel and its gradients, of pairs of points (N, D): a sequence each, of one query and one
    key.
    """
    terms = kind.terms(q.shape[1])
    assert terms is not None
    q, k = q[:, None, None], k[:, None, None]
    ones, nothing = torch.ones(len(q), 1, 1, 1), torch.empty(1, 0)
    weights = kind.parted(q, q.shape[3])[0].expand(len(q), 1, 1, -1)
    row, raw = (DistanceSpec(TileSpec(FORMULAS["exp"], rule, causal=False), terms) for rule in ("row", "raw"))
    found = -forward(DistanceInputs(q, k, ones, -weights, nothing), row)[1].flatten()
    # under the raw anchor y = e^(-d / t); a temperature of about d keeps it from vanishing
    temperature = found.clamp_min(1e-3)[:, None, None, None]
    inputs = DistanceInputs(q, k, ones, -weights / temperature, nothing)
    y, factor = forward(inputs, raw)
    dq, dk, *_ = backward((-temperature / y,), inputs, (y, factor), raw, frozenset("qk"))
    return found, dq[:, 0, 0], dk[:, 0, 0]


def exact(kind: metric.Metric, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the metric in float64."""
    q, k = (x.double()[:, None].requires_grad_() for x in (q, k))
    found = kind.pair(q, k)
    return found.detach().flatten(), *(
        x[:, 0] for x in kind.pair_vjp(q.detach(), k.detach(), found.detach(), torch.ones_like(found))
    )


@pytest.mark.parametrize("radius", [0.01, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("kind", [metric.Euclidean(), metric.Sphere(), metric.Hyperbolic(), metric.Product()], ids=str)
def test_float32_has_five_digits(kind: metric.Metric, radius: float) -> None:
    """Distances and gradients of points anywhere, of near ones and of nearly opposite ones, at all radii."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for dim in (3, 24):
        q = radius * torch.nn.functional.normalize(draw(60, dim), dim=-1)
        others = [
            radius
            * (0.5 + torch.rand(60, 1, generator=generator))
            * torch.nn.functional.normalize(draw(60, dim), dim=-1)
        ]
        others += [sign * (q + gap * radius * draw(60, dim)) for sign in (1, -1) for gap in (0.1, 1e-2, 1e-3, 1e-5)]
        for k in others:
            found, truth = distances(kind, q, k), exact(kind, q, k)
            assert ((found[0] - truth[0]).abs() <= 1e-5 * truth[0] + 1e-9).all()
            for a, t in zip(found[1:], truth[1:], strict=True):
                assert ((a - t).norm(dim=-1) <= 1e-5 * t.norm(dim=-1) + 1e-6 / radius).all()


@pytest.mark.parametrize("kind", [metric.Euclidean(), metric.Sphere(), metric.Hyperbolic(), metric.Product()], ids=str)
def test_the_same_points(kind: metric.Metric) -> None:
    """Points on themselves are at no distance and are not pulled, wherever they are; beyond radius 40, in the direction
    of another, and opposite, all is finite.
    """
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 200)[:, None]
    x[0] = 0
    found, dq, dk = distances(kind, x, x)
    assert found[1:].abs().max() < 1e-11  # zero has no direction to share with itself
    assert not dq.any()
    assert not dk.any()
    line = torch.logspace(-6, 3, 50)[:, None].expand(-1, 3 if isinstance(kind, metric.Product) else 1)
    for other in (1.5 * x, -x, 1e9 * x, torch.zeros_like(x), x.roll(1, 0)):
        assert all(
            part.isfinite().all()
            for pair in ((x, other), (other, x), (line, -line), (line, 2 * line))
            for part in distances(kind, *pair)
        )


def test_zero_vectors_have_no_direction() -> None:
    """On the sphere they are at a right angle to everything, each other included, and get no gradient."""
    x = torch.randn(4, 5)
    zero = torch.zeros(4, 5)
    for pair in ((x, zero), (zero, x), (zero, zero)):
        found, dq, dk = distances(metric.Sphere(), *pair)
        assert (found - torch.pi / 2).abs().max() < 2e-4
        assert dq.abs().max() < 1e-7
        assert dk.abs().max() < 1e-7


@pytest.mark.parametrize("name", ["plane", "sphere", "hyperbolic", "rewa", "rewa_oscillatory"])
def test_clustered_points(name: str) -> None:
    """Every query beside many keys, on some and opposite to others: what a trained layer may make of its tokens."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1, 2, 3, 9, generator=generator, dtype=torch.float64)
    x = centres[:, :, torch.arange(60) % 3] * (1 - 2 * (torch.arange(60) % 2))[:, None] + 1e-4 * torch.randn(
        1, 2, 60, 9, generator=generator, dtype=torch.float64
    )
    x[:, :, 30:] = x[:, :, :30]
    x[:, :, 7] = 0
    operator = KINDS[name]().float()
    q = x.float()
    v = torch.randn(1, 2, 60, 4, generator=generator)
    found = []
    for path, dtype in (("tiled", torch.float32), ("dense", torch.float64)):
        mine = copy.deepcopy(operator).to(dtype)
        tensors = [part.to(dtype, copy=True).requires_grad_() for part in (q, q, v)]
        y = zonal.attention(*tensors, mine, causal=True, path=path)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [*tensors, *mine.parameters()])])
    close(*found)


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["plane", "rewa-gates-dot", "rewa_oscillatory"])
def test_a_poisoned_token(name: str, bad: float, where: str) -> None:
    """A key that is not finite makes NaN of the queries that see it, and of their gradients; a query of itself and of
    the keys it sees.

    Of nothing else.
    """
    operator = randomised(KINDS[name]()).float()
    q, k, v = (torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    (q if where == "q" else k)[0, 1, 30, 2] = bad
    tensors = [x.requires_grad_() for x in (q, k, v)]
    y = zonal.attention(*tensors, operator, causal=True, path="tiled")
    expected = torch.zeros(2, 50, dtype=torch.bool)
    expected[1, slice(30, 31) if where == "q" else slice(30, None)] = True
    assert torch.equal(y.isnan().any(-1)[0], expected)
    dq, dk, _ = torch.autograd.grad(y.sum(), tensors)
    assert torch.equal(dq.isnan().any(-1)[0], expected)
    assert dk[0, 0].isfinite().all()
    assert where == "k" or dk[0, 1, 31:].isfinite().all()
    with torch.no_grad():
        assert torch.equal(zonal.attention(*tensors, operator, causal=True, path="tiled").isnan(), y.isnan())


# -- memory, threads, planning ---------------------------------------------------------------------------------------


def sample(tokens: int = 100, heads: int = 2) -> list[Tensor]:
    return [
        torch.randn(1, heads, tokens, 9, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)
    ]


run = functools.partial(general.run, path="tiled")


@pytest.mark.parametrize("name", ["rewa", "rewa-gates-dot"])
def test_a_memory_of_keys(name: str, ran: list[str]) -> None:
    """A decoder's tokens, queries prepared and keys remembered, run in the kernel and give what the whole sequence
    gives.
    """
    operator = KINDS[name]().float()
    tensors = [x.detach() for x in sample(40)]
    whole = zonal.attention(*tensors, operator, causal=True, path="dense")
    memory, parts = zonal.Memory.empty(operator, 1, 2, 9, 9, torch.float32), []
    for span in (slice(0, 17), slice(17, 18), slice(18, 40)):
        y, memory = zonal.attention(
            *(x[:, :, span] for x in tensors), operator, causal=True, memory=memory, return_memory=True, path="tiled"
        )
        parts.append(y)
    assert (torch.cat(parts, 2) - whole).abs().max() < 1e-5
    assert len(ran) == 3


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_again(threads: int) -> None:
    """Also with one head, where the queries are split over the threads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for heads in (1, 2):
            operator, tensors = m.rewa_oscillatory(), sample(300, heads)
            first = run(operator, tensors)
            assert all(torch.equal(a, b) for a, b in zip(first, run(operator, tensors), strict=True))
            torch.set_num_threads(1)
            for a, b in zip(first, run(operator, tensors), strict=True):
                assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())
            torch.set_num_threads(threads)
    finally:
        torch.set_num_threads(before)


def test_a_broken_kernel_is_seen() -> None:
    """The comparisons above can fail: a gradient made at another scale of the hyperbolic part is far off."""
    q, k, v = (x.detach() for x in sample(30))
    rules, nothing = TileSpec(FORMULAS["exp"], "row"), torch.empty(2, 0)
    weights, terms = torch.full((1, 2, 30, 1), -1.0), metric.Hyperbolic().terms(9)
    inputs = DistanceInputs(q, k, v, weights, nothing)
    results = forward(inputs, DistanceSpec(rules, terms))
    found = [
        backward((torch.ones_like(results[0]),), inputs, results, DistanceSpec(rules, part), frozenset("qkv"))
        for part in (terms, metric.Hyperbolic(scale=1.01).terms(9))
    ]
    truth = [x.requires_grad_() for x in (q.double(), k.double(), v.double())]
    exact = torch.autograd.grad(
        zonal.attention(*truth, by(metric.Hyperbolic()), causal=True, path="dense").sum(), truth
    )
    close(list(found[0][:3]), list(exact))
    with pytest.raises(AssertionError):
        close(list(found[1][:3]), list(exact))


def refused(operator: Operator, **more: object) -> str | None:
    q, k, v = (x.detach() for x in sample(5))
    return distance_path.refusal(prepare(operator, q, k, v, causal=True, **more))  # type: ignore[arg-type]


def test_what_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(m.rewa()) is None
    for operator, said in (
        (m.softmax(), "no sum of"),
        (by(metric.FisherRao()), "FisherRao is no sum of"),
        (by(metric.Product((metric.Euclidean(), metric.Fidelity()), (5, 4))), "Product is no sum of"),
        (by(metric.Product((metric.Euclidean(),) * 9)), "at most 8 distances"),
        (by(metric.Euclidean(), link=link.Oscillatory((1.0,) * 9, (1.0,) * 9, (1.0,) * 9)), "up to 8 waves"),
        (by(metric.Euclidean(), link=link.Identity(), anchor=anchor.Raw()), "Identity is not in it"),
        (m.rewa(prior=prior.ALiBi()), "log priors"),
    ):  # fmt: skip
        assert said in (refused(operator) or "")
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert "off" in (refused(m.rewa()) or "")


def test_explain_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 8, 2048, 96)
    for operator in (m.rewa(), m.rewa_oscillatory(), m.rewa(dot=0.1), by(metric.Sphere())):
        found = zonal.explain(operator, shape, causal=True, gradients=True)
        assert (found.path, found.tiles) == ("tiled", "a compiled kernel")
    assert "log priors" in zonal.explain(m.rewa(prior=prior.ALiBi()), shape, causal=True).tiles
    assert "float64" in zonal.explain(m.rewa(), shape, causal=True, dtype=torch.float64).tiles
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    slow = zonal.explain(m.rewa(), shape, causal=True)
    assert "off" in slow.tiles
    monkeypatch.delenv(native_kernels.VARIABLE)
    assert slow.plan.estimates[0].seconds > zonal.explain(m.rewa(), shape, causal=True).plan.estimates[0].seconds


def test_a_kernel_that_cannot_be_had_is_said_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's tiles run in its place, with a warning the first time, and the plan says so from then on."""
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        native_kernels.recipe, "make", lambda *_: (_ for _ in ()).throw(build.BuildError("build: no room"))
    )
    native_kernels.forget()
    try:
        tensors = sample(20)
        with pytest.warns(UserWarning, match="torch's tiles run in place"):
            y = zonal.attention(*tensors, m.rewa(), causal=True, path="tiled")
        assert (y - zonal.attention(*tensors, m.rewa(), causal=True, path="dense")).abs().max() < 1e-5
        assert "no room" in zonal.explain(m.rewa(), (1, 2, 64, 9)).tiles
    finally:
        native_kernels.forget()


# -- torch's machinery -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [True, False])
def test_opcheck(learned: bool) -> None:
    q, k, v = sample(23)
    terms = m.rewa().score.terms(9)
    assert terms is not None
    weights = torch.rand(1, 2, 23, 3).neg().requires_grad_(learned)
    mask = torch.ones(1, 23, dtype=torch.bool)
    mask[0, :3] = False
    coefficients = torch.rand(2, 3).requires_grad_(learned)
    spec = DistanceSpec(TileSpec(FORMULAS["exp"], "row"), terms, 1)
    assert decode(DistanceSpec, encode(spec)) == spec
    torch.library.opcheck(distance.operator, (q, k, v, weights, coefficients, mask, None, encode(spec)))


def test_second_derivatives_are_refused() -> None:
    general.check_second_derivatives(m.rewa(), sample(20), "tiled")


def test_a_training_step_compiles_without_a_break() -> None:
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(50, 36, ("rewa", "rewa_oscillatory"), 2))
    tokens = torch.randint(0, 50, (2, 40))

    def step(tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = function(tokens)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())

"""Compiled feature maps: against their definition in float64, through sums over their products, and their limits."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from kernels import general
from kernels.general import with_gradients
from kernels.sums_cases import assert_as_good
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, features, link, prior, score
from zonal import mechanisms as m
from zonal.algebra.score import FeatureLayer
from zonal.errors import ArgumentError
from zonal.execution.call import prepare
from zonal.execution.paths import features as features_path
from zonal.execution.paths import sums as sums_path
from zonal.features import Anchors, PositiveRandom, TensorProduct
from zonal.formula import Activation
from zonal.kernels import features as feature_kernel
from zonal.kernels import native as native_kernels
from zonal.kernels.features import FeaturesInputs, FeaturesSpec, made
from zonal.kernels.op import encode

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")


def featured(made_of: features.FeatureMap, **options: float | bool) -> Callable[[], Operator]:
    return lambda: Operator(features.Features(made_of, **options), link.Identity(), anchor.Row(allow_signed=True))


OPERATORS: dict[str, Callable[[], Operator]] = {
    "slay": m.slay,
    "slay-small": lambda: m.slay(scale="small", nodes=3, rule="minimax"),
    "slay-learned": lambda: m.slay(scale="small", learn=True),
    "slay-laplace": lambda: m.slay(polynomial="none", draws=20),
    "performer": m.performer,
    "performer-odd": lambda: m.performer(draws=13, orthogonal=False),
    "antithetic": featured(PositiveRandom(6, s=0.2, antithetic=True, learn=True), temperature=2.0),
    "anchors": featured(Anchors(5, learn=True)),
    "product": featured(TensorProduct(Anchors(3), PositiveRandom(7, learn=True)), temperature=0.5),
    "hedgehog": m.hedgehog,
    "hedgehog-exp": lambda: m.hedgehog(size=6, activation="exp"),
    "hedgehog-shared": featured(features.LearnedExp(10, shared=True)),
    "performer squared": lambda: m.performer(draws=6).replace(link=link.SquaredAffine(bias=0.3)),
    "slay-decay": lambda: m.slay(scale="small").replace(prior=prior.Decay((0.9, 0.99))),
    "slay-count": lambda: m.slay(scale="small").replace(anchor=anchor.Count(), prior=prior.Causal(include_self=False)),
}


def sample(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 13,
    value_dim: int = 9,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
    return [torch.randn(2, h, tokens, d, generator=generator).mul(0.7).to(dtype).requires_grad_() for h, d in shapes]


def operator_of(name: str, dim: int = 13, kv_heads: int = 2) -> Operator:
    """With the numbers of each head its own, where it has some."""
    return OPERATORS[name]().for_heads(kv_heads, dim=dim).float()


def layers_of(operator: Operator, dim: int = 13) -> tuple[FeatureLayer, FeatureLayer]:
    bound = operator.bind(4, 2)
    found = bound.score.layers(dim, bound.score_params, None)
    assert found is not None
    return found


def whole(numbers: Tensor, layer: FeatureLayer) -> Tensor:
    """The features of what the kernel makes."""
    if layer.left == 0:
        return numbers
    a, *b = numbers.split([layer.left, *[(numbers.shape[-1] - layer.left) // layer.nodes] * layer.nodes], -1)
    return torch.cat([(a[..., None] * each[..., None, :]).flatten(-2) for each in b], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 37, 300])
@pytest.mark.parametrize("name", OPERATORS)
def test_features_are_as_good_as_those_of_torch(name: str, tokens: int, dtype: torch.dtype) -> None:
    """Of queries and keys, with their gradients and those of what is learned: at most twice the error in float32."""
    operator = operator_of(name)
    double, other = copy.deepcopy(operator).double(), copy.deepcopy(operator)
    for side, x in zip(("query", "key"), sample(tokens, dtype=dtype), strict=False):
        layer = layers_of(operator)[side == "key"]
        got = with_gradients(whole(made(x, layer), layer), [x, *operator.parameters()])
        found = []
        for one, wide in ((other, torch.float32), (double, torch.float64)):
            leaf, bound = x.detach().to(wide).requires_grad_(), one.bind(4, 2)
            params = bound.score_params
            query, key = bound.score.prepare_query, bound.score.prepare_key
            ready = query(leaf, params, None) if side == "query" else key(leaf, params)
            found.append(with_gradients(ready, [leaf, *one.parameters()]))
        assert got[1].dtype == dtype
        assert_as_good([g.float() for g in got], found[0], found[1], dtype)


CALLS: dict[str, dict[str, bool]] = {
    "plain": {}, "padding": {"padding": True}, "strided": {"strided": True}, "bidirectional": {"bidirectional": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in OPERATORS
        for how in CALLS
        if how != "bidirectional" or name not in ("slay-decay", "slay-count")  # which have an order
    ],
)
def test_attention_is_as_good_as_the_dense_path(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for the state to be read, from both kinds of scores."""
    operator = operator_of(name)
    double, other = copy.deepcopy(operator).double(), copy.deepcopy(operator)
    q, k, v = sample(701 if name in ("slay", "slay-laplace") else 333)
    mask = None
    if how == "strided":
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    if how == "padding":
        mask = torch.ones(2, k.shape[2], dtype=torch.bool)
        mask[0, :40], mask[1, ::3] = False, False
        mask[1, 0] = True
        k.data[~mask[:, None].expand(-1, 2, -1)] = float("nan")
    called: list[int] = []
    original = feature_kernel.forward
    monkeypatch.setattr(feature_kernel.features.bodies["cpu"], "forward", lambda *x: called.append(1) or original(*x))

    def run(operator: Operator, dtype: torch.dtype, path: str) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        y = zonal.attention(*leaves, operator, causal=how != "bidirectional", key_padding_mask=mask, path=path)
        if mask is not None:  # left padding sees nothing
            y = y * mask.repeat_interleave(1, 0)[:, None, :, None]
        return with_gradients(y, [*leaves, *operator.parameters()])

    got = run(operator, torch.float32, "chunked")
    assert len(called) == 2
    assert_as_good(got, run(other, torch.float32, "dense"), run(double, torch.float64, "dense"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["performer", "antithetic", "hedgehog", "slay-small"])
def test_tiles_take_the_same_features(name: str, dtype: torch.dtype) -> None:
    """Those that are no products by the kernel, with all gradients; products by torch."""
    operator, tensors = operator_of(name), sample(130, dtype=dtype)
    double, other = copy.deepcopy(operator).double(), copy.deepcopy(operator)

    def run(operator: Operator, wide: torch.dtype, path: str) -> list[Tensor]:
        leaves = [x.detach().to(wide).requires_grad_() for x in tensors]
        y = zonal.attention(*leaves, operator, causal=True, path=path)
        return with_gradients(y, [*leaves, *operator.parameters()])

    assert_as_good(
        run(operator, dtype, "tiled"), run(other, dtype, "dense"), run(double, torch.float64, "dense"), dtype
    )


@pytest.mark.parametrize("name", ["slay-small", "slay-decay", "slay-learned", "hedgehog", "performer"])
def test_memories_of_the_kernel_are_those_of_torch(name: str) -> None:
    """Cut in pieces: the same rows as at once, and the state that a memory makes by torch."""
    operator = operator_of(name)
    with torch.no_grad():
        q, k, v = sample(200)
        y = zonal.attention(q, k, v, operator, causal=True, path="chunked")
        memory, rows = Memory.empty(operator, 2, 2, 13, 9), []
        for part in (slice(0, 90), slice(90, 91), slice(91, 200)):
            cut = [x[:, :, part] for x in (q, k, v)]
            out, memory = zonal.attention(
                *cut, operator, causal=True, memory=memory, return_memory=True, path="chunked"
            )
            rows.append(out)
        assert (torch.cat(rows, 2) - y).abs().max() < 1e-5
        kept = Memory.empty(operator, 2, 2, 13, 9).absorb(k, v).state  # type: ignore[attr-defined]
        assert (memory.state - kept).abs().max() < 1e-5 * (1 + kept.abs().max())  # type: ignore[attr-defined]


def test_exponentials_over_their_range() -> None:
    """Two units in the last place from denormal numbers to overflow; NaN and infinities as in torch."""
    x = torch.cat([torch.linspace(-120, 95, 4001), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    y = made(x.view(1, 1, -1, 1), FeatureLayer((Activation("exp", 0, 1),), torch.ones(1, 1, 1))).flatten()
    truth = x.double().exp()
    rounded = truth.float()
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y.isinf(), rounded.isinf())
    finite = y.isfinite()
    allowed = (truth * 2.5e-7).clamp_min(1.5e-45)
    assert ((y.double() - truth).abs() <= allowed)[finite].all()


def test_lanes_do_not_touch() -> None:
    """A NaN vector leaves all others and their gradients as they are, and zeros are as good as any."""
    x = sample(45)[0].detach()
    x[0, 1, 3] = 0
    bad = x.clone()
    bad[0, 2, 17] = torch.nan
    weight = torch.randn(2, 6, 13, generator=torch.Generator().manual_seed(1))
    layer = FeatureLayer((Activation("exp", 0, 6, 0.5, 0.1, 0.2, 3.0), Activation("square", 2, 4)), weight)
    found = []
    for each in (x, bad):
        each.requires_grad_()
        found.append(with_gradients(made(each, layer), [each]))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        different = (a != b).any(-1).nonzero()
        assert different.tolist() == [[0, 2, 17]]
        assert b[0, 2, 17].isnan().any()


@pytest.mark.parametrize("unit", [False, True])
def test_vectors_of_any_length(unit: bool) -> None:
    """Zero vectors are units of length zero without a gradient; others have theirs, however long or short."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 5, 8, generator=generator) * torch.tensor([0.0, 1e-10, 1.0, 1e5, 1e10])[:, None]
    x.requires_grad_()
    weight = torch.randn(1, 4, 8, generator=generator)
    y = made(x, FeatureLayer((Activation("square", 0, 4),), weight, unit=unit))
    u = score.unit(x.double()) if unit else x.double()
    wanted = (u @ weight.double().mT).square()
    assert ((y - wanted).abs() <= 1e-5 * u.square().sum(-1, keepdim=True)).all()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isfinite().all()
    assert not unit or not gradient[0, 0, 0].any()


def test_few_and_no_tokens() -> None:
    layer = layers_of(operator_of("slay"))[0]
    assert made(torch.zeros(2, 4, 0, 13), layer).shape == (2, 4, 0, 48)
    assert made(torch.zeros(0, 4, 3, 13), layer).shape == (0, 4, 3, 48)


def test_features_that_vanish_are_an_error() -> None:
    q, k, v = (x.detach() for x in sample(30))
    q[0, 1, 7] *= 100
    with pytest.raises(ArgumentError, match="all features PositiveRandom of some vector are 0 in float32"):
        zonal.attention(q, k, v, operator_of("performer"), causal=True, path="chunked")
    zonal.attention(q, k, v, operator_of("slay"), causal=True, path="chunked")


def test_the_scale_of_a_call_stands_in_for_the_temperature() -> None:
    q, k, v = (x.detach() for x in sample(80))
    for name in ("slay-small", "product", "performer", "hedgehog"):
        operator = operator_of(name).replace(anchor=anchor.Count())
        chunked, dense = (
            zonal.attention(q, k, v, operator, causal=True, scale=0.3, path=path) for path in ("chunked", "dense")
        )
        assert (chunked - dense).abs().max() < 1e-5 * (1 + dense.abs().max())


def test_maps_that_are_no_layer_run_by_torch() -> None:
    q, k, v = (x.detach() for x in sample(80))
    for options in ({"fusion": "hadamard"}, {"fusion": "shared"}, {"anew": True}, {"polynomial": "exact"}):
        operator = m.slay(scale="small", allow_signed=True, dim=13, **options)  # type: ignore[arg-type]
        bound = operator.bind(4, 2)
        assert bound.score.layers(13, bound.score_params, None) is None
        chunked, dense = (zonal.attention(q, k, v, operator, causal=True, path=path) for path in ("chunked", "dense"))
        assert (chunked - dense).abs().max() < 1e-5


def test_torch_makes_the_features_where_their_kernel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in sample(300))
    operator = operator_of("slay")
    y = zonal.attention(q, k, v, operator, causal=True, path="chunked")
    monkeypatch.setattr(features_path, "FAMILY", SimpleNamespace(refusal=lambda *given: "there is none"))
    monkeypatch.setattr(feature_kernel, "forward", None)
    found = sums_path.chunked(prepare(operator, q, k, v, causal=True))[0]
    assert (found - y).abs().max() < 1e-5


# -- torch's machinery -----------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    x = sample(23)[0]
    weight = torch.randn(2, 6, 13, generator=torch.Generator().manual_seed(1))
    half = Activation("exp", 0, 6, 0.5, 0.1, 0.2, 3.0)
    for learned in (True, False):
        for spec in (FeaturesSpec((half, half._replace(factor=-1.0)), softmax=True), FeaturesSpec((half,), unit=True)):
            given = FeaturesInputs(x, weight.requires_grad_(learned))
            torch.library.opcheck(feature_kernel.features.operator, (*given, encode(spec)))


def test_second_derivatives_are_refused() -> None:
    general.check_second_derivatives(operator_of("slay"), sample(20), "chunked")


@pytest.mark.parametrize("path", ["chunked", "tiled"])
@pytest.mark.parametrize("name", ["slay-small", "performer", "hedgehog"])
def test_a_call_compiles_without_a_break(name: str, path: str) -> None:
    operator, tensors = operator_of(name), sample(150)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path=path)

    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    leaves = [*tensors, *operator.parameters()]
    for a, b in zip(*(with_gradients(f(*tensors), leaves) for f in (attended, compiled)), strict=True):
        assert (a - b).abs().max() < 1e-5 * (1 + b.abs().max())


@pytest.mark.parametrize("made_of", [features.Slay(), features.RandomMaclaurin(8)])
def test_a_size_that_is_left_open_compiles_without_a_break(made_of: features.FeatureMap) -> None:
    operator, (q, k, v) = featured(made_of)(), sample(20)

    def attended(q: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True)

    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attended(q), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_again(threads: int) -> None:
    before, operator = torch.get_num_threads(), operator_of("slay-learned")
    try:
        torch.set_num_threads(threads)
        tensors = sample(600)
        leaves = [*tensors, *operator.parameters()]
        found = [
            with_gradients(zonal.attention(*tensors, operator, causal=True, path="chunked"), leaves) for _ in range(3)
        ]
        assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))
    finally:
        torch.set_num_threads(before)

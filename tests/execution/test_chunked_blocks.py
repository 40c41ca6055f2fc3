"""The chunked path: the block size is speed and not meaning; what it keeps, refuses and says."""

import pytest
import torch
from execution.chunks import BLOCKED, assert_same, call_of, leaves_of, made
from matrix import CASES, OPERATORS, Case, inputs, randomised
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError, PathError
from zonal.execution.paths import scan
from zonal.execution.paths.chunked import chunked, refusal
from zonal.execution.paths.dense import dense
from zonal.execution.plan import choose

PRIME = Case(batch=2, heads=4, kv_heads=2, queries=31, keys=31)
LATE = Case(batch=1, heads=2, kv_heads=1, queries=7, keys=29)
FREE = Case(batch=1, heads=2, kv_heads=2, queries=11, keys=23, causal=False, padding="random")
LEFT = Case(batch=2, heads=2, kv_heads=2, queries=23, keys=23, padding="left")


def check_blocks(name: str, case: Case, block: int | None = None) -> None:
    """The chunked path equals the definition, gradients included; what fades is refused where there is no order."""
    operator, data = made(name), inputs(case)
    if operator.tags.decays and not (case.causal or any(isinstance(p, prior.Causal) for p in operator.prior)):
        with pytest.raises(ArgumentError, match="fades with time, which has a meaning only for causal=True"):
            call_of(operator, data)
    else:
        call = call_of(operator, data)
        assert_same(chunked(call, block=block)[0], dense(call), leaves_of(operator, data))


@pytest.mark.parametrize("block", [1, 2, 3, 8, 16, 30, 31, 64])
@pytest.mark.parametrize(
    "case", [PRIME, LATE, FREE, LEFT], ids=["prime-gqa", "queries-last", "bidirectional", "left-padding"]
)
@pytest.mark.parametrize("name", BLOCKED)
def test_block_size_is_speed(name: str, case: Case, block: int) -> None:
    check_blocks(name, case, block)


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("name", ["squared_affine", "retention", "linear", "sko-chunk"])
def test_states_made_again(name: str, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward from every state, from every second and from every fifth."""
    monkeypatch.setattr(scan, "_stride", lambda job: stride)
    operator, data = made(name), inputs(PRIME)
    call = call_of(operator, data)
    assert_same(chunked(call, block=3)[0], dense(call), leaves_of(operator, data))


@pytest.mark.parametrize("padding", ["", "random"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BLOCKED)
def test_twenty_documents(name: str, causal: bool, padding: str) -> None:
    """Packed documents of all lengths, one token and a long one among them, as if each were alone."""
    lengths = [1, 3, 17, 2, 2, 5, 1, 8, 9, 4, 4, 31, 7, 1, 6, 16, 2, 3, 10, 5]
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total = int(edges[-1])
    packed = tuple(edges.tolist())
    check_blocks(name, Case(1, 2, 1, total, total, causal=causal, packed=packed, padding=padding), 4)


def test_documents_cost_no_loop_over_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty documents run as a handful of batches."""
    runs = []
    monkeypatch.setattr("zonal.execution.paths.chunked.scan", lambda *a: runs.append(a[0].shape) or scan.scan(*a))
    data = inputs(Case(batch=1, heads=1, kv_heads=1, queries=400, keys=400, packed=tuple(range(0, 401, 20))))
    chunked(call_of(made("squared_affine"), data))
    assert len(runs) == 1
    assert runs[0][0] == 20


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize(
    "case_name", ["one-token", "no-keys", "no-queries", "more-queries-than-keys", "all-forbidden", "strided"]
)
def test_small_and_odd_inputs(name: str, case_name: str) -> None:
    check_blocks(name, CASES[case_name])


@pytest.mark.parametrize("name", ["squared_affine", "linear", "retention", "ska-1", "polynomial_square"])
def test_what_is_kept_for_backward(name: str) -> None:
    """Linear in the number of tokens with a factor of a few inputs, however many features there are; no T x T, no T x
    m.
    """
    operator = made(name).float()
    tokens, dim = 1024, 16
    q, k, v = (torch.randn(1, 2, tokens, dim, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = zonal.attention(q, k, v, operator, causal=True, path="chunked")
    budget = {"polynomial_square": 24, "ska-1": 32}.get(name, 16)
    assert sum(kept.values()) < budget * q.nbytes
    y.sum().backward()


@pytest.mark.parametrize("name", ["squared_affine", "retention", "linear", "ska-0", "ska-1"])
def test_second_derivative_is_refused(name: str) -> None:
    data = inputs(PRIME)
    y = chunked(call_of(made(name), data), block=4)[0]
    with pytest.raises(PathError, match=r"no second derivative.*path='dense'"):
        torch.autograd.grad(y.sum(), data.q, create_graph=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("softmax", "link Exp has no finite feature map"),
        ("yat", "link Yat has no finite feature map"),
        ("distance", "no dot product of prepared vectors"),
        ("softmax-window", "prior Window weights each past key"),
        ("softmax-alibi", "prior ALiBi weights each past key"),
        ("sko-chebyshev", "no finite feature map"),
        ("ridge-yat", "kernel Cosine-Yat among keys is not the plain product"),
        ("koopman-exp", "kernel Cosine-Exp among keys is not the plain product"),
        ("ridge-window", "drops keys one by one"),
    ],
)
def test_refusals_say_why_and_what_else(name: str, words: str) -> None:
    call = call_of(randomised(OPERATORS[name]()), inputs(PRIME))
    assert words in (refusal(call) or "")
    with pytest.raises(PathError, match=r"path 'chunked' cannot run.*Use path='(tiled|dense)'"):
        choose(call, "chunked")


def test_refusals_that_depend_on_the_call() -> None:
    wide = inputs(Case(key_dim=40, queries=3, keys=3))
    assert "needs 135751 features at head dimension 40" in (refusal(call_of(made("polynomial_square"), wide)) or "")
    running = m.ska(power=1, running_max=True, key_limit=None).double()
    assert "an inverse of its own" in (refusal(call_of(running, inputs(PRIME))) or "")
    assert refusal(call_of(running, inputs(FREE))) is None
    faded = m.retention().replace(prior=(prior.Decay(), prior.ChunkCausal(4))).double()
    assert "whole chunks" in (refusal(call_of(faded, inputs(PRIME))) or "")
    with pytest.raises(ArgumentError, match="block of path 'chunked' must be >= 1"):
        chunked(call_of(made("linear"), inputs(PRIME)), block=0)


def test_paper_form_with_the_largest_key_bidirectional() -> None:
    operator, data = randomised(m.ska(power=2, running_max=True, key_limit=None)), inputs(FREE)
    call = call_of(operator, data)
    assert_same(chunked(call)[0], dense(call), leaves_of(operator, data))


@pytest.mark.parametrize("name", BLOCKED)
def test_no_leak_from_large_keys(name: str) -> None:
    """Keys of norm 1e3 from token t on leave all outputs before t as they were."""
    large = (
        5.0 if name in ("performer", "rewa_functional-linear") else 1e3
    )  # past that all of its features underflow, which is refused
    operator, data, t = made(name), inputs(Case(batch=1, queries=29, keys=29)), 13
    before = chunked(call_of(operator, data), block=8)[0]
    with torch.no_grad():
        for x in (data.q, data.k, data.v):
            x[:, :, t:] = large * torch.randn(
                x[:, :, t:].shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype
            )
    after = chunked(call_of(operator, data), block=8)[0]
    assert (before[:, :, :t] - after[:, :, :t]).abs().max() < 1e-10
    assert not torch.allclose(before[:, :, t + 3 :], after[:, :, t + 3 :], atol=1e-3)


def test_nan_in_padding_is_never_seen() -> None:
    for name in ("squared_affine", "retention", "ska-1"):
        operator, data = made(name), inputs(LEFT)
        expected = chunked(call_of(operator, data))[0]
        assert data.key_padding_mask is not None
        with torch.no_grad():
            for x in (data.k, data.v):
                x.masked_fill_(~data.key_padding_mask[:, None, :, None], float("nan"))
        y = chunked(call_of(operator, data))[0]
        real = data.key_padding_mask[:, None, :, None].expand_as(y)
        assert torch.allclose(y[real], expected[real], atol=1e-12)


def test_long_decays_neither_overflow_nor_vanish() -> None:
    """Decays that sum to thousands within a block, per token, in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 700, 8, generator=generator) for _ in range(3))
    decay = (
        -8 * torch.rand(1, 2, 700, generator=generator).square() * (torch.rand(1, 2, 700, generator=generator) > 0.5)
    )
    decay.requires_grad_()
    exact = zonal.attention(
        q.double(), k.double(), v.double(), m.retention().double(), causal=True, path="dense", log_decay=decay.double()
    )
    got = zonal.attention(q, k, v, m.retention(), causal=True, path="chunked", log_decay=decay)
    assert (got - exact).abs().max() < 1e-5 * exact.abs().max()
    a, b = (torch.autograd.grad(y.square().sum(), decay)[0] for y in (got, exact))
    assert (a - b).abs().max() < 1e-4 * b.abs().max()


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("power", [0, 1])
def test_drift_over_a_hundred_thousand_tokens(power: int, spread: float) -> None:
    """float32 against float64, the keys' directions over ``spread`` powers of ten in a basis that is nobody's: inverses
    are made again often enough, and where float32 could not do it, float64 does.

    Row by row, relative to the row.
    """
    r, tokens = 16, 100_000
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(r, r, generator=generator, dtype=torch.float64))[0]
    scale = torch.logspace(0, -spread, r, dtype=torch.float64)
    k, q = (
        (torch.randn(1, 1, tokens, r, generator=generator, dtype=torch.float64) * scale @ turn).float()
        for _ in range(2)
    )
    v = torch.randn(1, 1, tokens, 4, generator=generator)
    operator = m.ska(power=power)
    with torch.no_grad():
        single = zonal.attention(q, k, v, operator, causal=True, path="chunked")
        exact = zonal.attention(q.double(), k.double(), v.double(), operator.double(), causal=True, path="chunked")
    error = (single - exact).abs().amax(-1)[..., 1000:] / exact.abs().amax(-1)[..., 1000:]
    assert error.max() < 1e-3, f"largest error {error.max():.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["squared_affine", "linear", "retention", "ska-1", "ridge"])
def test_low_precision_computes_in_single(name: str, dtype: torch.dtype) -> None:
    operator = made(name).float()
    data = inputs(Case(queries=40, keys=40, key_dim=8)).to(dtype)
    got = zonal.attention(data.q, data.k, data.v, operator, causal=True, path="chunked")
    exact = zonal.attention(
        data.q.double(), data.k.double(), data.v.double(), operator.double(), causal=True, path="dense"
    )
    assert got.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 1.01 * rounding + 3e-5 * exact.abs().max()


@pytest.mark.parametrize(("target", "wrong"), [
    ("zonal.features.symmetric._square_vjp", lambda x, g: torch.zeros_like(x)),
    ("zonal.execution.paths.scan._decay_gradient", lambda scan, *a: torch.zeros_like(scan.v[..., 0]).double()),
    ("zonal.execution.paths.blocks.carried", lambda parts, first: parts.cumsum(2)),
])  # fmt: skip
def test_the_suite_can_fail(target: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_the_same() -> None:
        for name in ("squared_affine", "retention", "ska-1"):
            operator, data = made(name), inputs(PRIME)
            call = call_of(operator, data)
            assert_same(chunked(call, block=8)[0], dense(call), leaves_of(operator, data))

    monkeypatch.setattr(target, wrong)
    with pytest.raises(AssertionError, match="is off by"):
        all_the_same()

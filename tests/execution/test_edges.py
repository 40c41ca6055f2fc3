"""Inputs at the edge: queries that see no key, padding that holds NaN, rows of nearly no mass, axes of size zero."""

import pytest
import torch
from matrix import OPERATORS, randomised
from torch import Tensor

import zonal
from zonal import anchor, prior
from zonal import mechanisms as m
from zonal.errors import ArgumentError, NonFiniteError, PathError
from zonal.kernels import native as native_kernels

PATHS = ("dense", "tiled", "chunked", "streaming")


def tokens(
    queries: int, keys: int, dim: int = 4, value_dim: int = 3, heads: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, queries, dim), (2, heads, keys, dim), (2, heads, keys, value_dim))
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return q, k, v


WINDOWS = {"open": prior.Window(left=1), "own": prior.Window(left=0), "closed": prior.Window(1, 0)}


@pytest.mark.parametrize("causal", [False, True], ids=["both sides", "causal"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["softmax", "squared_affine", "distance", "softmax-top", "ridge", "sinkhorn"])
def test_a_window_with_more_queries_than_keys(name: str, window: str, causal: bool) -> None:
    """The first queries stand before the first key: they see what a window leaves open, else nothing, and read
    zeros.
    """
    operator = OPERATORS[name]().replace(prior=WINDOWS[window])
    q, k, v = tokens(9, 3)
    if causal and operator.tags.couples:
        with pytest.raises(ArgumentError, match="causal=True"):
            zonal.attention(q, k, v, operator.double(), causal=True)
        return
    exact = zonal.attention(q, k, v, operator.double(), causal=causal, path="dense")
    blind = 5 if window == "closed" or causal else 0
    assert bool((exact[:, :, :blind] == 0).all())
    for dtype in (torch.float64, torch.float32):
        cast, low = operator.to(dtype), [x.to(dtype) for x in (q, k, v)]
        for path in (*PATHS, "auto"):
            try:
                y = zonal.attention(*low, cast, causal=causal, path=path)
            except PathError:
                continue
            in_float32 = 1e-4 if operator.tags.couples else 1e-5  # a plan is found up to its tolerance
            allowed = 1e-10 if dtype == torch.float64 else in_float32
            error = float((y.double() - exact).detach().abs().max())
            assert error <= allowed, f"{path} in {dtype} is off by {error:.3g}"
            assert bool((y[:, :, :blind] == 0).all())


@pytest.mark.parametrize("held", [1, 6])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_memory_read_by_more_queries_than_new_keys(window: str, held: int) -> None:
    """As all keys at once, or refused where the window has let go of keys that the first queries see."""
    operator = m.softmax(prior=WINDOWS[window]).float()
    q, k, v = (x.float() for x in tokens(5, held + 2))
    exact = zonal.attention(q, k, v, operator, path="dense")
    _, memory = zonal.attention(q[:, :, :0], k[:, :, :held], v[:, :, :held], operator, return_memory=True)
    if held == 6:
        with pytest.raises(ArgumentError, match="a memory with a window has dropped the first"):
            zonal.attention(q, k[:, :, held:], v[:, :, held:], operator, memory=memory)
    else:
        y, _ = zonal.attention(q, k[:, :, held:], v[:, :, held:], operator, memory=memory)
        torch.testing.assert_close(y, exact, rtol=0, atol=2e-6)


PADDED = (
    "softmax",
    "linear",
    "retention",
    "sko",
    "yat-decay",
    "squared_affine",
    "ridge",
    "ska-1",
    "ska-fading",
    "softmax-top",
    "distance",
    "rewa",
    "sinkhorn",
    "hierarchical",
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_what_padding_holds_is_in_no_product(name: str, dtype: torch.dtype) -> None:
    """NaN and infinity in padded keys, values and biases: outputs and gradients as with zeros there, and no gradient
    for padding.
    """
    operator = randomised(OPERATORS[name]()).to(dtype)
    tags = operator.tags
    q, k, v = (x.to(dtype) for x in tokens(9, 9))
    bias = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    mask = torch.tensor([[True, False, True, True, False, True, True, False, False], [True] * 9])
    hidden = ~mask[:, None, :, None]
    for path in (*PATHS, "auto"):
        found = []
        for fill_k, fill_v in ((0.0, 0.0), (float("nan"), float("inf")), (float("inf"), float("nan"))):
            leaves = [
                x.clone().requires_grad_() for x in (q, k.masked_fill(hidden, fill_k), v.masked_fill(hidden, fill_v))
            ]
            biased = None if tags.solves or tags.couples else bias.masked_fill(hidden[..., 0], fill_v).requires_grad_()
            try:
                y = zonal.attention(
                    *leaves, operator, causal=not tags.couples, key_padding_mask=mask, key_bias=biased, path=path
                )
            except PathError:
                break
            wanted = leaves if biased is None else [*leaves, biased]
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), wanted)])
        for got in found[1:]:
            for index, (a, b) in enumerate(zip(got, found[0], strict=True)):
                assert torch.equal(a, b), (
                    f"{path}: item {index} (0 = output, then gradients) depends on what padding holds"
                )
        for _, _, dk, dv, *dbias in found:
            assert not dk.masked_select(hidden).any()
            assert not dv.masked_select(hidden).any()
            assert not any(bool(x.masked_select(hidden[..., 0]).any()) for x in dbias)


@pytest.mark.parametrize(("name", "runs"), [("squared_affine", False), ("yat", True)])
def test_a_given_decay_together_with_chunks(name: str, runs: bool) -> None:
    """Planned on the paths that take it; streaming keeps keys where there are no sums, and refuses where it would keep
    sums.
    """
    operator = OPERATORS[name]().replace(prior=prior.ChunkCausal(2)).float()
    q, k, v = (x.float() for x in tokens(6, 6))
    decay = -torch.rand(2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    exact = zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path="dense")
    for path in ("auto", "tiled", *(("streaming",) if runs else ())):
        torch.testing.assert_close(
            zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path=path), exact, rtol=0, atol=2e-6
        )
    if not runs:
        with pytest.raises(PathError, match="a decay together with whole chunks is not kept as sums"):
            zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path="streaming")


@pytest.mark.parametrize("path", [*PATHS, "auto"])
@pytest.mark.parametrize(
    "name", ["softmax", "linear", "squared_affine", "retention", "ridge", "ska-1", "yat", "distance", "sinkhorn"]
)
def test_values_or_keys_without_numbers(name: str, path: str) -> None:
    """No numbers of values: an empty answer of the right shape.

    None of keys: what the definition says, or an argument error.
    """
    operator = OPERATORS[name]().float()
    for dim, value_dim in ((4, 0), (0, 3)):
        q, k, v = (x.float().requires_grad_() for x in tokens(6, 6, dim, value_dim))
        try:
            y = zonal.attention(q, k, v, operator, causal=not operator.tags.couples, path=path)
        except ArgumentError:
            assert dim == 0
            continue
        assert y.shape == (2, 2, 6, value_dim)
        exact = zonal.attention(q, k, v, operator, causal=not operator.tags.couples, path="dense")
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)
        y.sum().backward()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_a_plan_too_large_for_its_type_is_refused(path: str, gradients: bool) -> None:
    """Without masses to keep to, a plan is its kernel, which overflows. The dense gradient solves a system besides."""
    operator = m.sinkhorn().replace(anchor=anchor.UnbalancedPlan(rho=(0.0, 0.0))).float()
    q, k, v = (x.float().requires_grad_(gradients) for x in tokens(5, 5))
    with pytest.raises(NonFiniteError, match="the plan holds infinity"):
        zonal.attention(1e3 * q, 1e3 * k, v, operator, path=path)


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_what_is_no_number_in_a_plan_is_refused(path: str) -> None:
    """Scores and key biases; masses of zero take no part, and give and receive nothing."""
    operator = m.sinkhorn()
    q, k, v = (x.float() for x in tokens(5, 5))
    batch, heads = q.shape[0], q.shape[1]
    broken = q.clone()
    broken[0, 0, 2, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        zonal.attention(broken, k, v, operator, path=path)
    for wrong in (float("nan"), float("inf")):
        bias = torch.zeros(batch, heads, 5)
        bias[..., 1] = wrong
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            zonal.attention(q, k, v, operator, path=path, key_bias=bias)
    none, all_ = torch.zeros(batch, heads, 5), torch.ones(batch, heads, 5)
    for masses in ((none, all_), (all_, none), (none, none)):
        y = zonal.attention(q, k, v, operator, path=path, query_mass=masses[0], key_mass=masses[1])
        assert not y.any()


@pytest.mark.parametrize(
    ("path", "causal", "kernels"), [*((path, True, "on") for path in PATHS), ("chunked", False, "off")]
)
def test_rows_of_nearly_no_mass(path: str, causal: bool, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries at whose angle the link nearly vanishes: a sum over features cancels there, and is as good as the sum
    over keys.
    """
    monkeypatch.setenv(native_kernels.VARIABLE, kernels)
    draw = torch.Generator().manual_seed(0)
    operator = m.squared_affine(learn_bias=False)
    zero = -float(operator.link.bias)  # type: ignore[union-attr]
    k = torch.zeros(1, 2, 24, 8, dtype=torch.float64)
    k[..., 0] = 1
    aside = torch.randn(k.shape, generator=draw, dtype=torch.float64) * (1 - k)
    q = zero * k + (1 - zero**2) ** 0.5 * torch.nn.functional.normalize(aside, dim=-1)
    k = torch.nn.functional.normalize(k + 1e-2 * torch.randn(k.shape, generator=draw, dtype=torch.float64), dim=-1)
    v = torch.randn(1, 2, 24, 3, generator=draw, dtype=torch.float64)
    given = [x.float() for x in (q, k, v)]

    def run(dtype: torch.dtype, path: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        y = zonal.attention(*leaves, operator.to(dtype), causal=causal, path=path)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    for index, (a, b) in enumerate(zip(run(torch.float32, path), run(torch.float64, "dense"), strict=True)):
        error = float((a.double() - b).abs().max() / b.abs().max())
        assert error < 1e-5, f"item {index} is off by {error:.3g} of its largest entry"

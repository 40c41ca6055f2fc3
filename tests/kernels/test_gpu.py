"""Attention on a CUDA device, from the public call down to the Triton kernels, against the dense path in float64
there.
"""

import copy

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Memory, mechanisms, prior
from zonal.errors import PathError
from zonal.execution.call import prepare
from zonal.execution.paths import ridge, sums, tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)",
    ),
]

OPERATORS = {
    "softmax": mechanisms.softmax, "sko": mechanisms.sko, "yat": mechanisms.yat,
    "squared_affine": mechanisms.squared_affine,
    "windowed": lambda: mechanisms.softmax(prior=prior.Window(100, 20)),
}  # fmt: skip
# relative to the largest entry: rounding of the inputs' type, of weights and of sums over 300 keys
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def inputs(dtype: torch.dtype, tokens: int = 300, dim: int = 64) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (1, 4, tokens, dim), (1, 2, tokens, dim), (1, 2, tokens, dim)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def close(got: Tensor, exact: Tensor, tolerance: float, what: str) -> None:
    got, exact = got.detach().double(), exact.detach().double()
    error = float((got - exact).abs().max() / exact.abs().max())
    assert error <= tolerance, f"{what} is off by {error:.3g} of the largest entry"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask", ["causal", "bidirectional", "padding", "packed"])
@pytest.mark.parametrize("name", OPERATORS)
def test_attention_equals_the_dense_path(name: str, mask: str, dtype: torch.dtype) -> None:
    """y and all gradients, what is learned included; another run gives the same bits."""
    operator = OPERATORS[name]().cuda()
    q, k, v = inputs(dtype)
    options: dict = {"causal": mask != "bidirectional"}
    if mask == "padding":
        options["key_padding_mask"] = torch.arange(300, device="cuda")[None] % 7 != 3
    if mask == "packed":
        options["cu_seqlens"] = torch.tensor([0, 1, 140, 300], device="cuda", dtype=torch.int32)
    assert tile.refusal(prepare(operator, q, k, v, **options)) is None, "the Triton kernel runs"
    leaves = [q, k, v, *operator.parameters()]
    y = zonal.attention(q, k, v, operator, path="tiled", **options)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    shadow = copy.deepcopy(operator).double()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = zonal.attention(wide[0], wide[1], wide[2], shadow, path="dense", **options)
    expected = torch.autograd.grad(exact, [*wide, *shadow.parameters()], dy.double(), allow_unused=True)
    close(y, exact, TOLERANCE[dtype], "y")
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None)
        if a is not None and b is not None and b.abs().max() > 0:
            close(a, b, 2 * TOLERANCE[dtype], f"gradient {index}")
    assert torch.equal(y, zonal.attention(q, k, v, operator, path="tiled", **options))


@pytest.mark.parametrize("name", ["softmax", "sko", "yat"])
def test_a_decoding_step_with_split_keys(name: str) -> None:
    operator = OPERATORS[name]().cuda()
    q, k, v = inputs(torch.bfloat16, tokens=5000)
    with torch.no_grad():
        y = zonal.attention(q[:, :, -1:], k, v, operator, causal=True, path="tiled")
        exact = zonal.attention(q[:, :, -1:].double(), k.double(), v.double(), operator, causal=True, path="dense")
    close(y, exact, TOLERANCE[torch.bfloat16], "y")


def test_the_planner_chooses_and_runs() -> None:
    q, k, v = inputs(torch.bfloat16)
    operator = mechanisms.sko().cuda()
    close(
        zonal.attention(q, k, v, operator, causal=True),
        zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense"),
        2e-2,
        "y",
    )


def test_the_operator_is_one_of_torch() -> None:
    """Shapes for tracing, gradients and mutation are what torch.library expects, and a compiled call has no graph
    break.
    """
    q, k, v = inputs(torch.float32, tokens=64)
    operator = mechanisms.softmax().cuda()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="tiled")

    y = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    close(y, attend(q, k, v), 1e-6, "the compiled call")


def test_no_second_derivative() -> None:
    q, k, v = inputs(torch.float32, tokens=32)
    y = zonal.attention(q, k, v, mechanisms.softmax().cuda(), causal=True, path="tiled")
    with pytest.raises(PathError, match="no second derivative"):
        torch.autograd.grad(y.sum(), q, create_graph=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_over_features_equal_the_dense_path(dtype: torch.dtype) -> None:
    """Through a memory handed on between two calls: y and all gradients; another run gives the same bits."""
    operator, (q, k, v) = mechanisms.squared_affine().cuda(), inputs(dtype, tokens=3000)
    assert sums.refusal(prepare(operator, q, k, v, causal=True)) is None, "the Triton kernel runs"

    def attend() -> Tensor:
        memory, parts = Memory.empty(operator, 1, 2, 64, 64, dtype=dtype, device=q.device), []
        for part in (slice(0, 2500), slice(2500, 3000)):
            y, memory = zonal.attention(
                q[:, :, part], k[:, :, part], v[:, :, part], operator, causal=True, memory=memory, path="chunked"
            )
            parts.append(y)
        return torch.cat(parts, 2)

    y = attend()
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [q, k, v], dy)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = zonal.attention(wide[0], wide[1], wide[2], copy.deepcopy(operator).double(), causal=True, path="dense")
    close(y, exact, TOLERANCE[dtype], "y")
    for letter, a, b in zip("qkv", found, torch.autograd.grad(exact, wide, dy.double()), strict=True):
        close(a, b, 2 * TOLERANCE[dtype], f"gradient of {letter}")
    assert torch.equal(y, attend())


def test_sums_over_features_compile_without_a_break() -> None:
    operator, (q, k, v) = mechanisms.squared_affine().cuda(), inputs(torch.float32, tokens=3000)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="chunked")

    y = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    close(y, attend(q, k, v), 1e-6, "the compiled call")
    # with torch 2.11 it is torch that refuses, and later
    with pytest.raises((PathError, RuntimeError), match=r"no second derivative|double backward"):
        torch.autograd.grad(torch.autograd.grad(y.sum(), q, create_graph=True)[0].sum(), q)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("power", [0, 1, 2])
def test_ridge_read_outs_equal_the_dense_path(power: int, dim: int, dtype: torch.dtype) -> None:
    """Through a memory handed on between two calls: y and all gradients; another run gives the same bits."""
    operator, (q, k, v) = mechanisms.ska(power=power).cuda(), inputs(dtype, tokens=700, dim=dim)
    assert ridge.refusal(prepare(operator, q, k, v, causal=True)) is None, "the Triton kernel runs"

    def attend() -> Tensor:
        memory, parts = Memory.empty(operator, 1, 2, dim, dim, dtype=dtype, device=q.device), []
        for part in (slice(0, 500), slice(500, 700)):
            y, memory = zonal.attention(
                q[:, :, part], k[:, :, part], v[:, :, part], operator, causal=True, memory=memory, path="chunked"
            )
            parts.append(y)
        return torch.cat(parts, 2)

    y = attend()
    dy = torch.randn_like(y)
    leaves = [q, k, v, *operator.parameters()]
    found = torch.autograd.grad(y, leaves, dy)
    shadow, wide = copy.deepcopy(operator).double(), [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = zonal.attention(wide[0], wide[1], wide[2], shadow, causal=True, path="dense")
    close(y, exact, TOLERANCE[dtype], "y")
    for index, (a, b) in enumerate(
        zip(found, torch.autograd.grad(exact, [*wide, *shadow.parameters()], dy.double()), strict=True)
    ):
        close(a, b, 3 * TOLERANCE[dtype], f"gradient {index}")
    assert torch.equal(y, attend())


def test_ridge_read_outs_compile_without_a_break() -> None:
    operator, (q, k, v) = mechanisms.ska(power=1).cuda(), inputs(torch.float32, tokens=500, dim=32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="chunked")

    y = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    close(y, attend(q, k, v), 1e-6, "the compiled call")
    # with torch 2.11 it is torch that refuses, and later
    with pytest.raises((PathError, RuntimeError), match=r"no second derivative|double backward"):
        torch.autograd.grad(torch.autograd.grad(y.sum(), q, create_graph=True)[0].sum(), q)


def test_keys_that_are_not_finite_reach_no_earlier_row() -> None:
    """Of ridge read-outs: rows that see such a key are NaN, and rows before it are what they were."""
    operator, (q, k, v) = mechanisms.ska(power=1).cuda(), inputs(torch.float32, tokens=200, dim=32)
    with torch.no_grad():
        good = zonal.attention(q, k, v, operator, causal=True, path="chunked")
        k[:, :, 100] = float("nan")
        y = zonal.attention(q, k, v, operator, causal=True, path="chunked")
    assert torch.equal(y[:, :, :101], good[:, :, :101])
    assert bool(y[:, :, 101:].isnan().all())

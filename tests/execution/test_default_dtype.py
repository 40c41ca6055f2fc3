"""torch.set_default_dtype, which libraries set while they load a model, changes no number and no buffer."""

from collections.abc import Iterator

import pytest
import torch
from matrix import OPERATORS, randomised
from torch import Tensor, nn

import zonal
from zonal.errors import PathError
from zonal.kernels.abi import address
from zonal.nn import ShortConvolution

# one or more of each compiled kernel, and what draws or makes numbers when it is built
NAMES = (
    "softmax", "cosine", "linear", "retention", "sko", "sko-fractional", "yat", "squared_affine", "polynomial_square",
    "ridge", "ska-mixed", "distance", "rewa",
    "rewa_operator-path", "rewa_riemannian", "softmax-window",
)  # fmt: skip
DEFAULTS = (torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture
def default_kept() -> Iterator[None]:
    """The default dtype is put back, whatever happens."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def answers(name: str, state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What the operator starts with, and outputs and gradients of every path that takes it, and of single steps of a
    decoder.
    """
    operator = OPERATORS[name]()
    start = {key: x.clone() for key, x in operator.state_dict().items()}
    operator = operator.float()
    if state is not None:
        operator.load_state_dict(state)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 9, 5, generator=draw, dtype=torch.float64).float().requires_grad_() for heads in (4, 2, 2)
    )
    found: list[Tensor] = []
    for path in ("dense", "tiled", "chunked", "streaming"):
        try:
            y = zonal.attention(q, k, v, operator, causal=True, path=path)
        except PathError:
            continue
        gradients = torch.autograd.grad(y.square().sum(), [q, k, v, *operator.parameters()], allow_unused=True)
        found += [y.detach(), *(x for x in gradients if x is not None)]
    with torch.no_grad():
        memory = zonal.Memory.empty(operator, batch=2, heads=2, key_dim=5, value_dim=5)
        for token in torch.stack([q[:, :2], k, v])[..., :3, None, :].unbind(3):
            y, memory = zonal.attention(*token.unbind(0), operator, causal=True, memory=memory)
            found.append(y)
    return start, found


@pytest.mark.parametrize("name", NAMES)
def test_the_default_dtype_changes_nothing(name: str, default_kept: None) -> None:
    state = randomised(OPERATORS[name]()).float().state_dict()
    start, expected = answers(name, state)
    for dtype in DEFAULTS:
        torch.set_default_dtype(dtype)
        again, got = answers(name, state)
        for key, x in start.items():
            assert again[key].dtype is x.dtype, f"{key} starts in {again[key].dtype} when the default is {dtype}"
            assert torch.equal(again[key], x), f"{key} starts elsewhere when the default is {dtype}"
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.dtype is b.dtype, f"item {index} is {a.dtype} when the default is {dtype}"
            assert torch.equal(a, b), (
                f"item {index} is off by {(a.double() - b.double()).abs().max():.3g} when the default is {dtype}"
            )


@pytest.mark.parametrize("dtype", DEFAULTS, ids=str)
def test_a_short_convolution_under_another_default(dtype: torch.dtype, default_kept: None) -> None:
    layer, x = (
        ShortConvolution(8, 4),
        torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32),
    )
    nn.init.constant_(layer.weight, 0.25)

    def run() -> list[Tensor]:
        given = x.clone().requires_grad_()
        y = layer(given)
        y = y[0] if isinstance(y, tuple) else y
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [given, layer.weight])]

    expected = run()
    torch.set_default_dtype(dtype)
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 6, dtype=torch.bfloat16),
        torch.zeros(4, 5),
        torch.zeros(6, 4).T,
        torch.zeros(4, 6, device="meta"),
        torch.zeros(24),
    ],
)
def test_a_buffer_that_is_something_else_is_refused(wrong: Tensor) -> None:
    """dtype, size, layout, device and shape: each alone would make a kernel read or write elsewhere."""
    with pytest.raises(TypeError, match=r"a buffer must be torch\.float32 of shape \(4, 6\)"):
        address(wrong, torch.float32, (4, 6))


def test_a_good_buffer_is_taken() -> None:
    x = torch.zeros(4, 6)
    assert address(x, torch.float32, (4, 6)) == x.data_ptr()
    assert address(None, torch.float32, (4, 6)) == 0
    wide = torch.zeros(4, 12)[:, :6]
    assert address(wide, torch.float32, (4, 6), strided=True) == wide.data_ptr()
    with pytest.raises(TypeError, match="and contiguous"):
        address(wide, torch.float32, (4, 6))

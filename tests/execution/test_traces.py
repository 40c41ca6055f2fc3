"""What is made while torch traces a call stays in that trace; later calls make their own, and graphs hold numbers."""

import contextlib
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

import zonal
from zonal import Operator, anchor
from zonal import mechanisms as m
from zonal.algebra.hashing import LSH

SPARSE = "sparse"
NAMES = [SPARSE, "performer", "slay(scale='small')", "squared_affine", "polynomial_square(degree=2)"]
SIZES = itertools.count(17)
"""Sizes of heads that no other call has: what is kept for them has not been made yet."""


def call_of(name: str, dim: int) -> tuple[Operator, str, list[Tensor]]:
    """An operator that divides by the sum of its row, so that values of one give one; its path; q, k and v."""
    operator = m.resolve("softmax" if name == SPARSE else name)
    if name == SPARSE:
        operator = operator.replace(anchor=anchor.TopK(4, LSH(tables=3, bits=2, reach=4, window=3)))
    return (
        operator,
        "sparse" if name == SPARSE else "chunked",
        [*torch.randn(2, 1, 2, 40, dim), torch.ones(1, 2, 40, 3)],
    )


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_are_not_kept(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZONAL_KERNELS", kernels)
    operator, path, tensors = call_of(name, next(SIZES))
    # some checks of a call ask for numbers, which fake tensors do not have
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(DataDependentOutputException):
        zonal.attention(*tensors, operator, causal=True, path=path)
    y = zonal.attention(*tensors, operator, causal=True, path=path)
    torch.testing.assert_close(y, torch.ones_like(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "sko(degrees=(3.,))"])
def test_an_exported_call_holds_its_numbers(name: str) -> None:
    """The program gives what the call gives, each time, and leaves nothing to later calls."""
    operator, path, (q, k, _) = call_of(name, next(SIZES))

    class Call(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return zonal.attention(q, k, v, operator, causal=True, path=path)

    tensors = (q, k, torch.randn(1, 2, 40, 3))
    program = torch.export.export(Call(), tensors, strict=False).module()
    expected = Call()(*tensors)
    assert expected.abs().amax() > 0.1
    for _ in range(2):
        torch.testing.assert_close(program(*tensors), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own_mode", [True, False])
@pytest.mark.parametrize("name", ["squared_affine", "ska", "local_global"])
@torch.no_grad()
def test_decoding_with_fake_tensors_leaves_nothing(name: str, own_mode: bool) -> None:
    """Inside their mode and outside of it; decoding of real tensors by the kernel follows."""
    operator = m.resolve(name)
    tensors = [*torch.randn(2, 1, 2, 40, next(SIZES)), torch.randn(1, 2, 40, 3)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) for x in tensors]

    def decoded(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        y, memory = zonal.attention(q, k, v, operator, causal=True, return_memory=True)
        token = [x[:, :, -1:] for x in (q, k, v)]
        after, memory = zonal.attention(*token, operator, causal=True, memory=memory)
        return [y, after, memory.decoder().step(*token)]

    with contextlib.suppress(DataDependentOutputException), mode if own_mode else contextlib.nullcontext():
        assert all(type(x) is FakeTensor for x in decoded(*fakes))
    found = decoded(*tensors)
    q, k, v = (torch.cat([x, x[:, :, -1:], x[:, :, -1:]], 2).double() for x in tensors)
    exact = zonal.attention(q, k, v, m.resolve(name).double(), causal=True, path="dense")
    torch.testing.assert_close(torch.cat(found, 2).double(), exact, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_who_sees_whom_is_kept_on_the_device_of_the_kernel() -> None:
    """A default device of torch neither stops a call of tensors on the CPU nor changes later ones."""
    operator, path, tensors = call_of("squared_affine", next(SIZES))
    for length, device in ((30, "cpu"), (40, "meta"), (40, "cpu")):  # the first call reads the operator's numbers
        with torch.device(device):
            y = zonal.attention(*(x[:, :, :length] for x in tensors), operator, causal=True, path=path)
        torch.testing.assert_close(y.cpu(), torch.ones(1, 2, length, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["yat(eps=0.1)", "sko(degrees=(2.5,))"])
def test_the_definition_is_one_graph_with_gradients(name: str) -> None:
    """Cosines of 1 are cut at 1, and what is cut keeps its gradient."""
    operator = m.resolve(name)
    q, k, v = torch.randn(3, 1, 2, 6, 5, generator=torch.Generator().manual_seed(0)).unbind(0)
    k[:, :, :3] = q[:, :, :3]

    def run(q: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="dense")

    leaves = [q.requires_grad_(), *operator.parameters()]
    y, expected = torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    found, own = (torch.autograd.grad(x.square().sum(), leaves) for x in (y, expected))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)

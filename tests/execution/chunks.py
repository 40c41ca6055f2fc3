"""What the chunked and streaming tests share: operators that run in blocks, calls on inputs of the matrix, comparison
of gradients.
"""

from collections.abc import Callable

import torch
from matrix import OPERATORS, Inputs, randomised
from torch import Tensor

from zonal import Operator, prior
from zonal import mechanisms as m
from zonal.execution.call import Call, prepare

BLOCKED: dict[str, Callable[[], Operator]] = {
    **{name: OPERATORS[name] for name in (
        "linear", "retention", "sko-fractional", "squared_affine", "polynomial_square", "slay", "performer", "hedgehog",
        "sko-chunk", "ridge", "ska-0", "ska-1", "ska-2", "ska-compact", "ska-paper", "ska-fading", "ska-mixed",
        "ska-relative", "ridge-chunk", "rewa_functional-linear", "kernel_ridge", "kernel_ridge-sko",
        "kernel_ridge-slay", "kernel_ridge-chunk",
    )},
    "retention-strict": lambda: m.retention().replace(prior=(prior.Decay(), prior.Causal(include_self=False))),
    "squared_affine-strict": lambda: m.squared_affine().replace(prior=prior.Causal(include_self=False)),
    "ska-1-self": lambda: m.ska(power=1).replace(prior=prior.Causal(include_self=True)),
}  # fmt: skip


def made(name: str) -> Operator:
    return randomised(BLOCKED[name]() if name in BLOCKED else OPERATORS[name]())


def call_of(operator: Operator, data: Inputs, part: slice = slice(None)) -> Call:
    """The prepared call of (a part of) the tokens."""
    mask, bias = data.key_padding_mask, data.key_bias
    return prepare(
        operator, data.q[:, :, part], data.k[:, :, part], data.v[:, :, part], causal=data.causal,
        cu_seqlens=data.cu_seqlens,
        key_padding_mask=None if mask is None else mask[:, part], key_bias=None if bias is None else bias[:, :, part],
    )  # fmt: skip


def leaves_of(operator: Operator, data: Inputs) -> list[Tensor]:
    return [x for x in (data.q, data.k, data.v, data.key_bias) if x is not None] + list(operator.parameters())


def assert_same(got: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float = 1e-9) -> None:
    """Equal outputs and equal gradients with respect to every leaf, relative to the largest entry."""
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=expected.dtype)
    pairs = [(got, expected)]
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), leaves, allow_unused=True, retain_graph=True),
        torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True, retain_graph=True),
        strict=True,
    ):
        if a is not None or b is not None:
            pairs.append((torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b))  # type: ignore[arg-type]
    for index, (a, b) in enumerate(pairs):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        error, scale = ((a - b).abs().max().item(), 1 + b.abs().max().item()) if b.numel() else (0.0, 1.0)
        assert error <= tolerance * scale, (
            f"item {index} (0 = output, then gradients) is off by {error:.3g} of {scale:.3g}"
        )

"""What padding holds reaches nothing: in every layer that mixes tokens, outputs and all gradients are those of zeros
there.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zonal
from zonal import mechanisms as m
from zonal.models import Encoder
from zonal.nn import Attention, GatedDeltaNet, Mamba2, Mamba3, MergeSchedule, Mixture

CAUSAL = (
    "softmax",
    "linear",
    "retention",
    "sko",
    "squared_affine",
    "yat",
    "slay",
    "ridge",
    "ska(power=1)",
    "ska(power=1, fading=True)",
    "rewa",
    "rewa_topological",
    "kernel_ridge",
)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda name=name: Attention(12, 2, name, head_dim=6, rotary=True, qk_norm=True, bias=True)
        for name in CAUSAL
    },
    **{
        f"{name} both ways": lambda name=name: Attention(12, 2, name, head_dim=6, causal=False)
        for name in ("softmax", "rewa", "sinkhorn", "hierarchical")
    },
    "convolution": lambda: Attention(12, 2, "softmax", head_dim=6, conv=3, bias=True),
    "mamba2": lambda: Mamba2(12, state=6, head_dim=4),
    "mamba3": lambda: Mamba3(12, state=6, head_dim=4),
    "gated_deltanet": lambda: GatedDeltaNet(12, head_dim=6),
    "mixture": lambda: Mixture([Attention(12, 2, name, head_dim=6) for name in ("softmax", "ridge")]),
    "encoder": lambda: Encoder(12, ("softmax", "sko"), 2, head_dim=6),
    "encoder that merges": lambda: Encoder(12, ("softmax", "sko"), 2, head_dim=6, merge=MergeSchedule((0.0, 0.2))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_padding_that_holds_nan_reaches_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.4)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, False, True, True, False, True, False], [True] * 9])

    def run(fill: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        filled = x.masked_fill(~mask[..., None], fill).requires_grad_()
        y = layer(filled, key_padding_mask=mask)[mask]
        dx, *rest = torch.autograd.grad(y.square().sum(), [filled, *layer.parameters()], allow_unused=True)
        return y.detach(), dx, tuple(torch.zeros(()) if g is None else g for g in rest)

    y, dx, found = run(float("nan"))
    exact, wanted_dx, wanted = run(0.0)
    assert torch.equal(y, exact)
    assert torch.equal(dx, wanted_dx)
    assert not dx[~mask].any()
    for which, a, b in zip(names, found, wanted, strict=True):
        assert torch.equal(a, b), f"the gradient of {which} depends on what padding holds"


def test_masses_of_a_plan_are_relative_to_their_document() -> None:
    """In float32 e^-120 is zero: the largest of another document, or of padding, must not be the measure."""
    torch.manual_seed(0)
    layer = zonal.nn.Attention(4, 1, m.sinkhorn(learn=True), causal=False)
    with torch.no_grad():
        layer.query_mass.projection.weight[0, 0] = 1.0
        first, second = torch.randn(2, 1, 3, 4)
        first[..., 0], second[..., 0] = 60.0, -60.0
        alone = layer(second)
        packed = layer(torch.cat((first, second), 1), cu_seqlens=torch.tensor([0, 3, 6]))[:, 3:]
        torch.testing.assert_close(packed, alone)
        second[..., 0] = -120.0
        padded = torch.cat((second, torch.zeros(1, 1, 4)), 1)
        found = layer(padded, key_padding_mask=torch.tensor([[True, True, True, False]]))[:, :3]
        torch.testing.assert_close(found, layer(second))
    assert float(alone.abs().max()) > 1e-3

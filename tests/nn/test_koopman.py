"""The Koopman MLP against its equation, and the lift: invariance, centring, memory."""

import math

import pytest
import torch

from zonal import nn as znn
from zonal.errors import ArgumentError


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_koopman_mlp_is_its_equation(gated: bool, rows: int) -> None:
    """Complex numbers written out, for few rows and for more than the output matrix has."""
    torch.manual_seed(0)
    layer = znn.KoopmanMLP(24, 32, gated=gated).double()
    x = torch.randn(rows, 24, dtype=torch.float64)
    pairs = torch.view_as_complex(torch.nn.functional.silu(layer.lift(x)).unflatten(-1, (-1, 2)).contiguous())
    z = torch.view_as_real(pairs * layer.eigenvalues()).flatten(-2)
    expected = layer.read(z if layer.gate is None else torch.sigmoid(layer.gate(x)) * z)
    assert torch.allclose(layer(x), expected, atol=1e-12)
    gradients = [torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (layer(x), expected)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_koopman_mlp_sizes() -> None:
    """The paper's hidden size; two matrices, or three when gated; eigenvalues inside the disk, whatever was learned."""
    layer = znn.KoopmanMLP(448)
    hidden = 64 * math.ceil(8 * 448 / 192)
    assert layer.lift.weight.shape == (hidden, 448)
    assert sum(p.numel() for p in layer.parameters()) == 2 * 448 * hidden + hidden
    assert sum(p.numel() for p in znn.KoopmanMLP(448, gated=True).parameters()) == 3 * 448 * hidden + hidden
    with torch.no_grad():
        layer.modulus.normal_(0, 5)
    assert (layer.eigenvalues().abs() <= 1).all()


def test_an_ungated_koopman_mlp_is_a_plain_layer() -> None:
    """Its rotations fold into the output matrix: a layer without them gives the same function."""
    torch.manual_seed(0)
    layer = znn.KoopmanMLP(16, 64).double()
    basis = torch.eye(64, dtype=torch.float64)
    turned = torch.view_as_real(
        torch.view_as_complex(basis.unflatten(-1, (-1, 2)).contiguous()) * layer.eigenvalues()
    ).flatten(-2)
    x = torch.randn(9, 16, dtype=torch.float64)
    assert torch.allclose(
        layer(x), torch.nn.functional.silu(layer.lift(x)) @ (turned @ layer.read.weight.T), atol=1e-12
    )


class Adapted(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("rows", [1, 40])
def test_an_adapter_or_hook_on_the_output_matrix_is_heard(rows: int) -> None:
    torch.manual_seed(0)
    layer, x = znn.KoopmanMLP(16, 32), torch.randn(rows, 16)
    y = layer(x)
    hook = layer.read.register_forward_hook(lambda module, inputs, found: 3 * found)
    torch.testing.assert_close(layer(x), 3 * y)
    hook.remove()
    adapted = Adapted(32, 16, bias=False)
    adapted.weight = layer.read.weight
    layer.read = adapted
    torch.testing.assert_close(layer(x), 2 * y)


def test_lift_knows_no_rotary_positions() -> None:
    """|k_j|^2 is the same at every position; k_j^2 turns with twice the angle."""
    torch.manual_seed(0)
    lift, rotary = znn.CGLift(8, 12).double(), znn.Rotary(8)
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    here, there = lift.features(rotary(x, 0)), lift.features(rotary(x, 7))
    assert torch.allclose(here[..., :4], there[..., :4], atol=1e-12)
    turn = torch.polar(torch.ones(4, dtype=torch.float64), 2 * rotary.angles(torch.tensor(7)))
    squares = [torch.complex(z[..., 4:8], z[..., 8:]) for z in (here, there)]
    assert torch.allclose(squares[0] * turn, squares[1], atol=1e-12)


def test_centring_takes_the_common_part_out() -> None:
    """Features of unrelated keys: far from orthogonal as they come, nearly so with the mean taken out."""
    torch.manual_seed(0)
    keys = torch.randn(500, 64, dtype=torch.float64)

    def coherence(mean: float) -> float:
        lift = znn.CGLift(64, 96, mean=mean).double()
        z = torch.nn.functional.normalize(lift.features(keys), dim=-1)
        return float((z[:250] * z[250:]).sum(-1).mean().detach())

    assert coherence(0.0) > 0.2
    assert abs(coherence(2.0)) < 0.02


def test_attention_with_a_lift_streams() -> None:
    """One token after another through a memory of lifted keys gives what the whole sequence gives."""
    torch.manual_seed(0)
    layer = znn.Attention(32, 2, "ska(power=1)", rotary=True, cg_lift=20).double()
    layer.reset_parameters(znn.Draws(seed=3))
    torch.nn.init.normal_(layer.output.weight)
    assert layer.lift is not None
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    pairs = (
        layer.key(torch.nn.functional.rms_norm(torch.randn(1, 200, 32).double(), (32,)))
        .unflatten(-1, (2, 2, -1))
        .square()
        .sum(-2)
    )
    assert float(layer.lift.mean[0].detach()) == pytest.approx(
        float(pairs.detach().mean()), rel=0.05
    )  # μ is the mean of |k_j|²
    whole = layer(x)
    memory, parts = layer.empty_memory(2), []
    for t in range(9):
        y, memory = layer(x[:, t : t + 1], memory)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-8)
    assert memory.memory.form.key_dim == 20


@pytest.mark.parametrize(("make", "message"), [
    (lambda: znn.KoopmanMLP(8, 7), "even hidden"),
    (lambda: znn.CGLift(7, 2), "even dim"),
    (lambda: znn.CGLift(8, 13), "at most 3 dim / 2 = 12"),
])  # fmt: skip
def test_bad_sizes(make: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()  # type: ignore[operator]

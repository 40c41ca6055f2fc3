"""What the diagnostics of ridge read-outs say, on keys of which it is known."""

import pytest
import torch

from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.memory import Memory
from zonal.nn import Attention
from zonal.nn.diagnostics import diagnose, of_layer, of_memory


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def absorbed(k, power=1, eps=0.1):
    memory = Memory.empty(m.ska(power=power, eps=eps, key_limit=None).double(), 1, 1, k.shape[-1], 3, torch.float64)
    return memory.absorb(k, draw(1, 1, k.shape[2], 3))


def test_a_full_and_an_empty_state():
    """Orthonormal keys: each takes one direction, and with r of them there is no room left."""
    full = of_memory(absorbed(torch.linalg.qr(draw(8, 8))[0][None, None], eps=1e-6))
    torch.testing.assert_close(full.used, torch.full((1, 1), 8.0, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(full.effective_rank, torch.full((1, 1), 8.0, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(full.condition, torch.ones(1, 1, dtype=torch.float64), atol=1e-9, rtol=0)
    half = of_memory(absorbed(torch.linalg.qr(draw(8, 8))[0][None, None, :3], eps=1e-6))
    torch.testing.assert_close(half.free, torch.full((1, 1), 5.0, dtype=torch.float64), atol=1e-4, rtol=0)
    empty = of_memory(Memory.empty(m.ska(power=1, eps=0.25), 1, 1, 8, 3))
    assert (empty.effective_rank.item(), empty.used.item()) == (0, 0)
    torch.testing.assert_close(empty.smallest, torch.full((1, 1), 0.25, dtype=torch.float64), atol=1e-7, rtol=0)


def test_dynamics_are_seen_in_the_spectrum():
    """Keys that turn by a fixed angle a step have a pair of eigenvalues at that angle, near the unit circle; those of
    noise are inside.
    """
    step = torch.arange(400, dtype=torch.float64)
    turning = torch.stack([(0.3 * step).cos(), (0.3 * step).sin()], -1)
    found = of_memory(absorbed(turning[None, None], eps=1e-6))
    assert found.spectrum is not None
    assert found.norm is not None
    torch.testing.assert_close(
        found.spectrum.angle().abs(), torch.full((1, 1, 2), 0.3, dtype=torch.float64), atol=1e-3, rtol=0
    )
    assert (found.spectrum.abs() > 0.99).all()
    for keys in (draw(1, 1, 300, 6), 100 * draw(1, 1, 4, 6), turning[None, None]):
        found = of_memory(absorbed(keys))
        assert (found.norm < 1).all()
        assert (found.spectrum.abs() <= found.norm[..., None] + 1e-12).all()
    assert of_memory(absorbed(draw(1, 1, 300, 6))).spectrum.abs().max() < 0.3
    assert of_memory(absorbed(draw(1, 1, 9, 6), power=0)).spectrum is None


@pytest.mark.parametrize(
    "spec", ["ska(power=1)", "ska(power=1, chunk=4)", "ska(power=1, fading=True)", "ridge(relative=0.1)"]
)
def test_a_layer(spec):
    torch.manual_seed(0)
    layer = Attention(16, 4, spec, kv_heads=2, conv=3, key_gate=True).double()
    x, mask = draw(2, 11, 16, seed=3), torch.ones(2, 11, dtype=torch.bool)
    mask[1, :4] = False
    stored = torch.rand(2, 11, generator=torch.Generator().manual_seed(2)) > 0.3
    found = of_layer(layer, x, key_padding_mask=mask, action_mask=stored)
    assert found.leverage.shape == found.lengths.shape == (2, 2, 11)
    silent = ~(mask & stored)[:, None].expand(2, 2, 11)
    assert found.leverage[silent].abs().max() == 0
    assert (found.leverage[~silent] > 0).all()
    if "fading" not in spec:
        torch.testing.assert_close(found.leverage.sum(-1), found.state.used)
    memory = layer(x, return_memory=True, key_padding_mask=mask, action_mask=stored)[1].memory
    torch.testing.assert_close(of_memory(memory).condition, found.state.condition)


def test_what_is_refused():
    with pytest.raises(ArgumentError, match=r"ridge statistics is required .* received one of kind 'keys'"):
        of_memory(Memory.empty(m.softmax(), 1, 1, 4, 4))
    with pytest.raises(ArgumentError, match="must be positive definite and finite"):
        diagnose(torch.zeros(4, 4), torch.zeros(4, 4))

"""RMSNorm and SwiGLU against their equations."""

import pytest
import torch
import torch.nn.functional as F

from zonal.errors import ArgumentError
from zonal.nn import RMSNorm, SwiGLU


@pytest.mark.parametrize("dim", [1, 7, 64])
def test_rms_norm_is_its_equation_with_gradients(dim):
    torch.manual_seed(0)
    norm = RMSNorm(dim, eps=1e-3).double()
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 5, dim, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    expected = norm.weight * x / (x.pow(2).sum(-1, keepdim=True) / dim + 1e-3).sqrt()
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(y, F.rms_norm(x, (dim,), norm.weight, 1e-3), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(norm, (x,))


def test_rms_norm_of_bfloat16_is_rounded_once():
    """Inside float32: the error against float64 is one rounding of the result, even for large inputs whose squares
    bfloat16 loses.
    """
    torch.manual_seed(0)
    x = (1e3 * torch.randn(4, 257)).bfloat16()
    y = RMSNorm(257)(x)
    exact = F.rms_norm(x.double(), (257,), eps=1e-6)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2**-8, atol=0)


def test_rms_norm_keeps_scale_invariance_down_to_eps():
    x = torch.randn(2, 33, dtype=torch.float64)
    norm = RMSNorm(33, eps=1e-12).double()
    torch.testing.assert_close(norm(x), norm(1e3 * x), rtol=1e-9, atol=1e-9)


def test_swiglu_is_its_equation():
    torch.manual_seed(0)
    mlp = SwiGLU(5, 11).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    z = x @ mlp.gate.weight.T
    expected = (z / (1 + (-z).exp()) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "make", [lambda: RMSNorm(0), lambda: RMSNorm(4, eps=0.0), lambda: SwiGLU(0, 4), lambda: SwiGLU(4, 0)]
)
def test_sizes_that_mean_nothing_are_refused(make):
    with pytest.raises(ArgumentError, match="required"):
        make()

"""Queries and keys of zeros under scores of directions: no direction, no gradient, in every type and on every path."""

import pytest
import torch

import zonal
from zonal import mechanisms as m

PATHS = {
    "cosine": ("dense", "tiled"), "yat": ("dense", "tiled"), "sko(degrees=(2.0,))": ("dense", "tiled", "chunked"),
    "squared_affine": ("dense", "tiled", "chunked"),
    "polynomial_square": ("dense", "tiled", "chunked"), "slay(scale='small')": ("dense", "chunked"),
}  # fmt: skip
CASES = [(spec, path) for spec, paths in PATHS.items() for path in paths]


def gradients(spec: str, path: str, dtype: torch.dtype, zeros: str, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, 9, 8, generator=generator).to(torch.bfloat16).to(dtype)
        for heads in (2, kv_heads, kv_heads)
    )
    for name, x in (("q", q), ("k", k)):
        if name in zeros:
            x[:, :, 2:5] = 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    operator = m.resolve(spec)
    y = zonal.attention(*leaves, operator.double() if dtype == torch.float64 else operator, causal=True, path=path)
    assert isinstance(y, torch.Tensor)
    return [*torch.autograd.grad(y.double().sin().sum(), leaves)]


@pytest.mark.parametrize(("spec", "path"), CASES)
@pytest.mark.parametrize(("zeros", "kv_heads"), [("k", 2), ("q", 2), ("qk", 1)])
def test_zero_vectors_have_gradients_of_zero(spec: str, path: str, zeros: str, kv_heads: int) -> None:
    """The derivative of a cosine at a vector of zeros is that of nothing; others have the definition's gradient, none
    is infinite.
    """
    exact = gradients(spec, "dense", torch.float64, zeros, kv_heads)
    for dtype, rounding in (
        (torch.float64, 1e-9),
        (torch.float32, 1e-4),
        (torch.bfloat16, 0.02),
        (torch.float16, 5e-3),
    ):
        found = gradients(spec, path, dtype, zeros, kv_heads)
        for name, one, other in zip("qkv", exact, found, strict=True):
            assert other.isfinite().all()
            assert (one - other.double()).abs().max() < rounding * (1 + one.abs().max())
            assert name not in zeros or not other[:, :, 2:5].any()


def test_all_keys_are_zeros() -> None:
    q, v = torch.randn(2, 1, 2, 7, 6).to(torch.float16).unbind(0)
    k = torch.zeros(1, 2, 7, 6, dtype=torch.float16, requires_grad=True)
    for operator in (m.cosine(), m.sko(), m.squared_affine()):
        y = zonal.attention(q, k, v, operator)
        assert isinstance(y, torch.Tensor)
        assert not torch.autograd.grad(y.float().square().sum(), k)[0].any()


def test_transforms_pass_through() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind(0)
    k[:, :, 1] = 0

    def loss(k: torch.Tensor) -> torch.Tensor:
        y = zonal.attention(q, k, v, m.cosine(), path="dense")
        assert isinstance(y, torch.Tensor)
        return y.square().sum()

    batch = torch.stack([k, 2 * k])
    found = torch.func.vmap(torch.func.grad(loss))(batch)
    assert torch.allclose(found[0], 2 * found[1])
    assert not found[:, :, :, 1].any()
    assert found.abs().max() > 0


@pytest.mark.parametrize("spec", ["cosine", "yat", "sko(degrees=(2.0,))", "ridge", "ska"])
@pytest.mark.parametrize("padded", [False, True])
def test_zero_vectors_have_second_derivatives(spec: str, padded: bool) -> None:
    """One token of zeros, also a padded one, leaves those of a shared projection numbers."""
    x, weight = torch.randn(2, 1, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    x[..., 2, :] = 0
    mask = torch.arange(5)[None] != 2 if padded else None
    operator = m.resolve(spec).double()

    def norm_of_gradient(weight: torch.Tensor) -> torch.Tensor:
        y = zonal.attention(x @ weight.mT, x @ weight, x, operator, causal=True, path="dense", key_padding_mask=mask)
        assert isinstance(y, torch.Tensor)
        return torch.autograd.grad(y.square().sum(), weight, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(norm_of_gradient, weight.requires_grad_())

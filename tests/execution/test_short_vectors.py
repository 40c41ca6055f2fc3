"""Cosines of vectors whose squares leave the range of float32: they are those of the same directions at length one, on
every path.
"""

import pytest
import torch

import zonal
from zonal import mechanisms as m
from zonal import score
from zonal.kernels import native as native_kernels

MAKE = {
    "yat": m.yat, "cosine": m.cosine, "sko": m.sko, "squared_affine": m.squared_affine,
    "polynomial_square": m.polynomial_square,
    "slay": lambda: m.slay("small"), "kernel_ridge": lambda: m.kernel_ridge(),
}  # fmt: skip
PATHS = {"yat": ("dense", "tiled"), "cosine": ("dense", "tiled"), "sko": ("dense", "tiled"),
    "squared_affine": ("dense", "tiled", "chunked"),
         "polynomial_square": ("dense", "chunked"), "slay": ("dense", "chunked"),
         "kernel_ridge": ("dense",)}  # fmt: skip
CASES = [(name, path) for name, paths in PATHS.items() for path in paths]


def run(operator, q, k, v, dy, path):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    y = zonal.attention(q, k, v, operator, causal=True, path=path)
    assert isinstance(y, torch.Tensor)
    return y.detach(), *torch.autograd.grad((y * dy).sum(), (q, k, v))


@pytest.mark.parametrize(("name", "path"), CASES)
@pytest.mark.parametrize(
    ("q_size", "k_size"), [(1e-20, 1.0), (1.0, 1e-20), (1e-22, 1e-21), (1e-30, 1e-12), (1e20, 1e21)]
)
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_directions_count_alone(name, path, q_size, k_size, kernels, monkeypatch):
    if kernels == "off":
        monkeypatch.setenv(native_kernels.VARIABLE, "off")
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, 1, 2, 40, 8).unbind(0)
    operator = MAKE[name]()
    y, dq, dk, dv = run(operator, q, k, v, dy, path)
    scaled = run(operator, q_size * q, k_size * k, v, dy, path)
    for found, wanted in zip(scaled, (y, dq / q_size, dk / k_size, dv), strict=True):
        assert torch.isfinite(found).all()
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("name", ["yat", "cosine", "sko", "squared_affine", "polynomial_square"])
@pytest.mark.parametrize(("q_power", "k_power"), [(-66, -67), (-70, 1), (1, -100), (66, 68)])
def test_directions_count_alone_in_bfloat16(name, q_power, k_power):
    """Processors that multiply bfloat16 take what is below the normal numbers of float32 for zero."""
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, 1, 2, 40, 8).bfloat16().unbind(0)
    operator, q_size, k_size = MAKE[name](), 2.0**q_power, 2.0**k_power
    y, dq, dk, dv = run(operator, q, k, v, dy, "tiled")
    scaled = run(operator, q_size * q, k_size * k, v, dy, "tiled")
    for found, wanted in zip(scaled, (y, dq / q_size, dk / k_size, dv), strict=True):
        assert torch.isfinite(found).all()
        assert (found - wanted).abs().max() <= 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("name", ["squared_affine", "polynomial_square", "sko"])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_decoding_takes_short_vectors(name, kernels, monkeypatch):
    if kernels == "off":
        monkeypatch.setenv(native_kernels.VARIABLE, "off")
    torch.manual_seed(0)
    operator = MAKE[name]()
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    found = []
    with torch.no_grad():
        for size in (1.0, 1e-21):
            memory = zonal.Memory.empty(operator, 1, 2, 8, 8, torch.float32).absorb(size * k[:, :, :5], v[:, :, :5])
            found.append(
                zonal.attention(
                    size * q[:, :, 5:], size * k[:, :, 5:], v[:, :, 5:], operator, causal=True, memory=memory
                )[0]
            )
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_have_cosine_zero(dtype):
    q, k, v = torch.randn(3, 1, 1, 5, 8).to(dtype).unbind(0)
    k[:, :, 2] = 0
    score = m.cosine(1.0).score
    assert torch.equal(score.prepare_key(k, {})[:, :, 2], torch.zeros(1, 1, 8, dtype=dtype))
    with torch.no_grad():
        assert torch.isfinite(zonal.attention(q, k, v, m.squared_affine())).all()


def test_the_smallest_numbers_of_a_short_type_have_a_direction():
    x = torch.tensor([[[[6e-8, -6e-8]]]], dtype=torch.float16)
    assert torch.allclose(m.cosine(1.0).score.prepare_key(x.float(), {}), torch.tensor([0.5**0.5, -(0.5**0.5)]))


@pytest.mark.parametrize(("name", "path"), [("cosine", "dense"), ("cosine", "tiled"), ("squared_affine", "chunked")])
def test_a_zero_vector_has_no_gradient(name, path):
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, 1, 2, 40, 8).unbind(0)
    q[:, :, 7] = k[:, :, 3] = 0
    y, dq, dk, _ = run(MAKE[name](), q, k, v, dy, path)
    assert torch.isfinite(y).all()
    assert dq[:, :, 7].abs().max() == dk[:, :, 3].abs().max() == 0
    assert dq[:, :, 8].abs().max() > 0


@pytest.mark.parametrize("length", [0.05, 1e-3, 1e-8, 1e-10, 1e-30])
def test_below_eps_a_vector_is_divided_by_eps(length):
    x = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    x = length * x / x.norm(dim=-1, keepdim=True)
    prepared = score.Cosine(eps=0.1).prepare_key(x, {})
    torch.testing.assert_close(prepared, x / 0.1)

"""Rotary positions against multiplication by complex units."""

import copy

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.nn import Rotary


def turned(x, positions, base=10000.0):
    """Independent form: coordinate i and i + d/2 are the real and imaginary part of one complex number."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    frequency = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    z = z * torch.polar(torch.ones(len(positions), half, dtype=torch.float64), positions.double()[:, None] * frequency)
    return torch.cat((z.real, z.imag), dim=-1)


@pytest.mark.parametrize(("dim", "base", "start"), [(2, 10000.0, 0), (6, 500.0, 3), (64, 10000.0, 131071)])
def test_equals_complex_multiplication(dim, base, start):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dim, dtype=torch.float64)
    expected = turned(x, torch.arange(start, start + 5), base)
    torch.testing.assert_close(Rotary(dim, base)(x, start), expected, rtol=1e-12, atol=1e-12)


def test_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    rotary = Rotary(32)
    near = (rotary(q, 7) * rotary(k, 2)).sum()
    far = (rotary(q, 100_007) * rotary(k, 100_002)).sum()
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)
    assert not torch.isclose(near, (rotary(q, 8) * rotary(k, 2)).sum(), atol=1e-3)


def test_float32_keeps_its_digits_at_a_million():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 4, 64)
    expected = turned(x.double(), torch.arange(10**6, 10**6 + 4)).float()
    torch.testing.assert_close(Rotary(64)(x, 10**6), expected, rtol=1e-5, atol=1e-5)


def test_position_tensors_and_offsets_agree():
    torch.manual_seed(0)
    rotary = Rotary(8)
    x = torch.randn(2, 3, 4, 8)
    per_row = rotary(x, torch.tensor([[5, 6, 7, 8], [0, 1, 2, 3]]))
    torch.testing.assert_close(per_row[0], rotary(x, 5)[0], rtol=0, atol=0)
    torch.testing.assert_close(per_row[1], rotary(x, torch.arange(4))[1], rtol=0, atol=0)


def test_the_kept_table_is_never_stale_and_nothing_enters_the_state():
    rotary = Rotary(8)
    x = torch.randn(1, 1, 4, 8)
    once = rotary(x, 3)
    rotary(x, 9)
    rotary(x.double(), 3)
    rotary(x[:, :, :2], 3)
    torch.testing.assert_close(rotary(x, 3), once, rtol=0, atol=0)
    assert rotary.state_dict() == {}
    torch.testing.assert_close(copy.deepcopy(rotary).bfloat16()(x, 3), once, rtol=0, atol=0)


def test_a_table_of_inference_mode_serves_training():
    rotary = Rotary(8)
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    with torch.inference_mode():
        once = rotary(x, 3)
    y = rotary(x, 3)
    y.sum().backward()
    torch.testing.assert_close(y, once, rtol=0, atol=0)


class Interrupted(Rotary):
    """Another call comes between as soon as the table of position 3 is kept, as one of another thread may."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "_table" and value is not None and value[0][0] == 3:
            self(torch.zeros(1, 1, 4, 8), 9)


def test_a_table_that_another_thread_keeps_is_not_taken():
    x = torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(Interrupted(8)(x, 3), Rotary(8)(x, 3), rtol=0, atol=0)


def test_bfloat16_in_bfloat16_out_turned_in_float32():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 9, 16).bfloat16()
    y = Rotary(16)(x, 1000)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, Rotary(16)(x.float(), 1000).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [lambda: Rotary(3), lambda: Rotary(0), lambda: Rotary(4, base=1.0), lambda: Rotary(4)(torch.zeros(1, 1, 1, 6))],
)
def test_bad_sizes_are_refused(make):
    with pytest.raises(ArgumentError, match=r"Rotary: .*received"):
        make()


def test_another_base_turns_by_other_angles():
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    rotary = Rotary(4)
    rotary(x)
    rotary.base = 100.0
    torch.testing.assert_close(rotary(x), Rotary(4, 100.0)(x), rtol=0, atol=0)

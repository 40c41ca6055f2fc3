"""What a stored value comes back times: eta gamma^K, and what the ridge leaves of it at each step."""

import pytest
import torch

from zonal import Memory
from zonal import mechanisms as m
from zonal.algebra.anchor import Koopman


@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize(("length", "eps"), [(1.0, 0.1), (0.5, 0.1), (1.0, 1e-8)])
def test_a_value_comes_back_times_the_documented_gain(power, length, eps):
    operator = m.ska(power=power, eps=eps).double()
    keys, values = torch.eye(8, dtype=torch.float64)[None, None], torch.randn(1, 1, 8, 3, dtype=torch.float64)
    with torch.no_grad():
        read = (
            Memory.empty(operator, 1, 1, 8, 3, torch.float64)
            .absorb(length * keys, values)
            .read(length * keys[:, :, :4])
        )
    gamma = 1 + 0.5 / (1 + torch.tensor(4.0, dtype=torch.float64).exp())
    kept = length**2 / (length**2 + eps)  # by the fit, and by each step
    assert torch.allclose(read, 1.5 * gamma**power * kept ** (power + 1) * values[:, :, power : 4 + power], rtol=1e-6)


def test_a_ridge_has_no_gain_of_its_own():
    keys, values = torch.eye(4, dtype=torch.float64)[None, None], torch.randn(1, 1, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        read = Memory.empty(m.ridge().double(), 1, 1, 4, 3, torch.float64).absorb(keys, values).read(keys)
    assert torch.allclose(read, values / 1.1, rtol=1e-6)


def test_the_default_takes_one_step():
    anchor = m.ska().anchor
    assert isinstance(anchor, Koopman)
    assert anchor.power == 1
    assert m.resolve("ska").anchor == anchor

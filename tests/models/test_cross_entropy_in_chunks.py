"""Cross-entropy without all logits: equal to torch's, gradients too, and small in memory."""

import pytest
import torch
import torch.nn.functional as F

from zonal.errors import ArgumentError
from zonal.models import cross_entropy, cross_entropy_sum


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_value_and_gradients_equal_torch(rows, rows_at_once, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", rows_at_once * 7 * 8)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (rows,))
    loss = cross_entropy_sum(hidden, weight, targets)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(3 * loss, (hidden, weight))
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_one_frozen_side_is_fine():
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(4, 5), torch.randn(7, 5, requires_grad=True), torch.randint(7, (4,))
    cross_entropy_sum(hidden, weight, targets).backward()
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets, reduction="sum"), weight)[0]
    torch.testing.assert_close(weight.grad, expected)


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1e4], [-1e4]])
    loss = cross_entropy_sum(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]))
    assert loss.item() == pytest.approx(2e4)


def test_bfloat16_sums_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(500, 8).bfloat16().requires_grad_()
    weight = torch.randn(300, 8).bfloat16().requires_grad_()
    targets = torch.randint(300, (500,))
    loss = cross_entropy_sum(hidden, weight, targets)
    exact = F.cross_entropy((hidden.double() @ weight.double().T), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert abs(loss.item() / exact.item() - 1) < 1e-3
    loss.backward()
    reference = torch.autograd.grad(
        F.cross_entropy((hidden.double() @ weight.double().T), targets, reduction="sum"), (hidden, weight)
    )
    for got, wanted in zip((hidden.grad, weight.grad), reference, strict=True):
        assert got.dtype == torch.bfloat16
        assert ((got - wanted).norm() / wanted.norm()).item() < 0.02


def test_autocast_casts_the_product_and_not_the_loss():
    torch.manual_seed(0)
    hidden, weight, targets = (
        torch.randn(20, 8, requires_grad=True),
        torch.randn(30, 8, requires_grad=True),
        torch.randint(30, (20,)),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, targets)
    assert loss.dtype == torch.float32
    plain = cross_entropy_sum(hidden, weight, targets)
    assert 0 < abs(loss.item() / plain.item() - 1) < 0.01
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_a_second_derivative_is_refused():
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    loss = cross_entropy_sum(hidden, weight, torch.tensor([0, 1]))
    with pytest.raises(ArgumentError, match="differentiable once"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_logits_of_a_large_vocabulary_stay_below_64_mib():
    """The largest allocation of forward and backward is a chunk, not (rows, vocabulary)."""
    vocabulary, rows = 50257, 1500
    assert 4 * vocabulary * cross_entropy.chunk_rows(vocabulary) <= 32 * 2**20
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        cross_entropy_sum(hidden, weight, targets).backward()
    total = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    assert 16 * 2**20 < peak < 48 * 2**20 < rows * vocabulary * 4

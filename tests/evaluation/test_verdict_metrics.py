"""The two numbers of evidence, by hand and against all pairs."""

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.evaluation import auroc, risk_curve


def test_auroc_counts_pairs():
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(0, 6, (40,), generator=generator).float() + 1,
        torch.randint(0, 6, (3, 9), generator=generator).float(),
    )
    pairs = a[:, None] - b.flatten()[None]
    assert auroc(a, b) == pytest.approx(float((pairs > 0).double().mean() + 0.5 * (pairs == 0).double().mean()))
    assert auroc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1
    assert auroc(torch.ones(3), torch.ones(5)) == 0.5


def test_risk_by_hand():
    evidence, right = torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([True, True, False, False])
    assert risk_curve(evidence, right, (0.25, 0.5, 0.75, 1.0)) == pytest.approx([0, 0, 1 / 3, 0.5])
    assert risk_curve(-evidence, right, (0.5,)) == [1.0]


def test_ties_are_taken_in_proportion_whatever_their_order():
    right = torch.tensor([True, False, False, True])
    assert (
        risk_curve(torch.ones(4), right, (0.25, 1.0))
        == risk_curve(torch.ones(4), right.flip(0), (0.25, 1.0))
        == [0.5, 0.5]
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: auroc(torch.ones(0), torch.ones(2)),
        lambda: auroc(torch.ones(2), torch.tensor([float("nan")])),
        lambda: risk_curve(torch.ones(2), torch.ones(3, dtype=torch.bool), (0.5,)),
        lambda: risk_curve(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.bool), (0.5,)),
        lambda: risk_curve(torch.ones(2), torch.ones(2, dtype=torch.int64), (0.5,)),
        lambda: risk_curve(torch.ones(2), torch.ones(2, dtype=torch.bool), (1.5,)),
    ],
)
def test_bad_evidence(call):
    with pytest.raises(ArgumentError, match="required"):
        call()

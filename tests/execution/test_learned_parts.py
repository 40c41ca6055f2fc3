"""Gradients of learned parts are what the output does when a part is moved: differences of the definition, without its
derivatives.
"""

import pytest
import torch
from matrix import OPERATORS, Case, fitted, inputs, randomised
from torch import Tensor

LEARNED = [name for name, make in OPERATORS.items() if list(make().parameters())]
STEP = 1e-5


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_learned_parts_are_differences(name: str) -> None:
    """Each parameter along two directions; none is cut off from the output."""
    operator = randomised(OPERATORS[name]())
    case = fitted(operator, Case(kv_heads=2, queries=6, keys=6))
    data = inputs(case)
    weight = torch.randn(case.batch, case.heads, case.queries, case.value_dim, dtype=torch.float64)

    def loss() -> Tensor:
        return (data.run(operator, "dense") * weight).sum()

    parameters = dict(operator.named_parameters())
    found = dict(zip(parameters, torch.autograd.grad(loss(), list(parameters.values())), strict=True))
    for part, parameter in parameters.items():
        for _ in range(2):
            direction = torch.randn_like(parameter)
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.add_(direction, alpha=sign * STEP)
                    ends.append(loss().item())
                    parameter.sub_(direction, alpha=sign * STEP)
            slope, expected = (ends[0] - ends[1]) / (2 * STEP), (found[part] * direction).sum().item()
            assert abs(slope - expected) <= 1e-6 * (1 + abs(slope)), (
                f"{part}: the output changes by {slope:.6g}, the gradient says {expected:.6g}"
            )

"""Declare an operator of your own and check the fast path against the definition, gradients included.

python examples/declare_an_operator.py
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

import zonal
from zonal import anchor, link, score


@dataclass(frozen=True)
class Cauchy(link.Link):
    """l(x) = 1 / (1 + sharpness (1 - x)) on cosines: positive, with heavier tails than the exponential."""

    positive = True

    sharpness: float = 10.0

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return 1 / (1 + self.sharpness * (1 - x))

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return self.sharpness * self.value(x, c).square()


def run(operator: zonal.Operator, inputs: tuple[Tensor, Tensor, Tensor], path: str) -> list[Tensor]:
    """The output of a path and its gradients for q, k and v."""
    y = zonal.attention(*inputs, operator, causal=True, path=path)
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


def largest_error(operator: zonal.Operator, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest difference between the tiled path and the definition, over output and gradients."""
    pairs = zip(run(operator, inputs, "tiled"), run(operator, inputs, "dense"), strict=True)
    return max((found - exact).abs().max().item() for found, exact in pairs)


def main() -> None:
    torch.manual_seed(0)
    operator = zonal.Operator(score=score.Cosine(), link=Cauchy(), anchor=anchor.Row())
    print(operator)
    print(f"\nIts ledger:\n{zonal.ledger.text(operator.moves())}\n")

    q, k, v = torch.randn(3, 2, 4, 300, 32, dtype=torch.float64).requires_grad_().unbind(0)
    error = largest_error(operator, (q, k, v))
    print(f"tiled against dense, float64, output and gradients: largest difference {error:.1e}")
    assert error < 1e-10

    # any slot can be swapped: the same evidence, read as a density
    error = largest_error(operator.replace(anchor=anchor.Count()), (q, k, v))
    print(f"the same with the Count anchor: {error:.1e}")
    assert error < 1e-10

    # the tiled path uses the derivative, the dense path does not: one that is wrong by one per cent is refused
    @dataclass(frozen=True)
    class Wrong(Cauchy):
        def derivative(self, x: Tensor, c: Tensor) -> Tensor:
            return 1.01 * super().derivative(x, c)

    try:
        operator.replace(link=Wrong())
    except zonal.errors.ArgumentError as error:
        print(error)
    else:
        raise AssertionError("a wrong derivative was accepted")

    q, k, v = torch.randn(3, 1, 8, 2048, 64).unbind(0)
    for path in ("dense", "tiled"):
        started = time.perf_counter()
        zonal.attention(q, k, v, operator, causal=True, path=path)
        print(f"2048 tokens, 8 heads, {path}: {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()

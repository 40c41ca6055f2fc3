"""A whole training step of small language models: each operator of constant memory against softmax.

A step is the loss of a batch, its gradient, its clipping and an update by AdamW, as ``zonal train`` makes them, in
float32. Two shapes: the text model of ``zonal demo``, and one of about 4M parameters. Batches have as many tokens at
every length. The peer of every ratio is the same model with softmax attention, on the same tokens in the same process.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import common
from zonal.models import CausalLM, ModelConfig, build
from zonal.training.optimiser import adamw, set_learning_rate
from zonal.training.step import Part, clip_gradient, forward_backward

OPERATORS = (
    "linear", "hedgehog", "performer", "slay", "squared_affine", "ska(power=0)", "ska(power=1, fading=True)",
    "retention",
)  # fmt: skip
LAYERS = ("mamba2", "gated_deltanet")
"""Layers with projections and a state of their own, and other numbers of parameters: they are only measured."""
SHAPES = {
    "demo": {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 2, "conv": 4},
    "4M": {"vocab_size": 4096, "dim": 256, "layers": 4, "heads": 4, "conv": 4},
}
TOKENS = 4096
"""Of a batch."""


@dataclass(frozen=True)
class Case:
    """One row. bound: the ratio to reach."""

    operator: str
    shape: str
    tokens: int
    bound: float | None = None

    def __str__(self) -> str:
        return f"{self.operator}, {self.shape}, T={self.tokens}"


def table() -> list[Case]:
    """A step of 256 tokens may take 1.3 times as long as with softmax; of 1024 and more it is to be faster."""
    bounds = {256: 1.3, 1024: 1.0, 2048: 1.0}
    return [
        Case(name, shape, tokens, bound if name in OPERATORS else None)
        for shape in SHAPES
        for tokens, bound in bounds.items()
        for name in (*OPERATORS, *LAYERS)
    ]


def model(operator: str, shape: str) -> CausalLM:
    sizes = SHAPES[shape]
    return build(ModelConfig(**{**sizes, "layers": (operator,) * sizes["layers"]}), 0)


def batch(shape: str, tokens: int) -> Part:
    """Random tokens, each with the next as its target."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(SHAPES[shape]["vocab_size"], (max(1, TOKENS // tokens), tokens + 1), generator=generator)
    return Part(drawn[:, :-1], drawn[:, 1:], drawn[:, 1:].numel())


def step(operator: str, shape: str, part: Part) -> Callable[[], object]:
    """One update of a model of its own."""
    trained = model(operator, shape)
    optimiser = adamw(trained, weight_decay=0.1, betas=(0.9, 0.95))
    set_learning_rate(optimiser, 1e-4)

    def run() -> object:
        loss = forward_backward(trained, [part], "float32")
        clip_gradient(trained, 1.0)
        optimiser.step()
        return loss

    return run


def gate(cases: Sequence[Case]) -> dict[str, float]:
    """The error of each gradient, of all weights together, against that of the same model in float64."""
    errors: dict[str, float] = {}
    for operator in dict.fromkeys(case.operator for case in cases):
        part, found = batch("demo", 100), []
        for dtype in (torch.float32, torch.float64):
            trained = model(operator, "demo").to(dtype)
            forward_backward(trained, [part._replace(tokens=part.tokens[:2], targets=part.targets[:2])], "float32")
            found.append(torch.cat([x.grad.flatten() for x in trained.parameters() if x.grad is not None]))
        errors[operator] = common.gate(operator, found[0], found[1], 2e-3)
    return errors


def measured(case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    part = batch(case.shape, case.tokens)
    found = common.compare(
        step(case.operator, case.shape, part), step("softmax", case.shape, part), device, pairs=9, budget=budget
    )
    return {"row": str(case), **asdict(case), "against_softmax": found.to_dict()}


def line(row: dict[str, Any], case: Case) -> str:
    """A row for people."""
    found = row["against_softmax"]
    return f"{common.ratio_text(found)} of softmax  {case} ({common.milliseconds(found['subject']['median'])})"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every bound holds, else 1."""
    run = common.Run(
        common.parser(__doc__ or "", "training_step", "budget", "only", budget=4.0, by_machine=True).parse_args(argv),
        only_cpu="the bounds are those of the CPU",
    )
    cases = [case for case in table() if run.options.only in str(case)]
    if run.options.quick:
        cases = [Case("linear", "demo", 64)]
    return common.bounded(run, cases, gate, lambda case: measured(case, run.device, run.budget), line)


if __name__ == "__main__":
    sys.exit(main())

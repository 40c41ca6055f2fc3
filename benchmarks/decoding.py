"""Language models that decode: seconds of a token, and the bytes that are kept, after 1k to 32k tokens.

The models are those of a preset, at equal numbers of parameters, with random weights (a token takes as long with any)
and a vocabulary of 4,096. Each reads a prompt of random tokens and then decodes a few, in float32, one sequence. The
peer of every ratio is the first model of the preset in the same process, in turns, after the same prompt. Run it where
nothing else runs:

    python -m benchmarks.decoding --threads 1
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from zonal.cli import presets
from zonal.models import CausalLM, ModelConfig, build
from zonal.models.layers import layers_for
from zonal.models.memory import ModelMemory

CALL = "bench decoding"
LENGTHS = (1024, 8192, 32768)
VOCABULARY = 4096
PIECE = 1024
"""Tokens of a prompt that are read at a time."""
DECODED = 8
"""Tokens of a measurement."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row. bound: none; a model is only measured."""

    model: str
    tokens: int
    bound: None = None

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens"


def configs(preset: str) -> dict[str, ModelConfig]:
    """The models of a preset by their names."""
    found = presets.find(preset, CALL)
    task = found.task.resolve(CALL)

    def config(layers: str) -> ModelConfig:
        options = dataclasses.replace(found.model, **found.shape_of(layers))
        return dataclasses.replace(options.config(task, layers_for(layers, options.layers)), vocab_size=VOCABULARY)

    return {label: config(layers) for label, layers in found.models.items()}


def prompt(tokens: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))


def read(model: CausalLM, tokens: Tensor) -> ModelMemory:
    """The memory after a prompt."""
    return model.prefill(tokens, chunk=PIECE)[1]


def decoding(model: CausalLM, memory: ModelMemory) -> Callable[[], Tensor]:
    """The next few tokens after a memory, each the most likely."""
    decoder = model.decoder(memory)
    token = torch.zeros(1, 1, dtype=torch.int64)

    def run() -> Tensor:
        nonlocal token
        for _ in range(DECODED):
            token = decoder.step(token, last_only=True).argmax(-1)
        return token

    return run


def gate(models: dict[str, ModelConfig], cases: Sequence[Case]) -> dict[str, float]:
    """The error of the logits of tokens that are decoded after a prompt, against the same model in float64 that reads
    prompt and tokens at once.
    """
    errors, tokens, before = {}, prompt(100), 90
    for label in dict.fromkeys(case.model for case in cases):
        model = build(models[label], 0).eval()
        decoder = model.decoder(read(model, tokens[:, :before]))
        with torch.no_grad():
            steps = [decoder.step(token, last_only=True) for token in tokens[:, before:].split(1, 1)]
            whole = build(models[label], 0).eval().double()(tokens)[:, before:]
        errors[label] = common.gate(label, torch.cat(steps, 1), whole, 2e-3)
    return errors


def line(row: dict[str, Any], case: Case) -> str:
    """A row for people."""
    return (
        f"{common.ratio_text(row['against_peer'])} of {row['peer']}  {case} "
        f"({row['tokens_per_second']:.0f} tokens a second, {row['bytes'] / 1e6:.2f} MB)"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 unless a model decodes something else than it reads."""
    options = common.parser(__doc__ or "", "decoding", "budget", "only", budget=4.0, by_machine=True)
    options.add_argument("--preset", default="text-contest", help="whose models (default: %(default)s)")
    run = common.Run(options.parse_args(argv), only_cpu="its models are made on the CPU")
    models = configs(run.options.preset)
    peer = next(iter(models))
    lengths, labels = ((64,), list(models)[-1:]) if run.options.quick else (LENGTHS, list(models))
    cases = [case for tokens in lengths for label in labels if run.options.only in str(case := Case(label, tokens))]
    first = build(models[peer], 0).eval()
    after: dict[int, ModelMemory] = {}

    def measured(case: Case) -> dict[str, Any]:
        model = build(models[case.model], 0).eval()
        if case.tokens not in after:
            after.clear()
            after[case.tokens] = read(first, prompt(case.tokens))
        memory = read(model, prompt(case.tokens))
        found = common.compare(
            decoding(model, memory), decoding(first, after[case.tokens]), run.device, pairs=9, budget=run.budget
        )
        return {
            "row": str(case), "model": case.model, "tokens": case.tokens, "peer": peer,
            "parameters": sum(x.numel() for x in model.parameters()), "bytes": memory.nbytes,
            "tokens_per_second": DECODED / found.subject.median, "against_peer": found.to_dict(),
        }  # fmt: skip

    return common.bounded(run, cases, lambda cases: gate(models, cases), measured, line)


if __name__ == "__main__":
    sys.exit(main())

"""What is inside the memories of a trained model, beside its run for the report: diagnostics.json (format: ``zonal.report.diagnostics``)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zonal.memory import FadingStatistics, RidgeStatistics
from zonal.models import CausalLM
from zonal.nn import Attention
from zonal.nn.diagnostics import of_layer
from zonal.report.diagnostics import NAME, SCHEMA
from zonal.store import write_json
from zonal.tasks.task import Task

ROWS = 8
"""Held-out sequences that are looked at."""


def write(folder: Path, model: CausalLM, task: Task) -> None:
    """Look at the first held-out sequences and write the file, or nothing for a model without ridge or Koopman layers."""
    if not any(_solves(block.attention) for block in model.blocks):
        return
    tokens = next(iter(task.evaluation_batches(ROWS))).tokens.to(next(model.parameters()).device)
    training = model.training
    model.eval()
    try:
        found = [{"layer": index, "heads": heads(layer, x)} for index, layer, x in model.layer_inputs(tokens) if isinstance(layer, Attention) and _solves(layer)]
    finally:
        model.train(training)
    write_json(folder / NAME, {"schema": SCHEMA, "sequences": tokens.shape[0], "tokens": tokens.shape[1], "layers": found})


@torch.no_grad()
def heads(layer: Attention, x: Tensor) -> list[dict[str, Any]]:
    """One object a key head after inputs x (B, T, dim): numbers and the estimated capacity are means over the sequences, the spectrum is that of the
    first, leverage that of every key of all (at most one: what has faded since is not taken off)."""
    found = of_layer(layer, x)
    state = found.state
    stored = [n for n in (2**i for i in range(2, 20)) if n < x.shape[1]] + [x.shape[1]]
    held = torch.stack([of_layer(layer, x[:, :n]).state.used.mean(0) for n in stored])
    numbers = {"smallest_eigenvalue": state.smallest, "condition": state.condition, "effective_rank": state.effective_rank}
    about = []
    for head in range(state.used.shape[1]):
        one: dict[str, Any] = {name: value[:, head].mean().item() for name, value in numbers.items()}
        one |= {"size": int((state.used + state.free)[0, head].round()), "leverage": found.leverage[:, head].flatten().clamp(0, 1).tolist()}
        one["capacity"] = {"stored": stored, "estimate": held[:, head].tolist()}
        if state.spectrum is not None:
            one["spectrum"] = torch.view_as_real(state.spectrum[0, head]).tolist()
        about.append(one)
    return about


def _solves(layer: object) -> bool:
    return isinstance(layer, Attention) and layer.causal and isinstance(layer.empty_memory(1).memory, RidgeStatistics | FadingStatistics)


__all__ = ["ROWS", "heads", "write"]

"""What is inside a trained model, beside its run for the report: of ridge memories diagnostics.json (format:
``zonal.report.diagnostics``), of attention by distance witnesses.json (format: ``zonal.report.key_embeddings``).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zonal.evaluation.metrics import evaluating
from zonal.memory.compact import statistics_of
from zonal.models import LanguageModel
from zonal.nn import Attention, key_embedding
from zonal.nn.diagnostics import of_layer
from zonal.report import diagnostics, key_embeddings
from zonal.store import shortened, write_checked
from zonal.tasks.task import Task

ROWS = 8
"""Held-out sequences that are looked at."""
POINTS = 500
"""At most so many of their tokens are drawn."""


def write(folder: Path, model: LanguageModel, task: Task) -> None:
    """Look at the first held-out sequences and write the files, or none for a model without layers of these kinds."""
    if not any(_solves(block.attention) or key_embedding.metric_of(block.attention) for block in model.blocks):
        return
    with evaluating(model) as device:
        tokens = next(iter(task.evaluation_batches(ROWS))).tokens.to(device)
        inputs = [(index, layer, x) for index, layer, x in model.layer_inputs(tokens) if isinstance(layer, Attention)]
        solved = [{"layer": index, "heads": heads(layer, x)} for index, layer, x in inputs if _solves(layer)]
        seen = torch.linspace(0, tokens.numel() - 1, min(POINTS, tokens.numel()), dtype=torch.float32).round().long()
        placed = [
            {"layer": index, "heads": spaces(layer, x, seen)}
            for index, layer, x in inputs
            if key_embedding.metric_of(layer)
        ]
    if solved:
        write_checked(
            folder / diagnostics.NAME,
            {
                "schema": diagnostics.SCHEMA,
                "sequences": tokens.shape[0],
                "tokens": tokens.shape[1],
                "layers": shortened(solved, 6),
            },
        )
    if placed:
        shown = tokens.flatten()[seen.to(tokens.device)].cpu()
        groups, group = task.token_groups(shown)
        names = [task.decode([token]) or str(token) for token in shown.tolist()]
        write_checked(
            folder / key_embeddings.NAME,
            {
                "schema": key_embeddings.SCHEMA,
                "groups": groups,
                "group": group.tolist(),
                "tokens": names,
                "layers": placed,
            },
        )


def has_geometry(model: LanguageModel) -> bool:
    """Whether a layer attends by a sum of distances."""
    return any(key_embedding.metric_of(block.attention) for block in model.blocks)


def geometry(model: LanguageModel) -> list[dict[str, Any]]:
    """Of each layer that attends by a sum of distances what its heads make of them now: layer, weights, curvature
    (``algebra.metric.Product.learned``).
    """
    return [
        {"layer": index, **{key: found[key] for key in ("weights", "curvature") if key in found}}
        for index, mixer in enumerate(block.attention for block in model.blocks)
        if isinstance(mixer, Attention) and key_embedding.metric_of(mixer)
        if "weights" in (found := mixer.learned())
    ]


@torch.no_grad()
def spaces(layer: Attention, x: Tensor, seen: Tensor) -> list[list[dict[str, Any]]]:
    """For each key head the spaces of its metric, with the keys of the tokens ``seen`` of inputs x (B, T, dim),
    numbered one sequence after another.
    """
    return [
        [
            {
                "space": part.name,
                "curvature": part.curvature,
                "share": part.share,
                "points": shortened(part.points[seen].tolist(), 4),
            }
            for part in head
        ]
        for head in key_embedding.of_layer(layer, x)
    ]


@torch.no_grad()
def heads(layer: Attention, x: Tensor) -> list[dict[str, Any]]:
    """One object a key head after inputs x (B, T, dim): numbers and the estimated capacity are means over the
    sequences, the spectrum is that of the first, leverage that of every key of all (at most one: what has faded since
    is not taken off).
    """
    found = of_layer(layer, x)
    state = found.state
    stored = [n for n in (2**i for i in range(2, 20)) if n < x.shape[1]] + [x.shape[1]]
    held = torch.stack([of_layer(layer, x[:, :n]).state.used.mean(0) for n in stored])
    numbers = {
        "smallest_eigenvalue": state.smallest,
        "condition": state.condition,
        "effective_rank": state.effective_rank,
    }
    about = []
    for head in range(state.used.shape[1]):
        one: dict[str, Any] = {name: value[:, head].mean().item() for name, value in numbers.items()}
        one |= {
            "size": int((state.used + state.free)[0, head].round()),
            "leverage": found.leverage[:, head].flatten().clamp(0, 1).tolist(),
        }
        one["capacity"] = {"stored": stored, "estimate": held[:, head].tolist()}
        if state.spectrum is not None:
            one["spectrum"] = torch.view_as_real(state.spectrum[0, head]).tolist()
        about.append(one)
    return about


def _solves(layer: object) -> bool:
    return isinstance(layer, Attention) and layer.causal and statistics_of(layer.empty_memory(1).memory) is not None

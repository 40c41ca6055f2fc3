"""What is inside a run's memories, from its ``diagnostics.json``: the numbers of the pictures and of the table.

The file is plain numbers, so that whatever measures a trained model can write it:

``{"schema": 1, "layers": [{"layer": 0, "heads": [head, …]}, …]}``, every key of a head optional:

- ``smallest_eigenvalue``, ``condition``, ``effective_rank``: of the regularised statistics G + ρI. ``size``: how many
  directions there are.
- ``spectrum``: [[re, im], …], eigenvalues of the whitened operator.
- ``leverage``: one number in [0, 1] a key: how much of its own value a key would return.
- ``capacity``: ``{"stored": [n, …], "estimate": [c, …]}``, how many of n stored keys are estimated to be recalled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zonal.errors import ArgumentError
from zonal.report import formats
from zonal.store import read_record, understood
from zonal.typed import made

SCHEMA = 1
NAME = "diagnostics.json"
BINS = 20
NUMBERS = ("smallest_eigenvalue", "condition", "effective_rank")


@dataclass(frozen=True)
class Head:
    """What the file says of one head; layer and head count from 1."""

    layer: int
    head: int
    numbers: Mapping[str, float]
    spectrum: tuple[tuple[float, float], ...] = ()
    leverage: tuple[float, ...] = ()
    stored: tuple[float, ...] = ()
    estimate: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """ "2.3": layer 2, head 3."""
        return f"{self.layer}.{self.head}"


def load(folder: Path) -> tuple[Head, ...] | None:
    """All heads of a run in reading order, from its folder; None where there are no diagnostics.

    Raises: FileFormatError naming the file and what in it is not as above.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    record = read_record(path, SCHEMA, "report", "Write it with this version of zonal, or remove it.")
    with understood("report", path):
        layers = made(tuple[Mapping[str, Any], ...], record.get("layers"), "layers")
        return tuple(
            _head(about, made(int, layer.get("layer", index), "layer") + 1, number)
            for index, layer in enumerate(layers)
            for number, about in enumerate(made(tuple[Mapping[str, Any], ...], layer.get("heads"), "heads"), 1)
        )


def _head(about: Mapping[str, Any], layer: int, number: int) -> Head:
    where = f"layer {layer}, head {number}"
    numbers = {key: about[key] for key in (*NUMBERS, "size") if about.get(key) is not None}
    found = {
        "layer": layer,
        "head": number,
        "numbers": {key: made(float, value, f"{where}: {key}") for key, value in numbers.items()},
        **{key: about[key] for key in ("spectrum", "leverage") if key in about},
        **made(Mapping[str, Any], about.get("capacity") or {}, f"{where}: capacity"),
    }
    head = made(Head, found, where)
    if len(head.stored) != len(head.estimate):
        raise ArgumentError(f"{where}: capacity needs as many estimates as numbers stored")
    if any(not -1e-3 <= value <= 1 + 1e-3 for value in head.leverage):
        raise ArgumentError(
            f"{where}: leverage must lie in [0, 1], received {min(head.leverage):g} … {max(head.leverage):g}"
        )
    return head


def spectra(heads: Sequence[Head]) -> list[dict[str, Any]]:
    """One panel a layer: the eigenvalues of each head as points."""
    panels: dict[int, list[dict[str, Any]]] = {}
    for head in heads:
        if head.spectrum:
            re, im = ([formats.short(pair[part]) for pair in head.spectrum] for part in (0, 1))
            panels.setdefault(head.layer, []).append({"head": head.head, "re": re, "im": im})
    return [{"layer": layer, "heads": found} for layer, found in panels.items()]


def bars(heads: Sequence[Head]) -> dict[str, dict[str, Any]]:
    """For each of ``NUMBERS`` that is there: x names of heads, y values, and the most that y can be, where that is
    known.
    """
    found = {}
    for key in NUMBERS:
        with_it = [head for head in heads if key in head.numbers]
        if with_it:
            sizes = [head.numbers.get("size", 0.0) for head in with_it] if key == "effective_rank" else [0.0]
            found[key] = {
                "x": [head.name for head in with_it],
                "y": [formats.short(head.numbers[key]) for head in with_it],
                "most": max(sizes) or None,
            }
    return found


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, list[Any]]:
    """Shares of values in [0, 1] by equal bins: x the middles of the bins, y the shares, which sum to 1."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, int(value * bins)))] += 1
    total = max(1, len(values))
    return {
        "x": [formats.short((index + 0.5) / bins) for index in range(bins)],
        "y": [formats.short(count / total) for count in counts],
    }


def leverage(heads: Sequence[Head]) -> dict[str, list[Any]] | None:
    """The histogram of all keys' leverages, all heads together."""
    values = [value for head in heads for value in head.leverage]
    return histogram(values) if values else None


def capacity(heads: Sequence[Head]) -> dict[str, list[Any]] | None:
    """Mean, least and most over heads of the estimate, at each number of stored keys."""
    at: dict[float, list[float]] = {}
    for head in heads:
        for stored, estimate in zip(head.stored, head.estimate, strict=True):
            at.setdefault(stored, []).append(estimate)
    if not at:
        return None
    x = sorted(at)
    mean = [formats.short(math.fsum(at[stored]) / len(at[stored])) for stored in x]
    return {
        "x": x,
        "mean": mean,
        "low": [formats.short(min(at[stored])) for stored in x],
        "high": [formats.short(max(at[stored])) for stored in x],
    }


def payload(heads: Sequence[Head]) -> dict[str, Any]:
    """All pictures of one run; what the file lacks is empty or None."""
    return {
        "spectra": spectra(heads),
        "bars": bars(heads),
        "leverage": leverage(heads),
        "capacity": capacity(heads),
    }

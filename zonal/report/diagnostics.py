"""What is inside a run's memories, from its ``diagnostics.json``: the numbers of the pictures and of the table.

The file is plain numbers, so that whatever measures a trained model can write it:

``{"schema": 1, "layers": [{"layer": 0, "heads": [head, …]}, …]}``, every key of a head optional:

- ``smallest_eigenvalue``, ``condition``, ``effective_rank``: of the regularised statistics G + ρI. ``size``: how many
directions there are. - ``spectrum``: [[re, im], …], eigenvalues of the whitened operator. - ``leverage``: one number in
[0, 1] a key: how much of its own value a key would return. - ``capacity``: ``{"stored": [n, …], "estimate": [c, …]}``,
how many of n stored keys are estimated to be recalled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from typing import Any

from zonal.errors import FileFormatError
from zonal.store import read_json

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


@dataclass(frozen=True)
class Diagnostics:
    """All heads of a run, in reading order."""

    heads: tuple[Head, ...] = field(default=())


def load(folder: Traversable) -> Diagnostics | None:
    """The diagnostics in a run's folder, None where there are none.

    Raises: FileFormatError naming the file and what in it is not as above.
    """
    path = folder / NAME
    record = record_of(path, SCHEMA)
    if record is None:
        return None
    heads = []
    for index, layer in enumerate(_list(record.get("layers"), "layers", path)):
        layer = _object(layer, f"layers[{index}]", path)
        place = int(_number(layer.get("layer", index), f"layers[{index}].layer", path)) + 1
        for head, about in enumerate(_list(layer.get("heads"), f"layers[{index}].heads", path)):
            heads.append(_head(_object(about, f"layers[{index}].heads[{head}]", path), place, head + 1, path))
    return Diagnostics(tuple(heads))


def record_of(path: Traversable, schema: int) -> dict[str, Any] | None:
    """The object in a file beside a run, None where there is no such file.

    Raises: FileFormatError when it is none of that schema.
    """
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record, dict) or record.get("schema") != schema:
        raise FileFormatError(
            f"report: {path} must be an object with schema {schema}. Write it with this version of zonal, or remove it."
        )
    return record


def _head(about: Mapping[str, Any], layer: int, head: int, path: Traversable) -> Head:
    where = f"layer {layer}, head {head}"
    capacity = _object(about.get("capacity") or {}, f"{where}: capacity", path)
    stored, estimate = (
        _numbers(capacity.get(key, []), f"{where}: capacity.{key}", path) for key in ("stored", "estimate")
    )
    if len(stored) != len(estimate):
        raise FileFormatError(
            f"report: {path}: {where}: capacity has {len(stored)} numbers stored and {len(estimate)} estimates; "
            "they belong in pairs."
        )
    leverage = _numbers(about.get("leverage", []), f"{where}: leverage", path)
    if any(not -1e-3 <= value <= 1 + 1e-3 for value in leverage):
        raise FileFormatError(
            f"report: {path}: {where}: leverage must lie in [0, 1], got {min(leverage):g} … {max(leverage):g}."
        )
    pairs = [
        _numbers(pair, f"{where}: spectrum", path)
        for pair in _list(about.get("spectrum", []), f"{where}: spectrum", path)
    ]
    if any(len(pair) != 2 for pair in pairs):
        raise FileFormatError(f"report: {path}: {where}: spectrum must be a list of [re, im] pairs.")
    numbers = {
        key: _number(about[key], f"{where}: {key}", path) for key in (*NUMBERS, "size") if about.get(key) is not None
    }
    return Head(layer, head, numbers, tuple((pair[0], pair[1]) for pair in pairs), leverage, stored, estimate)


def _list(value: Any, key: str, path: Traversable) -> list[Any]:
    if not isinstance(value, list):
        raise FileFormatError(f"report: {path}: {key} must be a list, got {type(value).__name__}.")
    return value


def _object(value: Any, key: str, path: Traversable) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FileFormatError(f"report: {path}: {key} must be an object, got {type(value).__name__}.")
    return value


def _number(value: Any, key: str, path: Traversable) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FileFormatError(f"report: {path}: {key} must be a finite number, got {value!r}.")
    return float(value)


def _numbers(value: Any, key: str, path: Traversable) -> tuple[float, ...]:
    return tuple(_number(each, key, path) for each in _list(value, key, path))


# --- pictures
# ----------------------------------------------------------------------------------------------------------


def spectra(heads: Sequence[Head]) -> list[dict[str, Any]]:
    """One panel a layer: the eigenvalues of each head as points."""
    panels: dict[int, list[dict[str, Any]]] = {}
    for head in heads:
        if head.spectrum:
            re, im = ([_short(pair[part]) for pair in head.spectrum] for part in (0, 1))
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
            most = (
                max((head.numbers.get("size", 0.0) for head in with_it), default=0.0)
                if key == "effective_rank"
                else 0.0
            )
            found[key] = {
                "x": [head.name for head in with_it],
                "y": [_short(head.numbers[key]) for head in with_it],
                "most": most or None,
            }
    return found


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, list[float]]:
    """Shares of values in [0, 1] by equal bins: x the middles of the bins, y the shares, which sum to 1."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, max(0, int(value * bins)))] += 1
    total = max(1, len(values))
    return {
        "x": [_short((index + 0.5) / bins) for index in range(bins)],
        "y": [_short(count / total) for count in counts],
    }


def leverage(heads: Sequence[Head]) -> dict[str, list[float]] | None:
    """The histogram of all keys' leverages, all heads together."""
    values = [value for head in heads for value in head.leverage]
    return histogram(values) if values else None


def capacity(heads: Sequence[Head]) -> dict[str, list[float]] | None:
    """Mean, least and most over heads of the estimate, at each number of stored keys."""
    at: dict[float, list[float]] = {}
    for head in heads:
        for stored, estimate in zip(head.stored, head.estimate, strict=True):
            at.setdefault(stored, []).append(estimate)
    if not at:
        return None
    x = sorted(at)
    mean = [_short(math.fsum(at[stored]) / len(at[stored])) for stored in x]
    return {
        "x": x,
        "mean": mean,
        "low": [_short(min(at[stored])) for stored in x],
        "high": [_short(max(at[stored])) for stored in x],
    }


def payload(found: Diagnostics, seed: int) -> dict[str, Any]:
    """All pictures of one run; what the file lacks is empty or None."""
    heads = found.heads
    return {
        "seed": seed,
        "spectra": spectra(heads),
        "bars": bars(heads),
        "leverage": leverage(heads),
        "capacity": capacity(heads),
    }


def _short(value: float) -> float:
    """What can be seen of a number."""
    return float(f"{value:.4g}")


__all__ = [
    "BINS",
    "NAME",
    "NUMBERS",
    "Diagnostics",
    "Head",
    "bars",
    "capacity",
    "histogram",
    "leverage",
    "load",
    "payload",
    "record_of",
    "spectra",
]

"""Where the keys of a run that attends by distance lie, from its ``witnesses.json``, and what its heads made of the
distances while they trained.

The file is plain numbers, so that whatever looks at a trained model can write it:

``{"schema": 1, "groups": [name, …], "group": [g, …], "tokens": [text, …], "layers": [{"layer": 0, "heads": [[space, …],
…]}, …]}``

- ``group``, ``tokens``: of each token that is drawn, the number of its group and what to call it.
- a space: ``{"space": name, "curvature": 1, 0, -1 or null, "share": s, "points": [[x, y], …]}``, a point a token; share
in [0, 1]: how much of
  the points is seen in two numbers. Curvature 1 and -1 are drawn in the unit disk.

While a run trains, each evaluation's line in ``metrics.jsonl`` may hold ``"geometry": [{"layer": 0, "weights": {space:
[one a head]}, "curvature": [one a head]}, …]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

from zonal.errors import FileFormatError
from zonal.report.diagnostics import record_of

SCHEMA = 1
NAME = "witnesses.json"


@dataclass(frozen=True)
class Space:
    """One space of one head; layer and head count from 1."""

    layer: int
    head: int
    name: str
    curvature: int | None
    share: float
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class KeyEmbeddings:
    """All spaces of a run in reading order, and what each token drawn is."""

    groups: tuple[str, ...]
    group: tuple[int, ...]
    tokens: tuple[str, ...]
    spaces: tuple[Space, ...]


def load(folder: Traversable) -> KeyEmbeddings | None:
    """The points in a run's folder, None where there are none.

    Raises: FileFormatError naming the file and what in it is not as above.
    """
    path = folder / NAME
    record = record_of(path, SCHEMA)
    if record is None:
        return None
    try:
        groups, tokens = tuple(str(name) for name in record["groups"]), tuple(str(text) for text in record["tokens"])
        group = tuple(int(number) for number in record["group"])
        spaces = tuple(
            Space(
                int(layer["layer"]) + 1, head, str(found["space"]), found["curvature"], float(found["share"]),
                tuple((float(x), float(y)) for x, y in found["points"]),
            )
            for layer in record["layers"] for head, each in enumerate(layer["heads"], start=1) for found in each
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"report: {path} is incomplete or damaged ({error!r}). Run the comparison again, or remove it."
        ) from error
    if len(group) != len(tokens) or any(len(space.points) != len(tokens) for space in spaces):
        raise FileFormatError(
            f"report: {path}: a group, a text and a point in every space are required of each of {len(tokens)} tokens."
        )
    if any(not 0 <= number < len(groups) for number in group):
        raise FileFormatError(
            f"report: {path}: group must count the {len(groups)} names of groups from 0, "
            f"got {min(group)} … {max(group)}."
        )
    return KeyEmbeddings(groups, group, tokens, spaces)


# --- pictures
# ----------------------------------------------------------------------------------------------------------


def payload(found: KeyEmbeddings, seed: int) -> dict[str, Any]:
    """What the script draws of one run."""
    return {
        "seed": seed, "groups": list(found.groups), "group": list(found.group), "tokens": list(found.tokens),
        "spaces": [
            {
                "layer": space.layer, "head": space.head, "name": space.name, "curvature": space.curvature,
                "share": round(space.share, 3), "x": [x for x, _ in space.points], "y": [y for _, y in space.points],
            }
            for space in found.spaces
        ],
    }  # fmt: skip


def over_training(lines: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], seed: int) -> dict[str, Any]:
    """Weights and curvature by step, from (step, geometry at it) in order, one at least: for each layer the lists of
    each head, one number a step.
    """
    lines = [(step, found) for step, found in lines if found]
    layers = []
    for place, first in enumerate(lines[0][1]):
        at = [found[place] for _, found in lines]
        weights = {name: _by_head([each["weights"][name] for each in at]) for name in first["weights"]}
        curvature = _by_head([each["curvature"] for each in at]) if "curvature" in first else None
        layers.append({"layer": int(first["layer"]) + 1, "weights": weights, "curvature": curvature})
    return {"seed": seed, "steps": [step for step, _ in lines], "layers": layers}


def _by_head(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in head] for head in zip(*rows, strict=True)]


__all__ = ["NAME", "SCHEMA", "KeyEmbeddings", "Space", "load", "over_training", "payload"]

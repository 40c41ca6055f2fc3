"""Where the keys of a run that attends by distance lie, from its ``witnesses.json``, and what its heads made of the
distances while they trained.

The file is plain numbers, so that whatever looks at a trained model can write it:

``{"schema": 1, "groups": [name, …], "group": [g, …], "tokens": [text, …], "layers": [{"layer": 0, "heads": [[space, …],
…]}, …]}``

- ``group``, ``tokens``: of each token that is drawn, the number of its group and what to call it.
- a space: ``{"space": name, "curvature": 1, 0, -1 or null, "share": s, "points": [[x, y], …]}``, a point a token;
  share in [0, 1]: how much of the points is seen in two numbers. Curvature 1 and -1 are drawn in the unit disk.

While a run trains, each evaluation's line in ``metrics.jsonl`` may hold
``"geometry": [{"layer": 0, "weights": {space: [one a head]}, "curvature": [one a head]}, …]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zonal.errors import ArgumentError
from zonal.report import formats
from zonal.store import read_record, understood
from zonal.typed import made

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


def load(folder: Path) -> KeyEmbeddings | None:
    """The points in a run's folder, None where there are none.

    Raises: FileFormatError naming the file and what in it is not as above.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    record = read_record(path, SCHEMA, "report", "Write it with this version of zonal, or remove it.")
    with understood("report", path):
        spaces = [
            {**found, "layer": layer["layer"] + 1, "head": number, "name": found["space"]}
            for layer in record["layers"]
            for number, each in enumerate(layer["heads"], start=1)
            for found in each
        ]
        read = made(KeyEmbeddings, {**record, "spaces": spaces}, "the record")
        if len({len(read.group), len(read.tokens), *(len(space.points) for space in read.spaces)}) != 1:
            raise ArgumentError(
                f"a group, a text and a point in every space are required of each of {len(read.tokens)} tokens"
            )
        if any(not 0 <= number < len(read.groups) for number in read.group):
            raise ArgumentError(
                f"group must count the {len(read.groups)} names of groups from 0, "
                f"received {min(read.group)} … {max(read.group)}"
            )
    return read


def payload(found: KeyEmbeddings) -> dict[str, Any]:
    """What the script draws of one run."""
    return {
        "groups": list(found.groups), "group": list(found.group), "tokens": list(found.tokens),
        "spaces": [
            {
                "layer": space.layer, "head": space.head, "name": space.name, "curvature": space.curvature,
                "share": round(space.share, 3), "x": [x for x, _ in space.points], "y": [y for _, y in space.points],
            }
            for space in found.spaces
        ],
    }  # fmt: skip


def over_training(lines: Sequence[tuple[int, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
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
    return {"steps": [step for step, _ in lines], "layers": layers}


def _by_head(rows: Sequence[Sequence[float]]) -> list[list[float | None]]:
    return [[formats.short(value) for value in head] for head in zip(*rows, strict=True)]

"""One comparison of the runs of several, such as those of other seeds on other machines."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zonal.errors import ArgumentError, FileWriteError
from zonal.names import known_names
from zonal.report import archive, commands
from zonal.store import staged_folder, write_checked, write_error
from zonal.training.config import first_difference
from zonal.training.record import FILE as RECORD
from zonal.training.spec import FILE, GRID, ComparisonSpec, read_comparison


@known_names
def join(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write the runs of several comparisons into a new folder as one comparison: all their operators, seeds and
    learning rates.

    Its runs that none of them has are not started; ``zonal compare --resume`` runs them. The name of the processor, the
    versions and the number of threads must be the same in all. The page names the commits of all.

    Args: folders of ``zonal compare``, packed or not. They stay as they are.

    Raises: ArgumentError for fewer than two folders, comparisons whose settings differ (the first that does is named),
    a run that two of them have, and a new folder that is there already.
    """
    sources, target = [Path(folder) for folder in folders], Path(out)
    if len(sources) < 2:
        raise ArgumentError(f"join: two folders or more were required, received {len(sources)}.")
    if target.exists():
        raise ArgumentError(f"join: {target} is there already. Choose a new folder.")
    read = [read_comparison(source) for source in sources]
    spec = _union([found for found, _ in read])
    for source, (found, stored) in zip(sources, read, strict=True):
        difference = spec.difference(found) or first_difference(_machine(stored), _machine(read[0][1]))
        if difference is not None:
            name, there, here = difference
            raise ArgumentError(
                f"join: the settings of {source} and {sources[0]} differ: {name} is {there!r} and {here!r}. Join "
                "comparisons of the same settings, with other operators, seeds or learning rates."
            )
    try:
        with staged_folder(target) as staging:
            for source in sources:
                with archive.opened(source) as root:
                    _add(root, staging, source)
            write_checked(staging / FILE, _record(spec, [stored for _, stored in read]))
    except OSError as error:
        raise error if isinstance(error, FileWriteError) else write_error("join", target, error) from error
    return target


def _union(specs: Sequence[ComparisonSpec]) -> ComparisonSpec:
    """The comparison that has the runs of all."""
    labels: dict[str, str] = {}
    for spec in specs:
        named = zip(spec.operators, spec.labels, strict=True)
        labels |= {operator: label for operator, label in named if operator not in labels}
    seeds = sorted({seed for spec in specs for seed in spec.seeds})
    rates = sorted({rate for spec in specs for rate in spec.learning_rates})
    shapes = {operator: shape for spec in reversed(specs) for operator, shape in spec.shapes.items()}
    grid = {
        "--operators": ",".join(labels), "--learning-rates": ",".join(map(repr, rates)),
        "--seeds": "".join(f"{seed}," for seed in seeds),
    }  # fmt: skip
    return replace(
        specs[0],
        operators=tuple(labels),
        labels=tuple(labels.values()),
        seeds=tuple(seeds),
        learning_rates=tuple(rates),
        screening_seeds=None,
        shapes=shapes,
        command=commands.variant(specs[0].command, grid),
    )


def _machine(stored: dict[str, Any]) -> dict[str, Any]:
    """What runs must share beside the settings to stand in one table."""
    device = {key: stored["device"].get(key) for key in ("name", "threads")}
    return {"steps": stored["steps"], "device": device, "versions": stored.get("versions")}


def _add(root: Path, staging: Path, source: Path) -> None:
    """Copy the runs of ``source``, which lie in ``root``."""
    for record in sorted(root.glob(f"runs/*/*/{RECORD}")):
        place = record.parent.relative_to(root)
        if (staging / place).exists():
            raise ArgumentError(
                f"join: {source} has a run that another folder has too, {place}. Leave one of them out."
            )
        shutil.copytree(record.parent, staging / place)


def _record(spec: ComparisonSpec, stored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """comparison.json of the whole."""
    first = {name: value for name, value in stored[0].items() if name not in GRID}
    timings = {name: timing for each in reversed(stored) for name, timing in each["plan"]["timings"].items()}
    commits = dict.fromkeys(each["commit"] for each in stored if each.get("commit"))
    return {
        **first,
        **spec.to_dict(),
        "training": first["training"],
        "plan": {**first["plan"], "timings": timings},
        **({"commit": ", ".join(commits)} if commits else {}),
    }


__all__ = ["join"]

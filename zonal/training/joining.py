"""One comparison of the runs of several, such as those of other seeds on other machines."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.report import archive, commands
from zonal.store import staged_folder, understood, write_checked, writing
from zonal.training.config import TrainConfig, first_difference
from zonal.training.record import FILE as RECORD
from zonal.training.spec import FILE, GRID, read_model, slugs, stored_comparison


@known_names
def join(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write the runs of several comparisons into a new folder as one comparison: all their operators, seeds and
    learning rates.

    Its runs that none of them has are not started; ``zonal compare --resume`` runs them. The name of the processor, the
    versions and the number of threads must be the same in all. The page names the commits of all.

    Args: folders of ``zonal compare``, packed or not. They stay as they are. The data of the task is not needed.

    Raises: ArgumentError for fewer than two folders, comparisons whose settings differ (the first that does is named),
    a run that two of them have, and a new folder that is there already.
    """
    sources, target = [Path(folder) for folder in folders], Path(out)
    if len(sources) < 2:
        raise ArgumentError(f"join: two folders or more were required, received {len(sources)}.")
    if target.exists():
        raise ArgumentError(f"join: {target} is there already. Choose a new folder.")
    stored = [stored_comparison(source, "join") for source in sources]
    whole = _union(stored)
    for source, each in zip(sources, stored, strict=True):
        with understood("join", source / FILE):
            difference = first_difference(_settings(each, each["operators"]), _settings(whole, each["operators"]))
        if difference is not None:
            name, there, here = difference
            raise ArgumentError(
                f"join: the settings of {source} are not those of the others: {name} is {there!r} there and {here!r} "
                "elsewhere. Join comparisons of the same settings, with other operators, seeds or learning rates."
            )
    with writing("join", target), staged_folder(target) as staging:
        for source in sources:
            with archive.opened(source) as root:
                _add(root, staging, source)
        write_checked(staging / FILE, whole)
    return target


def _union(stored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """comparison.json of the comparison that has the runs of all."""
    first, labels, shapes, timings = stored[0], {}, {}, {}
    for each in reversed(stored):  # what the first says of an operator stands
        timings |= each["plan"]["timings"]
        shapes |= each.get("shapes", {})
    for each in stored:
        named = zip(each["operators"], each["labels"], strict=True)
        labels |= {operator: label for operator, label in named if operator not in labels}
    seeds = sorted({seed for each in stored for seed in each["seeds"]})
    rates = sorted({rate for each in stored for rate in each["learning_rates"]})
    grid = {
        "--operators": ",".join(labels), "--learning-rates": ",".join(map(repr, rates)),
        "--seeds": "".join(f"{seed}," for seed in seeds),
        **({"--screening-seeds": str(len(seeds))} if len(rates) > 1 else {}),  # all try all, whatever parts did
    }  # fmt: skip
    commits = dict.fromkeys(each["commit"] for each in stored if each.get("commit"))
    return {
        **{name: value for name, value in first.items() if name not in GRID},
        "command": commands.variant(first["command"], grid),
        "operators": list(labels),
        "labels": list(labels.values()),
        "seeds": seeds,
        "learning_rates": rates,
        "plan": {**first["plan"], "timings": timings},
        **({"shapes": shapes} if shapes else {}),
        **({"commit": ", ".join(commits)} if commits else {}),
    }


def _settings(stored: dict[str, Any], operators: Sequence[str]) -> dict[str, Any]:
    """What all runs of these operators must share to stand in one table, and the folders where they are."""
    training = TrainConfig.from_dict(stored["training"]).trajectory()
    shapes = {operator: shape for operator, shape in stored.get("shapes", {}).items() if operator in operators}
    return {
        **{name: stored.get(name) for name in ("task", "run_on", "steps", "budget_seconds", "versions")},
        "training": {name: value for name, value in training.items() if name not in ("learning_rate", "seed")},
        # sizes alone are compared, so any operator may stand in the layers
        "model": read_model(stored["model"], "softmax").to_dict(),
        "shapes": {operator: read_model(shape, "softmax").to_dict() for operator, shape in shapes.items()},
        "device": {name: stored["device"].get(name) for name in ("name", "threads")},
        "folder": {operator: slugs(stored["operators"])[operator] for operator in operators},
    }


def _add(root: Path, staging: Path, source: Path) -> None:
    """Copy the runs of ``source``, which lie in ``root``."""
    for record in sorted(root.glob(f"runs/*/*/{RECORD}")):
        place = record.parent.relative_to(root)
        if (staging / place).exists():
            raise ArgumentError(f"join: {source} has a run that another folder has too, {place}. Leave one out.")
        shutil.copytree(record.parent, staging / place, ignore=shutil.ignore_patterns(".*.part"))  # half written


__all__ = ["join"]

"""A recipe file: the settings of one model as `zonal train` and `zonal compare` take them, by --preset with the file's name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zonal.cli import limits
from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.cli.preset import Preset
from zonal.errors import FileFormatError
from zonal.store import read_json, understood, write_json
from zonal.typed import check_fields

FILE = "recipe.json"
SUFFIX = ".json"
SCHEMA = 1
_OPTIONS = {"task": TaskOptions, "model": ModelOptions, "training": TrainingOptions}


def write(path: Path, preset: Preset) -> None:
    """Write the recipe, with the two commands that read it."""
    values = {name: _given(getattr(preset, name), kind()) for name, kind in _OPTIONS.items()}
    commands = {name: f"zonal {name} --preset {path.as_posix()}" for name in ("train", "compare")}
    head = {
        "schema": SCHEMA,
        "commands": commands,
        "about": preset.about,
        "models": dict(preset.models),
        "seeds": preset.seeds,
        "learning_rates": preset.learning_rates,
    }
    write_json(path, {**head, **values})


def read(path: Path, command: str) -> Preset:
    """The recipe in a file. Raises: FileFormatError when it is missing, damaged or of another version."""
    values = read_json(path)
    schema = values.get("schema") if isinstance(values, dict) else None
    if not isinstance(values, dict) or schema != SCHEMA or "models" not in values:
        raise FileFormatError(
            f"{command}: {path} is not a recipe of this version (schema {schema!r}). Required: the recipe.json that `zonal search` wrote."
        )
    with understood(command, path):
        check_fields("recipe", Preset, {name: value for name, value in values.items() if name not in _OPTIONS})
        options = {name: _made(kind, values[name], command) for name, kind in _OPTIONS.items()}
        return Preset(values["about"], values["models"], values["seeds"], values["learning_rates"], **options)


def _given(options: Any, defaults: Any) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != getattr(defaults, field.name)
    }


def _made(kind: type, values: Mapping[str, Any], command: str) -> Any:
    check_fields("recipe", kind, values)
    options = kind(**values)
    limits.check(command, options)
    return options

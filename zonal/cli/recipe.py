"""A recipe file: the settings of one model as `zonal train` and `zonal compare` take them, by --preset with the file's name."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.cli.preset import Preset
from zonal.errors import FileFormatError, ZonalError
from zonal.store import read_json, write_json

FILE = "recipe.json"
SUFFIX = ".json"
SCHEMA = 1
_OPTIONS = {"task": TaskOptions, "model": ModelOptions, "training": TrainingOptions}


def write(path: Path, preset: Preset) -> None:
    """Write the recipe, with the two commands that read it."""
    values = {name: _given(getattr(preset, name), kind()) for name, kind in _OPTIONS.items()}
    commands = {name: f"zonal {name} --preset {path.as_posix()}" for name in ("train", "compare")}
    head = {"schema": SCHEMA, "commands": commands, "about": preset.about, "models": dict(preset.models), "seeds": preset.seeds, "learning_rates": preset.learning_rates}
    write_json(path, {**head, **values})


def read(path: Path, command: str) -> Preset:
    """The recipe in a file. Raises: FileFormatError when it is missing, damaged or of another version."""
    values = read_json(path)
    schema = values.get("schema") if isinstance(values, dict) else None
    if not isinstance(values, dict) or schema != SCHEMA or "models" not in values:
        raise FileFormatError(f"{command}: {path} is not a recipe of this version (schema {schema!r}). Required: the recipe.json that `zonal search` wrote.")
    try:
        options = {name: _made(kind, values[name], path, command) for name, kind in _OPTIONS.items()}
        return Preset(values["about"], values["models"], values["seeds"], values["learning_rates"], **options)
    except KeyError as error:
        raise FileFormatError(f"{command}: {path} lacks the key {error}. It was edited or written by another version.") from error


def _given(options: Any, defaults: Any) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options) if getattr(options, field.name) != getattr(defaults, field.name)}


def _made(kind: type, values: Mapping[str, Any], path: Path, command: str) -> Any:
    try:
        return kind(**values)
    except (TypeError, ZonalError) as error:
        raise FileFormatError(f"{command}: {path} has options that this version does not know ({error}).") from error

"""Presets: settings of ``zonal compare`` and ``zonal train`` in a file.

Those that ship with the package are ``zonal/experiments/*.toml``: experiments of papers, scaled to a small machine
where they say so, with what the papers print. A file of one's own is named by its path: a TOML file of the same form,
or the recipe.json that ``zonal search`` wrote.
"""

import dataclasses
import importlib.resources
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from zonal import limits
from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.errors import ArgumentError, FileFormatError, unknown_name
from zonal.models.layers import canonical_layers
from zonal.report.commands import parted
from zonal.report.published import Published
from zonal.store import read_record, understood, write_json
from zonal.typed import check_fields, made

OPTION = "--preset"
RECIPE = "recipe.json"
SCHEMA = 1
_OPTIONS = {"task": TaskOptions, "model": ModelOptions, "training": TrainingOptions}
_KEYS = ("about", "seeds", "learning_rates", "screening_seeds", "operators", *_OPTIONS, "published")


@dataclass(frozen=True)
class Preset:
    """What a preset fills in where the command line says nothing.

    about: one line. models: label → spec of the model's layers; ``zonal train`` takes the first model, or the one that
    --operator names, the first rate and the first seed.
    published: what a paper prints. shapes: spec → options of the model in which that operator differs from the others.
    """

    about: str
    models: Mapping[str, str]
    seeds: str
    learning_rates: str
    task: TaskOptions
    model: ModelOptions
    training: TrainingOptions
    published: Published | None = None
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    screening_seeds: int | None = None

    @property
    def operators(self) -> str:
        return ",".join(self.models.values())

    def layers_of(self, entry: str) -> str:
        """The layers of the model that has this name, with or without quotation marks; any other entry as it is.

        Raises: ArgumentError for what is neither a name nor layers.
        """
        name = entry.strip("'\"")
        if name in self.models:
            return self.models[name]
        try:
            canonical_layers(entry)
        except ArgumentError as error:
            raise ArgumentError(f"{error} Models of this preset: {'; '.join(self.models)}.") from error
        return entry

    def label_of(self, operator: str) -> str | None:
        """The name for people of these layers; None when the preset does not have them."""
        return {canonical_layers(spec): label for label, spec in self.models.items()}.get(canonical_layers(operator))

    def shape_of(self, operator: str) -> Mapping[str, Any]:
        """The options of the model in which these layers differ from the others."""
        return {canonical_layers(spec): shape for spec, shape in self.shapes.items()}.get(
            canonical_layers(operator), {}
        )


def _shipped() -> Traversable:
    return importlib.resources.files("zonal") / "experiments"


def names() -> list[str]:
    """The presets that ship with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _shipped().iterdir() if file.name.endswith(".toml"))


def named(words: Sequence[str], command: str) -> tuple[str, Preset] | None:
    """The name after --preset on a command line, and what it stands for.

    Raises: ArgumentError when it is missing or unknown.
    """
    found = given(words, OPTION)
    if found == "":
        raise ArgumentError(f"{command}: {OPTION} requires a name. Presets: {', '.join(names())}.")
    return None if found is None else (found, find(found, command))


def given(words: Sequence[str], option: str) -> str | None:
    """The word after an option of a command line, the last of several as the parser has it: "" where there is none,
    None where the option is missing.
    """
    values = parted(words)[1].get(option)
    return None if values is None else next(iter(values), "")


def find(name: str, command: str) -> Preset:
    """The preset of that name, or the one in the file of that name.

    Raises: ArgumentError for an unknown name. FileFormatError for a file that is missing, damaged or of another
    version.
    """
    if name.endswith(".json"):
        return _recipe(Path(name), command)
    if name.endswith(".toml"):
        return _read(Path(name), command)
    if name not in names():
        raise unknown_name(command, "preset", name, names())
    return _read(_shipped() / f"{name}.toml", command)


def _read(path: Traversable, command: str) -> Preset:
    """The preset in a TOML file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileFormatError(f"{command}: {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:  # of TOML, of UTF-8
        raise FileFormatError(f"{command}: {path} is not valid TOML ({error}).") from error
    return _preset(values, path, command)


def _preset(values: Mapping[str, Any], path: Traversable, command: str) -> Preset:
    """The preset that the values of a file stand for."""
    for name in values:
        if name not in _KEYS:
            raise FileFormatError(f"{command}: {path} has an unknown key {name!r}. Keys: {', '.join(_KEYS)}.")
    with understood(command, path):
        models: dict[str, str] = {}
        shapes: dict[str, Mapping[str, Any]] = {}
        for label, entry in values["operators"].items():
            shape = {"spec": entry} if isinstance(entry, str) else dict(entry)
            models[label] = shape.pop("spec")
            if shape:
                _options(ModelOptions, shape, command)
                shapes[models[label]] = shape
        plain = {name: values[name] for name in ("about", "seeds", "learning_rates")}
        plain["screening_seeds"] = values.get("screening_seeds")
        check_fields("preset", Preset, {**plain, "models": models})
        options = {name: _options(kind, values.get(name, {}), command) for name, kind in _OPTIONS.items()}
        if not models:
            raise ValueError("at least one operator is required, it names none")
        published = made(Published | None, values.get("published"), "published")
        return Preset(**plain, models=models, published=published, shapes=shapes, **options)


def _options(kind: type, values: Mapping[str, Any], command: str) -> Any:
    """Options of a class by name; the others are at their defaults."""
    check_fields("preset", kind, values)
    # TOML has no tuples
    options = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    limits.check(command, options)
    return options


def write_recipe(path: Path, preset: Preset) -> None:
    """Write a preset as a recipe, with the two commands that read it."""
    options = {name: _given(getattr(preset, name), kind()) for name, kind in _OPTIONS.items()}
    head = {
        "schema": SCHEMA,
        "commands": {name: f"zonal {name} --preset {shlex.quote(path.as_posix())}" for name in ("train", "compare")},
        "about": preset.about,
        "models": dict(preset.models),
        "seeds": preset.seeds,
        "learning_rates": preset.learning_rates,
    }
    write_json(path, {**head, **options})


def _recipe(path: Path, command: str) -> Preset:
    """The preset in a recipe."""
    values = read_record(path, SCHEMA, command, "Required: the recipe.json that `zonal search` wrote.")
    kept = {name: value for name, value in values.items() if name not in ("schema", "commands")}
    return _preset({"operators" if name == "models" else name: value for name, value in kept.items()}, path, command)


def _given(options: Any, defaults: Any) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != getattr(defaults, field.name)
    }

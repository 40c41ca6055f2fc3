"""Experiments of papers, and this project's own, as settings of ``zonal compare`` and ``zonal train``, scaled to a small machine where that is said, and what the papers print.

A preset fills in options that the command line leaves out. Each lists how its recipe differs from the paper's. What `zonal search` found is one, too: a file.
"""

from collections.abc import Sequence
from pathlib import Path

from zonal.cli import presets_echo, presets_operators, presets_rewa, recipe
from zonal.cli.preset import Preset
from zonal.errors import ArgumentError, unknown_name

OPTION = "--preset"
PRESETS: dict[str, Preset] = {**presets_echo.PRESETS, **presets_rewa.PRESETS, **presets_operators.PRESETS}


def named(words: Sequence[str], command: str) -> str | None:
    """The name after --preset among the words of a command line. Raises: ArgumentError when it is missing or unknown."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == OPTION:
            if not equals and place + 1 == len(words):
                raise ArgumentError(f"{command}: {OPTION} requires a name. Presets: {', '.join(PRESETS)}.")
            found = value if equals else words[place + 1]
            find(found, command)
            return found
    return None


def find(name: str, command: str) -> Preset:
    """The preset of that name, or the recipe in the file of that name (.json). Raises: ArgumentError or FileFormatError when there is none."""
    if name.endswith(recipe.SUFFIX):
        return recipe.read(Path(name), command)
    if name not in PRESETS:
        raise unknown_name(command, "preset", name, PRESETS)
    return PRESETS[name]

"""What is fuzzed: by name, how cases are drawn and how one is checked."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fuzz import calls, damaged, sequences, texts
from hypothesis.strategies import SearchStrategy


class Target(NamedTuple):
    """cases: of a full run. check: raises for a case that fails."""

    draw: Callable[[], SearchStrategy[Any]]
    check: Callable[[Any], None]
    cases: int


TARGETS: dict[str, Target] = {
    "attention": Target(calls.attentions, calls.check_attention, 20_000),
    "arguments": Target(calls.misfits, calls.check_misfit, 20_000),
    "memories": Target(sequences.sequences, sequences.check_sequence, 10_000),
    "specs": Target(texts.specs, texts.check_spec, 30_000),
    "presets": Target(texts.preset_files, texts.check_preset, 20_000),
    "files": Target(damaged.damages, damaged.check_damage, 30_000),
    "models": Target(lambda: damaged.damages(damaged.PRETRAINED), damaged.check_damage, 5_000),
    "commands": Target(texts.commands, texts.check_command, 2_000),
}

__all__ = ["TARGETS", "Target"]

"""A regime: the operator of every layer, and the parameters that a search may move beside it."""

import functools
import re
from dataclasses import dataclass
from typing import Any

from zonal import mechanisms
from zonal.algebra import Operator
from zonal.errors import ArgumentError
from zonal.mechanisms import spec as specs
from zonal.models.layers import entry_of, operators_in
from zonal.report import formats, style
from zonal.training.checkpoint import fingerprint


@dataclass(frozen=True)
class Regime:
    """layers: the spec of each layer, as ``canonical`` writes it. head_dim: None = dim / heads."""

    layers: tuple[str, ...]
    learning_rate: float
    head_dim: int | None = None

    @property
    def operator(self) -> str:
        """The layers as one entry of a comparison."""
        return entry_of(self.layers)

    @property
    def label(self) -> str:
        """For people: the operator, or those of the layers in order, and the parameters."""
        short = [style.label(spec) for spec in dict.fromkeys(self.layers)]
        name = short[0] if len(short) == 1 else " → ".join(style.label(spec) for spec in self.layers)
        return f"{name}, lr {formats.rate(self.learning_rate)}" + (
            "" if self.head_dim is None else f", heads of {self.head_dim}"
        )

    @property
    def name(self) -> str:
        """Its folder: words for people, and eight letters that no other regime has."""
        words = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")[:48].rstrip("-.")
        return f"{words}-{fingerprint(self.to_dict())[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON; ``from_dict`` reverses it."""
        return {"layers": list(self.layers), "learning_rate": self.learning_rate, "head_dim": self.head_dim}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Regime":
        return cls(tuple(values["layers"]), values["learning_rate"], values["head_dim"])


# specs with arguments that people know by them
_WELL_KNOWN = ("ska(power=0)", "ska(power=2)")


@functools.cache
def _plain_names() -> dict[str, str]:
    """Declaration → the mechanism that it is, with all arguments left out or by a well-known spec."""
    known = (*(name for name in mechanisms.names() if name != "regime"), *_WELL_KNOWN)
    return {mechanisms.declaration(mechanisms.resolve(spec)): spec for spec in reversed(known)}


def operator_of(spec: str) -> Operator | None:
    """The operator of a layer's spec; None for a recurrence or a mixture, whose parts no slot holds."""
    return mechanisms.resolve(spec) if operators_in(spec) == (spec,) else None


def written(operator: Operator) -> str:
    """The one spec of a declaration: a mechanism's own where it is one, else ``regime(…)`` by its parts."""
    return _plain_names().get(mechanisms.declaration(operator)) or mechanisms.regime_spec(operator)


def canonical(spec: str) -> str:
    """A layer's spec as ``written`` has it, so that one regime has one name; as it is where it cannot be written by its
    parts.
    """
    operator = operator_of(spec)
    if operator is None:
        specs.name_of(spec)
        return " ".join(spec.split())
    try:
        return written(operator)
    except ArgumentError:
        return " ".join(spec.split())

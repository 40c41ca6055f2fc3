"""Typed moves: one slot of an operator swapped, one layer placed, or one parameter changed, and what the declaration
says of the result.

A move is proposed from a table; whether its result is an operator is not for the search to say: the parts check their
arguments, ``Operator.refusal`` says which parts mean nothing together, and the model says which sizes do not fit. What
they refuse is kept with their reason and never run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from zonal.algebra import Operator
from zonal.algebra.anchor import Koopman
from zonal.errors import ArgumentError
from zonal.mechanisms import regime, regime_spec
from zonal.mechanisms.regime import part_spec
from zonal.models import ModelConfig
from zonal.models.build import class_of
from zonal.report import style
from zonal.training.search.regime import Regime, canonical, operator_of, written

SCORES = (
    "dot", "dot(scale=1.0, key_limit=1.0)", "dot(scale=1.0, map='elu1')", "cosine",
    "cosine(temperature=0.1, learn_temperature=True)", "negative_distance",
)  # fmt: skip
FEATURES = (
    "features(features='positive_random(draws=64, orthogonal=True)', scaled=True)",
    "learned_exp(size=64)",
    "slay(polynomial='anchors(count=16)', draws=16)",
)
LINKS = (
    "exp",
    "identity",
    "gegenbauer",
    "yat",
    "squared_affine",
    "polynomial_square(polynomial=(0.1, 0.3, 1.0))",
    "oscillatory",
)
ANCHORS = ("row", "count", "raw", "topk(k=8)", "ridge(learn_ridge=True)", "koopman")
STRUCTURAL = ("score", "features", "link", "anchor", "power", "rank", "placement")
PARAMETERS = ("learning_rate", "head_dim")
KINDS = (*STRUCTURAL, *PARAMETERS)
PALETTE = ("softmax", "ska(power=1)", "mamba2")
"""What a placement move may put into a layer, unless a search names others."""
_FACTOR = 2  # of a power of two, so that a step up and one down return to the same number


@dataclass(frozen=True)
class Move:
    """One step from a regime to another. ``kind``: the slot or parameter; ``text``: what becomes of it."""

    kind: str
    text: str
    target: Regime


@dataclass(frozen=True)
class Skipped:
    """A move that is not made, and the reason."""

    kind: str
    text: str
    reason: str


@dataclass(frozen=True)
class Moves:
    """The moves out of one regime: those whose results are operators, and the others."""

    legal: tuple[Move, ...]
    skipped: tuple[Skipped, ...]


def moves(start: Regime, model: ModelConfig, kinds: Sequence[str] = KINDS, palette: Sequence[str] = PALETTE) -> Moves:
    """Every move out of ``start`` in the order of the tables, each judged. model: its sizes; ``layers`` and
    ``head_dim`` give way to the regime's.
    """
    legal: list[Move] = []
    skipped: list[Skipped] = []
    for found in proposals(start, model, kinds, palette):
        if isinstance(found, Skipped):
            skipped.append(found)
            continue
        reason = refusal(found.target, model)
        if reason is None:
            legal.append(found)
        else:
            skipped.append(Skipped(found.kind, found.text, reason))
    return Moves(tuple(legal), tuple(skipped))


def model_of(start: Regime, model: ModelConfig) -> ModelConfig:
    """The model of a regime. Raises: ArgumentError for sizes that do not fit."""
    return replace(model, layers=start.layers, head_dim=start.head_dim)


def refusal(target: Regime, model: ModelConfig) -> str | None:
    """Why a regime is no model, in the words of what refuses it, or None when it is one. No weights are made."""
    try:
        for spec in dict.fromkeys(target.layers):
            operator = operator_of(spec)
            if operator is not None:
                operator.check("search")
        with torch.device("meta"):
            shape = model_of(target, model)
            class_of(shape)(shape)
    except ArgumentError as error:
        return str(error)
    return None


def proposals(
    start: Regime, model: ModelConfig, kinds: Sequence[str] = KINDS, palette: Sequence[str] = PALETTE
) -> Iterator[Move | Skipped]:
    """All moves out of ``start``, not judged but for what has no result at all; each result once, under the first kind
    that reaches it.
    """
    seen = {start}
    for kind in (kind for kind in KINDS if kind in kinds):
        found = (
            _placements(start, palette)
            if kind == "placement"
            else _parameters(start, model, kind)
            if kind in PARAMETERS
            else _swaps(start, model, kind)
        )
        for move in found:
            if isinstance(move, Skipped):
                yield move
            elif move.target not in seen:
                seen.add(move.target)
                yield move


def _swaps(start: Regime, model: ModelConfig, kind: str) -> Iterator[Move | Skipped]:
    """A slot swapped in every layer that has the same operator."""
    for spec in dict.fromkeys(start.layers):
        where = "" if len(set(start.layers)) == 1 else f" of {style.label(spec)}"
        operator = operator_of(spec)
        if operator is None:
            yield Skipped(
                kind, f"{kind}{where}", f"{spec} is a recurrence or a mixture: it has no {kind} that could be swapped"
            )
            continue
        try:
            regime_spec(operator)
        except ArgumentError as error:
            yield Skipped(kind, f"{kind}{where}", str(error))
            continue
        for text, made in _slots(operator, replace(model, head_dim=start.head_dim), kind):
            name = f"{kind}{where}: {text}"
            try:
                swapped = written(made())
            except ArgumentError as error:
                yield Skipped(kind, name, str(error))
                continue
            layers = tuple(swapped if layer == spec else layer for layer in start.layers)
            yield Move(kind, name, replace(start, layers=layers))


Proposed = Iterator[tuple[str, Callable[[], Operator]]]


def _with(operator: Operator, parts: Mapping[str, Any]) -> Operator:
    """The operator with some arguments of ``regime`` swapped; what a layer does for its anchor (norms, starts) follows
    the new one.
    """
    own = {slot: part_spec(getattr(operator, slot)) for slot in ("score", "link", "anchor")}
    prior = tuple(part_spec(part) for part in operator.prior)
    return regime(**{**own, "prior": prior, "rank": operator.qk_dim, **parts})


def _slots(operator: Operator, model: ModelConfig, kind: str) -> Proposed:
    """What may stand in the slot ``kind``: its name, and how the operator is made."""
    if kind == "features":
        # the sum over features is the kernel, which any link but the identity would bend
        for score in FEATURES:
            yield f"{score} with link identity", partial(_with, operator, {"score": score, "link": "identity"})
    elif kind == "power":
        for step, word in ((1, "one more"), (-1, "one less")):
            yield word, partial(_moved, operator, step)
    elif kind == "rank":
        rank = operator.qk_dim or model.size_of_head
        for size in (rank // _FACTOR, rank * _FACTOR):
            yield f"{rank} → {size}", partial(_sized, operator, model, size)
    else:
        for part in {"score": SCORES, "link": LINKS, "anchor": ANCHORS}[kind]:
            yield part, partial(_with, operator, {kind: part})


def _moved(operator: Operator, step: int) -> Operator:
    anchor = operator.anchor
    if not isinstance(anchor, Koopman) or not isinstance(anchor.power, int):
        raise ArgumentError(
            f"anchor {part_spec(anchor)} has no one power that could go up or down; anchor.Koopman(power=...) has"
        )
    return _with(operator, {"anchor": part_spec(replace(anchor, power=anchor.power + step))})


def _sized(operator: Operator, model: ModelConfig, size: int) -> Operator:
    if model.qk_dim is not None:
        raise ArgumentError(
            f"the model sets the size of queries and keys to {model.qk_dim} in all layers, "
            "whatever an operator asks for; leave out its qk_dim"
        )
    # the size of values is what a layer gives by itself: one name for one operator
    return _with(operator, {"rank": None if size == model.size_of_head else size})


def _placements(start: Regime, palette: Sequence[str]) -> Iterator[Move | Skipped]:
    """Swaps of neighbouring layers that differ, and layers replaced by another layer's operator or by the palette's."""
    layers = start.layers
    if len(layers) == 1:
        yield Skipped("placement", "placement", "a model of one layer has one place")
        return
    for place in range(len(layers) - 1):
        if layers[place] != layers[place + 1]:
            swapped = (*layers[:place], layers[place + 1], layers[place], *layers[place + 2 :])
            yield Move("placement", f"layers {place + 1} and {place + 2} change places", replace(start, layers=swapped))
    for place in range(len(layers)):
        for spec in dict.fromkeys((*layers, *(canonical(entry) for entry in palette))):
            if spec != layers[place]:
                yield Move(
                    "placement",
                    f"layer {place + 1}: {style.label(spec)}",
                    replace(start, layers=(*layers[:place], spec, *layers[place + 1 :])),
                )


def _parameters(start: Regime, model: ModelConfig, kind: str) -> Iterator[Move | Skipped]:
    if kind == "learning_rate":
        for rate in (start.learning_rate * _FACTOR, start.learning_rate / _FACTOR):
            yield Move(kind, f"learning rate {start.learning_rate:g} → {rate:g}", replace(start, learning_rate=rate))
        return
    own = None if model.dim % model.heads else model.dim // model.heads
    size = start.head_dim or own
    assert size is not None  # a model without head_dim has dim / heads, a whole number
    for other in (size // _FACTOR, size * _FACTOR):
        yield Move(kind, f"heads of {size} → {other}", replace(start, head_dim=None if other == own else other))

"""Any operator by the names of its parts: regime(score="cosine", link="yat(eps=0.1)", anchor="ridge").

y_t = sum_s W_ts v_s, W = A(B * l(S)), with score S, link l, anchor A and priors B. The name of a part is the name of
its class in lower case, with the arguments that differ from their defaults. Cost: that of the parts
(``zonal.explain``). Paper: Geometric Attention (003).
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from zonal.algebra import Operator
from zonal.algebra.anchor import Anchor, Koopman
from zonal.algebra.declaration import Declaration, declared, require, require_one_of, require_whole
from zonal.algebra.link import Link
from zonal.algebra.operator import LayerInit, Readout
from zonal.algebra.prior import Prior
from zonal.algebra.score import Score
from zonal.errors import ArgumentError
from zonal.features import FeatureMap, Features
from zonal.mechanisms import spec as specs
from zonal.mechanisms.registry import mechanism


def part_name(kind: type[Declaration]) -> str:
    """The name of a declared type in a spec: SquaredAffine → squared_affine, TopK → topk."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z]{2})", "_", kind.__name__).lower()


def _named(kinds: Mapping[str, type[Declaration]]) -> dict[str, type[Declaration]]:
    return {part_name(kind): kind for kind in kinds.values()}


def _part(text: str, kinds: Mapping[str, type[Declaration]], slot: str) -> Declaration:
    if not isinstance(text, str):
        raise ArgumentError(f"regime: {slot} must be text such as {next(iter(_named(kinds)))!r}, received {text!r}.")
    return specs.made(text, _named(kinds), read=_inner)


def _inner(value: Any) -> Any:
    """The declaration that an argument's text names, as in negative_distance(metric='euclidean'); else the value."""
    if isinstance(value, tuple):
        return tuple(_inner(item) for item in value)
    kinds = declared("score", "link", "anchor", "prior", "metric", "search", "features")
    named = isinstance(value, str) and value.partition("(")[0].strip() in _named(kinds)
    return _part(value, kinds, "part") if named else value


@mechanism(
    "Regime",
    "an operator named by its parts: a score of query and key, a link from score to evidence, an anchor from evidence "
    "to weights.",
    weights="any combination of parts, by their names",
    memory="that of its parts",
    paths="those of its parts",
)
def regime(
    score: str = "dot",
    link: str = "exp",
    anchor: str = "row",
    prior: tuple[str, ...] = (),
    rank: int | None = None,
    readout: Literal["auto", "head", "concat"] | None = "auto",
    layer_init: Literal["auto", "default", "zero_output", "orthogonal"] = "auto",
) -> Operator:
    """y_t = sum_s W_ts v_s, W = A(B * l(S)), with each part given by name.

    score: the name of a score, or of a feature map, whose score is phi_q(q) . phi_k(k). link, anchor: names. prior: a
    tuple of names.
    rank: size of queries and keys per head in a layer (None: that of values). readout: "auto" normalises the output of
    each head where the anchor does not fix its size (count, raw), as ``sko`` and ``retention`` do. layer_init: "auto"
    initialises a Koopman anchor as ``ska`` does.

    Raises: ArgumentError for unknown names and arguments, and for parts that cannot be combined.
    """
    scored = _part(score, declared("score", "features"), "score")
    scored = Features(scored) if isinstance(scored, FeatureMap) else scored
    linked, anchored = _part(link, declared("link"), "link"), _part(anchor, declared("anchor"), "anchor")
    require(isinstance(prior, tuple), f"regime: prior must be a tuple of texts such as ('alibi',), received {prior!r}.")
    priors = tuple(_part(text, declared("prior"), "prior") for text in prior)
    require_one_of("regime: readout", readout, ("auto", "head", "concat", None))
    require_one_of("regime: layer_init", layer_init, ("auto", *get_args(LayerInit)))
    if rank is not None:
        require_whole("regime: rank", rank)
    assert isinstance(scored, Score)
    assert isinstance(linked, Link)
    assert isinstance(anchored, Anchor)
    return Operator(
        scored,
        linked,
        anchored,
        tuple(part for part in priors if isinstance(part, Prior)),
        name="regime",
        qk_dim=rank,
        readout=_readout(anchored) if readout == "auto" else readout,
        layer_init=_layer_init(anchored) if layer_init == "auto" else layer_init,
    )


def _readout(anchor: Anchor) -> Readout:
    return None if anchor.normalises or anchor.solves else "head"


def _layer_init(anchor: Anchor) -> LayerInit:
    return "orthogonal" if isinstance(anchor, Koopman) else "default"


def part_spec(part: Declaration) -> str:
    """A declaration as ``regime`` reads it: its name, with the arguments that are not at their defaults."""
    if isinstance(part, Features) and part == Features(part.features):
        part = part.features  # the name of a map means its score
    return _spec(part)


def _spec(part: Declaration) -> str:
    assert dataclasses.is_dataclass(part)
    fields = {
        field.name: getattr(part, field.name)
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default
    }
    arguments = ", ".join(f"{name}={_literal(value)!r}" for name, value in fields.items())
    return f"{part_name(type(part))}({arguments})" if arguments else part_name(type(part))


def _literal(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_literal(item) for item in value)
    return _spec(value) if isinstance(value, Declaration) else value


def regime_spec(operator: Operator) -> str:
    """Any operator as the spec ``regime(…)`` of its declaration, arguments at their defaults left out.

    Raises: ArgumentError for a declaration of parts that ``regime`` has no names for.
    """
    slots_of = {"score": operator.score, "link": operator.link, "anchor": operator.anchor}
    words = {slot: part_spec(part) for slot, part in slots_of.items()}
    values: dict[str, Any] = {
        slot: text for slot, text in words.items() if text != {"score": "dot", "link": "exp", "anchor": "row"}[slot]
    }
    if operator.prior:
        values["prior"] = tuple(part_spec(part) for part in operator.prior)
    if operator.qk_dim is not None:
        values["rank"] = operator.qk_dim
    if operator.readout != _readout(operator.anchor):
        values["readout"] = operator.readout
    if operator.layer_init != _layer_init(operator.anchor):
        values["layer_init"] = operator.layer_init
    spec = f"regime({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    if declaration(specs.made(spec, {"regime": regime})) != declaration(operator):
        raise ArgumentError(f"regime_spec: operator {operator.name!r} has parts that no spec can name: {operator!r}.")
    return spec


def declaration(operator: Operator) -> str:
    """The declaration of an operator without its name, as text. Equal texts mean equal operators."""
    return json.dumps(
        {key: value for key, value in operator.config().items() if key not in ("name", "spec")}, sort_keys=True
    )


__all__ = ["declaration", "part_name", "part_spec", "regime", "regime_spec"]

"""Mechanisms: an Operator value each, with its defaults and its paper. ``resolve`` reads specs such as ``ska(power=1)``."""

from collections.abc import Callable

from zonal.algebra import Operator
from zonal.algebra.named import reads_specs
from zonal.mechanisms import spec as specs
from zonal.mechanisms.echo import ridge, ska
from zonal.mechanisms.kernel_ridge import kernel_ridge
from zonal.mechanisms.linear import linear, retention
from zonal.mechanisms.regime import declaration, regime, regime_spec
from zonal.mechanisms.rewa import (
    rewa,
    rewa_categorical,
    rewa_functional,
    rewa_operator,
    rewa_oscillatory,
    rewa_riemannian,
    rewa_topological,
)
from zonal.mechanisms.sinkhorn import hierarchical, hyperbolic_transport, sinkhorn
from zonal.mechanisms.sko import sko
from zonal.mechanisms.slay import hedgehog, of_features, performer, slay
from zonal.mechanisms.softmax import cosine, softmax
from zonal.mechanisms.yat import polynomial_square, squared_affine, yat

_MECHANISMS: dict[str, Callable[..., Operator]] = {
    f.__name__: f
    for f in (
        softmax,
        cosine,
        linear,
        retention,
        sko,
        yat,
        squared_affine,
        polynomial_square,
        slay,
        performer,
        hedgehog,
        ridge,
        ska,
        kernel_ridge,
        rewa,
        rewa_categorical,
        rewa_functional,
        rewa_operator,
        rewa_oscillatory,
        rewa_riemannian,
        rewa_topological,
        sinkhorn,
        hyperbolic_transport,
        hierarchical,
        regime,
    )
}
SHORT = {"sq": "squared_affine"}


def names() -> tuple[str, ...]:
    """The names that ``resolve`` knows."""
    return tuple(_MECHANISMS)


@reads_specs
def resolve(spec: str) -> Operator:
    """The operator of a spec: a name, or a name with keyword arguments, ``sko(degrees=(2, 3), manifold_dim=32)``.

    Only Python literals are read. ``sq`` is short for ``squared_affine``.

    Raises: ArgumentError naming the valid names, arguments, and the nearest.
    """
    # priors are declarations, which only a regime names by texts
    hidden = () if specs.name_of(spec) == regime.__name__ else ("prior",)
    operator = specs.made(
        spec, {**_MECHANISMS, **{short: _MECHANISMS[name] for short, name in SHORT.items()}}, hidden=hidden
    )
    operator.spec = " ".join(spec.split())
    return operator


__all__ = [
    "SHORT",
    "cosine",
    "declaration",
    "hedgehog",
    "hierarchical",
    "hyperbolic_transport",
    "kernel_ridge",
    "linear",
    "names",
    "of_features",
    "performer",
    "polynomial_square",
    "regime",
    "regime_spec",
    "resolve",
    "retention",
    "rewa",
    "rewa_categorical",
    "rewa_functional",
    "rewa_operator",
    "rewa_oscillatory",
    "rewa_riemannian",
    "rewa_topological",
    "ridge",
    "sinkhorn",
    "ska",
    "sko",
    "slay",
    "softmax",
    "squared_affine",
    "yat",
]

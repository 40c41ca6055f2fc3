"""Mechanisms: named operators, one module each, with defaults and papers.

``resolve`` reads specs such as ``ska(power=1)``.
"""

from typing import TYPE_CHECKING

from zonal.algebra import Operator
from zonal.algebra.modules import modules_of
from zonal.algebra.named import reads_specs
from zonal.errors import ArgumentError
from zonal.mechanisms import spec as specs
from zonal.mechanisms.of_features import of_features
from zonal.mechanisms.regime import declaration, regime_spec
from zonal.mechanisms.registry import MECHANISMS, Mechanism

if TYPE_CHECKING:  # what editors show; at run time every module of this folder is found
    from zonal.mechanisms.cosine import cosine
    from zonal.mechanisms.hedgehog import hedgehog
    from zonal.mechanisms.hierarchical import hierarchical
    from zonal.mechanisms.hyperbolic_transport import hyperbolic_transport
    from zonal.mechanisms.kernel_ridge import kernel_ridge
    from zonal.mechanisms.linear import linear
    from zonal.mechanisms.local_global import local_global
    from zonal.mechanisms.performer import performer
    from zonal.mechanisms.polynomial_square import polynomial_square
    from zonal.mechanisms.regime import regime
    from zonal.mechanisms.retention import retention
    from zonal.mechanisms.rewa import rewa
    from zonal.mechanisms.rewa_categorical import rewa_categorical
    from zonal.mechanisms.rewa_functional import rewa_functional
    from zonal.mechanisms.rewa_operator import rewa_operator
    from zonal.mechanisms.rewa_oscillatory import rewa_oscillatory
    from zonal.mechanisms.rewa_riemannian import rewa_riemannian
    from zonal.mechanisms.rewa_topological import rewa_topological
    from zonal.mechanisms.ridge import ridge
    from zonal.mechanisms.sinkhorn import sinkhorn
    from zonal.mechanisms.ska import ska
    from zonal.mechanisms.sko import sko
    from zonal.mechanisms.slay import slay
    from zonal.mechanisms.softmax import softmax
    from zonal.mechanisms.squared_affine import squared_affine
    from zonal.mechanisms.yat import yat

modules_of(__name__, __path__)
globals().update({name: found.make for name, found in MECHANISMS.items()})
SHORT = {"sq": "squared_affine"}
WHOLE_LAYERS = ("gated", "gated_deltanet", "gated_kalmanet", "lifted", "mamba2", "mamba3", "mesanet", "mixture")
"""Names that stand beside those of operators where layers of a model are named (zonal.models.layers)."""


def names() -> tuple[str, ...]:
    """The names of all mechanisms."""
    return tuple(sorted(MECHANISMS))


@reads_specs
def resolve(spec: str) -> Operator:
    """The operator of a spec: a name, or a name with keyword arguments, ``sko(degrees=(2, 3), manifold_dim=32)``.

    Only Python literals are read. ``sq`` is short for ``squared_affine``.

    Raises: ArgumentError naming the valid names, arguments, and the nearest.
    """
    if (name := specs.name_of(spec)) in WHOLE_LAYERS:
        raise ArgumentError(
            f"operator spec: {name!r} names a layer of a model, and an operator of attention is required. Name it "
            "among the layers of a model: ModelConfig(layers=...), zonal train --operator, zonal compare --operators."
        )
    # priors are declarations, which only a regime names by texts
    hidden = () if name == "regime" else ("prior",)
    makers = {name: found.make for name, found in MECHANISMS.items()}
    operator = specs.made(spec, makers | {short: makers[name] for short, name in SHORT.items()}, hidden=hidden)
    operator.spec = " ".join(spec.split())
    return operator


__all__ = [
    "MECHANISMS", "SHORT", "Mechanism", "cosine", "declaration", "hedgehog", "hierarchical", "hyperbolic_transport",
    "kernel_ridge", "linear", "local_global", "names", "of_features", "performer", "polynomial_square", "regime",
    "regime_spec", "resolve", "retention", "rewa", "rewa_categorical", "rewa_functional", "rewa_operator",
    "rewa_oscillatory", "rewa_riemannian", "rewa_topological", "ridge", "sinkhorn", "ska", "sko", "slay", "softmax",
    "squared_affine", "yat",
]  # fmt: skip

"""Queries and keys for the compiled kernels of other paths, by the kernel for feature maps where it knows the map."""

import torch

from zonal import torch_func
from zonal.algebra.bound import Bound
from zonal.algebra.score import FeatureLayer
from zonal.execution.call import Call, Prepared
from zonal.kernels.features import FAMILY, made

Layers = tuple[FeatureLayer, FeatureLayer]


def layers_of(call: Call) -> Layers | None:
    """How the kernel for features makes queries and keys from raw ones; None = the score prepares them by torch."""
    if call.raw is None or call.device.type != "cpu" or torch_func.active():
        return None
    return layers_for(call.bound, call.head_dim, call.raw.scale, call.device.type, call.coefficients.dtype)


def layers_for(bound: Bound, dim: int, scale: float | None, device: str, dtype: torch.dtype) -> Layers | None:
    """``layers_of`` for raw queries and keys of ``dim`` numbers."""
    if FAMILY.refusal(device, dtype, lambda: None) is not None:
        return None
    layers = bound.score.layers(dim, bound.score_params, scale)
    # of many tokens torch applies a plain elementwise function as fast
    return None if layers is None or layers[0].weight is None else layers


def made_by(layers: Layers, call: Call) -> Prepared:
    """Queries and keys that the kernel makes from raw ones, float32. Their features may be products of theirs."""
    assert call.raw is not None
    q, k, v = call.raw[:3]
    return Prepared(made(q, layers[0]), made(k, layers[1]), v.to(torch.float32))


def prepared(call: Call) -> Prepared:
    """Prepared queries and keys, by the kernel where it makes all features."""
    layers = layers_of(call)
    return call.tokens if layers is None or layers[0].left else made_by(layers, call)


__all__ = ["Layers", "layers_for", "layers_of", "made_by", "prepared"]

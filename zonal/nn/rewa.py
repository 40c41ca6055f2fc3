"""Conversion of a softmax attention layer into a layer of REWA that computes the same function."""

import copy

import torch
from torch import nn

from zonal.algebra.link import Exp
from zonal.algebra.operator import Operator
from zonal.algebra.score import Dot
from zonal.errors import ArgumentError
from zonal.mechanisms import rewa
from zonal.nn.attention import Attention


def with_closed_gates(
    scale: float,
    *,
    parts: tuple[int, ...] | None = None,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0),
    gates: tuple[float, ...] = (0.0, 0.0, 0.0),
) -> Operator:
    """softmax(scale q · k) with three distances whose gates are closed: ``mechanisms.rewa`` with dot=scale.

    The other arguments are those of ``mechanisms.rewa``.
    """
    return rewa(parts=parts, weights=weights, gates=gates, dot=scale)


def from_softmax(
    layer: Attention | nn.MultiheadAttention,
    *,
    parts: tuple[int, ...] | None = None,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0),
    gates: tuple[float, ...] = (0.0, 0.0, 0.0),
    causal: bool = True,
) -> Attention:
    """The layer with distances in addition to its dot product: S_ts = q_t · k_s / √D − Σ_i g_i w_i d_i(q_t, k_s), on
    the same queries and keys.

    With gates of zero the outputs are those of the given layer. A closed gate has a gradient, so training opens it if a
    distance helps. Weights are copied; the given layer does not change.

    Args:
        layer: an ``Attention`` whose operator has the score ``Dot`` of plain queries and keys and the link ``Exp``,
            with any anchor and priors; or a ``torch.nn.MultiheadAttention`` without dropout and added keys, and with
            keys and values of size ``embed_dim``.
        parts, weights, gates: as in ``mechanisms.rewa``. The parts must sum to the size of a key.
        causal: whether the new layer is causal, for layers of torch, where this is an argument of each call.

    Raises:
        ArgumentError: the layer is not softmax attention of a dot product, or the parts do not fit.
    """
    new = copy.deepcopy(layer) if isinstance(layer, Attention) else _of_torch(layer, causal)
    operator, score = new.operator, new.operator.score
    if not isinstance(score, Dot) or not score.keeps_keys or not isinstance(operator.link, Exp):
        raise ArgumentError(
            "rewa.from_softmax: a layer with score Dot of plain queries and keys and link Exp is required, "
            f"received {score} and {operator.link}."
        )
    scale = score.scale if score.scale is not None else new.key_dim**-0.5
    found = with_closed_gates(scale, parts=parts, weights=weights, gates=gates).score
    place = next(operator.parameters(), new.key.weight)
    new.operator = (
        operator.replace(score=found.sized(new.key_dim, new.kv_heads))
        .for_heads(new.heads, new.kv_heads)
        .to(place.device)
    )
    new.operator.name = new.operator.spec = "rewa"
    return new


def _of_torch(layer: nn.MultiheadAttention, causal: bool) -> Attention:
    """torch's layer as one of this library, with its weights."""
    if not isinstance(layer, nn.MultiheadAttention):
        raise ArgumentError(
            "rewa.from_softmax: a zonal.nn.Attention or torch.nn.MultiheadAttention is required, received "
            f"{type(layer).__name__}."
        )
    plain = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn and layer.dropout == 0
    if not plain:
        raise ArgumentError(
            "rewa.from_softmax: a MultiheadAttention with dropout=0, kdim=vdim=None, add_bias_kv=False and "
            "add_zero_attn=False is required, received another."
        )
    biased = layer.in_proj_bias is not None
    new = Attention(layer.embed_dim, layer.num_heads, "softmax", bias=biased, causal=causal).to(layer.in_proj_weight)
    with torch.no_grad():
        linears = (new.query, new.key, new.value)
        for linear, weight in zip(linears, layer.in_proj_weight.chunk(3), strict=True):
            linear.weight.copy_(weight)
        new.output.weight.copy_(layer.out_proj.weight)
        if biased:
            for linear, bias in zip(linears, layer.in_proj_bias.chunk(3), strict=True):
                linear.bias.copy_(bias)
            new.output.bias.copy_(layer.out_proj.bias)
    return new


__all__ = ["from_softmax", "with_closed_gates"]

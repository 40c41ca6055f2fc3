"""What the parts of an attention layer must be like, each refused by a sentence."""

from typing import get_args

from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Count, PlanAnchor, Raw, Row
from zonal.algebra.declaration import require_one_of, require_whole
from zonal.algebra.operator import LayerInit
from zonal.algebra.prior import Causal, ChunkCausal, Window
from zonal.algebra.refusals import leak
from zonal.errors import ArgumentError, unknown_name
from zonal.memory.weights import weighs_keys


def sizes_of_heads(call: str, dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """``kv_heads`` and ``head_dim`` with their defaults. Raises: ArgumentError for sizes that do not fit."""
    kv_heads = heads if kv_heads is None else kv_heads
    for name, size in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
        require_whole(f"{call}: {name}", size)
    if heads % kv_heads:
        raise ArgumentError(f"{call}: kv_heads must divide heads={heads}, received kv_heads={kv_heads}.")
    if head_dim is None:
        if dim % heads:
            raise ArgumentError(
                f"{call}: dim={dim} is not a multiple of heads={heads}. Choose another number of heads "
                "or pass head_dim."
            )
        head_dim = dim // heads
    require_whole(f"{call}: head_dim", head_dim)
    return kv_heads, head_dim


def check_settings(readout_norm: str | None, conv: int, context_dim: int | None, init: str, dropout: float) -> None:
    """Raise ArgumentError for settings that no layer can have."""
    require_one_of("nn.Attention: readout_norm", readout_norm, ("auto", "head", "concat", None))
    require_whole("nn.Attention: conv", conv, 0)
    if conv == 1:
        raise ArgumentError(f"nn.Attention: conv must be 0 (none) or a width of at least 2, received {conv}.")
    if context_dim is not None:
        require_whole("nn.Attention: context_dim", context_dim)
    if init not in ("auto", *get_args(LayerInit)):
        raise unknown_name("nn.Attention", "init", init, ("auto", *get_args(LayerInit)))
    if not 0 <= dropout < 1:
        raise ArgumentError(f"nn.Attention: dropout must be at least 0 and below 1, received {dropout}.")


def check_start(init: LayerInit, qk_dim: int, head_dim: int, *, dim: int, context_dim: int) -> None:
    """Raise ArgumentError for a start that the projections from ``dim`` and ``context_dim`` numbers cannot have."""
    longest = max(qk_dim, head_dim if init == "orthogonal" else 0)
    for name, size in (("dim", dim), ("context_dim", context_dim)):
        if init != "default" and longest > size:
            raise ArgumentError(
                f"nn.Attention: projections that start orthogonal need heads of at most {name}={size} numbers, "
                f"received qk_dim={qk_dim} and head_dim={head_dim}. Choose smaller ones, because keys of "
                f"more than {name} numbers still have only {name} directions, or init='default'."
            )


def check_operator(
    operator: Operator, heads: int, kv_heads: int, *, causal: bool, key_gate: bool, context: bool
) -> None:
    """Raise ArgumentError for an operator that a layer cannot run. context: whether it reads one, which has more
    requirements (``context_refusal``).
    """
    if causal and operator.anchor.couples:
        raise ArgumentError(
            f"nn.Attention: with operator {operator.name!r}, whose queries depend on one another, "
            f"causal=True {leak(operator.anchor)}; pass causal=False for an encoder."
        )
    if not causal and not context and not any(prior.orders for prior in operator.prior):
        for what, holds in (
            ("has a window that ends with the query's own key", operator.tags.window),
            ("fades with time", operator.tags.decays),
        ):
            if holds:
                raise ArgumentError(
                    f"nn.Attention: operator {operator.name!r} {what}, which has a meaning only for causal=True. Use "
                    "another operator in an encoder."
                )
    if operator.score.deaths and any(isinstance(p, Window) for p in operator.prior):
        raise ArgumentError(
            "nn.Attention: a score with neighbours needs all earlier keys, and the memory of a Window prior "
            "lets them go. Drop the prior, or the neighbours."
        )
    if operator.score.one_map and kv_heads != heads:
        raise ArgumentError(
            f"nn.Attention: one map for queries and keys (shared_witness) needs kv_heads = heads = {heads}, "
            f"received kv_heads={kv_heads}."
        )
    if key_gate and not weighs_keys(operator):
        raise ArgumentError(
            "nn.Attention: key_gate is for ridge and Koopman read-outs of the plain product, and operator "
            f"{operator.name!r} is not one. Use m.ska() or m.ridge(), or leave key_gate out."
        )


def check_mass(
    operator: Operator, x: Tensor, mass: Tensor, padding: Tensor | None, *, ordered: bool, placed: bool
) -> None:
    """Raise ArgumentError for masses of merged tokens that a layer cannot use.

    ordered: earlier tokens do not see later ones. placed: the layer uses the positions of tokens.
    """
    if ordered or any(isinstance(p, Causal | ChunkCausal) for p in operator.prior):
        raise ArgumentError(
            "nn.Attention: tokens of a causal layer cannot be merged (mass): a bucket holds later tokens, which "
            "earlier tokens would read through it. Use causal=False, or do not merge."
        )
    if not isinstance(operator.anchor, Row | Count | Raw | PlanAnchor):
        raise ArgumentError(
            "nn.Attention: mass is defined for the anchors Row, Count and Raw and for plans; operator "
            f"{operator.name!r} has {type(operator.anchor).__name__}. Use one of those anchors, or do not merge."
        )
    if placed or operator.prior:
        raise ArgumentError(
            "nn.Attention: a bucket of tokens (mass) has no single position, which rotary positions, a short "
            "convolution, neighbourhoods, packed documents and position priors need. "
            "Add positions to the input of the first layer instead, or do not merge."
        )
    if mass.shape != x.shape[:2] or not mass.is_floating_point() or padding is not None:
        given = f"{mass.dtype} of shape {tuple(mass.shape)}" if padding is None else "a key_padding_mask as well"
        raise ArgumentError(
            f"nn.Attention: mass must be floating numbers of shape {tuple(x.shape[:2])}, with 0 for padding in place "
            f"of a key_padding_mask, received {given}."
        )


def context_refusal(operator: Operator, *, rotary: bool, conv: bool, same_size: bool) -> str | None:
    """Why a layer cannot read a context, or None: what it does needs the order of the tokens of one sequence.

    rotary, conv: whether it has them. same_size: whether tokens of the context are of the size of its own.
    """
    if rotary:
        return (
            "rotary positions compare places in one sequence, and a context has places of its own. Use rotary=False, "
            "and add positions to x and to the context."
        )
    if conv:
        return "a short convolution (conv) reads earlier tokens of x, and a context has none of them. Use conv=0."
    if operator.prior:
        names = ", ".join(type(prior).__name__ for prior in operator.prior)
        why = f"its prior {names} is of places in one sequence. Drop the prior, or use another operator."
    elif operator.tags.window:
        why = "its window ends with the query's own key. Use an operator without a window, such as its far kernel."
    elif operator.tags.family == "tree":
        why = "its tree is of one sequence of tokens. Use an operator without a tree."
    elif operator.score.deaths:
        why = "its neighbourhoods are of earlier tokens of one sequence. Use another score."
    elif operator.score.one_map and not same_size:
        why = "one map makes its queries and keys, so that x and the context must be of one size. Project one of them."
    else:
        return None
    return f"operator {operator.name!r} cannot read a context (cross-attention): {why}"


__all__ = ["check_mass", "check_operator", "check_settings", "check_start", "context_refusal", "sizes_of_heads"]

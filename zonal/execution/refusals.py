"""What ``attention`` refuses before it prepares a call: tensors that do not fit together, and arguments that the
operator does not take.
"""

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra import Operator, Tags
from zonal.algebra.declaration import require_values
from zonal.algebra.refusals import leak
from zonal.errors import ArgumentError
from zonal.memory.form import FLOATS
from zonal.memory.incoming import check_biases_taken, check_key_inputs

_AXES = "Tensors are (batch, heads, tokens, dim); those of (batch, tokens, heads, dim) need transpose(1, 2)."


def check_tokens(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, log_decay: Tensor | None, key_bias: Tensor | None
) -> None:
    """Raise ArgumentError naming the argument, what was required and what came."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ArgumentError(
                f"attention: {name} must have 4 axes (batch, heads, tokens, dim), received shape {tuple(x.shape)}."
            )
        if x.dtype not in FLOATS:
            raise ArgumentError(f"attention: {name} must be float16, bfloat16, float32 or float64, received {x.dtype}.")
    if not (q.dtype == k.dtype == v.dtype):
        raise ArgumentError(f"attention: q, k and v must share one dtype, received {q.dtype}, {k.dtype}, {v.dtype}.")
    if not (q.device == k.device == v.device):
        raise ArgumentError(
            f"attention: q, k and v must be on one device, received {q.device}, {k.device}, {v.device}."
        )
    if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0]:
        raise ArgumentError(
            f"attention: q, k and v must share the batch size (axis 0), received {q.shape[0]}, "
            f"{k.shape[0]}, {v.shape[0]}."
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ArgumentError(
            f"attention: k and v must share heads and tokens (axes 1, 2), received k {tuple(k.shape)} and v "
            f"{tuple(v.shape)}. {_AXES}"
        )
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(
            f"attention: q and k must share the head dimension (axis 3), received {q.shape[3]} and {k.shape[3]}."
        )
    if 0 in (q.shape[1], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            f"attention: the heads of q ({q.shape[1]}) must be a multiple of the heads of k and v ({k.shape[1]}), and "
            f"at least one. {_AXES}"
        )
    batch, kv_heads, keys, _ = k.shape
    check_key_inputs("attention", (batch, kv_heads, keys), k.device, key_padding_mask, log_decay, key_bias)


def check_packing(cu_seqlens: Tensor | None, batch: int) -> None:
    """Raise ArgumentError unless documents may be packed into a batch of this size."""
    if torch_func.mapped(cu_seqlens):
        raise ArgumentError(
            "attention: cu_seqlens must be the same for all elements of torch.func.vmap. "
            "Call attention once for each packing."
        )
    if cu_seqlens is not None and batch != 1:
        raise ArgumentError(
            f"attention: packed sequences (cu_seqlens) need batch size 1, received {batch}. "
            "Concatenate the documents along the tokens."
        )


def check_taken(
    operator: Operator, tags: Tags, scale: float | None, log_decay: Tensor | None, key_bias: Tensor | None
) -> None:
    """Raise ArgumentError for arguments that the operator does not take."""
    if scale is not None and (operator.link.domain is not None or tags.solves):
        raise ArgumentError(
            f"attention: operator {operator.name!r} fixes the scale of its score; scale must be None, received {scale}."
        )
    check_biases_taken("attention", operator.name, tags, log_decay, key_bias)
    if key_bias is not None and tags.couples and not torch_func.mapped(key_bias):  # no path takes a mapped one
        require_values(
            ~torch.isneginf(key_bias).any(),
            f"attention: anchor {type(operator.anchor).__name__} couples queries and needs a key_bias above -inf. "
            "Hide keys with key_padding_mask.",
        )


def check_order(operator: Operator, tags: Tags, tied: bool, fades: bool) -> None:
    """Raise ArgumentError for an operator that needs an order of queries and has none, or the reverse."""
    if tied and tags.couples:
        raise ArgumentError(
            f"attention: operator {operator.name!r} must not be causal: its anchor {type(operator.anchor).__name__} "
            f"lets each query's weights depend on all queries, and causal=True {leak(operator.anchor)}."
        )
    if tags.window and not tied:
        raise ArgumentError(
            f"attention: operator {operator.name!r} has a window that ends with the query's own key, which has a "
            "meaning only for causal=True."
        )
    if fades and not tied:
        raise ArgumentError(
            f"attention: operator {operator.name!r} fades with time, which has a meaning only for causal=True."
        )


__all__ = ["check_order", "check_packing", "check_taken", "check_tokens"]

"""Keys and values on their way into a memory: checked, and prepared by the score."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zonal.algebra import Operator, Tags
from zonal.algebra.operator import Bound
from zonal.algebra.score.base import prepared_keys
from zonal.errors import ArgumentError, NonFiniteError
from zonal.memory.form import FLOATS, Form
from zonal.memory.tokens import Tokens
from zonal.typed import check_tensors

_FORGOTTEN = -1e3
"""The least log decay that counts: its exp is 0 in float64, too."""


def check_tokens(
    operator: Operator,
    form: Form,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    key_bias: Tensor | None,
    key_gate: Tensor | None,
) -> None:
    """Raises: ArgumentError for shapes, types and devices that do not fit a memory of this form, and for biases that
    its operator does not take; NonFiniteError for NaN or infinity in a real token. key_gate: as ``check_weights`` lets
    it pass.
    """
    n = k.shape[2] if k.ndim == 4 else 0
    for name, x, dim in (("k", k, form.key_dim), ("v", v, form.value_dim)):
        required = (form.batch, form.heads, n, dim)
        if tuple(x.shape) != required:
            shown = f"({form.batch}, {form.heads}, {n if name == 'v' else 'any'}, {dim})"
            raise ArgumentError(
                f"Memory.absorb: {name} must have shape (batch, key heads, tokens, dim) = {shown}, received "
                f"{tuple(x.shape)}."
            )
        if x.dtype not in FLOATS or x.device != form.device:
            raise ArgumentError(
                f"Memory.absorb: {name} must be of a float type on {form.device}, received {x.dtype} on {x.device}."
            )
    check_key_inputs("Memory.absorb", (form.batch, form.heads, n), form.device, mask, log_decay, key_bias)
    check_biases_taken("Memory.absorb", operator.name, operator.tags, log_decay, key_bias)
    _check_numbers({"k": k, "v": v, "log_decay": log_decay, "key_bias": key_bias, "key_gate": key_gate}, mask)


def check_key_inputs(
    call: str,
    shape: tuple[int, int, int],
    device: torch.device,
    mask: Tensor | None,
    log_decay: Tensor | None,
    key_bias: Tensor | None,
) -> None:
    """Raise ArgumentError, which begins with ``call``, for a padding mask, decays or biases that do not fit keys of
    shape (batch, key heads, keys) on a device.
    """
    given = {"key_padding_mask": mask, "log_decay": log_decay, "key_bias": key_bias}
    check_tensors(call, given, device, optional=True)
    by_key = (shape[0], shape[2])
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != by_key):
        raise ArgumentError(
            f"{call}: key_padding_mask must be bool of shape (batch, keys) = {by_key} with True for real tokens, "
            f"received {mask.dtype} of shape {tuple(mask.shape)}."
        )
    for name, x in (("log_decay", log_decay), ("key_bias", key_bias)):
        if x is None:
            continue
        if not x.is_floating_point():
            advice = "A mask of keys is key_padding_mask" if x.dtype == torch.bool else "Convert it"
            raise ArgumentError(f"{call}: {name} must be floating point, received {x.dtype}. {advice}.")
        if tuple(x.shape) != shape:
            raise ArgumentError(
                f"{call}: {name} must have shape (batch, key heads, keys) = {shape}, received {tuple(x.shape)}."
            )


def _check_numbers(given: Mapping[str, Tensor | None], mask: Tensor | None) -> None:
    """What padding holds may be anything."""
    for name, x in given.items():
        if x is None:
            continue
        real = x if mask is None else x.masked_fill(~(mask[:, None, :, None] if x.ndim == 4 else mask[:, None]), 0)
        if name == "log_decay":
            if bool((real > 0).any()):
                raise ArgumentError(
                    "Memory.absorb: log_decay must be <= 0 (a rate from 0 to 1), received positive values."
                )
            real = real.clamp_min(_FORGOTTEN)
        if name == "key_bias":  # -infinity hides a key
            real = real.masked_fill(torch.isneginf(real), 0)
        if not bool(torch.isfinite(real).all()):
            raise NonFiniteError(
                f"Memory.absorb: {name} holds NaN or infinity in a real token; nothing was absorbed. Mend it or "
                "mask the token."
            )


def prepared(
    operator: Operator,
    form: Form,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tokens:
    """Tokens as ``extended`` takes them."""
    bound = operator.bind(form.heads, form.heads)
    with torch.autocast(k.device.type, enabled=False):
        keys = prepared_keys(bound.score, k.to(torch.promote_types(k.dtype, torch.float32)), bound.score_params)
    return Tokens(keys, v, mask, decay_of(bound, k, mask, log_decay), key_bias)


def check_biases_taken(call: str, name: str, tags: Tags, log_decay: Tensor | None, key_bias: Tensor | None) -> None:
    """Raise ArgumentError, which begins with ``call``, for decays or biases that operator ``name`` does not take."""
    who = f"{call}: operator {name!r}"
    if log_decay is not None and tags.window:
        raise ArgumentError(f"{who} sums up the keys before its window without a decay; log_decay must be None.")
    if log_decay is not None and tags.solves and not tags.decays:
        raise ArgumentError(
            f"{who} solves with the kernel among keys; log_decay must be None, unless it declares that its past fades, "
            "as mechanisms.ska(fading=True) does."
        )
    if key_bias is not None and tags.solves:
        raise ArgumentError(f"{who} solves with the kernel among keys; key_bias must be None.")


def decay_of(bound: Bound, k: Tensor, mask: Tensor | None, given: Tensor | None) -> Tensor | None:
    """The log decay of each key, (B or 1, Hkv, n) in float64: ``given``, or what the operator declares.

    A padded token is no step in time, whatever it holds, NaN included: it has 0. Below -1000 all is -1000.
    """
    if given is not None:
        decay = given.double().clamp_min(_FORGOTTEN)  # running sums through 1e9 or infinity lose what comes after it
    elif bound.log_decay is not None:
        decay = bound.log_decay.to(k.device).view(1, -1, 1).expand(1, -1, k.shape[2])
    else:
        return None
    return decay if mask is None else torch.where(mask[:, None], decay, 0.0)


__all__ = ["check_biases_taken", "check_key_inputs", "check_tokens", "decay_of", "prepared"]

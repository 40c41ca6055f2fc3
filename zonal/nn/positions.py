"""Positions of tokens under packing and padding, and checks of the two masks."""

import torch
from torch import Tensor

from zonal.algebra.prior import checked_cu_seqlens
from zonal.errors import ArgumentError
from zonal.typed import check_tensors


def check_masks(call: str, batch: int, length: int, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ArgumentError for a padding mask or packed offsets that do not fit (batch, length)."""
    check_tensors(call, {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens}, optional=True)
    if key_padding_mask is not None and cu_seqlens is not None:
        raise ArgumentError(
            f"{call}: key_padding_mask and cu_seqlens exclude each other; packed documents have no padding. Pass "
            "one of them."
        )
    if key_padding_mask is not None and (
        key_padding_mask.shape != (batch, length) or key_padding_mask.dtype != torch.bool
    ):
        raise ArgumentError(
            f"{call}: key_padding_mask must be a boolean tensor of shape {(batch, length)} with True at real tokens, "
            f"received {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}."
        )
    if cu_seqlens is not None:
        if batch != 1:
            raise ArgumentError(
                f"{call}: cu_seqlens packs all documents into one row, so x must have batch 1; received batch {batch}."
            )
        checked_cu_seqlens(cu_seqlens, length, call)


def document_index(cu_seqlens: Tensor, length: int) -> Tensor:
    """(T,): the index of the document of each packed token."""
    tokens = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def document_positions(cu_seqlens: Tensor, length: int) -> Tensor:
    """(T,) the position of each packed token within its document."""
    starts = cu_seqlens[:-1][document_index(cu_seqlens, length)]
    return torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype) - starts

"""Documents packed into rows: where each begins, from position_ids or from a mask of transformers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.errors import ArgumentError

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, from indices of batch, head, query and key that broadcast."""


def document_offsets(position_ids: Tensor | None, x: Tensor, real: Tensor | None) -> Tensor | None:
    """The offsets (N + 1,) of the documents in rows of tokens one behind the other, for positions (B, T) that start
    again from 0 with each document; None if each row is one document.

    Raises: ArgumentError for positions that neither go on by one nor start again from 0, and for packed documents with
        padding (real: which tokens are none, None = all are real).
    """
    if position_ids is None or x.shape[1] == 1:
        return None
    positions = position_ids.expand(x.shape[:2])
    follows = positions.diff(dim=1) == 1
    if real is not None:
        if not bool((follows | ~real[:, 1:] | ~real[:, :-1]).all()):
            raise ArgumentError(
                "ZonalModel: packed documents (position_ids that start again from 0) have no padding, and "
                "attention_mask marks some. Leave the padding out, or give each document a row."
            )
        return None
    if not bool((follows | (positions[:, 1:] == 0)).all()):
        raise ArgumentError(
            "ZonalModel: position_ids must go on by one, or start again from 0 with a new document. Tokens stand at "
            "the positions at which they are read; leave position_ids out."
        )
    return None if bool(follows.all()) else offsets_of(follows)


def offsets_of(follows: Tensor) -> Tensor:
    """The offsets (N + 1,) int32 of documents in rows one behind the other. follows (B, T - 1): whether the token after
    the first belongs to the document of the one before it.
    """
    starts = F.pad(~follows, (1, 0), value=True)
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).to(torch.int32)


def offsets_of_mask(mask: MaskFunction, batch: int, length: int, device: torch.device) -> Tensor | None:
    """The offsets of the documents that a causal mask of transformers keeps apart; None if each row is one document.

    A token begins a document where it does not see the token before it.

    Raises: ArgumentError for a mask by which a token sees the next one.
    """
    if length == 1:
        return None
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, length, device=device)[None]
    head = rows.new_zeros(1, 1)
    if bool(mask(rows, head, later - 1, later).any()):
        raise ArgumentError(
            "hf.convert: a converted decoder takes causal masks, and by this one some tokens see later ones (blocks "
            "of images, a prefix). Use another attn_implementation for such inputs."
        )
    follows = mask(rows, head, later, later - 1).expand(batch, length - 1)
    return None if bool(follows.all()) else offsets_of(follows)


__all__ = ["MaskFunction", "document_offsets", "offsets_of", "offsets_of_mask"]

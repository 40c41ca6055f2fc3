"""What a decay leaves of a ridge: each token fades it in all directions, and gives back in one what faded in all."""

import torch
from torch import Tensor


def directions(mask: Tensor | None, before: Tensor, tokens: int, width: int) -> Tensor:
    """(B, n): the direction t mod r whose ridge each token gives back, t the number of real tokens before it,
    ``before`` (B,) ahead of the first.
    """
    if mask is None:
        place = torch.arange(tokens, device=before.device)[None]
    else:
        place = mask.long().cumsum(-1) - mask.long()
    return (before[:, None] + place) % width


def given_back(direction: Tensor, amount: Tensor, width: int) -> Tensor:
    """sum over the last axis of amount_t e_{direction_t}: amount (…, n), direction as many or fewer -> (…, r)."""
    return amount.new_zeros(*amount.shape[:-1], width).scatter_add(-1, direction.expand(amount.shape), amount)


def turned(back: Tensor, steps: Tensor) -> Tensor:
    """What was given back to each direction (B, Hkv, r), as it were ``steps`` (B,) tokens later."""
    r = back.shape[-1]
    place = (torch.arange(r, device=steps.device) - steps[:, None]) % r
    return back.gather(2, place[:, None].expand(back.shape))


__all__ = ["directions", "given_back", "turned"]

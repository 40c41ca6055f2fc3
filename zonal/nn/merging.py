"""Merging of similar tokens between layers of an encoder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.carrier import Buckets, Factor
from zonal.errors import ArgumentError
from zonal.nn.norm import accumulation_dtype


@dataclass(frozen=True)
class MergeSchedule:
    """The share of the tokens that is merged away before each layer, for example ``MergeSchedule((0.0, 0.25, 0.25,
    0.0))``.

    rates: one number in [0, 1) per layer. Of n tokens, floor(rate · n) are merged away.

    Raises:
        ArgumentError: a rate is not a number in [0, 1).
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        given = tuple(self.rates) if isinstance(self.rates, Sequence) and not isinstance(self.rates, str) else ()
        if not given or not all(isinstance(rate, int | float) and not isinstance(rate, bool) for rate in given):
            raise ArgumentError(
                f"MergeSchedule: rates must be numbers in [0, 1), one per layer, received {self.rates!r}. Use "
                "MergeSchedule.even(share, layers) for a share over all layers."
            )
        for layer, rate in enumerate(given):
            if rate >= 1:
                raise ArgumentError(
                    f"MergeSchedule: a rate must lie in [0, 1), and {rate:g} before layer {layer} leaves no token: it "
                    "is the share of those present that goes. Take a smaller one; 0.5 halves them."
                )
            if not rate >= 0:
                raise ArgumentError(
                    f"MergeSchedule: a rate must lie in [0, 1), received {rate:g} before layer {layer}. 0 merges "
                    "nothing."
                )
        object.__setattr__(self, "rates", tuple(float(rate) for rate in given))

    @staticmethod
    def even(share: float, layers: int) -> "MergeSchedule":
        """The same rate before every layer except the first, so that in the last layer ``share`` of all tokens is gone.

        Raises:
            ArgumentError: the share is not in [0, 1), or there are fewer than two layers.
        """
        _check_share("even", share, layers)
        return MergeSchedule((0.0, *[1 - (1 - share) ** (1 / (layers - 1))] * (layers - 1)))

    @staticmethod
    def early(share: float, layers: int) -> "MergeSchedule":
        """Merge the whole share before the second layer, which saves the most time. Raises: as ``even``."""
        _check_share("early", share, layers)
        return MergeSchedule((0.0, share, *[0.0] * (layers - 2)))

    def counts(self, tokens: int) -> tuple[int, ...]:
        """The number of tokens that each layer sees, for an input of ``tokens`` tokens."""
        found = []
        for rate in self.rates:
            tokens -= min(math.floor(rate * tokens + 1e-9), tokens - 1)
            found.append(tokens)
        return tuple(found)


def _check_share(name: str, share: float, layers: int) -> None:
    if not 0 <= share < 1:
        raise ArgumentError(
            f"MergeSchedule.{name}: share (of the tokens that are gone in the last layer) must lie in [0, 1), "
            f"received {share:g}; 1 leaves no token. Take a smaller one."
        )
    if layers < 2:
        raise ArgumentError(
            f"MergeSchedule.{name}: at least 2 layers are required to merge between them, received {layers}. "
            "Give rates instead, such as MergeSchedule((0.5,))."
        )


@torch.no_grad()
def matched(x: Tensor, mass: Tensor, count: int) -> Factor:
    """The map that merges ``count`` tokens of each row of x (B, T, dim), from T tokens to T - count buckets.

    Each token at an even position finds its nearest token, by cosine, at an odd position. The best of these pairs are
    merged (Bolya et al., *Token merging*, 2023), so at most half of the tokens are merged at once. Tokens without mass
    (padding) at even positions are merged first, with any token, because they do not change a mean; those at odd
    positions stay at first.
    """
    length = x.shape[1]
    unit = F.normalize(x, dim=-1)
    near = unit[:, ::2] @ unit[:, 1::2].mT
    void = mass == 0
    near = near.masked_fill(void[:, None, 1::2], -2.0).masked_fill(void[:, ::2, None], 2.0)
    best, partner = near.max(-1)
    gone = best.topk(count, sorted=False).indices
    even = torch.arange(0, length, 2, device=x.device)
    stays = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device).scatter(1, even[gone], False)
    place = stays.cumsum(1) - 1
    to = place.clone()
    to[:, ::2] = torch.where(stays[:, ::2], place[:, ::2], place.gather(1, 2 * partner + 1))
    return Factor(to, length - count)


@dataclass(frozen=True, eq=False)
class Merged:
    """Tokens x (B, S, dim) of a coarser carrier, their masses (B, S), and the bucket of each original token."""

    x: Tensor
    mass: Tensor
    carrier: Buckets

    @staticmethod
    def of(x: Tensor, key_padding_mask: Tensor | None = None) -> "Merged":
        """Tokens before any merging, each of mass 1. Padding has mass 0 and becomes zero."""
        x = x if key_padding_mask is None else x.masked_fill(~key_padding_mask.unsqueeze(-1), 0)
        dtype = accumulation_dtype(x.dtype)  # masses are counts, which shorter types round
        mass = torch.ones(x.shape[:2], dtype=dtype, device=x.device)
        mass = mass if key_padding_mask is None else key_padding_mask.to(dtype)
        return Merged(x, mass, Buckets(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])))

    def holding(self, x: Tensor) -> "Merged":
        """The same carrier with other values x (B, S, dim)."""
        return replace(self, x=x)

    def without(self, count: int) -> "Merged":
        """With ``count`` fewer tokens. The value of a bucket is the mean of its tokens, weighted by mass. If more than
        half of the tokens go, they are merged in several rounds.

        Raises:
            ArgumentError: no token would be left.
        """
        length = self.x.shape[1]
        if not 0 <= count < length:
            raise ArgumentError(
                f"Merged.without: of {length} tokens at least one must stay, so that count must lie in 0 … "
                f"{length - 1}, received {count}. Merge fewer."
            )
        state = self
        while count:
            now = min(count, state.x.shape[1] // 2)
            factor = matched(state.x, state.mass, now)
            x, mass = factor.merged(state.x, state.mass), factor.masses(state.mass)
            state = Merged(x, mass, state.carrier.coarsened(factor))
            count -= now
        return state

    def unmerged(self) -> Tensor:
        """(B, T, dim): for each original token the value of its bucket."""
        return self.carrier.map.pulled(self.x)

    def pooled(self) -> Tensor:
        """(B, dim): the mean over the original tokens, which is the mean over buckets weighted by mass."""
        return Factor(self.carrier.labels.new_zeros(1, self.x.shape[1]), 1).merged(self.x, self.mass)[:, 0]


__all__ = ["MergeSchedule", "Merged", "matched"]

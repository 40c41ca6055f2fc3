"""Sums of outer products that fade, in blocks of plain torch: S_t = e^{g_t} S_{t-1} + k_t v_t^T for all tokens at once.

Within a block every pair of tokens is weighted by the decay between them; earlier tokens enter through the state before
the block. One state is therefore kept per block and not per token. Decays stay logarithms (float64) until two of them
are subtracted, so no weight is divided by a decay. A log decay of ``RESET`` forgets the past, which separates packed
documents.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

RESET = -1000.0
"""A log decay whose exponential is exactly 0 in every dtype."""


def cut(x: Tensor, size: int) -> Tensor:
    """(B, H, T, D) -> (B, H, n, size, D): blocks, the last one filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def uncut(x: Tensor, length: int) -> Tensor:
    """(B, H, n, size, D) -> (B, H, length, D)."""
    return x.flatten(2, 3)[:, :, :length]


@dataclass(frozen=True)
class Decays:
    """What is left of the past within blocks of C tokens, from log decays.

    reach: (B, H, n, C, 1), of the state before the block, at each token. near: (B, H, n, C, C), of token j at token i
    >= j, zero above the diagonal. rest: (B, H, n, C, 1), of each token at the block's end.
    """

    reach: Tensor
    near: Tensor
    rest: Tensor

    @classmethod
    def of(cls, log_decay: Tensor, size: int, dtype: torch.dtype) -> "Decays":
        """From (B, H, T) log decays <= 0 in float64."""
        total = cut(log_decay.unsqueeze(-1), size).squeeze(-1).cumsum(-1)
        future = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(dtype).masked_fill(future, float("-inf"))
        return cls(
            total.exp().to(dtype).unsqueeze(-1), between.exp(), (total[..., -1:] - total).to(dtype).exp().unsqueeze(-1)
        )


@dataclass(frozen=True)
class FadingSums:
    """S at every token, from what ``of`` makes of keys (B, H, T, N) and values (B, H, T, M).

    keys (B, H, n, C, N), values (B, H, n, C, M), decays; states: (B, H, n, N, M), S before each block; last: (B, H, N,
    M).
    """

    keys: Tensor
    values: Tensor
    decays: Decays
    states: Tensor
    last: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, log_decay: Tensor, state: Tensor, size: int) -> "FadingSums":
        """The sums over blocks of ``size`` tokens that follow a state (B, H, N, M)."""
        keys, values, decays = cut(keys, size), cut(values, size), Decays.of(log_decay, size, keys.dtype)
        added = (keys * decays.rest).mT @ values
        states = []
        for kept, more in zip(decays.reach[:, :, :, -1:].unbind(2), added.unbind(2), strict=True):
            states.append(state)
            state = kept * state + more
        return cls(keys, values, decays, torch.stack(states, 2), state)

    def read(self, queries: Tensor, columns: slice) -> Tensor:
        """S_t^T q_t over some columns of the values: (B, H, n, C, N) -> (B, H, n, C, columns)."""
        far = self.decays.reach * (queries @ self.states[..., columns])
        return far + ((queries @ self.keys.mT) * self.decays.near) @ self.values[..., columns]

    def diagonal(self, columns: slice) -> Tensor:
        """The diagonal of the square part of S_t: (B, H, n, C, N)."""
        far = self.decays.reach * self.states[..., columns].diagonal(dim1=-2, dim2=-1).unsqueeze(3)
        return far + self.decays.near @ (self.keys * self.values[..., columns])

    def frobenius(self, columns: slice) -> Tensor:
        """‖H_t‖_F of the square part of S_t, where its values are its keys: (B, H, n, C, 1).

        All three terms are sums of what is not negative; 1e-24 keeps the root of an empty sum differentiable.
        """
        state, near, reach = self.states[..., columns], self.decays.near, self.decays.reach
        pairs = (self.keys @ self.keys.mT).square()
        across = (self.keys @ state * self.keys).sum(-1, keepdim=True)
        far = reach.square() * state.square().sum((-2, -1), keepdim=True)
        square = far + 2 * reach * (near @ across) + ((near @ pairs) * near).sum(-1, keepdim=True)
        return (square + 1e-24).sqrt()


__all__ = ["RESET", "Decays", "FadingSums", "cut", "uncut"]

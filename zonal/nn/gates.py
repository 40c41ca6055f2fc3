"""Gates that an attention layer computes from its input: how fast the past fades, how strongly a key is stored, and the
masses of tokens in a plan.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.nn.initialise import Draws
from zonal.nn.norm import accumulation_dtype

_FASTEST = 4.0
"""A past with a ridge fades by no more than e^-4 over r tokens, after which each of its r directions has got its ridge
back once: in between no less than 4 / (e^4 - 1) = 7 % of it is left.
"""
_OPEN = 4.0


class DecayGate(nn.Module):
    """log λ = log σ(W x + b), or −c σ(W x + b) if the fastest log decay −c is given: one number per token and head.

    Args:
        dim: size of x.
        rates: λ of each head at x = 0, the initial rate.
        fastest: c > 0, or None for no limit. Initial rates faster than nine tenths of the limit are set to that value.
    """

    def __init__(self, dim: int, rates: Tensor, fastest: float | None = None) -> None:
        super().__init__()
        self.fastest = fastest
        self.register_buffer("start", rates.double().log(), persistent=False)
        self.projection = nn.Linear(dim, rates.shape[0])
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw W; b so that the rates are those given."""
        draws.normal_(self.projection.weight, "projection.weight")
        start = self.get_buffer("start")
        share = start.exp() if self.fastest is None else (-start / self.fastest).clamp_max(0.9)
        with torch.no_grad():
            self.projection.bias.copy_(torch.logit(share))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, dim) -> log λ (B, H, T) < 0 in float32 or better."""
        z = self.projection(x).transpose(1, 2)
        z = z.to(accumulation_dtype(z.dtype))
        return F.logsigmoid(z) if self.fastest is None else -self.fastest * torch.sigmoid(z)


def fastest_decay(width: int) -> float:
    """The fastest log decay of a ridge read-out with keys of ``width`` numbers."""
    return _FASTEST / width


class KeyGate(nn.Module):
    """w = σ(W x + b) per token and key head, nearly 1 at the start (b = 4). A key z is stored as w z, so a small w
    stores a distractor weakly.

    Args:
        dim: size of x.
        heads: number of key heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, heads)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Draw W, and set b = 4, which gives w = 0.98."""
        draws.normal_(self.projection.weight, "projection.weight")
        nn.init.constant_(self.projection.bias, _OPEN)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, dim) -> w (B, heads, T) in (0, 1)."""
        return torch.sigmoid(self.projection(x)).transpose(1, 2)


class MassGate(nn.Module):
    """e^(W x + b) per token and head, 1 at the start: the mass that a token gives or receives in a plan, relative to
    the sum over its document.

    Args:
        dim: size of x.
        heads: number of query heads or of key heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, heads)
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Set W = 0 and b = 0, so that all masses are equal."""
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, x: Tensor, real: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """x (B, T, dim) -> masses (B, heads, T) in (0, 1], in float32 or better. The largest of a document is 1.

        real: bool (B, T); the other tokens have mass 0. cu_seqlens: edges of packed documents; None: one a row.
        """
        z = self.projection(x).transpose(1, 2)
        z = z.to(accumulation_dtype(z.dtype))
        if real is not None:
            z = z.masked_fill(~real[:, None], float("-inf"))
        if cu_seqlens is None:
            top = z.detach().amax(-1, keepdim=True)
        else:
            edges = cu_seqlens.to(z.device)
            place = torch.bucketize(torch.arange(z.shape[-1], device=z.device), edges[1:], right=True).expand_as(z)
            tops = z.new_full((*z.shape[:-1], edges.numel() - 1), float("-inf"))
            top = tops.scatter_reduce(-1, place, z.detach(), "amax").gather(-1, place)
        return (z - top.masked_fill(top == float("-inf"), 0)).exp()


__all__ = ["DecayGate", "KeyGate", "MassGate", "fastest_decay"]

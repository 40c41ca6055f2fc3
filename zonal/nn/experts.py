"""The mixture of experts: feed-forward layers among which every token takes a few."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.initialise import Draws
from zonal.nn.norm import accumulation_dtype
from zonal.theory.update import Conditional


class MixtureOfExperts(nn.Module):
    """y_t = Σ_e g_te E_e(x_t), E_e a SwiGLU, g_t the softmax of W_r x_t over its ``top`` largest entries and 0
    elsewhere: a conditional on experts.

    Each expert runs on the tokens that take it, and no token is ever dropped: tokens do not meet, so that one at a time
    and all at once are the same (but where two entries of W_r x are equal up to rounding). Nothing balances the
    experts; ``load`` says how they are used.

    Args:
        dim: input and output size.
        hidden: size between, of each expert.
        experts: E, how many.
        top: how many of them a token takes, at least 2: the share of one alone would be 1, and nothing would teach W_r.
            E = all of them.

    Source: Shazeer et al. 2017, arXiv 1701.06538, with the softmax after the choice as in Jiang et al. 2024, arXiv
        2401.04088.

    Raises: ArgumentError for sizes that do not fit.
    """

    def __init__(self, dim: int, hidden: int, experts: int = 8, top: int = 2) -> None:
        super().__init__()
        if min(dim, hidden) < 1 or not 2 <= top <= experts:
            raise ArgumentError(
                f"nn.MixtureOfExperts: required dim and hidden >= 1 and 2 <= top <= experts, received dim={dim}, "
                f"hidden={hidden}, experts={experts}, top={top}."
            )
        self.dim, self.experts, self.top = dim, experts, top
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.reset_parameters(Draws())

    def reset_parameters(self, draws: Draws) -> None:
        """Weights as in a SwiGLU; every expert has its own."""
        draws.normal_(self.router.weight, "router.weight")
        draws.normal_(self.gate, "gate")
        draws.normal_(self.up, "up")
        draws.normal_(self.down, "down", output=True)

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token (..., top), and their shares in float32 or better, which sum to 1."""
        logits, index = self.router(x).topk(self.top, -1)
        return index, logits.to(accumulation_dtype(x.dtype)).softmax(-1)

    def shares(self, x: Tensor) -> Tensor:
        """g (..., E), 0 where an expert is not taken."""
        index, share = self.chosen(x)
        return share.new_zeros(*x.shape[:-1], self.experts).scatter(-1, index, share)

    @torch.no_grad()
    def load(self, x: Tensor) -> Tensor:
        """Of all that tokens take, the part that each expert gets: (E,), of sum 1; 1 / E each where they are used
        alike.
        """
        index, _ = self.chosen(x)
        return torch.bincount(index.flatten(), minlength=self.experts) / index.numel()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        flat = x.reshape(-1, self.dim)
        index, share = self.chosen(flat)
        order = index.flatten().argsort(stable=True)  # slots of tokens, by expert
        token = order.div(self.top, rounding_mode="floor")
        counts = torch.bincount(index.flatten(), minlength=self.experts).tolist()
        taken = [self._expert(rows, each) for each, rows in enumerate(flat[token].split(counts)) if len(rows)]
        if not taken:
            return torch.zeros_like(x)
        y = torch.cat(taken) * share.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(flat).index_add(0, token, y).view(x.shape)

    def dense(self, x: Tensor) -> Tensor:
        """The definition: every expert on every token, and the conditional of the shares. x (..., dim) -> (...,
        dim).
        """
        shares = Conditional(self.shares(x))
        values = torch.stack([self._expert(x, each) for each in range(self.experts)], -2)
        return shares(values.to(shares.weights.dtype)).to(x.dtype)

    def _expert(self, x: Tensor, each: int) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate[each])) * F.linear(x, self.up[each]), self.down[each])

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden={self.gate.shape[1]}, experts={self.experts}, top={self.top}"


__all__ = ["MixtureOfExperts"]

"""The mixture of experts: each token uses a few of many feed-forward layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.initialise import Draws
from zonal.nn.norm import accumulation_dtype


class MixtureOfExperts(nn.Module):
    """y_t = Σ_e g_te E_e(x_t), where E_e is a SwiGLU. g_t is the softmax over the ``top`` largest entries of W_r x_t,
    and 0 for the other experts.

    Each expert runs on the tokens that choose it (in programs of ``torch.export`` on all), and no token is dropped. The
    result of a token does not depend on other tokens, except that rounding may change the choice between two equal
    entries of W_r x. There is no balancing loss; ``load`` shows how the experts are used.

    Args:
        dim: size of input and output.
        hidden: hidden size of each expert.
        experts: number of experts E.
        top: experts per token, from 2 to E. With 1 the weight would always be 1, and W_r would get no gradient.

    Source: Shazeer et al. 2017, arXiv 1701.06538, with the softmax after the choice as in Jiang et al. 2024, arXiv
        2401.04088.

    Raises:
        ArgumentError: sizes do not fit.
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
        """Draw the weights of each expert as in a SwiGLU, each from its own stream."""
        draws.linear_(self.router, "router")
        draws.normal_(self.gate, "gate")
        draws.normal_(self.up, "up")
        draws.normal_(self.down, "down", output=True)

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token (..., top), and their weights, which sum to 1, in float32 or better."""
        logits, index = self.router(x).topk(self.top, -1)
        return index, logits.to(accumulation_dtype(x.dtype)).softmax(-1)

    def shares(self, x: Tensor) -> Tensor:
        """g (..., E): the weights of all experts, 0 for those that are not chosen."""
        index, share = self.chosen(x)
        return share.new_zeros(*x.shape[:-1], self.experts).scatter(-1, index, share)

    @torch.no_grad()
    def load(self, x: Tensor) -> Tensor:
        """The share of all choices that each expert gets, (E,). The shares sum to 1; 1 / E each is a balanced use."""
        index, _ = self.chosen(x)
        return torch.bincount(index.flatten(), minlength=self.experts) / index.numel()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        if torch.compiler.is_exporting():  # how many tokens choose an expert is no size that a program can have
            return self.dense(x)
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
        """The definition, which runs every expert on every token. x (..., dim) -> (..., dim)."""
        shares = self.shares(x)
        values = torch.stack([self._expert(x, each) for each in range(self.experts)], -2)
        return (shares[..., None, :] @ values.to(shares.dtype))[..., 0, :].to(x.dtype)

    def _expert(self, x: Tensor, each: int) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate[each])) * F.linear(x, self.up[each]), self.down[each])

    def extra_repr(self) -> str:
        return f"{self.dim}, hidden={self.gate.shape[1]}, experts={self.experts}, top={self.top}"


__all__ = ["MixtureOfExperts"]

"""Updates by weights: conditionals and plans, gated mixtures of them, and feed-forward layers as plans.

    y_i = Σ_j w_ij v_j        plan: w >= 0        conditional: w >= 0 and Σ_j w_ij = 1

A gated mixture is one update on the disjoint union of the carriers of its parts, where each part has its own keys and
values:

    Σ_k g_ik Σ_j w^k_ij v^k_j = Σ_(k, j) (g_ik w^k_ij) v^k_j

It is a conditional if all parts are conditionals and g_i is a distribution over them. It is a plan if all parts are
plans and g >= 0. A feed-forward layer W a(x) is a plan on the carrier of ± hidden units, for any activation: unit h has
weight a_h⁺ on the value W_h and a_h⁻ on -W_h. A mixture of experts is a conditional on the carrier of experts, with
values that depend on the row.

Weights of both signs (a Gegenbauer series, ridge and Koopman read-outs) are neither, and raise an error.

Source: Geometric Attention, definitions 5.10 to 5.13, propositions 5.2 and 5.3, theorem 5.1, corollary 5.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import require
from zonal.errors import ArgumentError, unknown_name
from zonal.typed import check_tensors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, eq=False)
class PlanUpdate:
    """weights (..., T, S) >= 0. Raises: ArgumentError for weights that are negative or not finite."""

    weights: Tensor

    def __post_init__(self) -> None:
        what = f"update.{type(self).__name__}"
        check_tensors(what, {"weights": self.weights})
        w = self.weights.detach()
        require(
            w.ndim >= 2 and w.is_floating_point(),
            f"{what}: weights must be floating numbers (..., T, S), received {w.dtype} of shape {tuple(w.shape)}.",
        )
        if not bool(((w >= 0) & w.isfinite()).all()):
            raise ArgumentError(
                f"{what}: weights must be finite and >= 0, received {float(w.min()):g} … {float(w.max()):g}. "
                "Signed kernels and solves are neither plans nor conditionals."
            )

    def __call__(self, values: Tensor) -> Tensor:
        """values (..., S, P), or (..., T, S, P) where they depend on the row -> (..., T, P)."""
        require(
            values.ndim >= 2 and values.shape[-2] == self.weights.shape[-1],
            f"update.{type(self).__name__}: values (..., {self.weights.shape[-1]}, P) are required, one row for each "
            f"column of the weights, received shape {tuple(values.shape)}.",
        )
        if values.ndim == self.weights.ndim + 1:
            return (self.weights[..., None, :] @ values)[..., 0, :]
        return self.weights @ values

    @property
    def masses(self) -> Tensor:
        """μ (..., T), the row sums."""
        return self.weights.sum(-1)

    def conditional(self) -> "Conditional":
        """κ with U = μ U_κ, the row-conditional. Raises: ArgumentError where a row has no mass."""
        empty = int((self.masses == 0).sum())
        require(
            empty == 0,
            f"update.PlanUpdate.conditional: every row must have mass, received {empty} without. "
            "An update without evidence leaves its input unchanged and is not a conditional.",
        )
        return Conditional(self.weights / self.masses[..., None])


@dataclass(frozen=True, eq=False)
class Conditional(PlanUpdate):
    """weights (..., T, S) >= 0 whose rows sum to 1. Raises: ArgumentError for others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_distribution("update.Conditional: rows of weights", self.weights)


def mixed(gate: Tensor, parts: Sequence[PlanUpdate]) -> PlanUpdate:
    """The gated mixture on the disjoint union of the parts' keys, in order: weights (..., T, S_1 + ... + S_K).

    Join the values in the same order with ``torch.cat``.

    Args:
        gate: (..., T, K) >= 0, one column per part.
        parts: conditionals or plans. Conditionals with a gate whose rows sum to 1 give a conditional.

    Returns: a ``Conditional`` if all parts are, else a ``PlanUpdate``.

    Raises: ArgumentError for a gate of another number of parts, a negative gate, or a gate of conditionals whose rows
    do not sum to 1.
    """
    found = [*parts]
    require(
        len(found) > 0 and gate.ndim >= 2 and gate.shape[-1] == len(found),
        f"update.mixed: a gate (..., T, {len(found)}) is required, a column a part, received {tuple(gate.shape)}.",
    )
    rows = [part.weights.shape[-2] for part in found]
    require(
        {gate.shape[-2], *rows} <= {1, max(gate.shape[-2], *rows)},
        f"update.mixed: as many rows of the gate as of each part are required, received {gate.shape[-2]} and {rows}.",
    )
    if not bool((gate >= 0).all()):
        raise ArgumentError(f"update.mixed: gate must be >= 0, received {float(gate.detach().min()):g}.")
    weights = torch.cat(
        [share[..., None] * part.weights for share, part in zip(gate.unbind(-1), found, strict=True)], -1
    )
    if not all(isinstance(part, Conditional) for part in found):
        return PlanUpdate(weights)
    _check_distribution("update.mixed: of conditionals, rows of the gate", gate)
    return Conditional(weights)


def signed(hidden: Tensor) -> PlanUpdate:
    """Hidden units (..., T, m) as a plan on the ± carrier: (..., T, 2 m), a⁺ and then a⁻."""
    # not relu of a and of -a, whose slopes at 0 are both 0
    positive = hidden >= 0
    return PlanUpdate(torch.cat([torch.where(positive, hidden, 0), torch.where(positive, 0, -hidden)], -1))


def columns(read: Tensor) -> Tensor:
    """The values of the ± carrier for W (P, m): (2 m, P), its columns and then their negatives."""
    return torch.cat([read.mT, -read.mT], -2)


def feed_forward(x: Tensor, lift: Tensor, activation: str, bias: Tensor | None = None) -> PlanUpdate:
    """The plan of the layer read(activation(lift x + bias)), without the bias of its read-out.

    The layer is ``feed_forward(x, lift, "gelu", bias)(columns(read))`` plus that bias. x (..., T, dim), lift (m, dim),
    bias (m,) -> weights (..., T, 2 m). For other layers, such as gated ones, use ``signed`` of their hidden units.

    Raises: ArgumentError for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise unknown_name("update.feed_forward", "activation", activation, ACTIVATIONS)
    return signed(ACTIVATIONS[activation](F.linear(x, lift, bias)))


def _check_distribution(what: str, rows: Tensor) -> None:
    """Raise ArgumentError unless rows (..., K) sum to 1, up to the rounding of a sum of K numbers and of each."""
    sums = rows.detach().double().sum(-1)
    off = float((sums - 1).abs().max()) if sums.numel() else 0.0
    count, own = rows.shape[-1], torch.finfo(rows.dtype)
    summed = min(own.eps, torch.finfo(torch.float32).eps)  # short types are summed in float32
    limit = 2 * own.eps + 8 * summed * count**0.5 + own.smallest_normal * own.eps * count
    require(
        off <= limit,
        f"{what} must sum to 1, received sums up to {off:.2g} away. Divide by their sums, or make a PlanUpdate.",
    )


__all__ = ["ACTIVATIONS", "Conditional", "PlanUpdate", "columns", "feed_forward", "mixed", "signed"]

"""How the scores of a trained layer divide, per head: the part that the weights do not see, the part that depends only
on the key, and how well dot products of few numbers explain the rest.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.anchor import BoundedPlan, Count, Marginals, Plan, PlanAnchor, Raw, Row, TopK, UnbalancedPlan
from zonal.algebra.anchor.plan import sums_of, weighted
from zonal.algebra.declaration import require, require_whole
from zonal.algebra.operator import Operator
from zonal.errors import ArgumentError
from zonal.execution.call import Call
from zonal.nn.attention import Attention
from zonal.theory import probe
from zonal.theory.probe import Observed, Probe


@dataclass(frozen=True)
class HeadForm:
    """The form of the log kernel of one head, log K = rows + columns + interaction, over all sequences.

    rows, columns, interaction: shares of the energy of log K about its mean; they sum to 1, or are all 0 where log K is
        constant.
    gauge: the share that the weights do not see: rows for anchors that divide by the row sum, rows and columns for
        balanced plans, nothing for Count and Raw.
    explained: for each rank, the share of the energy of the interaction that a dot product of this rank explains.
    spectrum: the share of each singular value of the interaction, with zeros at forbidden pairs. Under a mask the fit
        to the allowed pairs explains more than this.
    uniform, by_columns, by_rank: the mean divergence in nats between the weights of a query and those that the anchor
        makes of the row field only (equal weights, except for plans under a mask), of row and column field, and of
        both with the dot product of each rank (``probe.divergence``).
    refined: as ``by_rank``, with the form fitted to the weights. Empty if it was not asked for, and for plans.
    """

    rows: float
    columns: float
    interaction: float
    gauge: float
    explained: tuple[float, ...]
    spectrum: tuple[float, ...]
    uniform: float
    by_columns: float
    by_rank: tuple[float, ...]
    refined: tuple[float, ...]


class HeadMaps(NamedTuple):
    """One head on one sequence, (T, T) each, with -inf at forbidden pairs: log K, its interaction, the dot product of
    the given rank that is nearest to the interaction, and the weights.
    """

    evidence: Tensor
    interaction: Tensor
    product: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class _PlanProbe(Probe):
    """What an anchor with a plan sees: its own weights, for the masses (B, H, ·) of one head."""

    anchor: PlanAnchor
    marginals: Marginals

    @property
    def left(self) -> bool:
        return isinstance(self.anchor, Plan | BoundedPlan) or (
            isinstance(self.anchor, UnbalancedPlan) and self.anchor.rho[0] is None
        )

    @property
    def right(self) -> bool:
        return isinstance(self.anchor, Plan) or (isinstance(self.anchor, UnbalancedPlan) and self.anchor.rho[1] is None)

    def observe(self, log_kernel: Tensor) -> Observed:
        block = log_kernel.double()[:, None]
        rows, columns = sums_of(block)
        at = self.anchor.potentials(self.marginals, rows, columns)
        left = self.anchor.query_stepped(self.marginals, rows, at.query, at.key).potential[:, 0]
        right = weighted(self.marginals.key, at.key)[:, 0]
        return Observed(block[:, 0] + left[..., None] + right[..., None, :], left, right)


def refusal(operator: Operator) -> str | None:
    """The reason why heads of this operator have no form, or None if they have one.

    There is no form if the kernel has no logarithm or if the weights are not a function of single pairs.
    """
    if not operator.tags.positive:
        return f"the kernel of {operator.spec} may be negative"
    if operator.tags.solves:
        return f"the weights of {operator.spec} solve with the kernel among keys, and no probe of a kernel gives them"
    if not isinstance(operator.anchor, Row | TopK | Count | Raw | PlanAnchor):
        anchor = type(operator.anchor).__name__
        return f"the anchor of {operator.spec}, {anchor}, has weights that no probe of single pairs gives"
    return None


@torch.no_grad()
def forms(layer: Attention, x: Tensor, ranks: Sequence[int] = (1, 2, 4), *, refine: int = 0) -> list[HeadForm]:
    """The form of each head after inputs x (B, T, dim).

    Under a mask, also a causal one, the dot products are fitted to the allowed pairs (``probe.normal_form``). The share
    that they explain is then a lower bound.

    Args:
        layer: the layer.
        x: (B, T, dim).
        ranks: rising ranks of dot products.
        refine: steps of ``probe.refined``. 0: none.

    Raises:
        ArgumentError: ranks do not rise or exceed T, or ``refusal`` returns a reason.
    """
    _check(layer, x, "forms")
    for rank in ranks:
        require_whole("theory.heads.forms: ranks", rank)
    require(
        len(ranks) > 0 and all(a < b for a, b in itertools.pairwise(ranks)) and ranks[-1] <= x.shape[1],
        f"theory.heads.forms: one or more rising ranks up to the number of tokens, {x.shape[1]}, are required, "
        f"received {tuple(ranks)}.",
    )
    call = layer.called(x)
    kernels = enumerate(layer.evidence_of(call).unbind(1))
    return [_form(kernel, _probe(call, head), ranks, refine) for head, kernel in kernels]


@torch.no_grad()
def maps(layer: Attention, x: Tensor, rank: int) -> list[HeadMaps]:
    """The maps of each head for the first sequence of x (B, T, dim). Raises: as ``forms``."""
    _check(layer, x, "maps")
    require_whole("theory.heads.maps: rank", rank)
    require(
        rank <= x.shape[1],
        f"theory.heads.maps: a rank up to the number of tokens, {x.shape[1]}, is required, received {rank}.",
    )
    heads = zip(layer.evidence(x[:1])[0], layer.weights(x[:1])[0], strict=True)
    return [_maps(kernel, weights, rank) for kernel, weights in heads]


def _check(layer: Attention, x: Tensor, call: str) -> None:
    require(
        x.ndim == 3 and 0 not in x.shape[:2],
        f"theory.heads.{call}: x (batch, tokens, dim) with at least one token is required, received {tuple(x.shape)}.",
    )
    reason = refusal(layer.operator)
    if reason is not None:
        raise ArgumentError(f"theory.heads.{call}: {reason}. Its weights are layer.weights(x).")


def _probe(call: Call, head: int) -> Probe:
    """What the anchor sees of the kernel of one head."""
    anchor = call.bound.anchor
    if isinstance(anchor, PlanAnchor):
        assert call.marginals is not None
        query, key = (mass[:, head : head + 1] for mass in call.marginals[:2])
        return _PlanProbe(anchor, Marginals(query, key))
    if isinstance(anchor, Count):
        return probe.Kernel(-call.visibility.count(call.device)[0, 0].clamp_min(1).double().log())
    return probe.Kernel() if isinstance(anchor, Raw) else probe.Rows()


def _maps(log_kernel: Tensor, weights: Tensor, rank: int) -> HeadMaps:
    """Of one head's log K and weights (T, T)."""
    form = probe.normal_form(log_kernel, rank)
    product, weights = (
        x.masked_fill(log_kernel.isneginf(), float("-inf")) for x in (form.queries @ form.keys.mT, weights)
    )
    return HeadMaps(log_kernel, probe.centred(log_kernel).interaction, product, weights)


def _form(log_kernel: Tensor, seen: Probe, ranks: Sequence[int], refine: int) -> HeadForm:
    """Of one head's log K (B, T, T)."""
    parts = probe.energies(log_kernel)
    energies, interaction = [float(part.sum()) for part in parts], parts.interaction
    whole = sum(energies)
    above_rounding = whole > 1e-24 * float(log_kernel[~log_kernel.isneginf()].double().square().sum())
    rows, columns, _ = shares = [part / whole if above_rounding else 0.0 for part in energies]
    made = [probe.normal_form(log_kernel, rank) for rank in ranks]
    refinable = made if refine and not isinstance(seen, _PlanProbe) else []
    better = [probe.refined(form, log_kernel, steps=refine, probe=seen) for form in refinable]
    fields = made[0].rows[..., None] + made[0].columns[..., None, :]
    alone = probe.centred(log_kernel, "row").rows[..., None].expand_as(log_kernel)
    filled = probe.centred(log_kernel).interaction.masked_fill(log_kernel.isneginf(), 0)
    values = torch.linalg.svdvals(filled).square().sum(0)

    def apart(model: Tensor) -> float:
        rows = probe.divergence(log_kernel, model, seen)[~log_kernel.isneginf().all(-1)]
        return float(rows.mean()) if len(rows) else 0.0  # no row sees a key

    energy = interaction.sum()
    explained = [float((form.explained * interaction).sum() / energy) if bool(energy > 0) else 1.0 for form in made]
    return HeadForm(
        *shares, gauge=(rows if seen.left else 0.0) + (columns if seen.right else 0.0),
        explained=tuple(explained),
        spectrum=tuple((values / values.sum().clamp_min(1e-300)).tolist()),
        uniform=apart(alone), by_columns=apart(fields), by_rank=tuple(apart(form.scores) for form in made),
        refined=tuple(apart(form.scores) for form in better),
    )  # fmt: skip


__all__ = ["HeadForm", "HeadMaps", "forms", "maps", "refusal"]

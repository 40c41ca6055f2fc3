"""What the heads of a trained layer make of some inputs: how much of a score no one sees, how much is the keys' own, and how few numbers do for the rest."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra import probe
from zonal.algebra.declaration import require, require_whole
from zonal.nn.attention import Attention


@dataclass(frozen=True)
class HeadForm:
    """Of one head's log evidence log K = rows + columns + interaction, over all sequences.

    gauge, columns, interaction: shares of its energy about its mean, of sum 1. explained: of the interaction's energy, by rank. spectrum: of that energy, the share
    of each singular value, zeros standing at forbidden pairs, where what is fitted to the allowed ones explains more.
    uniform, by_columns, by_rank: nats by which a query's weights differ, on average, from equal ones, from those of the column field alone, and from those with the
    dot product of each rank as well (KL of row-conditionals). refined: the last, with form and dot product fitted to the weights; empty where that was not asked for.
    """

    gauge: float
    columns: float
    interaction: float
    explained: tuple[float, ...]
    spectrum: tuple[float, ...]
    uniform: float
    by_columns: float
    by_rank: tuple[float, ...]
    refined: tuple[float, ...]


class HeadMaps(NamedTuple):
    """One head on one sequence, (T, T) each, -inf where a pair is forbidden: log K, its interaction, the dot product of a rank that is nearest to that, and the weights."""

    evidence: Tensor
    interaction: Tensor
    product: Tensor
    weights: Tensor


@torch.no_grad()
def forms(layer: Attention, x: Tensor, ranks: Sequence[int] = (1, 2, 4), *, refine: int = 0) -> list[HeadForm]:
    """The form of each head after inputs x (B, T, dim). ranks: rising. refine: steps of ``probe.refined``, 0 = none.

    Under a mask, a causal one too, the rank is fitted to the allowed pairs (``probe.normal_form``), which shows at least what is explained.

    Raises: ArgumentError for ranks that do not rise or exceed T, and for operators whose kernel may be negative (``Attention.evidence``).
    """
    for rank in ranks:
        require_whole("nn.evidence.forms: ranks", rank)
    rising = len(ranks) > 0 and all(a < b for a, b in itertools.pairwise(ranks)) and ranks[-1] <= x.shape[1]
    require(rising, f"nn.evidence.forms: one or more rising ranks up to the number of tokens, {x.shape[1]}, are required, received {tuple(ranks)}.")
    return [_form(kernel, ranks, refine) for kernel in layer.evidence(x).unbind(1)]


@torch.no_grad()
def maps(layer: Attention, x: Tensor, rank: int) -> list[HeadMaps]:
    """What each head makes of the first of the inputs x (B, T, dim), pair by pair. Raises: as ``forms``."""
    require_whole("nn.evidence.maps: rank", rank)
    require(rank <= x.shape[1], f"nn.evidence.maps: a rank up to the number of tokens, {x.shape[1]}, is required, received {rank}.")
    return [_maps(kernel, rank) for kernel in layer.evidence(x[:1])[0]]


def _maps(log_kernel: Tensor, rank: int) -> HeadMaps:
    """Of one head's log K (T, T)."""
    form = probe.normal_form(log_kernel, rank)
    product, weights = (x.masked_fill(log_kernel.isneginf(), float("-inf")) for x in (form.queries @ form.keys.mT, probe.Rows().observe(log_kernel).log.exp()))
    return HeadMaps(log_kernel, probe.centred(log_kernel).interaction, product, weights)


def _form(log_kernel: Tensor, ranks: Sequence[int], refine: int) -> HeadForm:
    """Of one head's log K (B, T, T)."""
    energies = [float(part.sum()) for part in probe.energies(log_kernel)]
    whole, interaction = max(sum(energies), 1e-300), probe.energies(log_kernel).interaction
    made = [probe.normal_form(log_kernel, rank) for rank in ranks]
    better = [probe.refined(form, log_kernel, steps=refine) for form in made] if refine else []
    columns = made[0].columns[..., None, :].expand_as(log_kernel)
    values = torch.linalg.svdvals(probe.centred(log_kernel).interaction.masked_fill(log_kernel.isneginf(), 0)).square().sum(0)

    def apart(model: Tensor) -> float:
        return float(probe.divergence(log_kernel, model)[~log_kernel.isneginf().all(-1)].mean())

    return HeadForm(
        *(part / whole for part in energies),
        explained=tuple(float((form.explained * interaction).sum() / interaction.sum()) if bool(interaction.sum() > 0) else 1.0 for form in made),
        spectrum=tuple((values / values.sum().clamp_min(1e-300)).tolist()),
        uniform=apart(torch.zeros_like(log_kernel)), by_columns=apart(columns), by_rank=tuple(apart(form.scores) for form in made),
        refined=tuple(apart(form.scores) for form in better),
    )  # fmt: skip


__all__ = ["HeadForm", "HeadMaps", "forms", "maps"]

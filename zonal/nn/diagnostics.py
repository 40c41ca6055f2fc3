"""Diagnostics of ridge and Koopman read-outs, from their memories and from trained layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.memory import Memory
from zonal.memory.compact import statistics_of
from zonal.memory.whitened import WhitenedFeatures
from zonal.nn.attention import Attention


@dataclass(frozen=True)
class RidgeDiagnostics:
    """Of the sums G and M of each sequence and key head, (B, Hkv) unless said otherwise; float64.

    smallest, largest: eigenvalues of A = G + the ridge. condition: largest / smallest.
    effective_rank: exp of the entropy of the eigenvalues of G, taken as shares of their sum; from 1 to r, and 0 without
        keys. It counts the directions along which keys spread.
    used: tr(G A^-1), the summed leverage of all keys: how many of its r keys the state holds, as the ridge sees it.
    free: r - used: about how many more keys in new directions can be recalled exactly.
    norm: the largest singular value of the whitened step L^-1 M L^-T, with A = L L^T; below 1 where nothing fades. None
        without M (power 0).
    spectrum: the eigenvalues l of that step, complex (B, Hkv, r), largest modulus first. Modulus near 1 means that the
        component persists from step to step; the argument is its rotation per step.
    """

    smallest: Tensor
    largest: Tensor
    condition: Tensor
    effective_rank: Tensor
    used: Tensor
    free: Tensor
    norm: Tensor | None = None
    spectrum: Tensor | None = None


@torch.no_grad()
def diagnose(gram: Tensor, regular: Tensor, shift: Tensor | None = None) -> RidgeDiagnostics:
    """The diagnostics of sums G, A = G + the ridge and M, each (…, r, r).

    Raises: ArgumentError when A is not positive definite or not finite.
    """
    gram, regular = gram.double(), regular.double()
    lower, info = torch.linalg.cholesky_ex(regular)
    if bool((info > 0).any()) or not bool(torch.isfinite(lower).all()):
        raise ArgumentError(
            "diagnose: G + the ridge must be positive definite and finite. "
            "Raise the ridge, or look for keys that are not finite."
        )
    eigenvalues = torch.linalg.eigvalsh(regular)
    spread = torch.linalg.eigvalsh(gram).clamp_min(0)
    total = spread.sum(-1)
    shares = spread / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    rank = torch.where(total > 0, torch.special.entr(shares).sum(-1).exp(), 0)
    used = torch.cholesky_solve(gram, lower).diagonal(dim1=-2, dim2=-1).sum(-1)
    norm = spectrum = None
    if shift is not None:
        half = torch.linalg.solve_triangular(lower, shift.double(), upper=False)
        step = torch.linalg.solve_triangular(lower, half.mT, upper=False).mT
        norm = torch.linalg.matrix_norm(step, 2)
        spectrum = torch.linalg.eigvals(step)
        spectrum = spectrum.gather(-1, spectrum.abs().argsort(-1, descending=True))
    return RidgeDiagnostics(
        smallest=eigenvalues[..., 0], largest=eigenvalues[..., -1],
        condition=eigenvalues[..., -1] / eigenvalues[..., 0], effective_rank=rank, used=used,
        free=gram.shape[-1] - used, norm=norm, spectrum=spectrum,
    )  # fmt: skip


@torch.no_grad()
def leverage(keys: Tensor, regular: Tensor) -> Tensor:
    """z A^-1 z of keys (…, n, r), (…, n) in [0, 1) for keys that are in A: near one where a direction is a key's own,
    near zero where many share it.
    """
    lower = torch.linalg.cholesky(regular.double())
    return torch.linalg.solve_triangular(lower, keys.double().mT, upper=False).square().sum(-2)


@dataclass(frozen=True)
class LayerDiagnostics:
    """The state of a layer after it has read its inputs.

    state: diagnostics of its sums, per sequence and key head, (B, Hkv).
    leverage: (B, Hkv, T), z A^-1 z for the key z of each token. Without fading their sum is ``state.used``; the fading
        that followed a token is not subtracted.
    lengths: (B, Hkv, T), |z| of the keys as they are stored, limited and gated.
    """

    state: RidgeDiagnostics
    leverage: Tensor
    lengths: Tensor


@torch.no_grad()
def of_memory(memory: Memory) -> RidgeDiagnostics:
    """The diagnostics of a memory of ridge statistics, fading or not. Tokens of an unfinished chunk are included.

    Raises:
        ArgumentError: the memory is of another kind.
    """
    return diagnose(*_sums(memory))


def _sums(memory: Memory) -> tuple[Tensor, Tensor, Tensor | None]:
    """(G, G + the ridge, M)."""
    found = statistics_of(memory)
    if found is None:
        raise ArgumentError(
            "diagnostics: a memory of ridge statistics is required (of mechanisms.ridge or ska), received one "
            f"of kind {memory.kind!r}."
        )
    bound = memory.operator.bind(memory.form.heads, memory.form.heads)
    whole = found.settled()
    gram, _, shift, _ = whole.whitened(bound)
    return gram, whole.regularised(bound), shift


@torch.no_grad()
def of_layer(
    layer: Attention, x: Tensor, *, key_padding_mask: Tensor | None = None, action_mask: Tensor | None = None
) -> LayerDiagnostics:
    """The diagnostics of a layer after inputs x (B, T, dim). The masks are those of the layer.

    Raises:
        ArgumentError: the operator of the layer is not a ridge or Koopman read-out.
    """
    memory = layer(x, return_memory=True, key_padding_mask=key_padding_mask, action_mask=action_mask)[1].memory
    gram, regular, shift = _sums(memory)
    keys = layer.stored_keys(x, key_padding_mask=key_padding_mask, action_mask=action_mask)
    white = WhitenedFeatures.of(memory.operator.bind(memory.form.heads, memory.form.heads), memory.form.key_dim)
    if white is not None:
        keys = white.whitened(keys)
    return LayerDiagnostics(diagnose(gram, regular, shift), leverage(keys, regular), keys.norm(dim=-1))


__all__ = ["LayerDiagnostics", "RidgeDiagnostics", "diagnose", "leverage", "of_layer", "of_memory"]

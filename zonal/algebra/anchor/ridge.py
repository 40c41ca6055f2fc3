"""Anchors that solve with the kernel among keys: ridge read-outs and those after steps of fitted dynamics."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor.base import Anchor, Blocks
from zonal.algebra.declaration import Derived, Move, expand_rows, require, require_one_of, require_positive, row
from zonal.algebra.primal import after_step, contraction, factorised, fading_weights
from zonal.algebra.score import Params


def _prefix_solve(lower: Tensor, rows: Tensor, prefix: Tensor) -> Tensor:
    """Each row x_t of ``rows`` -> (A_t)^-1 x_t, A_t the leading block of A = L L^T that ``prefix[t]`` allows.

    Leading blocks of L are the factors of the leading blocks of A, so one factor serves every prefix:
    L^-1 x, cut to the prefix, then L^-T. prefix (…, T, S) bool.
    """
    half = torch.linalg.solve_triangular(lower, rows.transpose(-1, -2), upper=False).transpose(-1, -2)
    half = half.masked_fill(~prefix, 0)
    return torch.linalg.solve_triangular(lower.transpose(-1, -2), half.transpose(-1, -2), upper=True).transpose(-1, -2)


def _shift(rows: Tensor, key_mask: Tensor | None) -> Tensor:
    """(D a)_s = a_{s-1}, with s - 1 the previous real token: padding (key_mask (B, S) False) is skipped."""
    if key_mask is None or not rows.shape[-1]:
        return F.pad(rows[..., :-1], (1, 0))
    place = torch.arange(1, rows.shape[-1] + 1, device=rows.device)
    before = F.pad(torch.where(key_mask, place, 0).cummax(-1).values[:, :-1], (1, 0))  # 0 = none
    index = before.view(before.shape[0], *[1] * (rows.ndim - 2), before.shape[1]).expand(rows.shape)
    return F.pad(rows, (1, 0)).gather(-1, index)


@dataclass(frozen=True)
class Ridge(Anchor):
    """W = K_qk (K_kk + rho I)^-1 on the visible keys: kernel ridge regression from keys to values, refitted per query.

    Causal queries see strictly earlier keys.

    eps, mode: the ridge. ``constant``: rho = eps, one per head, kept positive by softplus when learned.
    ``running_max``: rho_t = eps max(m_t^2, 1e-12), with m_t^2 the largest K_ss that a query sees (the Echo paper's
    ridge, made causal). relative: adds relative tr(G_t) / r to rho_t, with G_t the Gram matrix of the visible keys;
    this is a fraction of their mean eigenvalue, for the plain product z.z only. With a ``Decay`` prior the past decays
    as in ``primal.fading_weights``. compact: a memory keeps the factor of G + eps I in float32 in place of sums and an
    inverse in float64, a quarter of the bytes (a third with powers above 0), and solves anew at each read.

    Raises: ArgumentError for numbers out of range. Source: Echo, eq. 13 with K = 0.
    """

    family = "ridge"
    reduction = "ridge"
    solves = True
    include_self = False
    kv_rows = ("raw_ridge",)
    later = ("compact",)
    spectral: ClassVar[bool] = False
    """Whether each Koopman step is divided by max(1, its norm)."""

    eps: float = 0.1
    mode: Literal["constant", "running_max"] = "constant"
    learn_ridge: bool = False
    relative: float = 0.0
    compact: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_positive(f"{name}: eps (the ridge)", self.eps)
        require_one_of(f"{name}: mode", self.mode, ("constant", "running_max"))
        require(not (self.learn_ridge and self.mode == "running_max"), f"{name}: learn_ridge needs mode='constant'.")
        require(
            not (self.compact and self.mode == "running_max"),
            f"{name}: compact keeps a factor that is made with eps; it needs mode='constant'.",
        )
        require(
            self.relative >= 0,
            f"{name}: relative (the ridge as a part of tr(G) / r) must be >= 0, received {self.relative}.",
        )

    def powers(self, heads: int) -> tuple[int, ...]:
        """How many steps of the Koopman operator the read-out of each head applies."""
        return (0,) * heads

    @property
    def moving(self) -> bool:
        """Whether the ridge depends on the visible keys, so that each query solves with its own ridge."""
        return self.mode == "running_max" or self.relative > 0

    @property
    def by_query(self) -> bool:
        return self.moving or self.spectral

    def initial(self) -> dict[str, Tensor]:
        # softplus^-1, so that training starts at exactly eps; written so that a large eps does not overflow
        return {"raw_ridge": row(self.eps + math.log(-math.expm1(-self.eps)))} if self.learn_ridge else {}

    def ridge(self, params: Params, heads: int) -> Tensor:
        """rho (H,) in float64 for the constant mode; the factor eps for the running maximum."""
        if not self.learn_ridge:
            return torch.full((heads,), self.eps, dtype=torch.float64)
        value = F.softplus(params["raw_ridge"].double())
        return expand_rows(value, heads, "the learned ridge")

    def moved(self, rho: Tensor, peak: Tensor | None, trace: Tensor, width: int) -> Tensor:
        """The ridge of queries whose visible keys have ``trace`` as the sum and ``peak`` as the maximum of K_ss.

        peak is needed for the running maximum. width: r.
        """
        ridge = rho if self.mode == "constant" or peak is None else rho * peak.clamp_min(1e-12)
        return ridge + self.relative / max(width, 1) * trace if self.relative else ridge

    def weights(self, blocks: Blocks) -> Tensor:
        assert blocks.kk is not None
        heads = blocks.qk.shape[1]
        rho = self.ridge(blocks.params, heads).to(blocks.qk)
        if blocks.log_decay is not None:
            assert blocks.q is not None
            assert blocks.k is not None
            return fading_weights(blocks.q, blocks.k, blocks.log_decay, rho, self.powers(heads), blocks.visibility)
        kernel = blocks.qk.exp() if blocks.log else blocks.qk
        if not self.by_query and blocks.visibility.nested:
            return self._nested(kernel, blocks, rho)
        return self._general(kernel, blocks, rho)

    def _nested(self, kernel: Tensor, blocks: Blocks, rho: Tensor) -> Tensor:
        kk, visibility, keys = blocks.kk, blocks.visibility, kernel.shape[-1]
        assert kk is not None
        if visibility.key_mask is not None:
            real = visibility.key_mask[:, None]
            kk = kk * (real[..., :, None] & real[..., None, :])
        if visibility.packed:
            start = visibility.segment_start.to(kk.device)
            kk = kk * (start[:, None] == start[None, :])
        lower = factorised(
            kk + rho.view(-1, 1, 1) * torch.eye(keys, dtype=kk.dtype, device=kk.device), type(self).__name__
        )
        s = torch.arange(keys)
        # the interval rule alone, before the key mask: a masked key is a zero row of kk, not a hole in the prefix
        inside = ((s >= visibility.lo[:, None]) & (s < visibility.hi[:, None])).to(kernel.device)
        rows = _prefix_solve(lower, kernel, inside)
        powers = self.powers(kernel.shape[1])
        for step in range(self.shifts):
            moved = _shift(rows, visibility.key_mask).masked_fill(~blocks.visible, 0)
            rows = after_step(powers, step, _prefix_solve(lower, moved @ kk, inside), rows)
        return rows.masked_fill(~blocks.visible, 0)

    def _general(self, kernel: Tensor, blocks: Blocks, rho: Tensor) -> Tensor:
        """Weights for any visible set, by one solve per query."""
        kk = blocks.kk
        assert kk is not None
        if kernel.shape[-1] == 0:
            return kernel
        heads, key_mask = kernel.shape[1], blocks.visibility.key_mask
        visible = blocks.visible.expand(kernel.shape[0], 1, *kernel.shape[-2:])
        eye = torch.eye(kernel.shape[-1], dtype=kk.dtype, device=kk.device)
        peak = torch.diagonal(kk, dim1=-2, dim2=-1)
        powers, width = self.powers(heads), 1 if blocks.k is None else blocks.k.shape[-1]
        out = []
        for t in range(kernel.shape[-2]):
            seen = visible[:, :, t]
            block = kk * (seen[..., :, None] & seen[..., None, :])
            own = torch.where(seen, peak, 0)
            ridge = self.moved(rho[None, :, None], own.amax(-1, keepdim=True), own.sum(-1, keepdim=True), width)
            ridge = ridge[..., None]
            lower = factorised(block + ridge * eye, type(self).__name__)
            weights = torch.cholesky_solve(kernel[:, :, t, :, None], lower)
            for step in range(self.shifts):
                moved = _shift(weights[..., 0], key_mask).masked_fill(~seen, 0)
                moved = torch.cholesky_solve(block @ moved[..., None], lower)
                if self.spectral:
                    assert blocks.k is not None
                    z = blocks.k.masked_fill(~seen[..., None], 0)
                    gram = z.mT @ z + ridge * torch.eye(width, dtype=z.dtype, device=z.device)
                    shrink = contraction(gram, z.mT @ _shift(z.mT, key_mask).mT, type(self).__name__)
                    moved = moved * shrink[..., None, None]
                weights = after_step(powers, step, moved, weights)
            out.append(weights[..., 0].masked_fill(~seen, 0))
        return torch.stack(out, -2) if out else kernel

    def moves(self) -> tuple[Move, ...]:
        equations = Derived(
            "normal equations",
            "hence W (K_kk + rho I) = K_qk on visible keys: weights may be negative, and rows sum to anything",
        )
        sums = Derived(
            "primal sums",
            "hence for a linear kernel, and on features for a polynomial of cosines, sums over keys (G = sum z z^T, C "
            "= sum v z^T) carry all of the past",
        )
        fit = "of all fits the one with the least squared error and rho times its size"
        read = "only what is read out of a fit from keys to values is observed"
        return (
            self.move("quotient", "regression probe", read, sums),
            self.move("section", "ridge", fit, *([] if self.shifts else [equations])),
        )


@dataclass(frozen=True)
class Koopman(Ridge):
    """y = eta gamma^power C P (M P)^power q, P = (G + rho I)^-1: a ridge read-out after ``power`` fitted steps.

    Dual form for any kernel: w_t = (S D)^power (K_kk + rho I)^-1 k_q, S = K_kk (K_kk + rho I)^-1, D the shift by one.

    power: for distinct keys, 0 returns eta times the value stored with the key, 1 returns eta gamma times the value one
    step later, and so on. A tuple gives one power per group of heads. eta (initially 1.5) and gamma = 1 +
    sigmoid(gate)/2 (gate initially -4) are learned per head.
    spectral_norm: "power" divides each step by max(1, s), with s the norm of L^-1 M L^-T by six power iterations. This
    is the paper's form and changes nothing, since s < 1; for the plain product z.z only.

    Raises: ArgumentError for powers out of range. Source: Echo, eqs. 12, 13 and 22.
    """

    power: int | tuple[int, ...] = 0
    learn_ridge: bool = True
    eta: float = 1.5
    gate: float = -4.0
    learn_scale: bool = True
    spectral_norm: Literal["none", "power"] = "none"

    def __post_init__(self) -> None:
        if self.mode == "running_max":
            object.__setattr__(self, "learn_ridge", False)
        super().__post_init__()
        if isinstance(self.power, list):
            object.__setattr__(self, "power", tuple(self.power))
        good = len(self._powers) > 0 and all(
            isinstance(p, int) and not isinstance(p, bool) and 0 <= p <= 8 for p in self._powers
        )
        require(
            good,
            "Koopman: power must be a whole number from 0 to 8, or a tuple of these, one per head group; "
            f"received {self.power!r}.",
        )
        require_one_of("Koopman: spectral_norm", self.spectral_norm, ("none", "power"))

    @property
    def _powers(self) -> tuple[int, ...]:
        return self.power if isinstance(self.power, tuple) else (self.power,)

    def powers(self, heads: int) -> tuple[int, ...]:
        # as ``expand_rows`` does, in plain numbers, which a traced call needs
        known, have = self._powers, len(self._powers)
        if heads % have == 0:
            return known * (heads // have)
        if have % heads:
            expand_rows(torch.tensor(known, dtype=torch.int64), heads, "Koopman powers")  # says what does not fit
        return known[have // heads - 1 :: have // heads]

    @property
    def shifts(self) -> int:
        return max(self._powers)

    @property
    def spectral(self) -> bool:
        return self.spectral_norm == "power" and self.shifts > 0

    def initial(self) -> dict[str, Tensor]:
        learned = super().initial()
        if self.learn_scale:
            learned["eta"] = row(self.eta)
            if self.shifts:
                learned["gate"] = row(self.gate)
        return learned

    def gamma(self, params: Params) -> Tensor:
        gate = params["gate"] if "gate" in params else row(self.gate)
        return 1 + 0.5 * torch.sigmoid(gate.double())

    def output_scale(self, params: Params, heads: int) -> Tensor:
        eta = params["eta"].double() if "eta" in params else row(self.eta).double()
        if self.shifts == 0:
            return eta
        gamma = self.gamma(params)
        return eta * gamma ** torch.tensor(self.powers(heads), dtype=gamma.dtype, device=gamma.device)

    def moves(self) -> tuple[Move, ...]:
        ahead = f"{self.power}" if isinstance(self.power, int) else ", ".join(map(str, self.power)) + " (by head)"
        follows = (
            Derived("shift", "hence a key in a direction of its own brings the value stored so many steps after it"),
            Derived(
                "contraction", "hence no step lengthens what it is applied to: a bound on its norm would change nothing"
            ),
        )
        text = f"keys follow linear dynamics; the read-out looks {ahead} step(s) ahead"
        shift = self.move("restriction", "linear dynamics", text, *follows)
        learned = ", which is learned per head" if self.learn_scale else ""
        gain = self.move("section", "gain", f"of all multiples of the read-out {self.eta:g} times it{learned}")
        return (*((shift,) if self.shifts else ()), *super().moves(), gain)


__all__ = ["Koopman", "Ridge"]

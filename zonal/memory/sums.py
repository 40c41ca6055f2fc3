"""Sums: S = sum phi(k) [v, 1]^T over tokens, with or without a decay, for polynomials of a dot product."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra import Operator, definition
from zonal.algebra.anchor.base import no_sum
from zonal.algebra.operator import Bound
from zonal.errors import ArgumentError
from zonal.features import SymmetricPowers, moments
from zonal.memory import marks
from zonal.memory.base import Form, Memory
from zonal.memory.criterion import ratio
from zonal.memory.refusals import served_by
from zonal.memory.summed import Summed
from zonal.memory.tokens import Tokens
from zonal.tracing import recorded


def features_of(operator: Operator, key_dim: int) -> SymmetricPowers:
    """The feature map of an operator that has one."""
    features = served_by(operator, key_dim)
    if features is None:  # an operator of a file that another program wrote
        raise ArgumentError(f"Memory: operator {operator.name!r} has no features, so its past cannot be kept as sums.")
    return features


def with_mass(normalises: bool, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(k, [v, 1] e^bias) in ``dtype``, padding as zeros; the column of ones is there for anchors that divide by the
    row's sum.
    """
    silent = tokens.silent()
    k, v = silent.k.to(dtype), silent.v.to(dtype)
    if normalises:
        v = F.pad(v, (0, 1), value=1.0)
        if tokens.mask is not None:
            v = v.masked_fill(~tokens.mask[:, None, :, None], 0)
    if tokens.key_bias is not None:
        bias = tokens.key_bias if tokens.mask is None else tokens.key_bias.masked_fill(~tokens.mask[:, None], 0)
        v = v * bias.to(dtype).exp().unsqueeze(-1)
    return k, v


def total_of(q: Tensor, state: Tensor, features: SymmetricPowers, bound: Bound) -> Tensor:
    """sum_s l(q . k_s) [v_s, 1]: q (B, H, T, D) and state (B, Hkv, m, P1) -> (B, H, T, P1)."""
    batch, heads, queries, dim = q.shape
    phi = features(q) if recorded([q]) else features.write(q)
    if not features.trivial:
        phi = phi * features.scale(bound.link.monomials(bound.coefficients.to(q)), dim).unsqueeze(1)
    return (phi.reshape(batch, bound.kv_heads, bound.groups * queries, phi.shape[-1]) @ state.to(phi)).view(
        batch, heads, queries, state.shape[-1]
    )


@torch.no_grad()
def least_of(q: Tensor, state: Tensor, features: SymmetricPowers, bound: Bound) -> Tensor:
    """The smallest sum over keys that is trusted for a row of a positive link, (B, H, T, 1). A tenth or more of a
    smaller sum may be rounding. 0 where no terms cancel.

    The absolute terms of a row, sum_a w_a psi_a(q) M_a, add up to at most |sqrt w psi(q)| |sqrt w M| (Cauchy-Schwarz).
    A sum over features is accurate to a few roundings of that bound, 1e-6 of it in float32; 2^-16 of it is required.
    The compiled kernel of the chunked path has the same rule.
    """
    if not bound.link.positive or features.degree == 1:
        return q.new_zeros(())
    monomials = bound.link.monomials(bound.coefficients.to(state))[: features.degree + 1].abs()
    weights = features.scale(monomials, q.shape[-1])
    sizes = state[..., -1].square().repeat_interleave(bound.groups, 1)
    held = (sizes * weights).sum(-1)[..., None, None]
    square = q.to(state).square().sum(-1, keepdim=True)
    asked = torch.stack([monomials[k] * square**k for k in range(features.lowest, features.degree + 1)]).sum(0)
    return (held * asked).sqrt() * (128 * torch.finfo(state.dtype).eps)


def plus(state: Tensor, k: Tensor, v: Tensor, features: SymmetricPowers) -> Tensor:
    """state + sum_s phi(k_s) v_s^T."""
    if k.shape[2] == 1 and not recorded((state, k, v)):
        # one pass over the state: what a decoder does at each token
        return torch.baddbmm(state.flatten(0, 1), features.write(k).mT.flatten(0, 1), v.flatten(0, 1)).view(state.shape)
    return state + moments(k, v, features)


def anchored(total: Tensor, bound: Bound, count: Tensor, least: Tensor | None = None) -> Tensor:
    """y from the sum over visible keys. count: how many they are, broadcastable to (B, H, T, 1).

    Rows of a positive link whose sum is below ``least`` (``least_of`` the state that they read; negative, without one)
    have cancelled to rounding: they are NaN.
    """
    name = type(bound.anchor).__name__
    if name == "Row":
        y, mass = total[..., :-1], total[..., -1:]
        if bound.link.positive:
            mass = mass.masked_fill(mass < (0 if least is None else least), float("nan"))
        empty = no_sum(mass)
        return torch.where(empty, 0, y / torch.where(empty, 1, mass))
    if name == "Count":
        return total * torch.where(count > 0, 1 / count.clamp_min(1).to(total.dtype), 0)
    return total


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Sums(Summed):
    """S = sum_s phi(k_s) [v_s, 1]^T: all that an operator needs of its past when its kernel is a polynomial of a dot
    product. The column of ones is there for anchors that divide by the row's sum.

    state: (B, Hkv, m, P or P + 1) in float32 or better, over m features. merge is commutative where nothing fades.
    """

    state: Tensor

    @classmethod
    def shapes(cls, operator: Operator, form: Form) -> dict[str, tuple[int, ...]]:
        size = features_of(operator, form.key_dim).dimension(operator.score.width(form.key_dim))
        return {"state": (form.batch, form.heads, size, form.value_dim + (1 if operator.tags.normalises else 0))}

    @property
    def features(self) -> SymmetricPowers:
        """The feature map phi."""
        return features_of(self.operator, self.form.key_dim)

    def with_terms(self, tokens: Tokens) -> "Sums":
        k, v = with_mass(self.operator.tags.normalises, tokens, self.form.statistics)
        earlier: Sums = self
        if tokens.log_decay is not None:
            v = v * tokens.left_at_end().to(v).unsqueeze(-1)
            earlier = fading(self).faded(tokens.log_decay.sum(-1))
        return replace(earlier, state=plus(earlier.state, k, v, self.features))

    def faded(self, log_decay: Tensor) -> Self:
        assert self.total is not None
        return replace(
            self, state=self.state * log_decay.exp().to(self.state)[..., None, None], total=self.total + log_decay
        )

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        wide = q.to(torch.promote_types(q.dtype, self.form.statistics))
        total = total_of(wide, self.settled().state, self.features, bound)
        return anchored(total, bound, self.real.view(-1, 1, 1, 1)).to(q.dtype)

    @property
    def evidence_refusal(self) -> str | None:
        tags = self.operator.tags
        if self.fades:
            return super().evidence_refusal
        if not tags.positive:
            return "K may be negative, and its sum over keys cancel"
        return None if tags.normalises else "it keeps no sum of K over keys"

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        home = home.to(torch.promote_types(home.dtype, self.form.statistics))
        q = bound.score.as_query(home, bound.score_params)
        mass = total_of(q, self.settled().state, self.features, bound)[..., -1]
        return ratio(mass, definition.paired(bound, bound.coefficients.to(q), q, home))

    def followed_by(self, other: Memory) -> Memory:
        if isinstance(other, Sums) and self.fades != other.fades:
            # tokens of one came with decays that the operator does not declare
            return fading(self).followed_by(fading(other))
        return super().followed_by(other)

    def added(self, other: Self, whole: Self) -> Self:
        return replace(whole, state=whole.state + other.state)

    def taken(self, other: Self, rest: Self) -> Self:
        return replace(rest, state=self.state - other.state)

    def marked(self) -> marks.Marked:
        assert self.total is not None
        return marks.Marked.of(self.count, self.total, [self.state], self.borders)


class FeatureSums(Sums):
    """``Sums`` without a decay."""

    kind: ClassVar[str] = "features"
    roundings: ClassVar[int] = 1
    fades: ClassVar[bool] = False


class DecayedSums(Sums):
    """``Sums`` whose past fades by a rate per token."""

    kind: ClassVar[str] = "decayed"
    roundings: ClassVar[int] = 4
    fades: ClassVar[bool] = True


def fading(memory: Sums) -> Sums:
    """The same sums as a memory whose past may fade. No time has passed in it yet, unless it already does."""
    if memory.fades:
        return memory
    form = memory.form
    none = torch.zeros(form.batch, form.heads, dtype=torch.float64, device=form.device)
    return DecayedSums(memory.operator, form, memory.count, state=memory.state, padding=memory.padding, total=none)


def carried(memory: Sums, state: Tensor, tokens: Tokens) -> Sums:
    """The memory after more tokens, when the state after them is known. Sums whose first decay comes with them fade
    from then on.
    """
    count, padding = memory.count + tokens.length, memory.padding + tokens.padded()
    after = replace(memory, count=count, padding=padding, state=state.to(memory.state))
    if tokens.log_decay is None:
        return after
    after = fading(after)
    assert after.total is not None
    return replace(after, total=after.total + tokens.log_decay.expand(memory.form.batch, -1, -1).sum(-1))


__all__ = [
    "DecayedSums",
    "FeatureSums",
    "Sums",
    "anchored",
    "carried",
    "fading",
    "features_of",
    "least_of",
    "plus",
    "total_of",
    "with_mass",
]

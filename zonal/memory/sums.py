"""FeatureSums and DecayedSums: S = sum phi(k) [v, 1]^T, all of the past of an operator whose kernel is a polynomial in
a dot product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal import device_memory
from zonal.algebra import Operator, definition
from zonal.algebra.operator import Bound
from zonal.errors import ArgumentError
from zonal.features import SymmetricPowers, moments
from zonal.memory import marks
from zonal.memory.base import Form, Memory
from zonal.memory.criterion import ratio
from zonal.memory.marks import Border
from zonal.memory.reading import no_evidence
from zonal.memory.refusals import served_by
from zonal.memory.spans import Part
from zonal.memory.tokens import Tokens, joined


def features_of(operator: Operator, key_dim: int) -> SymmetricPowers:
    """The feature map of an operator that has one."""
    features = served_by(operator, key_dim)
    assert features is not None
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
    recorded = torch.is_grad_enabled() and q.requires_grad
    phi = features(q) if recorded else features.write(q)
    if not features.trivial:
        phi = phi * features.scale(bound.link.monomials(bound.coefficients.to(q)), dim).unsqueeze(1)
    return (phi.reshape(batch, bound.kv_heads, bound.groups * queries, phi.shape[-1]) @ state).view(
        batch, heads, queries, state.shape[-1]
    )


@torch.no_grad()
def least_of(q: Tensor, state: Tensor, features: SymmetricPowers, bound: Bound) -> Tensor:
    """The sum over keys from which on a row of a positive link is known, (B, H, T, 1): below it a tenth or more may be
    rounding. 0 where no terms cancel.

    The sizes of a row's terms sum_a w_a psi_a(q) M_a add up to at most |sqrt w psi(q)| |sqrt w M| (Cauchy and Schwarz),
    of which a sum over features is
    known to some units in the last place: 1e-6 in float32, where 2^-16 of it is asked for. The chunked path's kernel
    for the CPU has the same rule.
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


def _plus(state: Tensor, k: Tensor, v: Tensor, features: SymmetricPowers) -> Tensor:
    """state + sum_s phi(k_s) v_s^T."""
    if k.shape[2] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (state, k, v))):
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
        empty = mass == 0
        return torch.where(empty, 0, y / torch.where(empty, 1, mass))
    if name == "Count":
        return total * torch.where(count > 0, 1 / count.clamp_min(1).to(total.dtype), 0)
    return total


def _start(operator: Operator, form: Form) -> tuple[Tensor, Tensor]:
    size = features_of(operator, form.key_dim).dimension(operator.score.width(form.key_dim))
    width = form.value_dim + (1 if operator.tags.normalises else 0)
    state = f"sums over {size} features for {form.batch} sequences of {form.heads} heads"
    device_memory.require(
        "Memory", state, _state_bytes(operator, form), form.device, "Use fewer features or a smaller batch."
    )
    state = torch.zeros(form.batch, form.heads, size, width, dtype=form.statistics, device=form.device)
    return state, torch.zeros(form.batch, dtype=torch.int64, device=form.device)


def _state_bytes(operator: Operator, form: Form) -> int:
    size = features_of(operator, form.key_dim).dimension(operator.score.width(form.key_dim))
    return form.batch * (
        form.heads * size * (form.value_dim + (1 if operator.tags.normalises else 0)) * form.statistics.itemsize + 8
    )


def _more_padding(padding: Tensor, tokens: Tokens) -> Tensor:
    absent = tokens.padded()
    return padding if absent is None else padding + absent


def _checked_state(state: Tensor, padding: Tensor, operator: Operator, form: Form) -> None:
    size = features_of(operator, form.key_dim).dimension(operator.score.width(form.key_dim))
    expected = (form.batch, form.heads, size, form.value_dim + (1 if operator.tags.normalises else 0))
    if state.shape != expected or state.dtype != form.statistics or padding.shape != (form.batch,):
        raise ValueError("the tensors do not have the shapes of the header")


def _fewer(mine: Tensor, theirs: Tensor) -> Tensor:
    if bool((theirs > mine).any()):
        raise ArgumentError("Memory.subtract: the other memory holds more padding than this one; it is no part of it.")
    return mine - theirs


@dataclass(frozen=True, eq=False, repr=False)
class FeatureSums(Memory):
    """state (B, Hkv, m, P or P + 1) in float32 or better: a plain sum over tokens, so merging is associative and
    commutative.

    padding: (B,) how many of ``count`` tokens were padding. pending: with a ChunkCausal prior, the tokens past the last
    whole chunk.
    """

    kind: ClassVar[str] = "features"
    roundings: ClassVar[int] = 1

    state: Tensor
    padding: Tensor
    pending: Tokens | None = None

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        return cls(operator, form, 0, *_start(operator, form))

    @property
    def real(self) -> Tensor:
        """Tokens that were not padding, (B,)."""
        return self.count - self.padding

    def _sum(self, tokens: Tokens) -> Tensor:
        k, v = with_mass(self.operator.tags.normalises, tokens, self.form.statistics)
        return _plus(self.state, k, v, features_of(self.operator, self.form.key_dim))

    def committed(self) -> "FeatureSums":
        """The memory up to the last whole chunk: what the next query sees."""
        if self.pending is None:
            return self
        absent = self.pending.padded()
        return replace(
            self,
            count=self.count - self.pending.length,
            padding=self.padding if absent is None else self.padding - absent,
            pending=None,
        )

    def settled(self) -> Tensor:
        """The sum over all tokens, pending ones included."""
        return self.state if self.pending is None else self._sum(self.pending)

    def extended(self, tokens: Tokens) -> Memory:
        if tokens.length == 0:
            return self
        if tokens.log_decay is not None:
            return fading(self).extended(tokens)
        count, padding = self.count + tokens.length, _more_padding(self.padding, tokens)
        if self.chunk is None:
            return replace(self, count=count, padding=padding, state=self._sum(tokens))
        tokens = joined(
            self.pending, tokens._replace(k=tokens.k.to(self.form.statistics), v=tokens.v.to(self.form.statistics))
        )
        whole = tokens.length // self.chunk * self.chunk
        state = self._sum(tokens.span(0, whole)) if whole else self.state
        rest = tokens.span(whole, tokens.length).map(torch.clone) if whole < tokens.length else None
        return replace(self, count=count, padding=padding, state=state, pending=rest)

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        dtype = self.form.statistics
        total = total_of(
            q.to(torch.promote_types(q.dtype, dtype)),
            self.settled(),
            features_of(self.operator, self.form.key_dim),
            bound,
        )
        return anchored(total, bound, self.real.view(-1, 1, 1, 1)).to(q.dtype)

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        tags = self.operator.tags
        if not (tags.normalises and tags.positive):
            why = (
                "it keeps no sum of K over keys" if tags.positive else "K may be negative, and its sum over keys cancel"
            )
            raise no_evidence(self.kind, self.operator.name, why)
        home = home.to(torch.promote_types(home.dtype, self.form.statistics))
        q = bound.score.as_query(home, bound.score_params)
        mass = total_of(q, self.settled(), features_of(self.operator, self.form.key_dim), bound)[..., -1]
        return ratio(mass, definition.paired(bound, bound.coefficients.to(q), q, home))

    def followed_by(self, other: Memory) -> Memory:
        if isinstance(other, DecayedSums):
            return fading(self).followed_by(other)
        assert isinstance(other, FeatureSums)
        count, padding = self.count + other.count, self.padding + other.padding
        if self.pending is None:
            return replace(self, count=count, padding=padding, state=self.state + other.state, pending=other.pending)
        if other.chunk is not None and other.count < other.chunk:
            return self if other.pending is None else self.extended(other.pending)
        raise ArgumentError(
            f"Memory.merge: the first memory ends inside a chunk ({self.count} tokens, chunks of {self.chunk}), "
            "which would move the borders of the second. "
            "Absorb the second one's tokens instead."
        )

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, FeatureSums)
        if other.pending is not None:
            raise ArgumentError(
                f"Memory.subtract: the other memory ends inside a chunk ({other.count} tokens, chunks of "
                f"{self.chunk}); only whole chunks can be taken out."
            )
        return replace(
            self,
            count=self.count - other.count,
            padding=_fewer(self.padding, other.padding),
            state=self.state - other.state,
        )

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        return self.folded(kept)

    def preceded(self, n: int) -> Self:
        if self.chunk is not None and n % self.chunk:
            raise ArgumentError(
                f"Memory.stack: {n} tokens of padding would move the borders of chunks of {self.chunk}. Pad the "
                "shorter sequences (key_padding_mask) as they come."
            )
        return replace(self, count=self.count + n, padding=self.padding + n)

    def trimmed(self) -> Self:
        if self.parts or self.chunk is not None:
            return self
        count, padding = unpadded(self.count, self.padding)
        return replace(self, count=count, padding=padding)

    def copied(self) -> Self:
        pending = None if self.pending is None else self.pending.map(torch.clone)
        return replace(self, state=self.state.clone(), padding=self.padding.clone(), pending=pending, parts=())

    def bytes_at(self, length: int) -> int:
        form = self.form
        waiting = 0 if self.chunk is None else length % self.chunk
        token = form.heads * (form.key_dim + form.value_dim) * form.statistics.itemsize
        return _state_bytes(self.operator, form) + form.batch * waiting * token

    def tensors(self) -> dict[str, Tensor]:
        pending = {} if self.pending is None else {f"pending.{name}": x for name, x in self.pending.named().items()}
        return {"state": self.state, "padding": self.padding, **pending}

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        _checked_state(tensors["state"], tensors["padding"], operator, form)
        return cls(operator, form, count, tensors["state"], tensors["padding"], restored_pending(tensors))


def carried(memory: "FeatureSums | DecayedSums", state: Tensor, tokens: Tokens) -> "FeatureSums | DecayedSums":
    """The memory after more tokens, when the state after them is known. Sums that begin to fade are from then on a
    memory that decays.
    """
    common = {
        "count": memory.count + tokens.length,
        "state": state.to(memory.state),
        "padding": _more_padding(memory.padding, tokens),
    }
    if tokens.log_decay is None:
        return replace(memory, **common)
    total = tokens.log_decay.expand(memory.form.batch, -1, -1).sum(-1)
    if isinstance(memory, DecayedSums):
        return replace(memory, **common, total=memory.total + total)
    return DecayedSums(memory.operator, memory.form, **common, total=total)


def restored_pending(tensors: dict[str, Tensor]) -> Tokens | None:
    """The pending tokens among saved tensors."""
    named = {name.removeprefix("pending."): x for name, x in tensors.items() if name.startswith("pending.")}
    return Tokens(**named) if named else None


def fading(memory: FeatureSums) -> "DecayedSums":
    """The same sums as a memory that decays, before any time has passed."""
    return DecayedSums(memory.operator, memory.form, memory.count, memory.state, memory.padding, _no_decay(memory.form))


def unpadded(count: int, padding: Tensor) -> tuple[int, Tensor]:
    """count and padding without what all rows have of it."""
    spare = int(padding.min())
    return count - spare, padding - spare


def _no_decay(form: Form) -> Tensor:
    return torch.zeros(form.batch, form.heads, dtype=torch.float64, device=form.device)


@dataclass(frozen=True, eq=False, repr=False)
class DecayedSums(Memory):
    """S_t = e^{g_t} S_{t-1} + phi(k_t) [v_t, 1]^T with log decays g <= 0 a token, and their total.

    merge(a, b) = e^{total of b} a + b: associative, not commutative. subtract takes out a beginning: subtract(merge(a,
    b), a) = b; anything else is refused, which ``borders`` tell.
    """

    kind: ClassVar[str] = "decayed"
    roundings: ClassVar[int] = 4

    state: Tensor
    padding: Tensor
    total: Tensor  # (B, Hkv) float64
    borders: tuple[Border, ...] = ()

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        return cls(operator, form, 0, *_start(operator, form), _no_decay(form))

    @property
    def real(self) -> Tensor:
        """Tokens that were not padding, (B,)."""
        return self.count - self.padding

    def extended(self, tokens: Tokens) -> Memory:
        if tokens.length == 0:
            return self
        if self.chunk is not None:
            raise ArgumentError(
                "Memory.absorb: a decay together with whole chunks is kept as keys and values; make the memory with "
                "kind='keys'."
            )
        k, v = with_mass(self.operator.tags.normalises, tokens, self.form.statistics)
        earlier = self
        if tokens.log_decay is not None:
            v = v * (tokens.log_decay.flip(-1).cumsum(-1).flip(-1) - tokens.log_decay).exp().to(v).unsqueeze(-1)
            earlier = self.faded(tokens.log_decay)
        state = _plus(earlier.state, k, v, features_of(self.operator, self.form.key_dim))
        return replace(
            earlier, count=self.count + tokens.length, padding=_more_padding(self.padding, tokens), state=state
        )

    def faded(self, log_decay: Tensor) -> "DecayedSums":
        """The memory after time passes by log decays (B or 1, Hkv, n) without a new token."""
        whole = log_decay.sum(-1)
        return replace(self, state=self.state * whole.exp().to(self.state)[..., None, None], total=self.total + whole)

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        dtype = self.form.statistics
        total = total_of(
            q.to(torch.promote_types(q.dtype, dtype)), self.state, features_of(self.operator, self.form.key_dim), bound
        )
        return anchored(total, bound, self.real.view(-1, 1, 1, 1)).to(q.dtype)

    def followed_by(self, other: Memory) -> Memory:
        other = fading(other) if isinstance(other, FeatureSums) else other
        assert isinstance(other, DecayedSums)
        faded = self.state * other.total.exp().to(self.state)[..., None, None]
        return replace(
            self, count=self.count + other.count, padding=self.padding + other.padding, state=faded + other.state,
            total=self.total + other.total, borders=marks.after_merge(self._marked(), other._marked()),
        )  # fmt: skip

    def _marked(self) -> marks.Marked:
        return marks.Marked.of(self.count, self.total, [self.state], self.borders)

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, DecayedSums)
        kept, later = marks.after_subtract(self._marked(), other._marked()), self.total - other.total
        state = self.state - other.state * later.exp().to(self.state)[..., None, None]
        return replace(
            self,
            count=self.count - other.count,
            padding=_fewer(self.padding, other.padding),
            state=state,
            total=later,
            borders=kept,
        )

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        return self.folded(kept)

    def preceded(self, n: int) -> Self:
        return replace(self, count=self.count + n, padding=self.padding + n, borders=marks.moved(self.borders, n))

    def trimmed(self) -> Self:
        if self.parts or self.chunk is not None:
            return self
        count, padding = unpadded(self.count, self.padding)
        return replace(self, count=count, padding=padding, borders=marks.moved(self.borders, count - self.count))

    def copied(self) -> Self:
        own = marks.copied(self.borders)
        return replace(
            self,
            state=self.state.clone(),
            padding=self.padding.clone(),
            total=self.total.clone(),
            borders=own,
            parts=(),
        )

    def bytes_at(self, length: int) -> int:
        return _state_bytes(self.operator, self.form) + self.form.batch * self.form.heads * 8 * (
            1 + 3 * len(self.borders)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"state": self.state, "padding": self.padding, "total": self.total} | marks.named(self.borders)

    def plain(self) -> dict[str, int]:
        return marks.places(self.borders)

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        _checked_state(tensors["state"], tensors["padding"], operator, form)
        if tensors["total"].shape != (form.batch, form.heads):
            raise ValueError("the tensors do not have the shapes of the header")
        return cls(
            operator,
            form,
            count,
            tensors["state"],
            tensors["padding"],
            tensors["total"],
            marks.restored(tensors, plain),
        )


__all__ = [
    "DecayedSums",
    "FeatureSums",
    "anchored",
    "carried",
    "features_of",
    "least_of",
    "restored_pending",
    "total_of",
    "unpadded",
    "with_mass",
]

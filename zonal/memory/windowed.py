"""WindowedSums: the keys and values of a window, and sums over features of all keys before it."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal import device_memory
from zonal.algebra import Operator
from zonal.algebra.anchor import State
from zonal.algebra.bound import Bound, Far
from zonal.algebra.declaration import require_values
from zonal.errors import ArgumentError
from zonal.memory.base import Form, Memory
from zonal.memory.keys import fit, key_dtype, token_bytes, zero_tokens
from zonal.memory.sums import features_of, plus, total_of, with_mass
from zonal.memory.tokens import Tokens, joined
from zonal.store import under

_LEAST = -80.0
"""Sums of the far kernel below e^-80 are not scaled up to one, which would overflow float32."""
_BIASED = 60.0
"""The sums hold e^bias in float32, from e^-87 to e^88, times features and counts."""


@dataclass(frozen=True, eq=False, repr=False)
class WindowedSums(Memory):
    """What an operator with ``LocalGlobal`` needs of its past.

    tokens: the last w real ones of each sequence, with prepared keys as they came; sequences with fewer have padding
    before them. state: (B, Hkv, m, P + 1) float32 or better, the sums S = sum phi(k) [v, 1]^T over all earlier ones.
    padding: (B,) how many of ``count`` tokens were padding. They are passed over. opening: where the operator keeps the
    first tokens, those of them that have left the window, real ones first; else None.

    merge(a, b) is the memory of the tokens of a and then of b, and is associative. subtract takes out a beginning,
    subtract(merge(a, b), a) = b, and refuses what the kept tokens show to be the middle or the end. With an opening it
    works only where what is left fits into the window.
    """

    kind: ClassVar[str] = "windowed"
    roundings: ClassVar[int] = 1

    tokens: Tokens
    state: Tensor
    padding: Tensor
    opening: Tokens | None = None

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        shape, dtype = _state_shape(operator, form), form.statistics
        size = torch.Size(shape).numel() * dtype.itemsize
        what = f"sums over {shape[2]} features for {form.batch} sequences of {form.heads} heads"
        device_memory.require("Memory", what, size, form.device, "Use fewer features or a smaller batch.")
        state = torch.zeros(shape, dtype=dtype, device=form.device)
        padding = torch.zeros(form.batch, dtype=torch.int64, device=form.device)
        first = _far(operator, form).first
        absent = torch.zeros(form.batch, first, dtype=torch.bool, device=form.device)
        opening = zero_tokens(operator, form, first)._replace(mask=absent) if first else None
        return cls(operator, form, 0, zero_tokens(operator, form, 0), state, padding, opening)

    @property
    def has_read(self) -> Tensor:
        return self.padding < self.count

    @property
    def reach(self) -> int:
        """How many of the last tokens are kept one by one."""
        return self.operator.anchor.window

    def extended(self, tokens: Tokens) -> "WindowedSums":
        if tokens.length == 0:
            return self
        require_summed("Memory.absorb", tokens)
        held = packed(self.followed(tokens))[0]
        return self.after(tokens, held, *self.left(held))

    def followed(self, tokens: Tokens) -> Tokens:
        """The kept tokens and then new ones, in the types of this memory."""
        k, v = tokens.k.to(key_dtype(self.operator, self.form)), tokens.v.to(self.form.dtype)
        return joined(self.tokens, tokens._replace(k=k, v=v))

    def after(self, tokens: Tokens, held: Tokens, opening: Tokens | None, state: Tensor) -> "WindowedSums":
        """The memory after more tokens. held: the kept ones and these, ``packed``; opening, state: what is kept of all
        but the last w of them."""
        count, padding = self.count + tokens.length, self.padding + tokens.padded()
        # before any tokens, those held are the caller's own tensors
        kept, state = _last(held, self.reach, copy=self.tokens.length == 0), state.to(self.state)
        return replace(self, count=count, tokens=kept, state=state, padding=padding, opening=opening)

    def left(self, held: Tokens) -> tuple[Tokens | None, Tensor]:
        """The opening and the sums when all but the last w of packed tokens have left the window."""
        leaving = held.span(0, max(held.length - self.reach, 0))
        if self.opening is None or leaving.length == 0 or self.opened:
            return self.opening, self.with_terms(leaving)
        found = opened(self.opening, leaving, self.opening.length)
        return found.opening, self.with_terms(found.rest)

    @property
    def opened(self) -> bool:
        """Whether the opening is known to be complete. A traced graph has no answers that depend on values."""
        mask = None if self.opening is None else self.opening.mask
        return mask is not None and not torch.compiler.is_compiling() and bool(mask.all())

    def with_terms(self, tokens: Tokens) -> Tensor:
        """The sums with the terms of tokens that have left the window."""
        if tokens.length == 0:
            return self.state
        k, v = with_mass(True, tokens, self.form.statistics)
        keys = _far(self.operator, self.form).keys(k)
        return plus(self.state, keys, v, features_of(self.operator, self.form.key_dim))

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        wide = q.to(torch.promote_types(q.dtype, self.form.statistics))
        if self.tokens.length == 0:
            return q.new_zeros(*q.shape[:3], self.form.value_dim)
        near = met(wide, joined(self.opening, self.tokens))
        far, features = far_of(bound), features_of(self.operator, self.form.key_dim)
        asked = far.queries(wide)
        return merged(near, total_of(asked, self.state, features, far.bound), far.weight).to(q.dtype)

    # --- verbs of two memories ----------------------------------------------------------------------------------------

    def followed_by(self, other: Memory) -> Memory:
        assert isinstance(other, WindowedSums)
        between = self.tokens if other.opening is None else joined(self.tokens, other.opening)
        held = packed(joined(between, other.tokens))[0]
        opening, state = self.left(held)
        count = self.count + other.count
        return replace(
            self, count=count, tokens=_last(held, min(self.reach, count)), state=state + other.state,
            padding=self.padding + other.padding, opening=opening,
        )  # fmt: skip

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, WindowedSums)
        count, padding = self.count - other.count, self.padding - other.padding
        if bool((padding < 0).any()):
            raise ArgumentError(
                "Memory.subtract: the other memory holds more padding than this one; it is no part of it."
            )
        if other.count == 0:
            return self
        if self._keeps_end_of(other, count - padding):
            raise ArgumentError(
                "Memory.subtract: the other memory is the middle or the end of this one, and from sums over a window's "
                "past only the beginning can be taken out. "
                "Keep this memory from before the merge, or merge with a name (span=…) and forget it."
            )
        real, kept = count - padding, self.tokens.span(max(self.tokens.length - count, 0), self.tokens.length)
        place = torch.arange(kept.length, 0, -1, device=real.device)
        if bool((real < kept.length).any()):  # of these the first are the other's
            theirs = place > real[:, None]
            kept = kept._replace(mask=~theirs if kept.mask is None else kept.mask & ~theirs)
        # with no more tokens than the window has, the sums are those of none
        some = real > self.reach
        if self.opening is not None and bool(some.any()):
            raise ArgumentError(
                f"Memory.subtract: operator {self.operator.name!r} keeps the first tokens of a sequence, and those of "
                "what is left are in the sums. Name spans as they come, and forget them."
            )
        state = torch.where(some[:, None, None, None], self.state - other.with_terms(other.tokens), 0)
        blank = self.start(self.operator, self.form)
        return replace(blank, count=count, tokens=kept.map(torch.clone), state=state, padding=padding)

    def _keeps_end_of(self, other: "WindowedSums", left: Tensor) -> bool:
        """Whether the other's last tokens, as far back as both memories keep them, end among the last ``left`` (B,) of
        this one, in any sequence.
        """
        mine, theirs = self.tokens.with_mask(), other.tokens.with_mask()
        assert mine.mask is not None
        assert theirs.mask is not None
        place = torch.arange(mine.length, 0, -1, device=left.device)
        last = theirs.span(theirs.length - 1, theirs.length)
        ends = mine.mask & mine.alike(last) & (place <= left[:, None])
        for end in ends.any(0).nonzero().flatten().tolist():
            length = min(end + 1, theirs.length)
            same = mine.span(end + 1 - length, end + 1).alike(theirs.span(theirs.length - length, theirs.length))
            # where the other keeps fewer tokens it has no more
            same = same | ~theirs.mask[:, theirs.length - length :]
            if bool((ends[:, end] & same.all(1)).any()):
                return True
        return False

    # --- rows, copies and files ---------------------------------------------------------------------------------------

    def preceded(self, n: int) -> Self:
        count = self.count + n
        tokens = self.tokens.preceded(max(min(count, self.reach) - self.tokens.length, 0))
        return self if n == 0 else replace(self, count=count, tokens=tokens, padding=self.padding + n)

    def trimmed(self) -> Self:
        if self.parts:
            return self
        spare, held = int(self.padding.min()), self.tokens
        if held.mask is not None:
            held = held.span(int((~held.mask).sum(-1).min()), held.length)
        return replace(self, count=self.count - spare, tokens=held.unmasked(), padding=self.padding - spare)

    def bytes_at(self, length: int) -> int:
        token = token_bytes(self.operator, self.form, self.tokens)
        constant = self.state.nbytes + self.padding.nbytes + (0 if self.opening is None else self.opening.nbytes)
        return constant + self.form.batch * min(length, self.reach) * token

    def tensors(self) -> dict[str, Tensor]:
        opening = {} if self.opening is None else self.opening.named()
        opening = {f"opening.{name}": x for name, x in opening.items()}
        return {**self.tokens.named(), "state": self.state, "padding": self.padding, **opening}

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        first = under(tensors, "opening.")
        held = Tokens(**{name: x for name, x in tensors.items() if name in ("k", "v", "mask", "key_bias")})
        opening, state, padding = Tokens(**first) if first else None, tensors["state"], tensors["padding"]
        fits = tuple(state.shape) == _state_shape(operator, form) and tuple(padding.shape) == (form.batch,)
        fits = fits and padding.dtype == torch.int64 and fit(held, operator, form)
        if opening is not None:
            fits = fits and fit(opening, operator, form) and opening.mask is not None and opening.log_decay is None
        if not fits:
            raise ValueError("the tensors do not have the shapes of the header")
        reach, kept = operator.anchor.window, 0 if opening is None else opening.length
        if held.length > reach or kept != _far(operator, form).first:
            raise ValueError(f"a window of {reach} tokens is declared, and {held.length} and {kept} are there")
        return cls(operator, form, count, held, state, padding, opening)


def _state_shape(operator: Operator, form: Form) -> tuple[int, int, int, int]:
    width = _far(operator, form).width(operator.score.width(form.key_dim))
    return form.batch, form.heads, features_of(operator, form.key_dim).dimension(width), form.value_dim + 1


def _far(operator: Operator, form: Form) -> Far:
    """The far kernel with numbers for key heads."""
    return far_of(operator.bind(form.heads, form.heads))


def far_of(bound: Bound) -> Far:
    """The far kernel of an operator that has one."""
    assert bound.far is not None
    return bound.far


def require_summed(call: str, tokens: Tokens) -> None:
    """Raise ArgumentError for biases whose exponential the sums do not hold. -inf hides a key, and padding may hold
    anything.
    """
    if tokens.key_bias is None:
        return
    bias = tokens.key_bias if tokens.mask is None else tokens.key_bias.masked_fill(~tokens.mask[:, None], 0)
    require_values(
        ((bias.abs() <= _BIASED) | torch.isneginf(bias)).all(),
        f"{call}: sums over the keys before the window hold exp(key_bias), so that key_bias must lie in "
        f"[-{_BIASED:g}, {_BIASED:g}] or be -inf, received other values. Use -inf to hide a key, subtract a constant "
        "from all biases of a sequence, which changes no output, or use path='dense'.",
    )


def packed(tokens: Tokens) -> tuple[Tokens, Tensor | None]:
    """Tokens with the padding of each sequence before its real ones, and which token stands at each place, (B, n);
    None = each where it was."""
    if tokens.mask is None:
        return tokens, None
    order = torch.argsort(tokens.mask.to(torch.uint8), dim=1, stable=True)
    return tokens.map(lambda x: taken(x, order)), order


class Leaving(NamedTuple):
    """Tokens that leave a window. opening: the first real ones of a sequence, those that had left it before among
    them. place: (B, n) of each of these among the leaving ones, below 0 for earlier ones. rest: the leaving ones, with
    those of the opening as padding.
    """

    opening: Tokens
    place: Tensor
    rest: Tokens


def opened(opening: Tokens | None, leaving: Tokens, first: int) -> Leaving:
    """The first tokens of a sequence, as many as ``first``, of an earlier opening and tokens that leave the window."""
    before = 0 if opening is None else opening.length
    # where nothing is padding, later ones are not among the first
    some = leaving if leaving.mask is not None else leaving.span(0, min(first, leaving.length))
    both = joined(opening, some.with_mask())
    assert both.mask is not None
    order = torch.argsort((~both.mask).to(torch.uint8), dim=1, stable=True)[:, :first]
    left = (both.mask & (both.mask.cumsum(1) > first))[:, before:]
    rest = F.pad(left, (0, leaving.length - some.length), value=True)
    return Leaving(both.map(lambda x: taken(x, order)), order - before, leaving._replace(mask=rest))


def taken(x: Tensor, index: Tensor) -> Tensor:
    """Tokens ``index`` (B, n) of each sequence: x (B, S) or (B, H, S, …)."""
    if x.ndim == 2:
        return x.gather(1, index)
    place = index.view(index.shape[0], 1, -1, *(1,) * (x.ndim - 3))
    return x.gather(2, place.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _last(held: Tokens, count: int, copy: bool = False) -> Tokens:
    """The last tokens, without a mask where all of them are real. copy: never as a view of those held."""
    gone = max(held.length - count, 0)
    held = held.span(gone, held.length)
    if copy or gone > count:  # a view would keep all that has left the window
        held = held.map(torch.clone)
    return held if torch.compiler.is_compiling() else held.unmasked()


def met(q: Tensor, held: Tokens, seen: Tensor | None = None) -> State:
    """Sums over kept tokens: prepared q (B, H, T, D). seen: (B, T, n) which of them each query sees, None = all."""
    held = held.silent()
    batch, heads, queries, dim = q.shape
    score = (q.reshape(batch, held.k.shape[1], -1, dim) @ held.k.to(q).mT).view(batch, heads, queries, -1)
    if held.key_bias is not None:
        score = score + held.key_bias.to(score).repeat_interleave(heads // held.k.shape[1], 1).unsqueeze(2)
    if held.mask is not None:
        seen = held.mask[:, None] if seen is None else seen & held.mask[:, None]
    if seen is not None:
        score = score.masked_fill(~seen[:, None], float("-inf"))
    by_key_head = score.view(batch, held.k.shape[1], -1, score.shape[-1])
    return State(*(x.view(batch, heads, queries, -1) for x in near_sums(by_key_head, held.v.to(q))))


def near_sums(score: Tensor, v: Tensor) -> State:
    """Sums of exp(score) v and exp(score) over the keys of a window: score (…, T, S), -inf = not seen, v (…, S, P)."""
    top = score.detach().amax(-1, keepdim=True)
    part = (score - top.masked_fill(top == float("-inf"), 0)).exp()
    return State(part @ v, part.sum(-1, keepdim=True), top)


def merged(near: State, beyond: Tensor, weight: Tensor) -> Tensor:
    """y (B, H, T, P) of the sums of a window and those before it, ``beyond`` (B, H, T, P + 1) = sum phi(q) . phi(k)
    [v, 1], whose factor is ``weight`` (H or 1,).

    Both are multiplied by e^-M, with M the larger one of the window's largest score and the logarithm of the other sum.
    A sum before the window that is not positive counts as none. Empty rows give 0.
    """
    beyond = beyond * weight.to(beyond).view(1, -1, 1, 1)
    mass = beyond[..., -1:]
    some = mass > 0
    level = torch.where(some, mass.detach(), 1).log().clamp_min(_LEAST)
    top = torch.where(some, torch.maximum(near.top, level), near.top)
    top = top.masked_fill(top == float("-inf"), 0)
    left, scale = (near.top - top).exp(), torch.where(some, -top, float("-inf")).exp()
    total, whole = left * near.total + scale * beyond[..., :-1], left * near.mass + scale * mass
    return torch.where(whole > 0, total / torch.where(whole > 0, whole, 1), whole)


__all__ = [
    "Leaving",
    "WindowedSums",
    "far_of",
    "merged",
    "met",
    "near_sums",
    "opened",
    "packed",
    "require_summed",
    "taken",
]

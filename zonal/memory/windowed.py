"""WindowedSums: the keys and values of a window, and sums over features of all keys before it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from zonal import device_memory
from zonal.algebra import Operator
from zonal.algebra.anchor import State
from zonal.algebra.bound import Bound, Far
from zonal.errors import ArgumentError
from zonal.memory.base import Form, Memory
from zonal.memory.keys import key_dtype
from zonal.memory.spans import Part
from zonal.memory.sums import features_of, least_of, plus, total_of, with_mass
from zonal.memory.tokens import Tokens, joined

_LEAST = -80.0
"""Sums of the far kernel below e^-80 are not scaled up to one, which would overflow float32."""


@dataclass(frozen=True, eq=False, repr=False)
class WindowedSums(Memory):
    """What an operator with ``LocalGlobal`` needs of its past.

    tokens: the last w real ones of each sequence, with prepared keys as they came; sequences with fewer have padding
    before them. state: (B, Hkv, m, P + 1) float32 or better, the sums S = sum phi(k) [v, 1]^T over all earlier ones.
    padding: (B,) how many of ``count`` tokens were padding. They are passed over.

    merge(a, b) is the memory of the tokens of a and then of b, and is associative. subtract takes out a beginning,
    subtract(merge(a, b), a) = b.
    """

    kind: ClassVar[str] = "windowed"
    roundings: ClassVar[int] = 1

    tokens: Tokens
    state: Tensor
    padding: Tensor

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        shape, dtype = _state_shape(operator, form), form.statistics
        size = torch.Size(shape).numel() * dtype.itemsize
        what = f"sums over {shape[2]} features for {form.batch} sequences of {form.heads} heads"
        device_memory.require("Memory", what, size, form.device, "Use fewer features or a smaller batch.")
        width = operator.score.width(form.key_dim)
        k = torch.empty(form.batch, form.heads, 0, width, dtype=key_dtype(operator, form), device=form.device)
        v = torch.empty(form.batch, form.heads, 0, form.value_dim, dtype=form.dtype, device=form.device)
        state = torch.zeros(shape, dtype=dtype, device=form.device)
        return cls(operator, form, 0, Tokens(k, v), state, torch.zeros_like(state[:, 0, 0, 0], dtype=torch.int64))

    @property
    def reach(self) -> int:
        """How many of the last tokens are kept one by one."""
        return self.operator.anchor.window

    def extended(self, tokens: Tokens) -> "WindowedSums":
        if tokens.length == 0:
            return self
        held = packed(self.followed(tokens))[0]
        return self.after(tokens, held, self.with_terms(held.span(0, max(held.length - self.reach, 0))))

    def followed(self, tokens: Tokens) -> Tokens:
        """The kept tokens and then new ones, in the types of this memory."""
        k, v = tokens.k.to(key_dtype(self.operator, self.form)), tokens.v.to(self.form.dtype)
        return joined(self.tokens, tokens._replace(k=k, v=v))

    def after(self, tokens: Tokens, held: Tokens, state: Tensor) -> "WindowedSums":
        """The memory after more tokens. held: the kept ones and these, ``packed``; state: the sums over all but the
        last w of them."""
        absent = tokens.padded()
        padding = self.padding if absent is None else self.padding + absent
        kept, state = _last(held, self.reach), state.to(self.state)
        return replace(self, count=self.count + tokens.length, tokens=kept, state=state, padding=padding)

    def with_terms(self, tokens: Tokens) -> Tensor:
        """The sums with the terms of tokens that have left the window."""
        if tokens.length == 0:
            return self.state
        far = far_of(self.operator.bind(self.form.heads, self.form.heads))
        k, v = with_mass(True, tokens, self.form.statistics)
        return plus(self.state, far.keys(k), v, features_of(self.operator, self.form.key_dim))

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        wide = q.to(torch.promote_types(q.dtype, self.form.statistics))
        batch, heads, queries, _ = q.shape
        held = self.tokens.silent()
        if held.length == 0:
            return q.new_zeros(batch, heads, queries, self.form.value_dim)
        rows = wide.reshape(batch, bound.kv_heads, -1, wide.shape[-1])
        score = rows @ held.k.to(wide).mT
        if held.key_bias is not None:
            score = score + held.key_bias.to(score).unsqueeze(2)
        if held.mask is not None:
            score = score.masked_fill(~held.mask[:, None, None], float("-inf"))
        near = State(*(x.view(batch, heads, queries, -1) for x in near_sums(score, held.v.to(wide))))
        far, features = far_of(bound), features_of(self.operator, self.form.key_dim)
        asked = far.queries(wide)
        beyond = total_of(asked, self.state, features, far.bound)
        least = least_of(asked, self.state, features, far.bound)
        return merged(near, beyond, far.weight, least).to(q.dtype)

    # --- verbs of two memories ----------------------------------------------------------------------------------------

    def followed_by(self, other: Memory) -> Memory:
        assert isinstance(other, WindowedSums)
        held = packed(joined(self.tokens, other.tokens))[0]
        state = self.with_terms(held.span(0, max(held.length - self.reach, 0))) + other.state
        return replace(
            self, count=self.count + other.count, tokens=_last(held, self.reach), state=state,
            padding=self.padding + other.padding,
        )  # fmt: skip

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, WindowedSums)
        count, padding = self.count - other.count, self.padding - other.padding
        if bool((padding < 0).any()):
            raise ArgumentError(
                "Memory.subtract: the other memory holds more padding than this one; it is no part of it."
            )
        real, kept = count - padding, self.tokens.span(max(self.tokens.length - count, 0), self.tokens.length)
        place = torch.arange(kept.length, 0, -1, device=real.device)
        if bool((real < kept.length).any()):  # of these the first are the other's
            theirs = place > real[:, None]
            kept = kept._replace(mask=~theirs if kept.mask is None else kept.mask & ~theirs)
        # with no more tokens than the window has, the sums are those of none
        some = (real > self.reach)[:, None, None, None]
        state = torch.where(some, self.state - other.with_terms(other.tokens), 0)
        return replace(self, count=count, tokens=kept.map(torch.clone), state=state, padding=padding)

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        return self.folded(kept)

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
        return replace(self, count=self.count - spare, tokens=_unmasked(held), padding=self.padding - spare)

    def copied(self) -> Self:
        tokens = self.tokens.map(torch.clone)
        return replace(self, tokens=tokens, state=self.state.clone(), padding=self.padding.clone(), parts=())

    def bytes_at(self, length: int) -> int:
        form = self.form
        width = self.operator.score.width(form.key_dim) * key_dtype(self.operator, form).itemsize
        token = form.heads * (width + form.value_dim * form.dtype.itemsize)
        token += 0 if self.tokens.mask is None else 1
        token += 0 if self.tokens.key_bias is None else form.heads * self.tokens.key_bias.element_size()
        return self.state.nbytes + self.padding.nbytes + form.batch * min(length, self.reach) * token

    def tensors(self) -> dict[str, Tensor]:
        return {**self.tokens.named(), "state": self.state, "padding": self.padding}

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        held = Tokens(**{name: x for name, x in tensors.items() if name not in ("state", "padding")})
        n, state, padding = held.length, tensors["state"], tensors["padding"]
        by_head, dtype = (form.batch, form.heads, n), key_dtype(operator, form)
        width = operator.score.width(form.key_dim)
        expected = ((*by_head, width), (*by_head, form.value_dim), (form.batch, n), by_head, by_head)
        fits = all(x is None or tuple(x.shape) == shape for x, shape in zip(held, expected, strict=True))
        fits = fits and tuple(state.shape) == _state_shape(operator, form) and tuple(padding.shape) == (form.batch,)
        if not fits or (held.k.dtype, padding.dtype) != (dtype, torch.int64):
            raise ValueError("the tensors do not have the shapes of the header")
        if n > operator.anchor.window or held.log_decay is not None:
            raise ValueError(f"a window of {operator.anchor.window} tokens is declared and {n} are there")
        return cls(operator, form, count, held, state, padding)


def _state_shape(operator: Operator, form: Form) -> tuple[int, int, int, int]:
    far = far_of(operator.bind(form.heads, form.heads))
    size = features_of(operator, form.key_dim).dimension(far.width(operator.score.width(form.key_dim)))
    return form.batch, form.heads, size, form.value_dim + 1


def far_of(bound: Bound) -> Far:
    """The far kernel of an operator that has one."""
    assert bound.far is not None
    return bound.far


def packed(tokens: Tokens) -> tuple[Tokens, Tensor | None]:
    """Tokens with the padding of each sequence before its real ones, and which token stands at each place, (B, n);
    None = each where it was."""
    if tokens.mask is None:
        return tokens, None
    order = torch.argsort(tokens.mask.to(torch.uint8), dim=1, stable=True)
    return tokens.map(lambda x: taken(x, order)), order


def taken(x: Tensor, index: Tensor) -> Tensor:
    """Tokens ``index`` (B, n) of each sequence: x (B, S) or (B, H, S, …)."""
    if x.ndim == 2:
        return x.gather(1, index)
    place = index.view(index.shape[0], 1, -1, *(1,) * (x.ndim - 3))
    return x.gather(2, place.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _last(held: Tokens, count: int) -> Tokens:
    """The last tokens, without a mask where all of them are real."""
    gone = held.length - count
    if gone > 0:
        held = held.span(gone, held.length)
        if gone > count:  # a view would keep all that has left the window
            held = held.map(torch.clone)
    return held if torch.compiler.is_compiling() else _unmasked(held)


def _unmasked(held: Tokens) -> Tokens:
    return held._replace(mask=None) if held.mask is not None and bool(held.mask.all()) else held


def near_sums(score: Tensor, v: Tensor) -> State:
    """Sums of exp(score) v and exp(score) over the keys of a window: score (…, T, S), -inf = not seen, v (…, S, P)."""
    top = score.detach().amax(-1, keepdim=True)
    part = (score - top.masked_fill(top == float("-inf"), 0)).exp()
    return State(part @ v, part.sum(-1, keepdim=True), top)


def merged(near: State, beyond: Tensor, weight: Tensor, least: Tensor | None = None) -> Tensor:
    """y (B, H, T, P) of the sums of a window and those before it, ``beyond`` (B, H, T, P + 1) = sum phi(q) . phi(k)
    [v, 1], whose factor is ``weight`` (H or 1,).

    Both are multiplied by e^-M, with M the larger one of the window's largest score and the logarithm of the other sum.
    A sum before the window that is not positive counts as none. least: the smallest such sum that is trusted
    (``least_of``). A row whose whole sum is less has cancelled to rounding and is NaN. Empty rows give 0.
    """
    beyond = beyond * weight.to(beyond).view(1, -1, 1, 1)
    mass = beyond[..., -1:]
    some = mass > 0
    level = torch.where(some, mass.detach(), 1).log().clamp_min(_LEAST)
    top = torch.where(some, torch.maximum(near.top, level), near.top)
    top = top.masked_fill(top == float("-inf"), 0)
    left, scale = (near.top - top).exp(), torch.where(some, -top, float("-inf")).exp()
    total, whole = left * near.total + scale * beyond[..., :-1], left * near.mass + scale * mass
    if least is not None:
        whole = whole.masked_fill(whole < scale * least * weight.to(beyond).view(1, -1, 1, 1), float("nan"))
    return torch.where(whole > 0, total / torch.where(whole > 0, whole, 1), whole)


__all__ = ["WindowedSums", "far_of", "merged", "near_sums", "packed", "taken"]

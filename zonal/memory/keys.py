"""KeyValues: all keys and values, for any operator. Grows with the tokens; a window keeps it short."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra import Operator, definition
from zonal.algebra.anchor import Ridge
from zonal.algebra.bound import Bound, expanded
from zonal.algebra.primal import factorised
from zonal.algebra.prior import ALiBi, Intervals, Visibility, Window, visibility
from zonal.algebra.score.base import shared_product
from zonal.errors import ArgumentError
from zonal.memory.base import Form, Memory
from zonal.memory.criterion import ratio
from zonal.memory.inverse import with_ridge
from zonal.memory.ridge import anchor_of
from zonal.memory.rows import concatenated
from zonal.memory.spans import Part
from zonal.memory.tokens import Tokens, joined
from zonal.tracing import recorded

_FIRST_ROOM = 64
_TAKING = threading.Lock()


class _Buffer:
    """Room for tokens that several memories may share: each sees its own span, and only the newest of them appends.

    What is written never changes, so a memory stays a value although appending costs no copy.
    """

    def __init__(self, room: Tokens, used: int) -> None:
        self.room = room
        self.used = used

    def taken(self, start: int, stop: int) -> bool:
        """Whether the room from ``start`` to ``stop`` now belongs to the caller. It does once: threads may append to
        one memory at the same time.
        """
        with _TAKING:
            free = self.used == start and stop <= self.room.length
            if free:
                self.used = stop
        return free


@dataclass(frozen=True, eq=False, repr=False)
class KeyValues(Memory):
    """Prepared keys and values as they came, with the padding mask, log decays and key biases where there are any.

    Held tokens are [begin, end) of the buffer: with a Window prior only those that a later query can still see.
    ahead: (B,) how many tokens of padding ``stack`` has put before the first.
    """

    kind: ClassVar[str] = "keys"
    roundings: ClassVar[int] = 0
    by_rows: ClassVar[bool] = True

    buffer: _Buffer
    begin: int
    end: int
    ahead: Tensor

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        return cls(operator, form, 0, _Buffer(zero_tokens(operator, form, 0), 0), 0, 0, _none_ahead(form))

    @property
    def tokens(self) -> Tokens:
        """What is held, as views."""
        return self.buffer.room.span(self.begin, self.end)

    @property
    def has_read(self) -> Tensor:
        held = self.tokens
        if held.mask is None or held.length < self.count:
            return torch.full((self.form.batch,), self.count > 0, dtype=torch.bool, device=self.form.device)
        return held.mask.any(1)

    @property
    def biased(self) -> bool:
        """Whether any key has a decay or a bias."""
        return self.buffer.room.log_decay is not None or self.buffer.room.key_bias is not None

    @property
    def reach(self) -> int | None:
        """How many of the last tokens can still be seen, or None for all. One more than a window's left: a read stands
        at the last of them.
        """
        window = next((p for p in self.operator.prior if isinstance(p, Window)), None)
        return None if window is None or self.chunk is not None else window.left + 1

    def extended(self, tokens: Tokens) -> Memory:
        if tokens.length == 0:
            return self
        tokens = tokens._replace(k=tokens.k.to(key_dtype(self.operator, self.form)), v=tokens.v.to(self.form.dtype))
        if tokens.key_bias is not None:  # whatever type the first had, later ones keep their digits
            tokens = tokens._replace(key_bias=tokens.key_bias.to(self.form.statistics))
        if tokens.log_decay is not None and tokens.log_decay.shape[0] != self.form.batch:
            tokens = tokens._replace(log_decay=tokens.log_decay.expand(self.form.batch, -1, -1))
        tokens = tokens.completed(self.buffer.room)
        buffer, end = self.buffer, self.end + tokens.length
        begin = self.begin if self.reach is None else max(self.begin, end - self.reach)
        # room in advance would be written to, and bound the length
        if recorded((*buffer.room, *tokens)) or torch_func.forward() or torch.compiler.is_compiling():
            held = joined(self.tokens, tokens.map(torch.clone) if self.begin == self.end else tokens)
            buffer, begin, end = _Buffer(held, held.length), begin - self.begin, held.length
            return replace(self, count=self.count + tokens.length, buffer=buffer, begin=begin, end=end)
        alike = all((a is None) == (b is None) for a, b in zip(buffer.room, tokens, strict=True))
        if not (alike and buffer.taken(self.end, end)):
            keep = min(begin, self.end)
            buffer, begin, end = _grown(self.buffer.room.span(keep, self.end), tokens), begin - keep, end - keep
        _write(buffer.room.span(end - tokens.length, end), tokens)
        return replace(self, count=self.count + tokens.length, buffer=buffer, begin=begin, end=end)

    @property
    def hidden(self) -> int:
        """How many of the held tokens a read does not see any more."""
        return 0 if self.reach is None else max(0, self.end - self.begin - self.reach)

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        if self.end == self.begin:
            return q.new_zeros(*q.shape[:3], self.form.value_dim)
        return self.weighed(q, bound, self._at_the_end(q.shape[2]))

    def _at_the_end(self, queries: int) -> Visibility:
        """What queries see that stand at the last held token."""
        n, whole = self.end - self.begin, torch.zeros(queries, dtype=torch.int64)
        return Visibility(Intervals(whole + self.hidden, whole + n, whole, whole + n - 1), n)

    def largest_weight(self, q: Tensor, bound: Bound) -> Tensor | None:
        tags = self.operator.tags
        if not (tags.positive and tags.normalises) or tags.solves:
            return None
        if self.end == self.begin:
            return q.new_zeros(q.shape[:3])
        weights, mask = self._weights(q, bound, self._at_the_end(q.shape[2])), self.tokens.mask
        if self.reach is None:  # with a window the first key is one of the middle of the sequence
            first = 0 if mask is None else mask.int().argmax(1).view(-1, 1, 1, 1)
            places = torch.arange(weights.shape[3], device=weights.device)
            weights = weights.masked_fill(places == first, 0)
        return weights.amax(-1)

    @property
    def evidence_refusal(self) -> str | None:
        tags = self.operator.tags
        if tags.solves and not isinstance(self.operator.anchor, Ridge):
            return f"anchor {type(self.operator.anchor).__name__} may solve in any way"
        if tags.solves:
            return "its past fades, which only sums (kind='fading') keep account of" if tags.decays else None
        if tags.window:
            return "its kernel depends on the distance of query and key, so that it is no measure of likeness"
        return None if tags.positive else "K may be negative, so that it is no measure of likeness"

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        """In the features of the kernel, K(a, b) = <f(a), f(b)>, which must not be negative unless the anchor
        solves: 1 - what is left of f(q) when the keys' have been taken out, k_q^T (K + rho I)^-1 k_q / K(q, q), for
        anchors that solve; for others the largest share that lies along one key."""
        block, own, k = self._block(home, bound)
        if not bound.anchor.solves or not k.shape[2]:
            return self._shares(block, own, k, bound).amax(-1) if k.shape[2] else own.new_zeros(own.shape)
        anchor = anchor_of(self.operator)
        block, own = (x.exp() if bound.link.log_space else x for x in (block, own))
        among = definition.kernel(bound, bound.coefficients.to(k), bound.score.as_query(k, bound.score_params), k)
        real = self._real(k, bound.groups)
        among = (among.exp() if bound.link.log_space else among) * real[..., None] * real[..., None, :]
        rho = anchor.ridge(bound.anchor_params, self.form.heads).to(k).repeat_interleave(bound.groups).view(1, -1, 1, 1)
        if anchor.moving:
            diagonal = among.diagonal(dim1=-2, dim2=-1)
            peak, trace = diagonal.amax(-1)[..., None, None], diagonal.sum(-1)[..., None, None]
            rho = anchor.moved(rho, peak, trace, self.form.key_dim)
        lower = factorised(with_ridge(among, rho), "Memory.read")
        solved = torch.linalg.solve_triangular(lower, (block * real[:, :, None]).mT, upper=False)
        return ratio(solved.square().sum(-2), own)

    def differing(self, q: Tensor, home: Tensor, bound: Bound, y: Tensor, support: Tensor) -> Tensor | None:
        """As for spans, with each held token as one."""
        block, own, k = self._block(home, bound)
        if not k.shape[2]:
            return own.new_zeros(own.shape)
        v = expanded(self.tokens.silent().v[:, :, self.hidden :].to(y), bound.groups)
        alike = self._shares(block, own, k, bound) > support[..., None]
        # no product of matrices: values that are equal shall differ by nothing
        distance = torch.cdist(y, v, compute_mode="donot_use_mm_for_euclid_dist")
        apart = ratio(distance, y.norm(dim=-1).unsqueeze(-1) + v.norm(dim=-1).unsqueeze(2))
        return torch.where(alike, apart, 0).amax(-1)

    def _block(self, home: Tensor, bound: Bound) -> tuple[Tensor, Tensor, Tensor]:
        """K of the queries (B, H, T, D) with the keys that a read sees, K(q, q) (B, H, T), in logarithms for a link in
        log space, and those keys (B, H, S, D).
        """
        compute = torch.promote_types(home.dtype, self.tokens.k.dtype)
        k = expanded(self.tokens.silent().k[:, :, self.hidden :].to(compute), bound.groups)
        home, coefficients = home.to(compute), bound.coefficients.to(compute)
        q = bound.score.as_query(home, bound.score_params)
        return definition.kernel(bound, coefficients, q, k), definition.paired(bound, coefficients, q, home), k

    def _shares(self, block: Tensor, own: Tensor, k: Tensor, bound: Bound) -> Tensor:
        """K(q, k)^2 / K(q, q) K(k, k) (B, H, T, S): what each key spans of a query by itself."""
        theirs = definition.paired(bound, bound.coefficients.to(k), bound.score.as_query(k, bound.score_params), k)
        if bound.link.log_space:
            share = (2 * block - own.unsqueeze(-1) - theirs.unsqueeze(2)).exp().clamp_max(1)
        else:
            share = ratio(block.square(), own.unsqueeze(-1) * theirs.unsqueeze(2))
        return share * self._real(k, bound.groups).unsqueeze(2)

    def _real(self, k: Tensor, groups: int) -> Tensor:
        """1 for tokens that a read sees, 0 for padding and keys that a bias hides: (B or 1, 1 or H, S) in the type
        of k.
        """
        mask, bias = self.tokens.mask, self.tokens.key_bias
        real = k.new_ones(1, 1, k.shape[2]) if mask is None else mask[:, None, self.hidden :].to(k)
        if bias is None:
            return real
        return real * expanded((~torch.isneginf(bias[..., self.hidden :])).to(k), groups)

    def newest(self, q: Tensor, bound: Bound, include_self: bool) -> Tensor:
        """What the query (B, H, 1, D) of the newest held token gets from the tokens that its operator lets it see."""
        seen = visibility(1, self.end - self.begin, bound.priors, causal=True, include_self=include_self)
        return self.weighed(q, bound, seen)

    def weighed(self, q: Tensor, bound: Bound, seen: Visibility) -> Tensor:
        """y of prepared queries at given positions among the held tokens."""
        return shared_product(self._weights(q, bound, seen), self.tokens.silent().v.to(q.dtype))

    def _weights(self, q: Tensor, bound: Bound, seen: Visibility) -> Tensor:
        """The weights (B, H, T, S) of prepared queries at given positions among the held tokens."""
        held = self.tokens.silent()
        seen = replace(seen, key_mask=held.mask)
        k, bias = held.k.to(q.dtype), bound.bias(seen, held.log_decay, held.key_bias)
        if bound.anchor.solves or bound.far is not None or not bound.score.bilinear:
            k = expanded(k, bound.groups)
        return definition.weights(bound, bound.coefficients.to(q), q, k, seen, bias, held.log_decay)

    def followed_by(self, other: Memory) -> Memory:
        assert isinstance(other, KeyValues)
        if self._parted_from(other) and self.chunk is None:
            pairs = zip(self.unbind(), other.unbind(), strict=True)
            return concatenated("merge", [mine.followed_by(theirs) for mine, theirs in pairs])
        if other.count > other.end - other.begin:
            # the second has let go of tokens of its own, so none of this one's can be seen any more
            return replace(other, operator=self.operator, count=self.count + other.count, ahead=self.ahead)
        return self.extended(other.tokens)

    def _parted_from(self, other: "KeyValues") -> bool:
        """Whether padding that ``stack`` put before the other's rows would part them from this one's tokens, under a
        prior that counts distances.
        """
        return any(isinstance(p, Window | ALiBi) for p in self.operator.prior) and bool(other.ahead.any())

    def joined(
        self, other: Memory, span: str | None, marks: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    ) -> Memory:
        stays = bool(span or self.parts or other.parts or self.chunk)
        if stays and isinstance(other, KeyValues) and self._parted_from(other):
            raise ArgumentError(
                f"Memory.merge: stack put {other.ahead.tolist()} tokens of padding before the rows of the other "
                "memory, which would lie between its tokens and this one's. Merge before stacking"
                f"{'' if self.chunk else ', or without named spans (unnamed)'}."
            )
        return super().joined(other, span, marks)

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, KeyValues)
        mine, theirs = self.tokens, other.tokens
        n = theirs.length
        if self.count != mine.length or other.count != n:
            raise ArgumentError(
                "Memory.subtract: one of the memories has let go of tokens outside its window, so its tokens cannot "
                "be told apart."
            )
        for start in (0, mine.length - n):
            if bool(mine.span(start, start + n).alike(theirs).all()):
                rest = mine.span(n, mine.length) if start == 0 else mine.span(0, start)
                return replace(self._holding(rest, rest.length), ahead=torch.zeros_like(self.ahead))
        raise ArgumentError(
            "Memory.subtract: the other memory's tokens are neither the first nor the last of this one. "
            "Merge under a name, merge(other, span=…), what may have to go from the middle."
        )

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        held = self.tokens
        gone = self.count - held.length  # what a window has let go of
        if start + count <= gone:
            return replace(self, count=self.count - count)
        if gone:
            raise ArgumentError(
                f"Memory.forget: the window has let go of {gone} tokens before this span's last, which would be seen "
                "again without it. Read the tokens again without the span, or keep them with kind='keys' of an "
                "operator without a window."
            )
        return self._holding(joined(held.span(0, start), held.span(start + count, held.length)), self.count - count)

    def preceded(self, n: int) -> Self:
        if n == 0:
            return self
        held, count = self.tokens, self.count + n
        whole = count if self.reach is None else min(count, self.reach)
        return replace(self._holding(held.preceded(whole - held.length), count), ahead=self.ahead + n)

    def trimmed(self) -> Self:
        if self.parts or self.chunk is not None:
            return self
        held, spare = self.tokens, int(self.ahead)
        gone = self.count - held.length  # what a window has let go of, the padding first
        held = held.span(max(0, spare - gone), held.length)
        return replace(self._holding(held.unmasked(), self.count - spare), ahead=torch.zeros_like(self.ahead))

    def keeping(self, sources: Sequence[Self], rows: Callable[[list[Tensor]], Tensor]) -> Self:
        return replace(self, ahead=rows([memory.ahead for memory in sources]))

    def _holding(self, tokens: Tokens, count: int) -> Self:
        return replace(self, count=count, buffer=_Buffer(tokens, tokens.length), begin=0, end=tokens.length)

    def bytes_at(self, length: int) -> int:
        form, room = self.form, self.buffer.room
        held = length if self.reach is None else min(length, self.reach)
        fades = self.operator.tags.decays or room.log_decay is not None  # log decays are float64
        token = token_bytes(self.operator, form, room) + (form.heads * torch.float64.itemsize if fades else 0)
        return form.batch * held * token

    def tensors(self) -> dict[str, Tensor]:
        return self.tokens.named()

    def contents(self) -> dict[str, Tensor]:
        return super().contents() | ({"ahead": self.ahead} if bool(self.ahead.any()) else {})

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        tokens = dict(tensors)
        none = _none_ahead(form)
        ahead = tokens.pop("ahead", none)
        held = Tokens(**tokens)
        n = held.length
        if not fit(held, operator, form) or (ahead.shape, ahead.dtype) != (none.shape, none.dtype):
            raise ValueError("the tensors do not have the shapes of the header")
        memory = cls(operator, form, count, _Buffer(held, n), 0, n, ahead)
        if n != (count if memory.reach is None else min(count, memory.reach)):
            raise ValueError(f"{count} tokens are announced and {n} are there")
        return memory


def key_dtype(operator: Operator, form: Form) -> torch.dtype:
    """Of kept keys: that of the memory, but float32 at least where the score changes keys (a unit vector in bfloat16 is
    off by 0.4 %).
    """
    return form.dtype if operator.score.keeps_keys else form.statistics


def zero_tokens(operator: Operator, form: Form, count: int) -> Tokens:
    """Tokens of zeros."""
    shape, width = (form.batch, form.heads, count), operator.score.width(form.key_dim)
    k = torch.zeros(*shape, width, dtype=key_dtype(operator, form), device=form.device)
    return Tokens(k, torch.zeros(*shape, form.value_dim, dtype=form.dtype, device=form.device))


def fit(tokens: Tokens, operator: Operator, form: Form) -> bool:
    """Whether kept tokens have the shapes and the type of a memory's."""
    by_head, width = (form.batch, form.heads, tokens.length), operator.score.width(form.key_dim)
    shapes = (*by_head, width), (*by_head, form.value_dim), (form.batch, tokens.length), by_head, by_head
    alike = all(x is None or tuple(x.shape) == shape for x, shape in zip(tokens, shapes, strict=True))
    return alike and tokens.k.dtype == key_dtype(operator, form)


def token_bytes(operator: Operator, form: Form, like: Tokens) -> int:
    """Bytes of a kept token of one sequence without its log decay. like: tokens with a mask and biases if it has."""
    key = operator.score.width(form.key_dim) * key_dtype(operator, form).itemsize
    bias = 0 if like.key_bias is None else like.key_bias.element_size()
    return form.heads * (key + form.value_dim * form.dtype.itemsize + bias) + (like.mask is not None)


def _none_ahead(form: Form) -> Tensor:
    return torch.zeros(form.batch, dtype=torch.int64, device=form.device)


def _grown(held: Tokens, tokens: Tokens) -> _Buffer:
    """A buffer with twice the room, which holds ``held`` and has taken the place of the new tokens; entries that only
    these have are filled in for the others.
    """
    n = held.length
    room = max(_FIRST_ROOM, 2 * n, n + tokens.length)

    def spacious(x: Tensor) -> Tensor:
        axis = 1 if x.dtype == torch.bool else 2  # the mask has no heads
        return x.detach().new_empty(*x.shape[:axis], room, *x.shape[axis + 1 :])

    whole = tokens.map(spacious)
    target = whole.span(0, n)
    for x, y, fill in zip(target, held, (0, 0, True, 0, 0), strict=True):
        if x is not None:
            x.copy_(y.detach()) if y is not None else x.fill_(fill)
    return _Buffer(whole, n + tokens.length)


def _write(place: Tokens, tokens: Tokens) -> None:
    for x, y in zip(place, tokens, strict=True):
        if x is not None and y is not None:
            # .data: what is written was never read before, so graphs that read other spans of the buffer stay valid
            x.data.copy_(y.detach())


__all__ = ["KeyValues", "fit", "key_dtype", "token_bytes", "zero_tokens"]

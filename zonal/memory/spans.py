"""Spans: stretches of tokens that a memory knows by name, and can forget as if they had never come.

A memory with named spans keeps, beside the whole that is read, its parts in order: named ones and the nameless
stretches between them. To forget one is to put the others together again, so nothing is subtracted and no rounding is
left behind. A part is kept as tokens while these take less than its sums would; a memory of keys and values needs no
more than the parts' lengths.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.prior import ChunkCausal
from zonal.errors import ArgumentError, unknown_name
from zonal.memory.form import Form
from zonal.memory.tokens import Tokens, joined

_FRESH = 32
"""So many tokens of a decoder's steps are put into its part together."""


class Span(NamedTuple):
    """A named stretch: it begins after ``start`` tokens of the memory and has ``count``, padding included. nbytes: kept
    for it.
    """

    name: str
    start: int
    count: int
    nbytes: int


class Part(NamedTuple):
    """A stretch of a memory. held: its own memory, or its tokens while these take less; None where nothing or the whole
    has them.

    mark: what a reader beyond the memory needs to go on after this part, each (B, …): the layers' convolution tails and
    positions.
    fresh: in the open part, tokens of a decoder's last steps, which are put into ``held`` together.
    """

    name: str | None
    count: int
    held: "Spanned | Tokens | None"
    mark: Mapping[str, Tensor]
    fresh: tuple[Tokens, ...] = ()

    @property
    def nbytes(self) -> int:
        return (0 if self.held is None else self.held.nbytes) + sum(x.nbytes for x in self.mark.values())

    def mapped(self, form: Form, change: Callable[[Tensor], Tensor]) -> "Part":
        """The part with each of its tensors changed alike, of a memory of that form."""
        if isinstance(self.held, Tokens):
            held = self.held.map(change)
        else:
            held = None if self.held is None else self.held.mapped(form, change)
        return self._replace(held=held, mark={name: change(x) for name, x in self.mark.items()})

    def about(self) -> dict[str, Any]:
        """What a file has to say of it besides its tensors."""
        kept = {"kind": self.held.kind, "plain": self.held.plain()} if isinstance(self.held, Spanned) else {}
        return {"name": self.name, "count": self.count, **kept}

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by name."""
        groups: dict[str, Mapping[str, Tensor]] = {"mark": self.mark}
        if isinstance(self.held, Tokens):
            groups["tokens"] = self.held.named()
        elif self.held is not None:
            groups["memory"] = self.held.tensors()
        return {f"{group}.{name}": x for group, named in groups.items() for name, x in named.items()}


@dataclass(frozen=True, eq=False, repr=False)
class Spanned(abc.ABC):
    """What a memory does with named spans. parts: () while no span was ever named; else all tokens in order, the last
    part still open.
    """

    kind: ClassVar[str]
    by_rows: ClassVar[bool] = False
    """Whether the whole keeps each token, so that parts need not."""

    operator: Operator
    form: Form
    count: int
    parts: tuple[Part, ...] = field(default=(), kw_only=True)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def spans(self) -> tuple[Span, ...]:
        """The named spans, oldest first."""
        found, start = [], 0
        for part in self.settled_parts():
            if part.name is not None:
                kept = self.bytes_at(self.count) - self.bytes_at(self.count - part.count) if self.by_rows else 0
                found.append(Span(part.name, start, part.count, part.nbytes + kept))
            start += part.count
        return tuple(found)

    def open(self, span: str, mark: Mapping[str, Tensor] | None = None) -> Self:
        """The memory with a new span begun: tokens that come belong to it until ``close`` or the next ``open``.

        For a document that comes in several calls, or through a layer. Raises: ArgumentError for a name that is taken.
        """
        self._check_new([span], "open")
        self._at_border("open")
        return replace(self, parts=(*self._closed(mark or {}), Part(span, 0, None, {})))

    def close(self, mark: Mapping[str, Tensor] | None = None) -> Self:
        """The memory with its open span ended: tokens that come next belong to none."""
        if not self.parts:
            return replace(self)
        self._at_border("close")
        return replace(self, parts=(*self._closed(mark or {}), _nothing()))

    def unnamed(self) -> Self:
        """The same memory without the record of its spans: smaller, and unable to forget them; another object in any
        case.
        """
        return replace(self, parts=())

    def forget(self, span: str) -> Self:
        """The memory as if the tokens of a span had never come, those after it following those before it.

        Sums are added up again from the other parts, so that nothing is subtracted. The result is the memory of these
        parts, bit for bit where nothing fades, and to rounding where the past fades.

        Raises: ArgumentError for an unknown name, and where a window has let go of tokens that would be seen again.
        """
        index, parts = self._find(span), self.settled_parts()
        start = sum(part.count for part in parts[:index])
        kept = list(parts[:index])
        for part in parts[index + 1 :]:
            self._append(kept, part)
        still_open = index < len(parts) - 1 and parts[-1].name is not None
        if kept[-1].name is not None and not still_open:
            kept.append(_nothing())
        whole = self.without_span(start, parts[index].count, kept)
        return replace(whole, parts=tuple(kept) if any(part.name is not None for part in kept) else ())

    # --- what a kind of memory provides -------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        """The empty memory of this kind."""

    @abc.abstractmethod
    def extended(self, tokens: Tokens) -> "Spanned":
        """``absorb`` of prepared, checked tokens, by a memory without parts."""

    @abc.abstractmethod
    def followed_by(self, other: Any) -> Any:
        """``merge`` of a memory of the same form, both without parts."""

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        """The whole without the tokens [start, start + count), of which ``kept`` are the parts."""
        return self.folded(kept)

    @abc.abstractmethod
    def bytes_at(self, length: int) -> int:
        """``nbytes`` of such a memory after ``length`` tokens without padding, absorbed one after another."""

    @abc.abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything to be saved, by name, each (B, …)."""

    def plain(self) -> dict[str, int]:
        """Plain numbers to be saved besides ``count``."""
        return {}

    @classmethod
    @abc.abstractmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        """The memory that ``tensors()`` and ``plain()`` described; KeyError or ValueError when they do not fit."""

    def keeping(self, sources: Sequence[Self], rows: Callable[[list[Tensor]], Tensor]) -> Self:
        """This memory, made of rows of ``sources``, with what can be kept of what they had derived."""
        return self

    def mapped(self, form: Form, change: Callable[[Tensor], Tensor]) -> Self:
        """The memory with each of its tensors changed alike, and of that form."""
        named = {name: change(x) for name, x in self.tensors().items()}
        whole = self.restored(self.operator, form, self.count, named, self.plain())
        parts = tuple(part.mapped(form, change) for part in self.settled_parts())
        return replace(whole.keeping([self], lambda found: change(found[0])), parts=parts)

    @property
    def nbytes(self) -> int:
        """Bytes of what is held, all sequences and heads and spans together (spare room in growing buffers is not
        counted).
        """
        return self.bytes_at(self.count) + sum(part.nbytes for part in self.settled_parts())

    @property
    def chunk(self) -> int | None:
        """The chunk of a declared ChunkCausal prior: tokens past the last whole chunk are kept apart."""
        return next((p.size for p in self.operator.prior if isinstance(p, ChunkCausal)), None)

    # --- parts --------------------------------------------------------------------------------------------------------

    def recorded(self, after: Any, tokens: Tokens) -> Any:
        """``after``, which is this memory after more tokens, with these as tokens of the open part."""
        if not self.parts:
            return after
        last = self.parts[-1]
        last = last._replace(count=last.count + tokens.length)
        if not self.by_rows:
            fresh = (*last.fresh, after.own(tokens)) if tokens.length else last.fresh
            last = last._replace(fresh=fresh)
            if sum(piece.length for piece in fresh) >= _FRESH:
                last = after.settled_part(last)
        return replace(after, parts=(*self.parts[:-1], last))

    def own(self, tokens: Tokens) -> Tokens:
        """Tokens as a part keeps them: copies in the type of the sums."""
        dtype = self.form.statistics
        decay = None if tokens.log_decay is None else tokens.log_decay.expand(self.form.batch, -1, -1).clone()
        mask, bias = (None if x is None else x.clone() for x in (tokens.mask, tokens.key_bias))
        return Tokens(tokens.k.to(dtype, copy=True), tokens.v.to(dtype, copy=True), mask, decay, bias)

    def settled_part(self, part: Part) -> Part:
        """The part with its fresh tokens in what it holds."""
        whole: Tokens | None = None
        for piece in part.fresh:
            whole = joined(whole, piece)
        if whole is None:
            return part
        with torch.autocast(self.form.device.type, enabled=False):  # the steps may have come under one
            return part._replace(held=self.lengthened(part.held, whole), fresh=())

    def settled_parts(self) -> tuple[Part, ...]:
        """The parts, all of their tokens in what they hold."""
        return (*self.parts[:-1], self.settled_part(self.parts[-1])) if self.parts else ()

    def lengthened(self, held: "Spanned | Tokens | None", tokens: Tokens) -> "Spanned | Tokens | None":
        """What a part of this memory holds after more tokens."""
        if isinstance(held, Spanned):
            return held.extended(tokens)
        whole = joined(held, tokens)
        return whole if whole.nbytes <= self.bytes_at(0) else self.part_memory(whole)

    def part_memory(self, held: "Spanned | Tokens | None") -> "Spanned":
        """The memory of a part of this one."""
        if isinstance(held, Spanned):
            return held
        empty = self.start(self.operator, self.form)
        with torch.autocast(self.form.device.type, enabled=False):
            return empty if held is None else empty.extended(held)

    def folded(self, kept: Sequence[Part]) -> Any:
        """The memory of all parts in order."""
        whole = self.start(self.operator, self.form)
        for part in kept:
            if part.count:
                whole = whole.followed_by(self.part_memory(part.held))
        return whole

    def together(
        self, other: "Spanned", whole: Any, span: str | None, marks: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    ) -> Any:
        """``whole`` (this memory, then the other) with the parts of both. ``span`` names the whole of the other."""
        if not self.parts and not other.parts and span is None:
            return whole
        parts = list(self._closed(marks[0]))
        others = other._closed(marks[1])
        if span is not None:
            others = (others[0]._replace(name=span),)
        for part in others:
            self._append(parts, part)
        return replace(whole, parts=(*parts, _nothing()))

    def _closed(self, mark: Mapping[str, Tensor]) -> tuple[Part, ...]:
        """The parts, the open one closed; it is left out when nothing came into it. The first is nameless: what was
        there before any span.
        """
        if not self.parts:
            # a copy of the object: the verbs that work in place replace what this one holds
            return (Part(None, self.count, replace(self) if self.count and not self.by_rows else None, mark),)
        last = self.settled_part(self.parts[-1])
        if last.name is None and last.count == 0 and len(self.parts) > 1:
            return self.parts[:-1]
        return (*self.parts[:-1], last._replace(mark=mark))

    def _append(self, parts: list[Part], part: Part) -> None:
        """Add a part; nameless neighbours become one."""
        last = parts[-1]
        if part.name is None and part.count == 0:
            return
        if part.name is not None or last.name is not None:
            parts.append(part)
            return
        if last.count == 0 or self.by_rows:
            held = part.held
        elif isinstance(last.held, Tokens) and isinstance(part.held, Tokens):
            held = self.lengthened(last.held, part.held)
        else:
            held = self.part_memory(last.held).followed_by(self.part_memory(part.held))
        parts[-1] = Part(None, last.count + part.count, held, part.mark)

    def _find(self, span: str) -> int:
        names = [part.name for part in self.parts]
        if span not in names or span is None:
            known = [name for name in names if name is not None]
            if not known:
                raise ArgumentError(
                    f"Memory.forget: no span was ever named here, so {span!r} cannot be found. Name spans as they "
                    f"come: absorb(k, v, span={span!r})."
                )
            raise unknown_name("Memory.forget", "span", span, known)
        return names.index(span)

    def _check_new(self, spans: Sequence[str], verb: str) -> None:
        known = {part.name: part for part in self.parts}
        for span in spans:
            if not isinstance(span, str) or not span:
                raise ArgumentError(
                    f"Memory.{verb}: a span's name must be a string that is not empty, received {span!r}."
                )
            if span in known:
                raise ArgumentError(
                    f"Memory.{verb}: there is a span {span!r} already, of {known[span].count} tokens. Forget it "
                    "first, or choose another name."
                )

    def _at_border(self, verb: str) -> None:
        """With whole chunks a span begins and ends at a border of chunks: to forget it then moves no other chunk."""
        named = verb == "open" or (self.parts and self.parts[-1].name is not None)
        if self.chunk is not None and named and self.count % self.chunk:
            raise ArgumentError(
                f"Memory.{verb}: a span holds whole chunks of {self.chunk} tokens, and the memory stands at "
                f"{self.count}. Fill the chunk up with padding (key_padding_mask)."
            )


def _nothing() -> Part:
    return Part(None, 0, None, {})


__all__ = ["Part", "Span", "Spanned"]

"""Summed: what all memories that hold sums over tokens have in common, whether their past fades or not."""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from zonal import device_memory
from zonal.algebra import Operator
from zonal.errors import ArgumentError
from zonal.memory import marks
from zonal.memory.base import Form, Memory
from zonal.memory.marks import Border
from zonal.memory.seams import Seam
from zonal.memory.tokens import Tokens, joined
from zonal.store import under

_Record = TypeVar("_Record", Seam, Border)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Summed(Memory):
    """S_t = e^{g_t} S_{t-1} + (the terms of token t), with log decays g_t <= 0; g_t = 0 where nothing fades.

    padding: (B,) how many of ``count`` tokens were padding. They are passed over: no term, and no time.
    total: (B, Hkv) float64, the sum of log decays; None where nothing fades.
    pending: with a ChunkCausal prior (which goes with no decay), the tokens past the last whole chunk.
    borders, seams: what a merge writes down, so that one of the two can be taken out again.

    merge(a, b) = e^{total of b} S_a + S_b, plus what ties the two together: associative. subtract takes out a beginning
    where the past fades, subtract(merge(a, b), a) = b, and any part that is known where it does not.
    """

    fades: ClassVar[bool]

    padding: Tensor
    total: Tensor | None = None
    borders: tuple[Border, ...] = ()
    seams: tuple[Seam, ...] = ()
    pending: Tokens | None = None

    # --- what a family of sums provides -------------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def shapes(cls, operator: Operator, form: Form) -> dict[str, tuple[int, ...]]:
        """The shapes of its sums, by name; the first is (B, Hkv, features, …)."""

    @abc.abstractmethod
    def with_terms(self, tokens: Tokens) -> Self:
        """The sums with the terms of tokens (at least one) added; count, padding and pending stay."""

    def faded(self, log_decay: Tensor) -> Self:
        """The memory after its past has faded by a sum of log decays (B or 1, Hkv), without a new token; of kinds whose
        past fades.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def added(self, other: Self, whole: Self) -> Self:
        """This memory followed by ``other``. whole: this memory, faded by the decays of the other's tokens, with the
        count, padding and borders of both already; the other's sums are still to be added.
        """

    @abc.abstractmethod
    def taken(self, other: Self, rest: Self) -> Self:
        """``rest``, which is this memory with the count, padding, total and borders that are left, without the sums of
        the other.
        """

    def marked(self) -> marks.Marked:
        """What tells the sums of this memory from those of others; of kinds whose past fades."""
        raise NotImplementedError

    # --- a memory and its tokens --------------------------------------------------------------------------------------

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        """The empty memory of this kind, its sums all 0. Raises: InsufficientMemoryError when they would not fit."""
        found = cls._layout(operator, form)
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in found.values())
        features = next(iter(cls.shapes(operator, form).values()))[2]
        what = f"sums over {features} features for {form.batch} sequences of {form.heads} heads"
        device_memory.require("Memory", what, size, form.device, "Use fewer features or a smaller batch.")
        zeros = {name: torch.zeros(shape, dtype=dtype, device=form.device) for name, (shape, dtype) in found.items()}
        return cls(operator, form, 0, **zeros)  # type: ignore[arg-type]

    @classmethod
    def _layout(cls, operator: Operator, form: Form) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor of an empty memory, by name."""
        dtype = torch.float64 if cls.double else form.statistics
        found = {name: (shape, dtype) for name, shape in cls.shapes(operator, form).items()}
        if cls.fades:
            found["total"] = ((form.batch, form.heads), torch.float64)
        return found | {"padding": ((form.batch,), torch.int64)}

    @property
    def real(self) -> Tensor:
        """Tokens that were not padding, (B,)."""
        return self.count - self.padding

    @property
    def has_read(self) -> Tensor:
        return self.real > 0

    @property
    def unfaded(self) -> float:
        """``count``, or where the past fades at most 1 / (1 - l), with l the geometric mean of the rates of the head
        that fades least.
        """
        if self.total is None:
            return self.count
        mean = float((self.total.detach() / self.real.clamp_min(1)[:, None]).max())
        return min(self.count, -1 / math.expm1(mean)) if mean < 0 else self.count

    @property
    def summed(self) -> Tensor:
        """Real tokens that are in the sums and do not wait for their chunk to end, (B,)."""
        return self.committed().real

    def committed(self) -> Self:
        """The memory up to the last whole chunk: what the next query sees."""
        if self.pending is None:
            return self
        padding = self.padding - self.pending.padded()
        return replace(self, count=self.count - self.pending.length, padding=padding, pending=None)

    def settled(self) -> Self:
        """The memory with all tokens in the sums, pending ones included."""
        return self if self.pending is None else replace(self.with_terms(self.pending), pending=None)

    def extended(self, tokens: Tokens) -> Memory:
        if tokens.length == 0:
            return self
        count, padding = self.count + tokens.length, self.padding + tokens.padded()
        if self.chunk is None:
            return replace(self.with_terms(tokens), count=count, padding=padding)
        if self.fades or tokens.log_decay is not None:
            raise ArgumentError(
                "Memory.absorb: a decay together with whole chunks is kept as keys and values; make the memory with "
                "kind='keys'."
            )
        dtype = self.form.statistics
        waiting = joined(self.pending, tokens._replace(k=tokens.k.to(dtype), v=tokens.v.to(dtype)))
        whole = waiting.length // self.chunk * self.chunk
        sums = self.with_terms(waiting.span(0, whole)) if whole else self
        rest = waiting.span(whole, waiting.length).map(torch.clone) if whole < waiting.length else None
        return replace(sums, count=count, padding=padding, pending=rest)

    # --- verbs of two memories ----------------------------------------------------------------------------------------

    def followed_by(self, other: Memory) -> Memory:
        assert isinstance(other, type(self))
        if self.pending is None:
            earlier = self if other.total is None else self.faded(other.total)
            borders = () if self.total is None else marks.after_merge(self.marked(), other.marked())
            tokens = {"count": self.count + other.count, "padding": self.padding + other.padding}
            return self.added(other, replace(earlier, **tokens, borders=borders, pending=other.pending))
        if self.chunk is not None and other.count < self.chunk:  # nothing of the other is in its sums yet
            return self if other.pending is None else self.extended(other.pending)
        raise ArgumentError(
            f"Memory.merge: the first memory ends inside a chunk ({self.count} tokens, chunks of {self.chunk}), "
            "which would move the borders of the second. Absorb the second one's tokens instead."
        )

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, type(self))
        if other.pending is not None:
            raise ArgumentError(
                f"Memory.subtract: the other memory ends inside a chunk ({other.count} tokens, chunks of "
                f"{self.chunk}); only whole chunks can be taken out."
            )
        if bool((other.padding > self.padding).any()):
            raise ArgumentError(
                "Memory.subtract: the other memory holds more padding than this one; it is no part of it."
            )
        if other.count == 0:
            return self
        left = {"count": self.count - other.count, "padding": self.padding - other.padding}
        if self.total is None or other.total is None:
            return self.taken(other, replace(self, **left))
        borders = marks.after_subtract(self.marked(), other.marked())
        if self.count == other.count:
            return self.start(self.operator, self.form)
        total = self.total - other.total
        return self.taken(other.faded(total), replace(self, **left, total=total, borders=borders))

    # --- rows, copies and files ---------------------------------------------------------------------------------------

    def preceded(self, n: int) -> Self:
        behind = tuple(seam._replace(at=seam.at + n) for seam in self.seams)
        borders = marks.moved(self.borders, n)
        return replace(self, count=self.count + n, padding=self.padding + n, seams=behind, borders=borders)

    def trimmed(self) -> Self:
        if self.parts or self.seams or self.chunk is not None:
            return self
        spare = int(self.padding.min())
        borders = marks.moved(self.borders, -spare)
        return replace(self, count=self.count - spare, padding=self.padding - spare, borders=borders)

    @property
    def derived_bytes(self) -> int:
        """Bytes of what is derived from the sums and kept beside them."""
        return 0

    def bytes_at(self, length: int) -> int:
        form, waiting = self.form, 0 if self.chunk is None else length % self.chunk
        token = (self.operator.score.width(form.key_dim) + form.value_dim) * form.statistics.itemsize
        held = self.numbers() | self._written_down()
        return sum(x.nbytes for x in held.values()) + self.derived_bytes + form.batch * form.heads * waiting * token

    def numbers(self) -> dict[str, Tensor]:
        """The tensors that every memory of this kind has, by name."""
        return {name: getattr(self, name) for name in self._layout(self.operator, self.form)}

    def tensors(self) -> dict[str, Tensor]:
        pending = {} if self.pending is None else {f"pending.{name}": x for name, x in self.pending.named().items()}
        return self.numbers() | self._written_down() | pending

    def plain(self) -> dict[str, int]:
        return {name: each.at for name, each in self._by_name().items()}

    def _by_name(self) -> dict[str, Seam | Border]:
        """What merges wrote down: "seam0", "seam1", …, "border0", …"""
        every = {"seam": self.seams, "border": self.borders}
        return {f"{kind}{i}": each for kind, found in every.items() for i, each in enumerate(found)}

    def _written_down(self) -> dict[str, Tensor]:
        return {f"{name}.{part}": getattr(x, part) for name, x in self._by_name().items() for part in x._fields[1:]}

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        described = cls._layout(operator, form)
        for name, (shape, dtype) in described.items():
            if tuple(tensors[name].shape) != shape or tensors[name].dtype != dtype:
                raise ValueError("the tensors do not have the shapes of the header")
        waiting = under(tensors, "pending.")
        return cls(
            operator,
            form,
            count,
            **{name: tensors[name] for name in described},  # type: ignore[arg-type]
            seams=_read(Seam, tensors, plain),
            borders=_read(Border, tensors, plain),
            pending=Tokens(**waiting) if waiting else None,
        )


def _read(kind: type[_Record], tensors: Mapping[str, Tensor], plain: Mapping[str, int]) -> tuple[_Record, ...]:
    """What merges wrote down, from ``tensors`` and ``plain`` of a memory. Raises: KeyError when a part is missing."""
    word = kind.__name__.lower()
    names = [f"{word}{i}" for i in range(sum(name.startswith(word) for name in plain))]
    return tuple(kind(plain[name], *(tensors[f"{name}.{part}"] for part in kind._fields[1:])) for name in names)


__all__ = ["Summed"]

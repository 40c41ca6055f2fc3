"""Batches of memories, for serving many sequences at once: rows are gathered and scattered, memories are stacked and
unbound.
"""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from zonal.algebra.operator import apart
from zonal.errors import ArgumentError
from zonal.memory.alike import check_draws
from zonal.memory.spans import Part, Spanned
from zonal.memory.tokens import Tokens

_FILLS = {"mask": True, "log_decay": 0, "key_bias": 0}

AnyMemory = TypeVar("AnyMemory", bound="Batched")


@dataclass(frozen=True, eq=False, repr=False)
class Batched(Spanned):
    """Operations on the sequences of a batch. Rows never mix: each behaves as it would alone."""

    # --- verbs --------------------------------------------------------------------------------------------------------

    def gather(self, index: Sequence[int] | Tensor) -> Self:
        """The memory of the sequences ``index``, in that order. Rows may be left out or repeated."""
        return self.picked(checked_index("Memory.gather", index, self.form.batch))

    def scatter(self, index: Sequence[int] | Tensor, other: Self) -> Self:
        """This memory with the sequences ``index`` replaced by those of ``other``, one each.

        Raises: ArgumentError where ``stack`` would, for rows that are not there, twice there, or as many as the other
        has not.
        """
        places = checked_index("Memory.scatter", index, self.form.batch)
        if places.unique().numel() != places.numel():
            raise ArgumentError(f"Memory.scatter: each row can be replaced once, received {places.tolist()}.")
        both = concatenated("scatter", [self, other])
        if other.form.batch != places.numel():
            raise ArgumentError(
                f"Memory.scatter: the other memory holds {other.form.batch} sequences for {places.numel()} rows. "
                "Gather those that are meant."
            )
        order = torch.arange(self.form.batch)
        order[places] = self.form.batch + torch.arange(places.numel())
        return both.picked(order)

    @staticmethod
    def stack(memories: "Iterable[AnyMemory]") -> "AnyMemory":
        """One memory of the sequences of several, one after another. Those that hold fewer tokens get padding before
        their first.

        Raises: ArgumentError for unlike memories, for spans that are not the same in all, and for chunks that do not
        end together.
        """
        return concatenated("stack", tuple(memories))

    def unbind(self) -> tuple[Self, ...]:
        """A memory for each sequence, without the padding that ``stack`` gave it."""
        return tuple(self.picked(torch.tensor([row], dtype=torch.int64)).trimmed() for row in range(self.form.batch))

    # --- what a kind of memory provides -------------------------------------------------------------------------------

    @abc.abstractmethod
    def preceded(self, n: int) -> Self:
        """The memory as if n tokens of padding had come first. Its parts stay."""

    @abc.abstractmethod
    def trimmed(self) -> Self:
        """The memory of one sequence without the padding that no query could tell from nothing."""

    # --- rows ---------------------------------------------------------------------------------------------------------

    def picked(self, index: Tensor) -> Self:
        """``gather`` of checked rows."""
        index = index.to(self.form.device)
        return self.mapped(self.form._replace(batch=index.numel()), lambda x: x[index])


def checked_index(call: str, index: Sequence[int] | Tensor, batch: int) -> Tensor:
    """Rows of a batch as int64 (n,). Raises: ArgumentError naming the call."""
    given = torch.as_tensor(index).cpu()
    if given.ndim != 1 or given.numel() == 0 or given.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"{call}: index must be a list of rows, or whole numbers (n >= 1,), received {index!r}.")
    if int(given.min()) < 0 or int(given.max()) >= batch:
        raise ArgumentError(f"{call}: rows must lie in [0, {batch}), received {given.tolist()}.")
    return given.to(torch.int64)


def concatenated(verb: str, memories: "Sequence[AnyMemory]") -> "AnyMemory":
    """The rows of all memories, one memory's after another's."""
    _check_rows(verb, memories)
    first, names = memories[0], [part.name for part in memories[0].parts]
    count = max(memory.count for memory in memories)
    if names:
        counts = ([part.count for part in memory.parts] for memory in memories)
        count = sum(max(found) for found in zip(*counts, strict=True))
    spare = [count - memory.count for memory in memories]
    if first.chunk is not None and (moving := [n for n in spare if n % first.chunk]):
        raise ArgumentError(
            f"Memory.{verb}: {moving[0]} tokens of padding would move the borders of chunks of {first.chunk}. Pad the "
            "shorter sequences (key_padding_mask) as they come."
        )
    aligned = [memory.preceded(n) for memory, n in zip(memories, spare, strict=True)]
    form = first.form._replace(batch=sum(memory.form.batch for memory in memories))
    named, plain = _joined_rows([memory.tensors() for memory in aligned]), aligned[0].plain()
    if any(memory.plain() != plain for memory in aligned):  # borders that only some rows have
        seams = {name for memory in aligned for name in memory.plain()}
        named, plain = {name: x for name, x in named.items() if name.partition(".")[0] not in seams}, {}
    whole = first.restored(first.operator, form, count, named, plain).keeping(aligned, torch.cat)
    parts = tuple(_joined_parts(verb, aligned, index) for index in range(len(names)))
    return replace(whole, parts=parts)


def _check_rows(verb: str, memories: Sequence[Any]) -> None:
    """Raise ArgumentError unless these are memories of one kind, form and operator, and have the same spans."""
    if not memories or not all(isinstance(memory, Batched) for memory in memories):
        raise ArgumentError(f"Memory.{verb}: at least one Memory is required and nothing else, received {memories!r}.")
    first, *others = memories
    for other in others:
        check_alike(verb, first, other, free_batch=True)
    spans = [[part.name for part in memory.parts] for memory in memories]
    if any(found != spans[0] for found in spans):
        shown = "; ".join(str([span.name for span in memory.spans()]) for memory in memories)
        raise ArgumentError(
            f"Memory.{verb}: all rows of a memory have the same spans in the same order, received {shown}. Call "
            "unnamed() on those that need not forget any more."
        )
    lengths = [[part.count for part in memory.parts] for memory in memories]
    if first.by_rows and any(found != lengths[0] for found in lengths):
        raise ArgumentError(
            f"Memory.{verb}: kept keys have their spans in the same places in all rows, received spans of {lengths} "
            "tokens. Pad them to one length, or call unnamed()."
        )


def check_alike(verb: str, first: Any, other: Any, *, free_batch: bool) -> None:
    """Raise ArgumentError unless two memories are of one kind, form and operator. free_batch: of any number of rows."""
    if type(other) is not type(first):
        raise ArgumentError(
            f"Memory.{verb}: memories must be of one kind, received {first.kind!r} and {other.kind!r}. Make them "
            "with the same kind in Memory.empty."
        )
    if other.form != (first.form._replace(batch=other.form.batch) if free_batch else first.form):
        raise ArgumentError(
            f"Memory.{verb}: memories must have one form{' but for the batch' if free_batch else ''}, received "
            f"{first.form.shown()} and {other.form.shown()}."
            f"{'' if free_batch else ' Gather the rows that belong together, or absorb the tokens again.'}"
        )
    check_draws(f"Memory.{verb}", first.operator, other.operator)
    if not first.of_operator(other.operator):
        raise ArgumentError(
            f"Memory.{verb}: memories must belong to one operator, received "
            f"{apart(first.operator, other.operator)}. Absorb the tokens again into Memory.empty of this one."
        )


def _joined_rows(groups: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of equal names one after another along the batch; masks, decays and biases that only some have are filled
    in.
    """
    like = {name: x for group in groups for name, x in group.items()}

    def found(group: dict[str, Tensor], name: str) -> Tensor:
        if name in group:
            return group[name]
        head, _, leaf = name.rpartition(".")
        k = group[f"{head}.k" if head else "k"]
        shape = (k.shape[0], k.shape[2]) if leaf == "mask" else k.shape[:3]
        return torch.full(shape, _FILLS[leaf], dtype=like[name].dtype, device=k.device)

    whole = [name for name in like if name.rpartition(".")[2] in _FILLS or all(name in group for group in groups)]
    return {name: torch.cat([found(group, name) for group in groups]) for name in whole}


def _joined_parts(verb: str, memories: Sequence[Any], index: int) -> Part:
    parts = [memory.settled_part(memory.parts[index]) for memory in memories]
    count, held = max(part.count for part in parts), [part.held for part in parts]
    if any(part.mark.keys() != parts[0].mark.keys() for part in parts):
        raise ArgumentError(
            f"Memory.{verb}: the memories come from layers of different kinds. Stack those of one layer."
        )
    mark = {name: torch.cat([part.mark[name] for part in parts]) for name in parts[0].mark}
    whole: Any = None
    if all(isinstance(x, Tokens) for x in held):
        padded = [part.held.preceded(count - part.count) for part in parts]
        whole = Tokens(**_joined_rows([tokens.named() for tokens in padded]))
    elif any(x is not None for x in held):
        whole = concatenated(verb, [memory.folded([part]) for memory, part in zip(memories, parts, strict=True)])
    return Part(parts[0].name, count, whole, mark)


__all__ = ["Batched", "check_alike", "checked_index", "concatenated"]

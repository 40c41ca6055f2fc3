"""What a layer remembers of a sequence."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zonal import store
from zonal.algebra import Operator
from zonal.algebra.operator import apart
from zonal.errors import ArgumentError, FileFormatError
from zonal.memory import Decoder, Memory, Span
from zonal.memory.alike import digests_of_draws, same_declaration, unlike_digests
from zonal.memory.form import ENDLESS
from zonal.memory.rows import check_alike, checked_index

_KIND = "layer memories"


@dataclasses.dataclass(frozen=True, repr=False)
class LayerDecoder:
    """A layer that continues from its memory token by token: ``y, decoder = layer(x, decoder)``. ``decoder.value()``
    returns the memory so far.

    Made by ``LayerMemory.decoder``. The operator's decoder is changed in place, so that the result of a call takes the
    place of what was given to it.
    """

    decoder: Decoder
    tail: Tensor | None = None
    length: int = 0
    padding: Tensor | None = None
    carried: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    others: "tuple[LayerDecoder, ...]" = ()

    @property
    def memory(self) -> Memory:
        """What the operator remembers of keys and values so far."""
        return self.decoder.memory()

    @property
    def operator(self) -> Operator:
        return self.decoder.operator

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.decoder.form.batch

    @property
    def position(self) -> int | Tensor:
        """The position of the next token: one number, or (B,) where rows differ."""
        return self.length if self.padding is None else self.length - self.padding

    def advance(
        self,
        absorbed: Decoder | Memory,
        tail: Tensor | None,
        tokens: int,
        key_padding_mask: Tensor | None,
        carried: Mapping[str, Tensor] | None = None,
    ) -> "LayerDecoder":
        """The decoder after ``tokens`` more tokens, which have come into the operator's."""
        decoder = absorbed if isinstance(absorbed, Decoder) else absorbed.decoder()
        padding = _padding(self.padding, key_padding_mask)
        return LayerDecoder(decoder, tail, self.length + tokens, padding, carried or {})

    def value(self) -> "LayerMemory":
        """The memory of all tokens so far. Later steps do not change it."""
        others = tuple(other.value() for other in self.others)
        return LayerMemory(self.memory, self.tail, self.length, self.padding, self.carried, others)


@dataclasses.dataclass(frozen=True, repr=False)
class LayerMemory:
    """The past of a layer, as a value: nothing here is changed in place.

    Each part of the memory remembers how the layer stood at its end (``mark``), so that to forget the newest span is to
    go back.

    Args:
        memory: what the operator remembers of keys and values.
        tail: (B, w − 1, dim), the last inputs of the short convolution; None where there is none.
        length: tokens read, padding included; more where the first stood at a later position, or spans were forgotten.
        padding: (B,) how many of them were padding; None = none in any row.
        carried: what else a layer hands from token to token, by name, each (B, …).
        others: the memories of a mixture's further parts, which read the same tokens; every verb is theirs, too.
    """

    memory: Memory
    tail: Tensor | None = None
    length: int = 0
    padding: Tensor | None = None
    carried: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    others: "tuple[LayerMemory, ...]" = ()

    @property
    def position(self) -> int | Tensor:
        """The position of the next token: one number, or (B,) where rows differ."""
        return self.length if self.padding is None else self.length - self.padding

    @property
    def operator(self) -> Operator:
        return self.memory.operator

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.memory.batch

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows and spans together."""
        tensors = [*([] if self.tail is None else [self.tail]), *self.carried.values()]
        return self.memory.nbytes + sum(x.nbytes for x in (*tensors, *self.others))

    def advance(
        self,
        absorbed: Memory | Decoder,
        tail: Tensor | None,
        tokens: int,
        key_padding_mask: Tensor | None,
        carried: Mapping[str, Tensor] | None = None,
    ) -> "LayerMemory":
        """The memory after ``tokens`` more tokens."""
        assert isinstance(absorbed, Memory)
        padding = _padding(self.padding, key_padding_mask)
        return LayerMemory(absorbed, tail, self.length + tokens, padding, carried or {})

    def value(self) -> "LayerMemory":
        """This memory, as ``LayerDecoder.value`` gives one: either may be the past of a layer."""
        return self

    def decoder(self) -> LayerDecoder:
        """A decoder that continues from here; the layer takes it in place of a memory. This memory is not changed."""
        others = tuple(other.decoder() for other in self.others)
        return LayerDecoder(self.memory.decoder(), self.tail, self.length, self.padding, self.carried, others)

    def at(self, position: int) -> "LayerMemory":
        """This empty memory, its first token to stand at ``position``."""
        if self.memory.count or self.memory.parts or position < 0:
            raise ArgumentError(
                f"LayerMemory.at: an empty memory and a position >= 0 are required, received {self.memory.count} "
                f"tokens and {position}."
            )
        return self._each(lambda layer: dataclasses.replace(layer, length=position, padding=None))

    # --- spans ------------------------------------------------------------------------------------------------------

    def spans(self) -> tuple[Span, ...]:
        """The named spans, oldest first."""
        return self.memory.spans()

    def open(self, span: str) -> "LayerMemory":
        """The memory with a new span begun: tokens that are read belong to it until ``close`` or the next ``open``."""
        return self._each(lambda layer: dataclasses.replace(layer, memory=layer.memory.open(span, layer._mark())))

    def close(self) -> "LayerMemory":
        """The memory with its open span ended."""
        return self._each(lambda layer: dataclasses.replace(layer, memory=layer.memory.close(layer._mark())))

    def unnamed(self) -> "LayerMemory":
        """The same memory without the record of its spans: smaller, and unable to forget them."""
        return self._each(lambda layer: dataclasses.replace(layer, memory=layer.memory.unnamed()))

    def forget(self, span: str) -> "LayerMemory":
        """The memory without the keys and values of a span; see ``Memory.forget``.

        The newest span takes the layer back to where it stood before: tail, position and all. Without an older one,
        what came after it keeps its keys, values and positions as they were computed, and so does the tail.

        Raises: ArgumentError for an unknown name, and for an older span of a Mamba-3 layer, whose last token enters
        with the next span.
        """
        return self._each(lambda layer: layer._forgotten(span))

    def _forgotten(self, span: str) -> "LayerMemory":
        parts, memory = self.memory.parts, self.memory.forget(span)
        index = [part.name for part in parts].index(span)
        if not parts[0].mark:
            raise ArgumentError(
                f"LayerMemory.forget: span {span!r} was begun by the operator's memory alone. Begin spans with "
                "LayerMemory.open, or read with prefill(span=…)."
            )
        rest = [*parts[:index], *parts[index + 1 :]]
        # the first part tells where the layer began; the open one has no mark yet
        marks = [part.mark for i, part in enumerate(rest) if part.mark and (part.count or i == 0)]
        reached = [mark["length"] - mark["padding"] for mark in marks]
        newest = not any(part.count for part in parts[index + 1 :])
        if self.carried and not newest:
            raise ArgumentError(
                f"LayerMemory.forget: the layer carries {', '.join(self.carried)} from token to token, so that later "
                f"spans hold a part of span {span!r}. Forget the newest span first."
            )
        if index < len(parts) - 1 and parts[-1].count:
            reached.append(self.reached())
        if newest:
            return _marked(memory, marks[-1], torch.stack(reached).amax(0))
        return placed(dataclasses.replace(self, memory=memory), torch.stack(reached).amax(0))

    def merge(self, other: "LayerMemory", *, span: str | None = None) -> "LayerMemory":
        """The memory of what this one read and then what the other read, apart: neither saw the other.

        Each keeps the positions that it was read at, and the next token stands behind the later of the two ends; the
        convolution continues from the other's tail. ``span`` names all that the other read.

        Raises: ArgumentError for memories of unlike layers, for names that are taken, and for what a Mamba-3 layer read
        (its state turns with all that came before).
        """
        _check_memories("merge", [other])
        if other.memory.operator is not self.memory.operator:
            raise ArgumentError(
                "LayerMemory.merge: the memories were made by two layers. Read both texts with one model, or "
                "load both files with its load_memory()."
            )
        if self.carried and self.memory.count and other.memory.count:
            raise ArgumentError(
                f"LayerMemory.merge: the layer carries {', '.join(self.carried)} from token to token, which texts that "
                "were read apart do not have in common. Read the second text from the first one's memory."
            )
        check_alike("merge", self.memory, other.memory, free_batch=False)
        if self.tail is not None and other.tail is not None:  # a row that is only padding goes on from this one's tail
            # the position tells of padding that a window has let go of, where positions begin at 0
            read = (other.memory.has_read & (other.reached() > 0))[:, None, None]
            other = dataclasses.replace(other, tail=torch.where(read, other.tail, self.tail))
        memory = self.memory.joined(other.memory, span, (self._mark(), other._mark()))
        last = other if other.memory.count else self
        others = tuple(mine.merge(theirs, span=span) for mine, theirs in zip(self.others, other.others, strict=True))
        merged = LayerMemory(memory, last.tail, 0, None, last.carried, others)
        return placed(merged, torch.maximum(self.reached(), other.reached()))

    # --- rows -------------------------------------------------------------------------------------------------------

    def gather(self, index: Sequence[int] | Tensor) -> "LayerMemory":
        """The memory of the sequences ``index``, in that order. Rows may be left out or repeated."""
        places = checked_index("LayerMemory.gather", index, self.batch)
        return self._each(lambda layer: layer._picked(layer.memory.gather(index), places))

    def scatter(self, index: Sequence[int] | Tensor, other: "LayerMemory") -> "LayerMemory":
        """This memory with the sequences ``index`` replaced by those of ``other``, one each."""
        _check_memories("scatter", [other])
        memory = self.memory.scatter(index, other.memory)
        places = checked_index("LayerMemory.scatter", index, self.batch)
        order = torch.arange(self.batch)
        order[places] = self.batch + torch.arange(places.numel())
        found = _rows_of([self, other], memory)._picked(memory, order)
        both = zip(self.others, other.others, strict=True)
        return dataclasses.replace(found, others=tuple(mine.scatter(index, theirs) for mine, theirs in both))

    @staticmethod
    def stack(memories: "Iterable[LayerMemory]") -> "LayerMemory":
        """One memory of the sequences of several, one after another; see ``Memory.stack``."""
        memories = tuple(memories)
        _check_memories("stack", memories)
        if not memories or any(memory.memory.operator is not memories[0].memory.operator for memory in memories):
            raise ArgumentError(
                "LayerMemory.stack: memories of one layer are required, at least one. Read all texts with one model."
            )
        found = _rows_of(memories, Memory.stack([memory.memory for memory in memories]))
        others = zip(*(memory.others for memory in memories), strict=True)
        return dataclasses.replace(found, others=tuple(LayerMemory.stack(each) for each in others))

    def unbind(self) -> "tuple[LayerMemory, ...]":
        """A memory for each sequence, without the padding that ``stack`` gave it."""
        rows = (
            placed(self._picked(memory, torch.tensor([row], dtype=torch.int64)), self.reached()[row : row + 1])
            for row, memory in enumerate(self.memory.unbind())
        )
        if not self.others:
            return tuple(rows)
        others = zip(*(other.unbind() for other in self.others), strict=True)
        return tuple(dataclasses.replace(row, others=each) for row, each in zip(rows, others, strict=True))

    # --- files and copies -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, whole or not at all; read it with the layer's ``load_memory``."""
        save_memories(path, [self])

    def __deepcopy__(self, memo: object) -> "LayerMemory":
        return self.fork()

    def fork(self) -> "LayerMemory":
        """A copy that shares no storage."""
        return self._each(lambda layer: layer._changed(layer.memory.fork(), torch.clone))

    def to(self, device: torch.device | str) -> "LayerMemory":
        """The memory on another device. The layer's operator stays where it is: move the layer, too."""
        return self._each(lambda layer: layer._changed(layer.memory.to(device), lambda x: x.to(device)))

    def __repr__(self) -> str:
        besides = [*([] if self.tail is None else ["a convolution's tail"]), *self.carried]
        besides += [f"{len(self.others)} more memories"] if self.others else []
        return f"LayerMemory({self.memory!r}, {self.length} tokens read{''.join(f', {what}' for what in besides)})"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _each(self, verb: "Callable[[LayerMemory], LayerMemory]") -> "LayerMemory":
        """What ``verb`` makes of this memory, beside what it makes of the others."""
        return dataclasses.replace(verb(self), others=tuple(verb(other) for other in self.others))

    def reached(self) -> Tensor:
        """The position of the next token, (B,) int64."""
        start = torch.full((self.batch,), self.length, dtype=torch.int64, device=self.memory.form.device)
        return start if self.padding is None else start - self.padding

    def _mark(self) -> dict[str, Tensor]:
        """The state of the layer, which ``_marked`` restores."""
        tail = {} if self.tail is None else {"tail": self.tail}
        carried = {f"carried.{name}": value for name, value in self.carried.items()}
        reached = self.reached()
        return {"length": reached, "padding": torch.zeros_like(reached)} | tail | carried

    def _picked(self, memory: Memory, index: Tensor) -> "LayerMemory":
        """The rows ``index`` of this layer, whose memory is given, without the others."""
        index = index.to(memory.form.device)
        return dataclasses.replace(self._changed(memory, lambda x: x[index]), others=())

    def _changed(self, memory: Memory, tensor: Callable[[Tensor], Tensor]) -> "LayerMemory":
        """This layer with another memory, and its tensors changed alike."""
        return dataclasses.replace(
            self,
            memory=memory,
            tail=None if self.tail is None else tensor(self.tail),
            padding=None if self.padding is None else tensor(self.padding),
            carried={name: tensor(value) for name, value in self.carried.items()},
        )


Past = LayerMemory | LayerDecoder
"""What a layer can continue from."""


def _padding(before: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """How many tokens of each row were padding, (B,), after those of a mask (B, T)."""
    if key_padding_mask is None:
        return before
    absent = (~key_padding_mask).sum(dim=1)
    return absent if before is None else before + absent


def _check_memories(verb: str, given: Sequence[LayerMemory]) -> None:
    for each in given:
        if not isinstance(each, LayerMemory):
            raise ArgumentError(
                f"LayerMemory.{verb}: another LayerMemory is required, received {type(each).__name__}. Read the other "
                "text with the layer, from its empty_memory()."
            )


def placed(layer: LayerMemory, reached: Tensor) -> LayerMemory:
    """The layer with its next tokens at the positions ``reached`` (B,)."""
    length = int(reached.max())
    padding = length - reached
    return dataclasses.replace(layer, length=length, padding=padding if bool(padding.any()) else None)


def _marked(memory: Memory, mark: Mapping[str, Tensor], reached: Tensor) -> LayerMemory:
    """The layer in the state that ``_mark`` saved."""
    return placed(LayerMemory(memory, mark.get("tail"), carried=store.under(mark, "carried.")), reached)


def _rows_of(layers: Sequence[LayerMemory], memory: Memory) -> LayerMemory:
    """``memory`` with the rows of the layers one after another beside it."""
    tails = [layer.tail for layer in layers if layer.tail is not None]
    carried = {name: torch.cat([layer.carried[name] for layer in layers]) for name in layers[0].carried}
    rows = LayerMemory(memory, torch.cat(tails) if tails else None, carried=carried)
    return placed(rows, torch.cat([layer.reached() for layer in layers]))


def save_memories(path: str | os.PathLike[str], layers: Sequence[LayerMemory], origin: str = "") -> None:
    """Write the memories of layers to one safetensors file.

    What the operators learned and drew stays with the layers; the file holds digests of what they drew. origin: of
    which weights.
    """
    tensors: dict[str, Tensor] = {}
    headers = []
    for index, layer in enumerate(_flat(layers)):
        named = {f"memory.{name}": value for name, value in layer.memory.contents().items()}
        named |= {name: x for name in ("tail", "padding") if (x := getattr(layer, name)) is not None}
        named |= {f"carried.{name}": value for name, value in layer.carried.items()}
        tensors |= {f"{index}.{name}": value for name, value in named.items()}
        operator = {"operator": layer.memory.operator.config(), "drawn": digests_of_draws(layer.memory.operator)}
        headers.append({**layer.memory.about(), **operator, "length": layer.length})
    store.save_tensors(path, tensors, {"kind": _KIND, "layers": headers, "origin": origin})


def load_memories(
    path: str | os.PathLike[str], empty: Sequence[LayerMemory], origin: str = ""
) -> tuple[LayerMemory, ...]:
    """Read a file of ``save_memories`` for layers whose empty memories of one sequence are given. origin: the layers'
    weights.

    Raises: FileFormatError when the file is missing, damaged, or belongs to other layers.
    """
    tensors, header = store.load_tensors(path, _KIND)
    headers, wanted = header.get("layers"), _flat(empty)
    if not isinstance(headers, list) or len(headers) != len(wanted):
        held = len(headers) if isinstance(headers, list) else "no"
        raise FileFormatError(
            f"load {_KIND}: {path} holds {held} layers, {len(wanted)} were required. It belongs to another model."
        )
    made_by = header.get("origin", "")
    if origin and made_by and made_by != origin:
        raise FileFormatError(
            f"load {_KIND}: {path} was made with other weights than this model's. Read the text again with prefill()."
        )
    layers = []
    for index, (about, like) in enumerate(zip(headers, wanted, strict=True)):
        try:
            layers.append(_restored(about, store.under(tensors, f"{index}."), like))
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            detail = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise FileFormatError(
                f"load {_KIND}: {path} does not fit layer {index}: {detail}. Load it with the model it was made by."
            ) from error
    found = iter(layers)
    return tuple(dataclasses.replace(next(found), others=tuple(next(found) for _ in like.others)) for like in empty)


def _flat(layers: Sequence[LayerMemory]) -> list[LayerMemory]:
    """The memories with those of a mixture's further parts behind them."""
    return [part for layer in layers for part in (layer, *layer.others)]


def _restored(about: dict[str, Any], tensors: dict[str, Tensor], like: LayerMemory) -> LayerMemory:
    form, operator = like.memory.form, like.memory.operator
    told_operator = Operator.from_config(about["operator"])
    if not same_declaration(told_operator, operator):
        raise ValueError(f"it and the layer have different operators, {apart(told_operator, operator)}")
    told = about.get("drawn")  # files of earlier versions do not tell
    if told is not None and (unlike := unlike_digests(digests_of_draws(operator), told)):
        raise ValueError(f"its operator drew other numbers ({', '.join(unlike)}) than the layer's")
    expected = {"memory": like.memory.kind, "heads": form.heads, "key_dim": form.key_dim, "value_dim": form.value_dim}
    for name, value in expected.items():
        if about[name] != value:
            raise ValueError(f"{name} is {about[name]!r}, the layer has {value!r}")
    tensors = {name: value.to(form.device) for name, value in tensors.items()}
    tail, padding = tensors.pop("tail", None), tensors.pop("padding", None)
    wanted = None if like.tail is None else (about["batch"], *like.tail.shape[1:])
    if (None if tail is None else tuple(tail.shape)) != wanted:
        raise ValueError(
            f"the convolution's tail is {None if tail is None else tuple(tail.shape)}, the layer has {wanted}"
        )
    if padding is not None and (tuple(padding.shape) != (about["batch"],) or padding.dtype != torch.int64):
        raise ValueError(f"padding is {padding.dtype} of shape {tuple(padding.shape)}")
    carried = store.under(tensors, "carried.")
    found = {name: (tuple(value.shape), value.dtype) for name, value in carried.items()}
    asked = {name: ((about["batch"], *value.shape[1:]), value.dtype) for name, value in like.carried.items()}
    if found != asked:
        raise ValueError(f"what the layer carries is {found}, the layer has {asked}")
    if not isinstance(about["length"], int) or not 0 <= about["length"] < ENDLESS:
        raise ValueError(f"{about['length']!r} is no number of tokens")
    named = {name.removeprefix("memory."): x for name, x in tensors.items() if not name.startswith("carried.")}
    return LayerMemory(Memory.described(about, named, operator, form.device), tail, about["length"], padding, carried)

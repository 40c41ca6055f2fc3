"""What a layer remembers of a sequence."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zonal import store
from zonal.algebra import Operator
from zonal.errors import ArgumentError, FileFormatError
from zonal.memory import DecayedSums, FadingStatistics, FeatureSums, Form, KeyValues, Memory, RidgeStatistics
from zonal.memory.base import same_declaration

_KIND = "layer memories"
_MEMORIES: tuple[type[Memory], ...] = (KeyValues, FeatureSums, DecayedSums, RidgeStatistics, FadingStatistics)


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The past of a layer, as a value: nothing here is changed in place.

    Args:
        memory: what the operator remembers of keys and values.
        tail: (B, w − 1, dim), the last inputs of the short convolution; None where there is none.
        length: tokens read, padding included.
        padding: (B,) how many of them were padding; None = none in any row.
        carried: what else a layer hands from token to token, by name, each (B, …).
    """

    memory: Memory
    tail: Tensor | None = None
    length: int = 0
    padding: Tensor | None = None
    carried: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def position(self) -> int | Tensor:
        """The position of the next token: one number, or (B,) where rows differ."""
        return self.length if self.padding is None else self.length - self.padding

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.memory.batch

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows together."""
        return self.memory.nbytes + (0 if self.tail is None else self.tail.nbytes) + sum(value.nbytes for value in self.carried.values())

    def advance(
        self, memory: Memory, tail: Tensor | None, tokens: int, key_padding_mask: Tensor | None, carried: Mapping[str, Tensor] | None = None
    ) -> "LayerMemory":
        """The memory after ``tokens`` more tokens."""
        padding = self.padding
        if key_padding_mask is not None:
            absent = (~key_padding_mask).sum(dim=1)
            padding = absent if padding is None else padding + absent
        return LayerMemory(memory, tail, self.length + tokens, padding, carried or {})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, whole or not at all; read it with the layer's ``load_memory``."""
        save_memories(path, [self])

    def fork(self) -> "LayerMemory":
        """A copy that shares no storage."""
        return LayerMemory(
            self.memory.fork(),
            None if self.tail is None else self.tail.clone(),
            self.length,
            None if self.padding is None else self.padding.clone(),
            {name: value.clone() for name, value in self.carried.items()},
        )


def save_memories(path: str | os.PathLike[str], layers: Sequence[LayerMemory]) -> None:
    """Write the memories of layers to one safetensors file. Learned values of the operators stay with the layers."""
    tensors: dict[str, Tensor] = {}
    headers = []
    for index, layer in enumerate(layers):
        memory, form = layer.memory, layer.memory.form
        named = {f"memory.{name}": value for name, value in memory.tensors().items()}
        named |= {name: value for name, value in (("tail", layer.tail), ("padding", layer.padding)) if value is not None}
        named |= {f"carried.{name}": value for name, value in layer.carried.items()}
        tensors |= {f"{index}.{name}": value for name, value in named.items()}
        shape = {"batch": form.batch, "heads": form.heads, "key_dim": form.key_dim, "value_dim": form.value_dim}
        headers.append(
            {
                "memory": memory.kind,
                "operator": memory.operator.config(),
                "dtype": str(form.dtype).removeprefix("torch."),
                "count": memory.count,
                "plain": memory.plain(),
                "length": layer.length,
                **shape,
            }
        )
    store.save_tensors(path, tensors, {"kind": _KIND, "layers": headers})


def load_memories(path: str | os.PathLike[str], empty: Sequence[LayerMemory]) -> tuple[LayerMemory, ...]:
    """Read a file of ``save_memories`` for layers whose empty memories of one sequence are given.

    Raises: FileFormatError when the file is missing, damaged, or belongs to other layers.
    """
    tensors, header = store.load_tensors(path, _KIND)
    headers = header.get("layers")
    if not isinstance(headers, list) or len(headers) != len(empty):
        held = len(headers) if isinstance(headers, list) else "no"
        raise FileFormatError(f"load {_KIND}: {path} holds {held} layers, {len(empty)} were required. It belongs to another model.")
    layers = []
    for index, (about, like) in enumerate(zip(headers, empty, strict=True)):
        start = f"{index}."
        own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        try:
            layers.append(_restored(about, own, like))
        except (KeyError, TypeError, AttributeError, ValueError, ArgumentError) as error:
            detail = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise FileFormatError(f"load {_KIND}: {path} does not fit layer {index}: {detail}. Load it with the model it was made by.") from error
    return tuple(layers)


def _restored(about: dict[str, Any], tensors: dict[str, Tensor], like: LayerMemory) -> LayerMemory:
    form, operator = like.memory.form, like.memory.operator
    if not same_declaration(Operator.from_config(about["operator"]), operator):
        raise ValueError(f"the operator is {about['operator']['spec']!r}, the layer has {operator.spec!r}")
    dtype = getattr(torch, about["dtype"])
    expected = {"memory": like.memory.kind, "heads": form.heads, "key_dim": form.key_dim, "value_dim": form.value_dim}
    for name, value in expected.items():
        if about[name] != value:
            raise ValueError(f"{name} is {about[name]!r}, the layer has {value!r}")
    tensors = {name: value.to(form.device) for name, value in tensors.items()}
    tail, padding = tensors.pop("tail", None), tensors.pop("padding", None)
    wanted = None if like.tail is None else (about["batch"], *like.tail.shape[1:])
    if (None if tail is None else tuple(tail.shape)) != wanted:
        raise ValueError(f"the convolution's tail is {None if tail is None else tuple(tail.shape)}, the layer has {wanted}")
    if padding is not None and (tuple(padding.shape) != (about["batch"],) or padding.dtype != torch.int64):
        raise ValueError(f"padding is {padding.dtype} of shape {tuple(padding.shape)}")
    carried = {name.removeprefix("carried."): tensors.pop(name) for name in [*tensors] if name.startswith("carried.")}
    found = {name: (tuple(value.shape), value.dtype) for name, value in carried.items()}
    asked = {name: ((about["batch"], *value.shape[1:]), value.dtype) for name, value in like.carried.items()}
    if found != asked:
        raise ValueError(f"what the layer carries is {found}, the layer has {asked}")
    if not isinstance(about["length"], int) or about["length"] != about["count"]:
        raise ValueError(f"{about['length']!r} tokens are announced and {about['count']!r} are held")
    kind = next(memory for memory in _MEMORIES if memory.kind == about["memory"])
    named = {name.removeprefix("memory."): value for name, value in tensors.items()}
    whole = Form(about["batch"], form.heads, form.key_dim, form.value_dim, dtype, form.device)
    return LayerMemory(kind.restored(operator, whole, about["count"], named, about["plain"]), tail, about["length"], padding, carried)

"""The memory of a model: the memories of its layers."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.memory import Span
from zonal.nn import LayerMemory
from zonal.nn.memory import save_memories

_SAMPLES = 16


@dataclasses.dataclass(frozen=True, repr=False)
class ModelMemory:
    """The memories of all layers, first layer first, as a value. Each operation returns a new memory.

    origin: the ``fingerprint`` of the weights that made it. "": not known.
    """

    layers: tuple[LayerMemory, ...]
    origin: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, layers and spans together."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.layers[0].batch

    @property
    def count(self) -> int:
        """Tokens held, padding included."""
        return self.layers[0].memory.count

    @property
    def position(self) -> int | Tensor:
        """The position of the next token: one number, or (B,) if rows differ."""
        return self.layers[0].position

    # --- spans ------------------------------------------------------------------------------------------------------

    def spans(self) -> tuple[Span, ...]:
        """The named spans, oldest first, with the bytes of all layers."""
        found = zip(*(layer.spans() for layer in self.layers), strict=True)
        return tuple(group[0]._replace(nbytes=sum(span.nbytes for span in group)) for group in found)

    def open(self, span: str) -> "ModelMemory":
        """The memory with a new span. Tokens that are read belong to it until ``close`` or the next ``open``."""
        return self._with(layer.open(span) for layer in self.layers)

    def close(self) -> "ModelMemory":
        """The memory with its open span closed."""
        return self._with(layer.close() for layer in self.layers)

    def unnamed(self) -> "ModelMemory":
        """The same memory without its spans. It is smaller and cannot forget them."""
        return self._with(layer.unnamed() for layer in self.layers)

    def forget(self, span: str) -> "ModelMemory":
        """The memory without a span, in every layer.

        For the newest span, and for a span that was read separately and merged, the result equals a memory that never
        read it. An older span of a text that was read in one piece is not forgotten completely: later tokens have read
        it in the layers below.

        Raises:
            ArgumentError: the name is unknown.
        """
        return self._with(layer.forget(span) for layer in self.layers)

    def merge(self, other: "ModelMemory", *, span: str | None = None) -> "ModelMemory":
        """The memory of two texts that were read separately. Neither sees the other; later tokens see both. ``span``
        names the whole text of ``other``.

        Raises:
            ArgumentError: the memories belong to different models, a name is taken, or the model has Mamba-3 layers.
        """
        self._same_model("merge", other)
        return self._with(mine.merge(theirs, span=span) for mine, theirs in zip(self.layers, other.layers, strict=True))

    # --- rows -------------------------------------------------------------------------------------------------------

    def gather(self, index: Sequence[int] | Tensor) -> "ModelMemory":
        """The memory of the sequences ``index``, in this order. Rows may be left out or repeated."""
        return self._with(layer.gather(index) for layer in self.layers)

    def scatter(self, index: Sequence[int] | Tensor, other: "ModelMemory") -> "ModelMemory":
        """This memory with the sequences ``index`` replaced by those of ``other``, one each."""
        self._same_model("scatter", other)
        return self._with(mine.scatter(index, theirs) for mine, theirs in zip(self.layers, other.layers, strict=True))

    @staticmethod
    def stack(memories: "Iterable[ModelMemory]") -> "ModelMemory":
        """One memory of the sequences of several memories, of equal length or not, to serve several users together.

        Raises:
            ArgumentError: there is no memory, or they belong to different models.
        """
        memories = tuple(memories)
        if not memories:
            raise ArgumentError("ModelMemory.stack: at least one memory is required.")
        for other in memories[1:]:
            memories[0]._same_model("stack", other)
        return memories[0]._with(
            LayerMemory.stack(layers) for layers in zip(*(memory.layers for memory in memories), strict=True)
        )

    def unbind(self) -> "tuple[ModelMemory, ...]":
        """A memory for each sequence."""
        return tuple(self._with(layers) for layers in zip(*(layer.unbind() for layer in self.layers), strict=True))

    # --- files and copies -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, completely or not at all. ``load_memory`` of the model reads it."""
        save_memories(path, self.layers, self.origin)

    def __deepcopy__(self, memo: object) -> "ModelMemory":
        return self.fork()

    def fork(self) -> "ModelMemory":
        """A copy that shares no storage."""
        return self._with(layer.fork() for layer in self.layers)

    def to(self, device: torch.device | str) -> "ModelMemory":
        """The memory on another device. Move the model as well."""
        return self._with(layer.to(device) for layer in self.layers)

    # --- inside -----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        spans = [span.name for span in self.spans()]
        return (
            f"ModelMemory({len(self.layers)} layers, {self.batch} sequences of {self.count} tokens, "
            f"{self.nbytes} bytes{f', spans {spans}' if spans else ''})"
        )

    def _with(self, layers: Iterable[LayerMemory]) -> "ModelMemory":
        return ModelMemory(tuple(layers), self.origin)

    def _same_model(self, verb: str, other: "ModelMemory") -> None:
        if not isinstance(other, ModelMemory):
            raise ArgumentError(
                f"ModelMemory.{verb}: another ModelMemory is required, received {type(other).__name__}."
            )
        if len(other.layers) != len(self.layers) or (self.origin and other.origin and self.origin != other.origin):
            raise ArgumentError(
                f"ModelMemory.{verb}: the memories come from two models, or from two states of one. Read all "
                "texts with the same weights (prefill)."
            )


def fingerprint(model: nn.Module) -> str:
    """A short name for the weights of a model: SHA-256 over names, shapes and some entries of each weight."""
    digest, samples = hashlib.sha256(), []
    for name, parameter in model.named_parameters():
        digest.update(f"{name}|{tuple(parameter.shape)}|".encode())
        flat = parameter.detach().reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // _SAMPLES)].double())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]

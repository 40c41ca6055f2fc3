"""What a model remembers of a sequence: the memories of its layers."""

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
    """The past of every layer, first layer first, as a value: each verb returns the result and leaves this memory as it
    was.

    origin: of which weights, as ``fingerprint`` says; "" = not known.
    """

    layers: tuple[LayerMemory, ...]
    origin: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows, layers and spans together."""
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
        """The position of the next token: one number, or (B,) where rows differ."""
        return self.layers[0].position

    # --- spans ------------------------------------------------------------------------------------------------------

    def spans(self) -> tuple[Span, ...]:
        """The named spans, oldest first, with the bytes that all layers keep for them."""
        found = zip(*(layer.spans() for layer in self.layers), strict=True)
        return tuple(group[0]._replace(nbytes=sum(span.nbytes for span in group)) for group in found)

    def open(self, span: str) -> "ModelMemory":
        """The memory with a new span begun: tokens that are read belong to it until ``close`` or the next ``open``."""
        return self._with(layer.open(span) for layer in self.layers)

    def close(self) -> "ModelMemory":
        """The memory with its open span ended."""
        return self._with(layer.close() for layer in self.layers)

    def unnamed(self) -> "ModelMemory":
        """The same memory without the record of its spans: smaller, and unable to forget them."""
        return self._with(layer.unnamed() for layer in self.layers)

    def forget(self, span: str) -> "ModelMemory":
        """The memory without a span, in every layer.

        Never having read it, exactly: for the newest span, and for one that was read apart and merged. For an older one
        of a text that was read in one go, later tokens have seen it in the layers below, and what they keep of that
        stays.

        Raises: ArgumentError for an unknown name.
        """
        return self._with(layer.forget(span) for layer in self.layers)

    def merge(self, other: "ModelMemory", *, span: str | None = None) -> "ModelMemory":
        """The memory of two texts that were read apart: neither saw the other, and what is read next sees both.

        ``span`` names all of the other's text. Raises: ArgumentError for memories of two models, names that are taken,
        Mamba-3 layers.
        """
        self._same_model("merge", other)
        return self._with(mine.merge(theirs, span=span) for mine, theirs in zip(self.layers, other.layers, strict=True))

    # --- rows -------------------------------------------------------------------------------------------------------

    def gather(self, index: Sequence[int] | Tensor) -> "ModelMemory":
        """The memory of the sequences ``index``, in that order; a row may be left out, or come several times."""
        return self._with(layer.gather(index) for layer in self.layers)

    def scatter(self, index: Sequence[int] | Tensor, other: "ModelMemory") -> "ModelMemory":
        """This memory with the sequences ``index`` replaced by those of ``other``, one each."""
        self._same_model("scatter", other)
        return self._with(mine.scatter(index, theirs) for mine, theirs in zip(self.layers, other.layers, strict=True))

    @staticmethod
    def stack(memories: "Sequence[ModelMemory]") -> "ModelMemory":
        """One memory of the sequences of several, one after another, of equal length or not: users who are served
        together.
        """
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
        """Write to one safetensors file, whole or not at all; read it with the model's ``load_memory``."""
        save_memories(path, self.layers, self.origin)

    def fork(self) -> "ModelMemory":
        """A copy that shares no storage: two continuations of one past."""
        return self._with(layer.fork() for layer in self.layers)

    def to(self, device: torch.device | str) -> "ModelMemory":
        """The memory on another device. The model's operators stay where they are: move the model, too."""
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
                f"ModelMemory.{verb}: the memories come from two models, or from two states of one. Read both "
                "texts with the same weights (prefill)."
            )


def fingerprint(model: nn.Module) -> str:
    """A short name of a model's weights: SHA-256 over names, shapes and some numbers of each."""
    digest, samples = hashlib.sha256(), []
    for name, parameter in model.named_parameters():
        digest.update(f"{name}|{tuple(parameter.shape)}|".encode())
        flat = parameter.detach().reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // _SAMPLES)].double())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]

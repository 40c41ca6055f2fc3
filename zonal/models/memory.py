"""What a model remembers of a sequence: the memories of its layers."""

import dataclasses
import os

from zonal.nn import LayerMemory
from zonal.nn.memory import save_memories


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """The past of every layer, first layer first, as a value."""

    layers: tuple[LayerMemory, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows and layers together."""
        return sum(layer.nbytes for layer in self.layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, whole or not at all; read it with the model's ``load_memory``."""
        save_memories(path, self.layers)

    def fork(self) -> "ModelMemory":
        """A copy that shares no storage: two continuations of one past."""
        return ModelMemory(tuple(layer.fork() for layer in self.layers))

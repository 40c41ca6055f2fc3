"""What a model remembers of a sequence: the memories of its layers."""

import dataclasses

from zonal.nn import LayerMemory


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """The past of every layer, first layer first, as a value."""

    layers: tuple[LayerMemory, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows and layers together."""
        return sum(layer.nbytes for layer in self.layers)

    def fork(self) -> "ModelMemory":
        """A copy that shares no storage: two continuations of one past."""
        return ModelMemory(tuple(layer.fork() for layer in self.layers))

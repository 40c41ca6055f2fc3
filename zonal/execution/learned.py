"""Learned: whether an operator still is what it was when something was made from it."""

import torch
from torch import Tensor

from zonal.algebra.operator import Operator


class Learned:
    """What an operator had learned or been fitted to. It is compared by value: nobody counts what is written through ``.data``."""

    def __init__(self, operator: Operator) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._values = [x.detach().clone() for x in _parts(operator)]

    def stands(self, operator: Operator) -> bool:
        now = _parts(operator)
        if len(now) != len(self._values):
            return False
        for x, kept in zip(now, self._values, strict=True):
            if x.dtype is not kept.dtype or x.device != kept.device or not torch.equal(x, kept):
                return False
        return True

    @property
    def nothing(self) -> bool:
        """Whether there is nothing that could change."""
        return not self._values


def _parts(operator: Operator) -> list[Tensor]:
    # ``parameters()`` walks all modules, in thrice the time, and an attribute of a module is looked for where it is not, first
    modules = operator._modules
    return [*modules["learned_parts"]._parameters.values(), *modules["fixed_parts"]._buffers.values()]  # type: ignore[union-attr,list-item]


__all__ = ["Learned"]

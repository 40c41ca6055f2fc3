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
        return len(now) == len(self._values) and all(
            x.dtype is kept.dtype and x.device == kept.device and torch.equal(x, kept) for x, kept in zip(now, self._values, strict=True)
        )

    @property
    def nothing(self) -> bool:
        """Whether there is nothing that could change."""
        return not self._values


def _parts(operator: Operator) -> list[Tensor]:
    # ``parameters()`` walks all modules, in thrice the time
    return [*operator.learned_parts._parameters.values(), *operator.fixed_parts._buffers.values()]  # type: ignore[list-item]


__all__ = ["Learned"]

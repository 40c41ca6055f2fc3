"""What an operator has learned and drawn, and whether it has changed or moved since a plan or a decoder was made."""

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.errors import ArgumentError

# numbers of a tensor up to which it is kept and compared as a list
_FEW = 64


class Numbers:
    """The learned and drawn numbers of an operator as they were when something was computed from them."""

    def __init__(self, operator: Operator) -> None:
        # a few numbers are compared fastest as a list, many as a tensor
        self._kept = [
            x.tolist() if x.is_cpu and x.numel() <= _FEW else x.detach().clone() for x in numbers_of(operator)
        ]

    def changed(self, operator: Operator) -> bool:
        """Whether the operator now has others."""
        now = numbers_of(operator)
        if len(now) != len(self._kept):
            return True
        for x, kept in zip(now, self._kept, strict=True):
            if isinstance(kept, Tensor):
                if x.dtype is not kept.dtype or x.device != kept.device or not torch.equal(x, kept):
                    return True
            elif x.numel() > _FEW or not x.is_cpu or x.tolist() != kept:
                return True
        return False

    @property
    def none(self) -> bool:
        """Whether there is nothing that could change."""
        return not self._kept


def numbers_of(operator: Operator) -> list[Tensor]:
    """What an operator has learned, and what it drew or was fitted to."""
    # looked up past ``Module.__getattr__``, which takes a good part of a short step
    fixed = operator._modules["fixed_parts"]
    learned, drawn = operator._modules["learned_parts"], fixed._buffers  # type: ignore[union-attr]
    # what a parametrization computes is no parameter of the module itself, which has one more module then
    values = learned.values() if learned._modules else learned._parameters.values()  # type: ignore[union-attr]
    return [*values, *drawn.values()]  # type: ignore[list-item]


def devices_of(operator: Operator) -> list[torch.device]:
    """Where each of ``numbers_of`` is."""
    return [x.device for x in numbers_of(operator)]


def check_devices(call: str, operator: Operator, before: list[torch.device]) -> None:
    """Raise ArgumentError, which begins with ``call``, when an operator's numbers have left the devices ``before``."""
    for was, now in zip(before, devices_of(operator), strict=False):
        if was != now:
            raise ArgumentError(
                f"{call}: operator {operator.name!r} was on {was} when this was made, and is on {now} now. "
                f"Move it back with operator.to({str(was)!r}), or start anew with the operator where it is."
            )


__all__ = ["Numbers", "check_devices", "devices_of", "numbers_of"]

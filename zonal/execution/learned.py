"""Learned: whether an operator still is what it was when something was made from it."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zonal.algebra.operator import Operator


class _Bytes(NamedTuple):
    """Numbers of the CPU that lie together, and what they were. shared keeps their memory, so that no other tensor comes to lie there."""

    shared: Tensor
    address: int
    now: ctypes.Array[ctypes.c_char]
    before: bytes

    @classmethod
    def of(cls, x: Tensor) -> "_Bytes | None":
        if type(x) not in (Tensor, Parameter) or not x.is_cpu or not x.is_contiguous() or not x.numel():
            return None
        now = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
        return cls(x.detach(), x.data_ptr(), now, now.raw)

    def stand(self, x: Tensor) -> bool:
        """Whether x is they, unchanged. An operation of torch takes longer than this, most of all where everything has to be fetched from afar."""
        kept = self.shared
        return (
            type(x) in (Tensor, Parameter)
            and x.data_ptr() == self.address
            and x.dtype is kept.dtype
            and x.shape == kept.shape
            and self.now.raw == self.before
        )


class Learned:
    """What an operator had learned or been fitted to. It is compared by value: nobody counts what is written through ``.data``."""

    def __init__(self, operator: Operator) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._values = [_Bytes.of(x) or x.detach().clone() for x in _parts(operator)]
        # a parametrization takes a parameter away and computes it at each call from numbers that are nowhere here
        self._declared = sum(len(names) for names in (*operator._learned.values(), *operator._fixed.values()))

    def stands(self, operator: Operator) -> bool:
        now = _parts(operator)
        if not len(now) == len(self._values) == self._declared:
            return False
        for x, kept in zip(now, self._values, strict=True):
            if isinstance(kept, _Bytes):
                if not kept.stand(x):
                    return False
            elif x.dtype is not kept.dtype or x.device != kept.device or not torch.equal(x, kept):
                return False
        return True

    @property
    def nothing(self) -> bool:
        """Whether there is nothing that could change."""
        return not self._declared


def _parts(operator: Operator) -> list[Tensor]:
    # ``parameters()`` walks all modules, in thrice the time, and an attribute of a module is looked for where it is not, first
    modules = operator._modules
    return [*modules["learned_parts"]._parameters.values(), *modules["fixed_parts"]._buffers.values()]  # type: ignore[union-attr,list-item]


__all__ = ["Learned"]

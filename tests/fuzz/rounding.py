"""How far arithmetic of a type may be from the definition: the definition with roundings drawn at random.

A gradient near zero may be a sum of large terms, so that no share of its own size is a fair bound. Running the
definition in the same type does not show that either: its own roundings may cancel by luck, as those of a softmax of
one key do. Monte Carlo arithmetic (Parker, 1997) rounds each number at random when an operation reads it; the spread of
a few runs is what the arithmetic can hold.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from zonal import Operator
from zonal.algebra.anchor import Blocks, Row

# what reads numbers only to compare them, or passes one on as it is: rounding one copy of two would make equals differ
_COMPARED = {
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite", "isinf", "sort", "topk", "argsort", "argmax", "argmin",
    "amax", "amin", "max", "min", "maximum", "minimum", "equal", "is_nonzero", "_local_scalar_dense", "where", "clone",
    "masked_fill", "clamp", "clamp_min", "clamp_max", "neg", "abs", "cat", "stack", "index", "gather", "_to_copy",
}  # fmt: skip


class Rounding(TorchDispatchMode):
    """Each number of type ``dtype`` that an operation reads is off by up to ``eps`` of itself, while gradients are
    recorded, and where ``backward``. What is computed in a wider type keeps its digits, and so do the steps of an
    iteration to a fixed point, which would not come to rest.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.backward = False
        self._dtype, self._eps = dtype, torch.finfo(dtype).eps
        self._draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        kept = schema.is_mutable or any(each.alias_info is not None for each in schema.returns)
        if not kept and schema.name.split("::")[1] not in _COMPARED and (torch.is_grad_enabled() or self.backward):
            args = tree_map(self._rounded, args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != self._dtype:
            return x
        off = 2 * torch.rand(x.shape, generator=self._draw, dtype=torch.float64) - 1
        return (x * (1 + self._eps * off)).to(self._dtype)


@contextlib.contextmanager
def weights_made_again(seed: int) -> Iterator[None]:
    """Weights of the row anchor as kernels make them again for gradients: from the logarithm of a row's sum.

    It is kept in the computing type, and its rounding is a share of the weight that grows with the scores: at scores of
    a million, a tenth.
    """
    ordinary, draw = Row.weights, torch.Generator().manual_seed(seed)

    def weights(self: Row, blocks: Blocks) -> Tensor:
        found = ordinary(self, blocks)
        if not blocks.log or not found.numel():
            return found
        with torch.no_grad():
            total = blocks.qk.logsumexp(-1, keepdim=True)
            off = 2 * torch.rand(total.shape, generator=draw, dtype=torch.float64).to(total) - 1
            again = (total.masked_fill(total.isinf(), 0) * torch.finfo(total.dtype).eps * off).exp()
        return found * again

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "weights", weights)
        yield


def patient(operator: Operator) -> Operator:
    """The operator, whose plan is kept where roundings let it come near its tolerance only."""
    if not hasattr(operator.anchor, "on_limit"):
        return operator
    return operator.replace(anchor=replace(operator.anchor, on_limit="keep"))  # type: ignore[type-var]


__all__ = ["Rounding", "patient", "weights_made_again"]

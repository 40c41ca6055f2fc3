"""Steps over sums of features: the kernel passes over the sums once a step."""

from dataclasses import replace

import torch
from torch import Tensor

from zonal.execution.call import Call
from zonal.execution.paths import tile
from zonal.execution.paths.steps.base import Steps, refusal
from zonal.execution.paths.steps.products import Product, by_head, product_of, weights_of
from zonal.features.serve import powers_of
from zonal.kernels.decode import FAMILY as SUMS
from zonal.kernels.decode import Decoder as Kernel
from zonal.kernels.decode import DecodeSpec
from zonal.kernels.native import Reason
from zonal.memory.sums import Sums, fading
from zonal.tracing import recorded


def sums_refusal(call: Call) -> Reason:
    """Why the kernel of sums does not take a few tokens after a memory, or None."""
    memory = call.memory
    if call.held is None and call.tags.cancels:
        return "sums for this call alone may cancel, and are float64"
    if isinstance(memory, Sums) and recorded([memory.state]):
        return "it has no gradients, and the memory may be asked for some"
    if memory is not None and memory.form.statistics != torch.float32:
        return "it is for sums in float32, and the memory holds others"
    return refusal(SUMS, call, ("features", "decayed"), tile.other_anchor)


class SumsSteps(Steps):
    """A memory of sums over features in the hands of the kernel, which changes its own copy of them in place.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: Sums) -> None:
        super().__init__(call, memory)
        bound, dim, found = call.bound, call.shape.dim, None
        memory = memory if call.log_decay is None else fading(memory)
        features = powers_of(bound.link)
        batch, kv_heads, _, value_dim = self.sizes
        with torch.no_grad():
            if call.raw is not None:
                found = product_of(bound, call.head_dim, self.scale)
            self._raw, product = found is not None, found or Product(1.0)
            spec = DecodeSpec(
                (batch, self.heads, kv_heads, dim if product.maps is None else call.head_dim, value_dim),
                features.degree, features.lowest, tile.kind_of(call), bound.link.positive, call.tags.includes_self,
                product.normalise,
            )  # fmt: skip
            self._kernel = Kernel(spec, by_head(product.scale, self.heads), weights_of(bound, dim), product.maps)
        self._before, self._state, self._own = memory, memory.state.contiguous(), False
        self._padding = memory.padding.contiguous()
        self._total, self._declared, self._passed = memory.total, bound.log_decay, 0  # tokens at the declared rate
        self._keep = (
            None if self._declared is None else self._declared.exp().float().view(1, -1, 1).expand(batch, -1, -1)
        )

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (q, k, v) if self._raw else super().prepared(q, k, v)

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        (batch, _, tokens, _), into = q.shape, self._state if self._own else None
        keep = self._keep if log_decay is None else log_decay.exp().float()
        if keep is not None:
            keep = keep.expand(batch, -1, tokens).contiguous()
        found = self._kernel(q, k, v, self._state, self._count, self._padding, into, keep)
        if found is None:
            return None
        self._count, self._state, self._own = self._count + tokens, found[1], True
        if log_decay is None:
            self._passed += tokens
        elif self._total is not None:
            self._total = self._total + log_decay.sum(-1)
        return found[0] if found[0].dtype is self.dtype else found[0].to(self.dtype)

    def memory(self) -> Sums:
        self._own = False  # the next step writes to a new place
        total = self._total
        if total is not None and self._declared is not None:
            total = total + self._passed * self._declared
        return replace(self._before, count=self._count, state=self._state, total=total)


__all__ = ["SumsSteps", "sums_refusal"]

"""Steps of a decoder by a compiled kernel on the CPU: a few tokens absorbed into sums over features and read, in one
pass over the sums.
"""

from dataclasses import replace

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.score import Fused
from zonal.execution import native
from zonal.execution.call import Call
from zonal.features import feature_map
from zonal.kernels import transforms
from zonal.kernels.decode import DTYPES, FAMILY, DecodeSpec
from zonal.kernels.decode import Decoder as Kernel
from zonal.kernels.native import Reason
from zonal.kernels.op import plain
from zonal.memory import DecayedSums, FeatureSums

MOST_TOKENS = 16
"""Past this many tokens the kernel for whole sequences (``native_sums``) shares more work between them."""
_FEW = 64


def refusal(call: Call, kind: str) -> Reason:
    """Why torch's verbs of a memory of this kind run in the kernel's place, or None."""
    return FAMILY.refusal(call.device.type, call.coefficients.dtype, lambda: _unfit(call, kind))


def _unfit(call: Call, kind: str) -> Reason:
    if torch.compiler.is_compiling() or transforms.active():
        return "a call that is traced or transformed needs operations of torch"
    queries, keys = call.shape[2:4]
    if kind != "features":
        return f"a memory of kind {kind!r} is not in it"
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if native.other_anchor(call):
        return native.other_anchor(call)
    if not call.bias.empty or call.visibility.key_mask is not None or call.visibility.packed:
        return "log priors (decay, key biases), key masks and packed documents are not in it"
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return (
            f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
        )
    if native.empty_rows(call):
        return native.empty_rows(call)
    if torch.is_grad_enabled() and (call.requires_grad or call.coefficients.requires_grad):
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    return None


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
            elif x.numel() > _FEW or x.tolist() != kept:
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


class Compiled:
    """What the compiled steps of all memories share: which tensors the next step takes without being prepared and
    planned again.
    """

    def __init__(self, call: Call) -> None:
        batch, heads, _, _, _, value_dim = call.shape
        self.operator, self.bound = call.operator, call.bound
        self.heads, self.scale, self.dtype = heads, None if call.raw is None else call.raw.scale, call.dtype
        self.sizes = batch, call.bound.kv_heads, call.head_dim, value_dim
        self._numbers = Numbers(call.operator)

    def takes(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
        """Whether the kernel runs a step of these tensors with the numbers that it has."""
        batch, kv_heads, dim, value_dim = self.sizes
        if q.ndim != 4 or scale != self.scale or not plain(q, k, v):
            return False
        dtype, tokens, numbers = self.dtype, q.shape[2], self._numbers
        if (
            not 1 <= tokens <= MOST_TOKENS
            or q.shape != (batch, self.heads, tokens, dim)
            or k.shape != (batch, kv_heads, tokens, dim)
            or v.shape != (batch, kv_heads, tokens, value_dim)
            or not q.dtype is k.dtype is v.dtype is dtype
        ):
            return False
        if torch.is_grad_enabled() and (not numbers.none or q.requires_grad or k.requires_grad or v.requires_grad):
            return False
        return numbers.none or not numbers.changed(self.operator)


class SumsSteps(Compiled):
    """A memory of sums over features in the hands of the kernel, which changes its own copy of them in place.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: FeatureSums | DecayedSums) -> None:
        super().__init__(call)
        bound, dim, fused = call.bound, call.shape[4], None
        features = feature_map(bound.link)
        assert features is not None
        if call.raw is not None:
            fused = bound.score.fused(call.head_dim, bound.score_params, self.scale)
        self.fused, plain = fused is not None, fused or Fused(False, 0.0, 1.0)
        batch, kv_heads, _, value_dim = self.sizes
        spec = DecodeSpec(
            (batch, self.heads, kv_heads, dim, value_dim), features.degree, features.lowest,
            native.kind_of(bound.anchor), bound.link.positive, call.include_self,
            plain.normalise, plain.eps,
        )  # fmt: skip
        with torch.no_grad():
            trivial = torch.tensor([0.0, 1.0], dtype=torch.float32).view(2, 1, 1, 1)
            monomials = trivial if features.trivial else bound.link.monomials(bound.coefficients)
            scale = plain.scale
            scale = scale if isinstance(scale, Tensor) else torch.full((self.heads,), scale, dtype=torch.float32)
            self._kernel = Kernel(spec, scale, features.scale(monomials.float(), dim))
        self._before, self._count, self._padding = memory, memory.count, memory.padding.contiguous()
        self._state, self._own = memory.state.contiguous(), False

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """y (B, H, T, P), or None where the environment has switched kernels off, and nothing has changed."""
        if self.fused:
            return self.run(q, k, v)
        score, params = self.bound.score, self.bound.score_params
        with torch.autocast("cpu", enabled=False):
            return self.run(
                score.prepare_query(q.float(), params, self.scale), score.prepare_key(k.float(), params), v.float()
            )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """``step`` of queries and keys as the kernel takes them."""
        if q.dtype not in DTYPES:
            q, k, v = q.float(), k.float(), v.float()
        into = self._state if self._own else None
        found = self._kernel(q, k, v, self._state, self._count, self._padding, into)
        if found is None:
            return None
        self._count, self._state, self._own = self._count + q.shape[2], found[1], True
        return found[0] if found[0].dtype is self.dtype else found[0].to(self.dtype)

    @property
    def count(self) -> int:
        """Tokens so far, padding included."""
        return self._count

    def memory(self) -> FeatureSums | DecayedSums:
        """The memory after all steps. Later ones leave it as it is: the next writes to a new place."""
        self._own = False
        return replace(self._before, count=self._count, state=self._state)


__all__ = ["MOST_TOKENS", "Compiled", "Numbers", "SumsSteps", "numbers_of", "refusal"]

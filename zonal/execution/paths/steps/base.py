"""What the steps of all memories share: what is refused, and the class that each kind completes."""

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra.score.base import prepared_keys
from zonal.execution.call import Call
from zonal.execution.numbers import Numbers
from zonal.execution.paths import tile
from zonal.kernels.native import Family, Reason
from zonal.kernels.op import plain
from zonal.memory import Memory
from zonal.tracing import traced

MOST_TOKENS = 16
"""Past this many tokens the kernel for whole sequences (``sums``) shares more work between them."""


def refusal(family: Family, call: Call, kinds: tuple[str, ...], other: Callable[[Call], Reason]) -> Reason:
    """The refusal of a family that takes memories of these kinds. other: of operators."""
    return family.refusal(call.device.type, call.coefficients.dtype, lambda: unfit(call, kinds, other))


def unfit(call: Call, kinds: tuple[str, ...], other: Callable[[Call], Reason]) -> Reason:
    """The refusal of a call in every family: of memories of other kinds, of what ``other`` says, and of inputs."""
    # the tensors as they were given: steps prepare queries and keys themselves
    if traced() or torch_func.forward() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in call.given):
        return "a call that is traced or transformed, or has subclasses of tensors, needs operations of torch"
    if call.kind not in kinds:
        return f"a memory of kind {call.kind!r} is not in it"
    reason = other(call)
    if reason is not None:
        return reason
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if call.key_bias is not None or call.visibility.key_mask is not None or call.visibility.packed:
        return "key biases, key masks and packed documents are not in it"
    queries, keys = call.shape.queries, call.shape.keys
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return (
            f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
        )
    if call.recorded:
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    return tile.empty_rows(call)


class Steps(abc.ABC):
    """A memory in the hands of a kernel: its tokens so far, and which tensors a step takes without a new plan."""

    def __init__(self, call: Call, memory: Memory) -> None:
        shape = call.shape
        self.operator, self.bound = call.operator, call.bound
        self.heads, self.scale, self.dtype = shape.heads, None if call.raw is None else call.raw.scale, call.dtype
        self.sizes = shape.batch, call.bound.kv_heads, call.head_dim, shape.value_dim
        self._numbers = Numbers(call.operator)
        self._count = memory.count

    @property
    def count(self) -> int:
        """Tokens so far, padding included."""
        return self._count

    @abc.abstractmethod
    def memory(self) -> Memory:
        """The memory after all steps. Later ones leave it as it is."""

    def step(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """y (B, H, T, P), or None where the environment has switched kernels off or too much fades, and nothing has
        changed. log_decay: (B or 1, Hkv, T); None: as the operator declares it.
        """
        return self.run(*self.prepared(q, k, v), log_decay)

    @abc.abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """``step`` of tensors that are ``prepared``."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
        """Whether the kernel runs a step of these tensors with the numbers that it has."""
        batch, kv_heads, dim, value_dim = self.sizes
        if q is None or k is None or v is None:  # plain() passes over None; other values are refused by it
            return False
        if scale != self.scale or not plain((q, k, v)) or q.ndim != 4:
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

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors as ``run`` takes them: in float32, with queries and keys prepared by the score."""
        score, params = self.bound.score, self.bound.score_params
        with torch.autocast("cpu", enabled=False):
            q, k = score.prepare_query(q.float(), params, self.scale), prepared_keys(score, k.float(), params)
            return q, k, v.float()


__all__ = ["MOST_TOKENS", "Steps", "refusal", "unfit"]

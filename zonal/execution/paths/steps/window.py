"""Steps over the keys of a window and the sums before it, by one kernel."""

from dataclasses import replace

import torch
from torch import Tensor

from zonal.execution.call import Call
from zonal.execution.paths import tile
from zonal.execution.paths.steps.base import Steps, refusal
from zonal.execution.paths.steps.products import by_head, product_of, weights_of
from zonal.features.serve import powers_of
from zonal.formula import FORMULAS
from zonal.kernels.decode import FAMILY as SUMS
from zonal.kernels.decode import Decoder as Kernel
from zonal.kernels.decode import DecodeSpec, Window, WindowSpec
from zonal.kernels.native import Reason
from zonal.memory.tokens import Tokens
from zonal.memory.windowed import WindowedSums, far_of
from zonal.tracing import recorded

_ROOM = 64
"""A window has room for as many further tokens as it has, and these, before its keys move to a new place."""


def window_refusal(call: Call) -> Reason:
    """Why the kernel of a window and sums does not take a few tokens after a memory, or None."""
    memory = call.memory
    if isinstance(memory, WindowedSums):
        kept = [x for x in (memory.tokens, memory.opening) if x is not None]
        if recorded([memory.state, *(x for tokens in kept for x in tokens[:2])]):
            return "it has no gradients, and the memory may be asked for some"
        if any(tokens.key_bias is not None for tokens in kept):
            return "the memory keeps key biases, which are not in it"
        if memory.form.dtype != call.dtype:
            return f"the memory keeps keys in {memory.form.dtype}, and this call has them in {call.dtype}"
    return refusal(SUMS, call, ("windowed",), _other_kernels)


def _other_kernels(call: Call) -> Reason:
    """The refusal of other kernels in a window and before it than those that the kernel computes."""
    far, fused = far_of(call.bound).bound, call.fused
    if fused is None or fused.normalise or tile.code_of(call.bound.link) != FORMULAS["exp"]:
        return "the kernel of its window is not the exponential of a plain dot product"
    if product_of(far, call.head_dim, None) is None:
        return f"its far score {type(far.score).__name__} is neither a dot product nor made of features of one layer"
    return None


class WindowSteps(Steps):
    """The keys of a window and the sums before it in the hands of the kernel, which changes its own copies of them.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: WindowedSums) -> None:
        super().__init__(call, memory)
        dim, far = call.head_dim, far_of(call.bound)
        batch, kv_heads, _, value_dim = self.sizes
        features = powers_of(far.bound.link)
        with torch.no_grad():
            fused, product = call.fused, product_of(far.bound, dim, None)
            assert fused is not None
            assert product is not None
            near, scale, key_scale = by_head(fused.scale, self.heads), by_head(product.scale, self.heads), 1.0
            if not product.normalise:  # as ``Far`` scales what it sees
                scale, key_scale = scale * near * dim**0.25, dim**-0.25
            spec = DecodeSpec(
                (batch, self.heads, kv_heads, dim, value_dim), features.degree, features.lowest, "row",
                far.bound.link.positive, True, product.normalise,
            )  # fmt: skip
            share = by_head(far.weight, self.heads)
            rules = WindowSpec(far.window, far.first, near, share, key_scale)
            weights = weights_of(far.bound, far.bound.score.width(dim))
            self._kernel = Kernel(spec, scale, weights, product.maps, rules)
        self._before, self._state, self._own = memory, memory.state.contiguous(), False
        self._padding = memory.padding.contiguous()
        self._size, self._length = far.window, memory.tokens.length
        opening = memory.tokens.span(0, 0) if memory.opening is None else memory.opening
        first = opening.map(lambda x: x.clone(memory_format=torch.contiguous_format))  # the kernel writes into it
        kept, held, opened = memory.tokens, _real(memory.tokens), _real(first)
        self._window = Window(kept.k, kept.v, self._length, held, first.k, first.v, opened)

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        assert log_decay is None
        tokens, window = q.shape[2], self._window
        if window.end + tokens > window.k.shape[2]:
            self._window = window = self._moved(window)
        into = self._state if self._own else None
        found = self._kernel(q, k, v, self._state, self._count, self._padding, into, window=window)
        if found is None:
            return None
        self._count, self._length = self._count + tokens, min(self._length + tokens, self._size)
        self._state, self._own = found[1], True
        return found[0]

    def _moved(self, window: Window) -> Window:
        """The window at the start of a new place. Memories that were given away keep the old one."""
        start = window.end - self._length

        def moved(x: Tensor) -> Tensor:
            room = x.new_empty(*x.shape[:2], 2 * self._size + _ROOM, x.shape[3])
            room[:, :, : self._length] = x[:, :, start : window.end]
            return room

        return replace(window, k=moved(window.k), v=moved(window.v), end=self._length)

    def memory(self) -> WindowedSums:
        # later steps write behind its keys, and to other sums
        self._own, window = False, self._window
        last = slice(window.end - self._length, window.end)
        tokens = Tokens(window.k[:, :, last], window.v[:, :, last])
        if bool((window.held < self._length).any()):
            place = torch.arange(self._length, 0, -1, device="cpu")
            tokens = tokens._replace(mask=place <= window.held[:, None])
        opening = self._before.opening
        if opening is not None:
            mask = torch.arange(opening.length, device="cpu") < window.opened[:, None]
            opening = Tokens(window.opening_k.clone(), window.opening_v.clone(), mask)
        return replace(self._before, count=self._count, tokens=tokens, state=self._state, opening=opening)


def _real(tokens: Tokens) -> Tensor:
    """How many of the tokens are real, (B,) int64."""
    if tokens.mask is None:
        return torch.full((tokens.k.shape[0],), tokens.length, dtype=torch.int64, device="cpu")
    return tokens.mask.sum(-1)


__all__ = ["WindowSteps", "window_refusal"]

"""The decoder of every memory: it steps by a compiled kernel where it can, else by the memory's own operations."""

from dataclasses import replace

import torch
from torch import Tensor

from zonal import torch_func
from zonal.errors import ArgumentError
from zonal.execution.call import Call, check_memory, lowered, prepare, resumed, spread, weighted
from zonal.execution.mask import log_decay_of
from zonal.execution.numbers import check_devices, devices_of, numbers_of
from zonal.execution.paths.steps.base import Steps
from zonal.execution.paths.streaming import by_torch, compiled_steps, first_step
from zonal.execution.refusals import check_tokens
from zonal.memory import Decoder, Memory
from zonal.memory.decoding import NOTHING, Given
from zonal.memory.incoming import prepared


class StepDecoder(Decoder):
    """``Decoder`` that uses a compiled kernel for the steps that one supports.

    While ``_steps`` is set, it holds the sums of all tokens, and ``_held`` only the record of spans. Otherwise
    ``_held`` is the memory.
    """

    def __init__(self, memory: Memory) -> None:
        if not isinstance(memory, Memory):
            raise ArgumentError(f"Decoder: a memory is required, received {type(memory).__name__}.")
        self.operator, self.form, self._device = memory.operator, memory.form, memory.form.device.type
        self._held: Memory = replace(memory)  # what absorb_ makes of the given one is not ours
        self._steps: Steps | None = None
        self._shapes = [x.shape for x in numbers_of(memory.operator)]
        self._devices = devices_of(memory.operator)
        self._asked = _next(memory)

    def advance(self, q: Tensor, k: Tensor, v: Tensor, given: Given, scale: float | None) -> Tensor:
        y = self._advanced(q, k, v, given, scale)
        if self.count >= self._asked:
            memory = self.memory()
            memory.warn_of_drift(0, stacklevel=5)
            self._asked = _next(memory)
        return y

    def _advanced(self, q: Tensor, k: Tensor, v: Tensor, given: Given, scale: float | None) -> Tensor:
        steps = self._steps if given is NOTHING or self._only_decays(given) else None
        if torch_func.forward():  # tangents, which the kernels do not carry
            steps = None
        if steps is None or torch.is_autocast_enabled(self._device) or not steps.takes(q, k, v, scale):
            q, k, v = lowered("Decoder.step", q, k, v)
            q, k = spread(q, k, v)
            if steps is not None and not steps.takes(q, k, v, scale):
                steps = None
        y = None
        if steps is not None:
            decay = given.log_decay
            if decay is not None:
                check_tokens(q, k, v, None, decay, None)
                decay = log_decay_of(steps.bound, k, None, decay)
            y = steps.step(q, k, v, decay)
        if y is not None:
            if self._held.parts:
                tokens = prepared(self.operator, self.form, k, v, log_decay=given.log_decay)
                self._held = self._held.recorded(self._held, tokens)
            return y
        with torch.autocast(q.device.type, enabled=False):
            self._check(q, k)
            call = prepare(
                self.operator, q, k, v, causal=True, key_padding_mask=given.key_padding_mask, scale=scale,
                log_decay=given.log_decay, key_bias=given.key_bias,
            )  # fmt: skip
            return self._planned(weighted(call, given.action_mask, given.key_gate, whole=False))

    def _only_decays(self, given: Given) -> bool:
        """Whether a step is given log decays, which its memory has, and nothing else."""
        decays = given.log_decay is not None and self.operator.tags.decays
        return decays and all(x is None for x in given._replace(log_decay=None))

    def memory(self) -> Memory:
        return replace(self._held if self._steps is None else self._steps.memory(), parts=self._held.parts)

    @property
    def count(self) -> int:
        """Tokens so far, padding included."""
        return self._held.count if self._steps is None else self._steps.count

    def _planned(self, call: Call) -> Tensor:
        """A step by a kernel that is set up with the operator's present numbers, or by the memory's own operations."""
        memory = self.memory()
        check_memory(call, memory)
        call = resumed(call, memory.unnamed())
        steps = compiled_steps(call)
        y = None if steps is None else first_step(call, steps)
        if y is None:
            y, after = by_torch(call)
            assert after is not None
            steps = None
        else:
            after = memory
        if memory.parts:
            after = memory.recorded(after, call.new_tokens)
        self._held, self._steps = after, steps
        return y

    def _check(self, q: Tensor, k: Tensor) -> None:
        if torch_func.active() or torch_func.forward():
            raise ArgumentError(
                "Decoder.step: a decoder keeps tensors, and torch.func's transforms and forward-mode derivatives "
                "cannot. Use zonal.attention on all tokens."
            )
        check_devices("Decoder.step", self.operator, self._devices)
        shapes = [x.shape for x in numbers_of(self.operator)]
        if shapes != self._shapes:
            raise ArgumentError(
                f"Decoder.step: the learned parts of operator {self.operator.name!r} had the shapes "
                f"{[tuple(s) for s in self._shapes]} and have "
                f"{[tuple(s) for s in shapes]}. Absorb the tokens again into a memory of the operator as it is."
            )
        if q.ndim == k.ndim == 4 and (q.shape[2] != k.shape[2] or q.shape[2] == 0):
            raise ArgumentError(
                f"Decoder.step: at least one token is required, each with a query, received {q.shape[2]} queries and "
                f"{k.shape[2]} keys."
            )


Decoder.implementation = StepDecoder


def _next(memory: Memory) -> int:
    """At how many tokens it is asked again whether to warn of drift."""
    return (memory.count // memory.tokens_before_drift + 1) * memory.tokens_before_drift


__all__ = ["StepDecoder"]

"""``zonal.plan``: a choice of ``zonal.explain`` as a value that runs calls of these shapes without planning again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra import Operator
from zonal.algebra.named import operator_of
from zonal.errors import ArgumentError
from zonal.execution.call import Call, lowered, prepare, spread
from zonal.execution.explain import Explanation, explain, full_shapes
from zonal.execution.numbers import Numbers, check_devices, devices_of
from zonal.execution.paths.sums import Runner
from zonal.execution.plan import choose, run
from zonal.kernels.op import plain
from zonal.names import known_names
from zonal.stretch import active


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel with all that follows from a plan, and the operator's numbers that it was given."""

    run: Runner
    numbers: Numbers

    def fits(self, operator: Operator) -> bool:
        """Whether the operator still has these numbers, and nobody asks for their gradients."""
        if self.numbers.none:
            return True
        return not torch.is_grad_enabled() and not self.numbers.changed(operator)


class Plan:
    """How calls of these shapes run. ``plan(q, k, v)`` runs one; ``print(plan)`` explains it as ``zonal.explain`` does.

    The operator's learned numbers are read at each call, so that a plan follows its operator through training.
    Gradients flow through a plan that was made for them. A plan refuses shapes, types and devices other than its own.

    path: that it takes. explanation: the choice and its grounds, as a value.
    """

    def __init__(
        self, operator: Operator, explanation: Explanation, causal: bool, scale: float | None,
        shapes: Sequence[tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.operator, self.explanation, self.causal, self.scale = operator, explanation, causal, scale
        self.shapes = tuple(map(torch.Size, shapes))
        self.dtype: torch.dtype = getattr(torch, explanation.dtype)
        self._kernel: _Kernel | None = None
        self._devices = devices_of(operator)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kernel": None}  # a copy prepares its own

    @property
    def path(self) -> str:
        return self.explanation.path

    def __str__(self) -> str:
        return str(self.explanation)

    def __repr__(self) -> str:
        return f"Plan({self.operator.name!r}, {self.explanation.shape}, {self.explanation.plan.routes[0]})"

    @known_names
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """y (B, H, T, P) of ``zonal.attention`` for tensors as the plan was made for, by the route that it chose.

        Raises: ArgumentError for other shapes, another type or device, an operator that has moved to another device, a
            mask where none was planned (or the reverse), and gradients where none were planned.
        """
        if active() is not None:
            raise ArgumentError(
                "plan: a plan is for the tokens of one process, and within sequence_parallel others hold the rest. "
                "Call zonal.attention."
            )
        kernel = self._kernel
        if kernel is not None and key_padding_mask is None and self._plain(q, k, v) and kernel.fits(self.operator):
            y = kernel.run(*spread(q, k, v), v)
            if y is not None:
                return y
        q, k, v = lowered("plan", q, k, v)
        self._check(q, k, v, key_padding_mask)
        with torch.autocast(q.device.type, enabled=False):
            call = prepare(
                self.operator, q, k, v, causal=self.causal, key_padding_mask=key_padding_mask, scale=self.scale
            )
            if call.recorded and not self.explanation.shape.gradients:
                raise ArgumentError(
                    "plan: gradients may be asked for, and the plan was made without them. Call it inside "
                    "torch.no_grad(), or make the plan with gradients=True."
                )
            if call.empty:
                return choose(call, "dense").routes[0].run(call)[0]
            # what the plan chose may know no transforms and no tangents
            again = torch_func.active() or torch_func.forward()
            y = run(choose(call, self.path) if again else self.explanation.plan, call)[0]
        if kernel is None and not torch.compiler.is_compiling() and self._plain(q, k, v):
            self._kernel = self._made(call)
        return y

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether a compiled kernel of the CPU may be given these tensors as they are."""
        if q is None or k is None or v is None or not plain((q, k, v)):  # plain() passes over None
            return False
        if (q.shape, k.shape, v.shape) != self.shapes:
            return False
        if not q.dtype is k.dtype is v.dtype is self.dtype is torch.float32:
            return False
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return False
        return not torch.is_autocast_enabled("cpu")

    def _made(self, call: Call) -> _Kernel | None:
        make = self.explanation.plan.routes[0].runner
        if make is None or self.explanation.shape.padded:
            return None
        with torch.inference_mode(False), torch.no_grad():
            found = make(call)
            return None if found is None else _Kernel(found, Numbers(call.operator))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        check_devices("plan", self.operator, self._devices)
        device = self.explanation.shape.device
        for name, x, shape in zip("qkv", (q, k, v), self.shapes, strict=True):
            if x.shape != shape or x.dtype != self.dtype or x.device.type != device.type:
                raise ArgumentError(
                    f"plan: {name} must be {self.dtype} of shape {tuple(shape)} on {device}, received {x.dtype} of "
                    f"shape {tuple(x.shape)} on {x.device}. Make another plan for it, or call zonal.attention, which "
                    "plans each call."
                )
        if (mask is not None) != self.explanation.shape.padded:
            made, came = ("with", "none") if self.explanation.shape.padded else ("without", "one")
            raise ArgumentError(
                f"plan: the plan was made {made} a key_padding_mask, and the call has {came}. "
                f"Make another plan with key_padding={mask is not None}."
            )


@known_names
def plan(
    operator: Operator | str,
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradients: bool | None = None,
    key_padding: bool = False,
    path: str = "auto",
) -> Plan:
    """A plan for calls of ``zonal.attention`` of these shapes: ``plan(q, k, v)`` runs them without planning again.

    Args:
        operator: an Operator, or a spec such as "sko", which is read once.
        q_shape, k_shape, v_shape: (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, P). By default k has the shape of q, and v
            the shape of k.
        causal, scale, path: as ``zonal.attention`` has them.
        gradients: whether they flow; None = as torch.is_grad_enabled() says now.
        key_padding: whether calls have a key_padding_mask.

    Raises: ArgumentError for arguments that ``zonal.attention`` would refuse, in the same words; PathError when the
        path cannot run such calls.
    """
    operator = operator_of("plan", operator)
    found = explain(
        operator, q_shape, k_shape, v_shape, causal=causal, scale=scale, dtype=dtype, device=device,
        gradients=torch.is_grad_enabled() if gradients is None else gradients, key_padding=key_padding, path=path,
    )  # fmt: skip
    return Plan(operator, found, causal, scale, full_shapes(q_shape, k_shape, v_shape))


__all__ = ["Plan", "plan"]

"""Where NaN or infinity came from: the batch is run again with a watch on every layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zonal.models import LanguageModel
from zonal.training.step import Part, autocast


def _finite(value: Any) -> bool:
    """Whether every floating-point tensor in a module's output is finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, tuple | list):
        return all(_finite(each) for each in value)
    return True


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.requires_grad else None
    if isinstance(value, tuple | list):
        return next((found for each in value if (found := _first_tensor(each)) is not None), None)
    return None


def locate_non_finite(model: LanguageModel, parts: Sequence[Part], dtype: str, *, backward: bool) -> str:
    """One phrase that says where the first non-finite number appears when ``parts`` are run again.

    In this order: a parameter that is not finite before anything is run; the first layer whose output is not finite
    (in order of execution; the innermost that shows it); with ``backward``, the layer at whose output the gradient is
    first not finite, seen from the loss; a parameter with a non-finite gradient.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter.detach()):
            return f"parameter {name!r} is already not finite"
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    outputs: list[str] = []
    gradients: list[str] = []
    handles = []

    def watch(name: str):
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if not _finite(output):
                outputs.append(name)
            tensor = _first_tensor(output) if backward else None
            if tensor is not None:
                tensor.register_hook(lambda gradient: None if _finite(gradient) else gradients.append(name))

        return after

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(watch(name)))
    device = next(model.parameters()).device
    saved = {name: parameter.grad for name, parameter in model.named_parameters()}
    try:
        for part in parts:
            with torch.set_grad_enabled(backward), autocast(device, dtype):
                loss, _ = model.loss(part.tokens, part.targets)
            if outputs:
                return f"the first non-finite output is that of layer {outputs[0]!r} ({kinds[outputs[0]]})"
            if not _finite(loss):
                return "every layer's output is finite, the loss computed from them is not"
            if backward:
                model.zero_grad(set_to_none=True)
                (loss / max(1, part.count)).backward()
                bad = [
                    name
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None and not _finite(parameter.grad)
                ]
                if gradients:
                    name = gradients[0]
                    return (
                        f"the gradient that reaches the output of layer {name!r} ({kinds[name]}) is not finite, "
                        "but those nearer to the loss are"
                    )
                if bad:
                    return f"the gradient of parameter {bad[-1]!r} is not finite, those of all layers' outputs are"
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in model.named_parameters():
            parameter.grad = saved[name]
    return (
        "the same batch run again is finite: the computation is not deterministic on this device, "
        "or the sum of all parts overflows"
    )

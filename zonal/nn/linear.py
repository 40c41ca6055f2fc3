"""Linear layers that may be read as their weight."""

from torch import nn


def plain(linear: nn.Module) -> bool:
    """Whether a call computes the product with the weight and nothing else: no adapter and no hook is there."""
    hooks = (linear._forward_pre_hooks, linear._forward_hooks, linear._backward_pre_hooks, linear._backward_hooks)
    return type(linear) is nn.Linear and not any(hooks)


__all__ = ["plain"]

"""How a score's features are made, in the form that the compiled kernel of features knows."""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.formula import Activation


class FeatureLayer(NamedTuple):
    """Features of a raw vector x as the kernel of features computes them: g_i(w_i . u), with u = x, or x / |x| if
    ``unit``.

    activations: the functions g_i, in runs of equal ones. weight: (H or 1, n, D), the rows w_i; None: w_i . u is u_i.
    softmax: instead, the softmax over all arguments of g, times its gain.
    left, nodes: where left > 0, these numbers are [a, b_1, …, b_nodes] with ``left`` of them in a, and the features are
    the products a ⊗ b_1, …, a ⊗ b_nodes. name: of the feature map, where it is an error that all features of a vector
    are 0.
    """

    activations: tuple[Activation, ...]
    weight: Tensor | None
    unit: bool = False
    softmax: bool = False
    left: int = 0
    nodes: int = 1
    name: str = ""

    def scaled(self, gain: float) -> "FeatureLayer":
        """The features times a number."""
        scaled: list[Activation] = []
        at = 0
        for each in self.activations:
            taken = self.left == 0 or at < self.left
            scaled.append(each._replace(gain=each.gain * gain) if taken else each)
            at += each.count
        return self._replace(activations=tuple(scaled))

    def scaled_input(self, factor: float) -> "FeatureLayer":
        """The features of vectors times a number > 0."""
        if self.unit:
            return self
        shrunk = (e._replace(factor=e.factor * factor, norm=e.norm * factor**2) for e in self.activations)
        return self._replace(activations=tuple(shrunk))


def underflow_error(name: str, dtype: torch.dtype) -> ArgumentError:
    """The error that all features of some vector underflow. name: of the feature map."""
    return ArgumentError(
        f"attention: all features {name} of some vector are 0 in {str(dtype).removeprefix('torch.')}, being "
        "exponentials of minus its length squared: the sums that rows are divided by would vanish. Make queries and "
        "keys shorter (a norm on them, qk_norm=True in a layer)."
    )


__all__ = ["FeatureLayer", "underflow_error"]

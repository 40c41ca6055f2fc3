"""Features that are trained to reproduce the attention weights of a kernel, and the training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_one_of, require_positive, require_whole
from zonal.algebra.score import FeatureLayer
from zonal.errors import ArgumentError, NonFiniteError
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side, Source
from zonal.formula import Activation


@dataclass(frozen=True)
class LearnedExp(FeatureMap):
    """phi(x) = softmax over features of [W x, -W x], or exp of it: positive, with W (m/2, d) trained per head.

    It claims no kernel. size: m, even. activation: ``softmax`` (bounded) or ``exp``. shared: one W for queries and
    keys. init_scale: size of the entries of W x for a unit vector x before training. With ``exp`` start it small for
    long vectors, such as 0.25 for the queries and keys of a trained model.

    Source: Zhang et al. 2024 (Hedgehog).
    """

    unit = False
    claim = Claim("learned", "projections are trained to reproduce a kernel's rows")
    nonnegative = True

    size: int
    activation: Literal["softmax", "exp"] = "softmax"
    shared: bool = False
    init_scale: float = 1.0

    def __post_init__(self) -> None:
        require_whole("LearnedExp: size", self.size, 2, most=2**16)
        require_positive("LearnedExp: init_scale", self.init_scale)
        require(
            self.size % 2 == 0,
            "LearnedExp: an even size >= 2 is required, because each projection is used with both signs, "
            f"received {self.size}.",
        )
        require_one_of("LearnedExp: activation", self.activation, ("softmax", "exp"))

    @property
    def learned(self) -> tuple[str, ...]:
        return ("weight",) if self.shared else ("query_weight", "key_weight")

    def dimension(self, dim: int) -> int:
        return self.size

    def flops(self, dim: int) -> int:
        return self.size * (dim + 3)

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        raise ArgumentError(
            "LearnedExp.kernel: learned features claim no kernel of q.k. "
            "Compare their rows with those of the kernel they were trained on."
        )

    def draw(self, source: Source) -> dict[str, Tensor]:
        start = source.units("weight", self.size // 2, orthogonal=True) * source.dim**0.5 * self.init_scale
        return {name: start.clone() for name in self.learned}

    def _weight(self, buffers: Buffers, side: Side) -> Tensor:
        return buffers["weight" if self.shared else f"{side}_weight"]

    def layer(self, buffers: Buffers, side: Side) -> FeatureLayer:
        half = Activation("exp", 0, self.size // 2)
        both = half, half._replace(factor=-1.0)
        return FeatureLayer(both, self._weight(buffers, side), softmax=self.activation == "softmax")

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        along = x @ self._weight(buffers, side).mT
        both = torch.cat([along, -along], -1)
        return both.softmax(-1) if self.activation == "softmax" else both.exp()


def rows(kernel: Tensor, causal: bool, delta: float = 0.0) -> Tensor:
    """Weights K / (sum of the row + delta) of a kernel (…, T, S); ``causal``: keys 0 … t only.

    Rows whose sum is 0 give 0.
    """
    if causal:
        kernel = kernel.tril()
    total = kernel.sum(-1, keepdim=True) + delta
    return kernel / torch.where(total == 0, torch.inf, total)


@torch.inference_mode(False)
@torch.enable_grad()
def distil(
    features: FeatureMap,
    buffers: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    kernel: Callable[[Tensor], Tensor],
    *,
    causal: bool = True,
    steps: int = 200,
    rate: float = 0.02,
) -> dict[str, Tensor]:
    """Buffers with learned parts trained so that rows of phi_q . phi_k match those of ``kernel``(q . k).

    Adam minimises |W - W*|^2 / |W*|^2 over the weights of all rows, with a rate that falls linearly to zero. q, k (B,
    H, T, d) as the score prepares them.

    It trains inside ``torch.no_grad`` and ``torch.inference_mode``, too.

    Raises: ArgumentError for a map without learned parts, NonFiniteError when the loss is not finite.
    """
    require(
        bool(features.learned),
        f"distil: {type(features).__name__} has nothing to learn; set its learn=True, or use LearnedExp.",
    )
    q, k = q.detach().clone(), k.detach().clone()  # what inference mode has made takes no gradient
    with torch.no_grad():
        wanted = rows(kernel(q @ k.mT), causal)
    values = {name: value.detach().clone().requires_grad_(name in features.learned) for name, value in buffers.items()}
    optimiser = torch.optim.Adam([values[name] for name in features.learned], lr=rate)
    size = wanted.square().sum()
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimiser.zero_grad()
        loss = (rows(features.query(q, values) @ features.key(k, values).mT, causal) - wanted).square().sum() / size
        if not bool(loss.isfinite()):
            raise NonFiniteError(
                f"distil: the loss of {type(features).__name__} is {float(loss.detach())} at step {step}. "
                "Use a smaller rate, or unit vectors."
            )
        loss.backward()
        optimiser.step()
    return {name: value.detach() for name, value in values.items()}


__all__ = ["LearnedExp", "distil", "rows"]

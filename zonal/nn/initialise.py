"""Initial weights: one independent random stream per parameter, named by the parameter.

Two models that differ only in their operator therefore share, bit for bit, every parameter of equal name and shape, so
a comparison of operators starts from one point.
"""

import dataclasses

import torch
from torch import Tensor, nn

from zonal.features.base import stream


@dataclasses.dataclass(frozen=True)
class Draws:
    """The source of initial weights.

    Args:
        std: standard deviation of ordinary weight matrices (GPT-2 and Llama use 0.02).
        output_std: the same for projections that write into the residual stream; None = ``std``.
        seed: the seed of all streams; None draws from torch's global generator.
        prefix: the qualified name of the module that draws, with a trailing dot unless empty.
    """

    std: float = 0.02
    output_std: float | None = None
    seed: int | None = None
    prefix: str = ""

    def child(self, name: str) -> "Draws":
        """The source for the submodule ``name``."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}.")

    def generator(self, name: str) -> torch.Generator | None:
        """The generator of parameter ``name`` (``features.base.stream``), or None without a seed."""
        return None if self.seed is None else stream(self.seed, f"{self.prefix}{name}")

    def whole(self, name: str) -> int:
        """An integer from the stream of ``name``, to seed another generator."""
        return int(torch.randint(2**63 - 1, (), generator=self.generator(name), device="cpu"))

    @torch.no_grad()
    def normal_(self, parameter: Tensor, name: str, *, output: bool = False, std: float | None = None) -> None:
        """Fill with N(0, std²); ``output`` marks a projection into the residual stream."""
        if parameter.is_meta:  # without numbers; torch would load its compiler to draw them
            return
        if std is None:
            std = self.output_std if output and self.output_std is not None else self.std
        # drawn in float32 on the CPU, then copied: the same numbers for every dtype and device
        parameter.copy_(
            torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=self.generator(name))
        )

    def linear_(self, layer: nn.Linear, name: str, *, output: bool = False) -> None:
        """Fill the weight of the submodule ``name`` as ``normal_`` does, and its bias with zeros."""
        self.normal_(layer.weight, f"{name}.weight", output=output)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def uniform_(self, parameter: Tensor, name: str, bound: float) -> None:
        """Fill with U(−bound, bound)."""
        if parameter.is_meta:
            return
        parameter.copy_(
            torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=self.generator(name))
        )

    @torch.no_grad()
    def orthogonal_(self, parameter: Tensor, name: str, blocks: int) -> None:
        """Fill a (blocks · r, dim) matrix with ``blocks`` semi-orthogonal (r, dim) matrices, one per head."""
        generator = self.generator(name)
        for block in parameter.chunk(blocks):
            block.copy_(nn.init.orthogonal_(torch.empty(block.shape, dtype=torch.float32), generator=generator))

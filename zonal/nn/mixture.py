"""The mixture of layers, in which every token weights the parts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.algebra.operator import Operator
from zonal.errors import ArgumentError
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.memory import LayerMemory, Past
from zonal.nn.mixer import Inputs, TokenMixer


class Mixture(TokenMixer):
    """y_t = Σ_k g_k(x_t) · part_k(x)_t with g(x) = softmax(W₂ SiLU(W₁ x)). Each part has its own projections and may
    have another geometry.

    Args:
        parts: two or more layers of one width, such as ``Attention`` with different operators, but no mixtures.
        hidden: hidden size of the gate.

    Every part reads every token, so cost and memory are sums over the parts. All parts must support the ``path`` of a
    call; its ``action_mask`` is for the parts that can read a token without storing it.

    Source: Phadke, *The Universal REWA Attention Framework*, 2025, section 10.3.2.

    Raises:
        ArgumentError: parts do not fit together.
    """

    splits = True

    def __init__(self, parts: Sequence[TokenMixer], hidden: int = 16) -> None:
        super().__init__()
        found = [*parts]
        if len(found) < 2 or not all(isinstance(part, TokenMixer) and not isinstance(part, Mixture) for part in found):
            raise ArgumentError(
                "nn.Mixture: two or more layers, none of them a mixture, are required, received "
                f"{', '.join(type(part).__name__ for part in found) or 'none'}."
            )
        if len({(part.dim, part.causal) for part in found}) > 1:
            each = ", ".join(f"(dim={part.dim}, causal={part.causal})" for part in found)
            raise ArgumentError(f"nn.Mixture: parts of one dim, all causal or none, are required, received {each}.")
        if hidden < 1:
            raise ArgumentError(f"nn.Mixture: hidden must be at least 1, received {hidden}.")
        self.dim, self.causal = found[0].dim, found[0].causal
        self.carries, self.parts_beside = found[0].carries, len(found) - 1
        self.parts = nn.ModuleList(found)
        self.gate_in = nn.Linear(self.dim, hidden)
        self.gate_out = nn.Linear(hidden, len(found))
        self.reset_parameters(Draws())

    @property
    def operator(self) -> Operator:  # type: ignore[override]
        """The operator of the first part, whose memory comes first."""
        return self._parts()[0].operator

    @property
    def convolution(self) -> ShortConvolution | None:  # type: ignore[override]
        """The convolution of the first part."""
        return self._parts()[0].convolution

    @property
    def output(self) -> nn.Linear:  # type: ignore[override]
        """The projection of the first part."""
        return self._parts()[0].output

    def _parts(self) -> list[TokenMixer]:
        return [part for part in self.parts if isinstance(part, TokenMixer)]

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights. The parts start with nearly equal shares."""
        for index, part in enumerate(self._parts()):
            part.reset_parameters(draws.child(f"parts.{index}"))
        draws.linear_(self.gate_in, "gate_in")
        draws.linear_(self.gate_out, "gate_out")

    @property
    def chooses(self) -> bool:
        return any(part.chooses for part in self._parts())

    def _empty(self, batch: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        first, *others = (part.empty_memory(batch, dtype, device) for part in self._parts())
        return dataclasses.replace(first, others=tuple(others))

    def reads(self, tokens: int) -> Tensor:
        return torch.stack([part.reads(tokens) for part in self._parts()]).any(0)

    def learned(self) -> dict[str, Any]:
        """The learned quantities of each part, with the name of the part before each quantity."""
        return {
            f"part {index} {name}": value
            for index, part in enumerate(self._parts(), start=1)
            for name, value in part.learned().items()
        }

    def shares(self, x: Tensor) -> Tensor:
        """g(x), (B, T, parts): positive numbers that sum to 1."""
        return self.gate_out(F.silu(self.gate_in(x))).softmax(-1)

    def _mix(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Past | None]:
        before, mask, cu_seqlens, path, action_mask, _ = inputs
        each = [None] * len(self.parts) if before is None else [dataclasses.replace(before, others=()), *before.others]
        found: list[Tensor] = []
        after: list[Past] = []
        for part, past in zip(self._parts(), each, strict=True):
            chosen = action_mask if part.chooses else None
            result = part(x, past, key_padding_mask=mask, cu_seqlens=cu_seqlens, path=path, action_mask=chosen)
            found.append(result[0] if isinstance(result, tuple) else result)
            after += result[1:] if isinstance(result, tuple) else ()
        shares = self.shares(x).to(found[0].dtype)
        y = shares[..., :1] * found[0]
        for index, one in enumerate(found[1:], start=1):
            y = y + shares[..., index, None] * one
        return y, dataclasses.replace(after[0], others=tuple(after[1:])) if after else None

    def extra_repr(self) -> str:
        return f"{self.dim}, parts={len(self.parts)}"


__all__ = ["Mixture"]

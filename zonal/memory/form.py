"""Form: the shape of a memory."""

from typing import NamedTuple

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENDLESS = 2**62
"""More tokens than any memory has: kernels count them in 64 bits."""


class Form(NamedTuple):
    """The shape of a memory: plain numbers. dtype is that of the keys and values; sums are float32 or better."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def statistics(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def shown(self) -> str:
        return (
            f"(batch {self.batch}, heads {self.heads}, key_dim {self.key_dim}, value_dim {self.value_dim}, "
            f"{self.dtype}, {self.device})"
        )


__all__ = ["ENDLESS", "FLOATS", "Form"]

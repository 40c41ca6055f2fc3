"""Subnormal numbers, which are nearer to 0 than 1.2e-38 in float32: processors are slow at them."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Subnormal numbers count as 0 in this thread and in threads that it starts meanwhile. Threads that torch has
    started before still compute with them. What held before is put back.

    A product with such a number takes a hundred times longer. Training meets them where attention is sharp: the
    gradients of keys that are hardly attended to are as small.
    """
    # numpy before 2.4 looks for the smallest numbers once, and warns and keeps 0 where it does so with them flushed
    for kind in (np.float32, np.float64):
        np.finfo(kind)
    # torch can set this and does not tell it
    before = not (torch.tensor(1e-39, dtype=torch.float32) * 1).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)

"""Numbers below 1.2e-38, which processors are slow at."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Float32 numbers below 1.2e-38, and float64 ones below 2.2e-308, count as 0 in this thread and in threads that it
    starts meanwhile.

    A processor takes a hundred times longer for a product with such a number. Training meets them where attention is
    sharp: the gradients of keys that are hardly attended to are as small.
    """
    before = not (torch.tensor(1e-39, dtype=torch.float32) * 1).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)

"""Pictures in the IDX format, as MNIST has them."""

import gzip
from pathlib import Path

import torch
from torch import Tensor


def write(path: Path, numbers: Tensor) -> None:
    """A compressed file of bytes in their shape."""
    head = bytes([0, 0, 8, numbers.ndim]) + b"".join(size.to_bytes(4, "big") for size in numbers.shape)
    path.write_bytes(gzip.compress(head + bytes(numbers.to(torch.uint8).flatten().tolist())))


def folder(where: Path, pixels: Tensor, labels: Tensor, tested: int) -> Path:
    """The four files of a data set; the last ``tested`` pictures are for the test."""
    for name, part in (("train", slice(None, -tested)), ("t10k", slice(-tested, None))):
        write(where / f"{name}-images-idx3-ubyte.gz", pixels[part])
        write(where / f"{name}-labels-idx1-ubyte.gz", labels[part])
    return where

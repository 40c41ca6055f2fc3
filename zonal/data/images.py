"""Pictures with labels, read from files in the IDX format: Fashion-MNIST, and anything laid out as it is."""

import gzip
import hashlib
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zonal.errors import FileFormatError
from zonal.store import check_file

# bytes that a file may hold, and those that one byte of its compressed form can stand for
_MOST, _RATIO = 2**31, 1032
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist puts it."""
FASHION_CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


@dataclass(frozen=True, eq=False)
class Images:
    """pixels (N, H, W) uint8, labels (N,) int64."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sha256(self) -> str:
        """Of all that is in it, by which a run knows what it learned from."""
        found = hashlib.sha256(str(tuple(self.pixels.shape)).encode())
        for part in (self.pixels, self.labels):
            found.update(part.contiguous().numpy().tobytes())
        return found.hexdigest()

    def scaled(self, rows: Tensor | slice) -> Tensor:
        """(n, 1, H, W) in float32 from -1 to 1, as a model takes them."""
        return self.pixels[rows, None].float() / 127.5 - 1


def fashion_mnist(folder: str | os.PathLike[str] = FASHION_MNIST) -> tuple[Images, Images]:
    """60,000 pictures to learn from and 10,000 to test, 28 x 28, of ten kinds of clothing (Xiao, Rasul, Vollgraf 2017,
    MIT licence).

    folder: with the four files of the data set, or of another one laid out as MNIST: ``train-images-idx3-ubyte.gz``,
    ``t10k-labels-idx1-ubyte.gz`` …

    Raises: FileFormatError for files that are not there or damaged, and parts that do not fit together.
    """
    learnt, tested = _part(Path(folder), "train"), _part(Path(folder), "t10k")
    sizes = [tuple(part.pixels.shape[1:]) for part in (learnt, tested)]
    if sizes[0] != sizes[1] or 0 in sizes[0]:
        raise FileFormatError(
            f"images: the pictures in {folder} must have one size (H, W), received {sizes[0]} for 'train' and "
            f"{sizes[1]} for 't10k'."
        )
    return learnt, tested


def _part(folder: Path, name: str) -> Images:
    pixels = read_idx(folder / f"{name}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{name}-labels-idx1-ubyte.gz")
    if pixels.ndim != 3 or labels.ndim != 1 or len(pixels) != len(labels) or not len(labels):
        raise FileFormatError(
            f"images: {folder} must hold pictures (N, H, W) and as many labels (N,) for {name!r}, "
            f"received {tuple(pixels.shape)} and {tuple(labels.shape)}."
        )
    return Images(pixels, labels.long())


def read_idx(path: Path) -> Tensor:
    """The bytes of a compressed IDX file as uint8, in the shape that it states.

    Raises: FileFormatError when it is not there, damaged, or of another format.
    """
    check_file("images", path)
    try:
        with gzip.open(path) as file:
            head = file.read(4)
            axes = head[3] if head[:3] == b"\x00\x00\x08" and len(head) == 4 else 0
            lengths = file.read(4 * axes)
            shape = [int.from_bytes(lengths[at : at + 4], "big") for at in range(0, len(lengths), 4)]
            size = math.prod(shape)
            whole = axes and len(lengths) == 4 * axes
            fits = whole and size <= min(_MOST, _RATIO * path.stat().st_size)  # before that much is asked for
            data = file.read(size + 1) if fits else b""
    except FileNotFoundError as error:
        raise FileFormatError(
            f"images: {path} does not exist. Fashion-MNIST comes with the Debian package dataset-fashion-mnist: "
            "`apt-get install dataset-fashion-mnist`, or, without root rights, "
            "`apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb "
            ".` and the folder usr/share/datasets/fashion-mnist."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"images: {path} cannot be read ({error}). It may be truncated; get it again.") from error
    if not fits or len(data) != size:
        raise FileFormatError(
            f"images: {path} is no IDX file of bytes, or has lost some: it states the shape {tuple(shape)}, and "
            f"at most {_MOST:,} bytes are read. Get it again."
        )
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape)
        if size
        else torch.zeros(shape, dtype=torch.uint8)
    )

"""Pictures in the IDX format: read as written, and refused when damaged."""

import gzip

import pytest
import torch
from data import idx

from zonal.data.images import fashion_mnist, read_idx
from zonal.errors import FileFormatError

PIXELS = torch.arange(6 * 4 * 3).view(6, 4, 3).to(torch.uint8)


def test_what_is_written_is_read(tmp_path):
    learnt, tested = fashion_mnist(idx.folder(tmp_path, PIXELS, torch.arange(6), 2))
    assert (len(learnt), len(tested)) == (4, 2)
    assert torch.equal(tested.pixels, PIXELS[4:])
    assert tested.labels.tolist() == [4, 5]
    assert tested.labels.dtype == torch.int64
    scaled = learnt.scaled(torch.tensor([3, 0]))
    assert scaled.shape == (2, 1, 4, 3)
    assert torch.equal(scaled[1, 0], PIXELS[0].float() / 127.5 - 1)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileFormatError, match=r"does not exist. Fashion-MNIST comes with the Debian package .*dpkg -x"):
        fashion_mnist(tmp_path)
    idx.folder(tmp_path, PIXELS, torch.arange(6), 2)
    labels, pixels = tmp_path / "train-labels-idx1-ubyte.gz", tmp_path / "train-images-idx3-ubyte.gz"
    idx.write(labels, torch.arange(3))
    with pytest.raises(FileFormatError, match=r"as many labels .* for 'train', received \(4, 4, 3\) and \(3,\)"):
        fashion_mnist(tmp_path)
    idx.folder(tmp_path, PIXELS, torch.arange(6), 2)
    idx.write(tmp_path / "t10k-images-idx3-ubyte.gz", PIXELS[4:, :2])
    with pytest.raises(FileFormatError, match=r"one size \(H, W\), received \(4, 3\) for 'train' and \(2, 3\) for"):
        fashion_mnist(tmp_path)  # sequences of test pictures had other lengths than the task said
    data = pixels.read_bytes()
    for broken in (data[:-9], b"plain"):
        pixels.write_bytes(broken)
        with pytest.raises(FileFormatError, match="cannot be read"):
            read_idx(pixels)
    cut = [gzip.decompress(data)[:size] for size in (4, 8, 12, 14, -1)]
    for content in (b"", b"\x00\x00\x08", b"\x00\x00\x0d\x01\x00\x00\x00\x01\x05", *cut):
        pixels.write_bytes(gzip.compress(content))
        with pytest.raises(FileFormatError, match="no IDX file of bytes, or has lost some"):
            read_idx(pixels)

"""The memory of spans: sums of whole numbers, and the codes that stand for spans."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Raw
from zonal.algebra.link import Identity
from zonal.algebra.score import Dot
from zonal.data.permutation import mix
from zonal.errors import ArgumentError
from zonal.ingest.text import Read, bucket
from zonal.memory import Memory
from zonal.memory.sums import FeatureSums

KEY_DIM = 256
"""Buckets of a head."""
CODE = 255
"""Signs of a code. A value has one number more, which counts spans."""
MOST = 1 << 24
"""Spans up to which sums in float32 are exact."""
_TOGETHER = 1 << 14  # spans whose codes are there at a time


def empty(heads: int) -> FeatureSums:
    """The memory before the first span: ``heads`` times ``KEY_DIM`` buckets, 256 KiB a head."""
    operator = Operator(Dot(scale=1.0), Identity(), Raw())
    made = Memory.empty(operator, 1, heads, KEY_DIM, CODE + 1, torch.float32, torch.device("cpu"))
    assert isinstance(made, FeatureSums)
    return made


def of(reads: Sequence[Read], heads: int) -> FeatureSums:
    """The memory of documents: the sum over their spans of key and value.

    What ``absorb`` gives for the keys as vectors of zeros and ones, made without the zeros.
    """
    memory = empty(heads)
    if not any(len(each.spans) for each in reads):
        return memory
    values = torch.nn.functional.pad(signs(*identities(reads)), (0, 1), value=1.0)
    keys = torch.from_numpy(np.concatenate([each.keys for each in reads])).long()
    sizes = torch.from_numpy(np.concatenate([each.sizes for each in reads])).long()
    span = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns of the argument check_invariants
        marks = torch.sparse_coo_tensor(
            torch.stack([keys, span]), torch.ones(len(keys), dtype=torch.float32), (heads * KEY_DIM, len(sizes))
        )
    state = torch.sparse.mm(marks, values).view_as(memory.state)
    return replace(memory, count=len(sizes), state=state)


def together(memory: FeatureSums, other: FeatureSums) -> FeatureSums:
    """Both memories in one. Raises: ArgumentError for more spans than sums in float32 can count."""
    if memory.count + other.count > MOST:
        raise ArgumentError(
            f"ingest: a memory holds at most {MOST:,} spans exactly, {memory.count + other.count:,} were to be held. "
            "Read the folders into two memories."
        )
    # not by merge, which warns of rounding errors that whole numbers do not have
    return replace(memory, count=memory.count + other.count, state=memory.state + other.state)


def rows(memory: FeatureSums, words: Sequence[str]) -> Tensor:
    """What the memory holds of each word: (words, CODE + 1), in float64.

    A row is the sum of the values of all spans with a word of this bucket; its last number says how many they are.
    """
    heads = memory.form.heads
    query = torch.zeros(1, heads, len(words), KEY_DIM, dtype=torch.float32)
    for place, word in enumerate(words):
        head, column = divmod(bucket(word, heads * KEY_DIM), KEY_DIM)
        query[0, head, place, column] = 1
    return memory.read(query)[0].sum(0).double()


def scores(values: Tensor, places: tuple[np.ndarray, np.ndarray]) -> Tensor:
    """How well the codes of spans fit a weighted sum of rows (CODE,): an estimate of the sum of the weights of the
    words that question and span share.
    """
    digests, starts = places
    return torch.cat(
        [
            signs(digests[at : at + _TOGETHER], starts[at : at + _TOGETHER]) @ values.float() / CODE
            for at in range(0, len(digests), _TOGETHER)
        ]
    )


def identities(reads: Sequence[Read]) -> tuple[np.ndarray, np.ndarray]:
    """What the codes of spans are made of: the first 8 bytes of the document's digest, and where the span starts."""
    digests = [np.full(len(each.spans), int(each.digest[:16], 16), dtype=np.uint64) for each in reads]
    return np.concatenate(digests), np.concatenate([each.spans[:, 0] for each in reads]).astype(np.uint64)


def signs(digests: np.ndarray, starts: np.ndarray) -> Tensor:
    """The codes of spans, (n, CODE) of -1 and 1, the same on every machine."""
    base = _mixed(digests ^ _mixed(starts))[:, None] + np.arange(1, 5, dtype=np.uint64)
    bits = np.unpackbits(_mixed(base).astype("<u8").view(np.uint8), axis=1)[:, :CODE]
    return torch.from_numpy(bits).float() * 2 - 1


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64 of each number (Steele, Lea and Flood 2014)."""
    return mix(x + np.uint64(0x9E3779B97F4A7C15))


__all__ = ["CODE", "KEY_DIM", "empty", "identities", "of", "rows", "scores", "signs", "together"]

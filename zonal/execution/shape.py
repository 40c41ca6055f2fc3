"""A call as the planner sees it: sizes and structure, no numbers."""

from typing import NamedTuple

import torch

from zonal.algebra import Tags
from zonal.algebra.operator import Bound
from zonal.algebra.prior import Window
from zonal.execution.call import Call

EXPONENTIAL = 4.0
"""What an exponential of torch takes, by what a plain elementwise call (an addition) takes."""


class Shape(NamedTuple):
    """A call as the planner sees it: sizes and structure, no numbers.

    batch … value_dim: B, H, Hkv, T, S, D (of prepared queries and keys), P. head_dim: of raw queries and keys.
    itemsize: bytes of a number in the computing type. coefficients: of the link. learned: those that get gradients.
    pairs: pairs of a query and a key that are compared, of one head. documents: packed along the tokens. tied: queries
    have positions. chunk, window: of such priors. biased: log priors. past: tokens of the memory that the call
    continues from. keeps: whether a memory is returned. kind: of the memory that a path which carries one would have.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    head_dim: int
    itemsize: int
    device: torch.device
    tags: Tags
    bound: Bound
    coefficients: int
    learned: int
    pairs: float
    documents: int = 1
    tied: bool = False
    chunk: int | None = None
    window: Window | None = None
    padded: bool = False
    biased: bool = False
    gradients: bool = False
    past: int = 0
    keeps: bool = False
    kind: str = "keys"

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def back(self) -> int:
        """How often a product is made: once, and backward twice more."""
        return 3 if self.gradients else 1

    @property
    def width(self) -> int:
        """Numbers of a value that sums over keys carry, with the row's mass where it is divided by."""
        return self.value_dim + self.tags.normalises

    @property
    def steps(self) -> float:
        """Elementwise operations of torch for one pair of tokens: of the score, the link and the log prior."""
        score, link = self.bound.score, self.bound.link
        own = 0 if score.bilinear else score.passes(self.head_dim)
        evidence = EXPONENTIAL if self.tags.log_space else link.operations + (link.domain is not None)
        return own + evidence + self.biased * (3 + (0 if self.tags.log_space else EXPONENTIAL))

    def __str__(self) -> str:
        kv = f" (kv {self.kv_heads})" if self.kv_heads != self.heads else ""
        past = f" after {self.past} tokens" if self.past else ""
        return f"B={self.batch} H={self.heads}{kv} T={self.queries} S={self.keys} D={self.dim} P={self.value_dim}{past}"


def shape_of(call: Call) -> Shape:
    """The shape of a prepared call."""
    batch, heads, queries, keys, dim, value_dim = call.shape
    seen, held = call.visibility, call.held
    learned = call.coefficients.shape[0] if call.coefficients.requires_grad else 0
    earlier = 0 if held is None or held.kind != "keys" else held.tokens
    return Shape(
        batch=batch, heads=heads, kv_heads=call.bound.kv_heads, queries=queries, keys=keys, dim=dim,
        value_dim=value_dim, head_dim=call.head_dim, itemsize=call.coefficients.dtype.itemsize, device=call.device,
        tags=call.tags, bound=call.bound, coefficients=call.coefficients.shape[0], learned=learned,
        pairs=_pairs(call, queries, keys + earlier), documents=seen.documents, tied=call.causal, chunk=call.chunk,
        window=call.window, padded=seen.key_mask is not None, biased=call.biased, gradients=call.recorded,
        past=0 if held is None else held.tokens, keeps=held is not None, kind=call.kind,
    )  # fmt: skip


def _pairs(call: Call, queries: int, keys: int) -> float:
    """How many (query, key) pairs of a head the rules allow, about: the key mask apart."""
    seen, window = call.visibility, call.window
    if seen.borders is not None:
        lengths = seen.borders.diff().double()
        total = float(lengths.square().sum()) / (2 if call.causal else 1)
    elif call.causal:  # the last queries of the keys
        total = queries * (keys - queries / 2 + 0.5) if queries <= keys else keys * keys / 2
    else:
        total = float(queries * keys)
    if window is not None:
        ahead = 0 if call.causal else keys / 2 if window.right is None else window.right
        reach = window.left + 1 + ahead
        total = min(total, float(queries * min(reach, keys)))
    return max(total, 0.0)


__all__ = ["EXPONENTIAL", "Shape", "shape_of"]

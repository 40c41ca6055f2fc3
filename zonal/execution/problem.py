"""What a plan is made from: the shapes and structure of a call, without its numbers."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zonal.algebra import Tags
from zonal.algebra.anchor import Hierarchical, Ridge, TopK
from zonal.algebra.hashing import LSH, MOST_BITS
from zonal.algebra.prior import Decay, Window
from zonal.execution import (
    native_decode,
    native_ridge,
    native_ridge_decode,
    native_sparse,
    native_sums,
    tiled,
    transport,
)
from zonal.execution.call import Call
from zonal.execution.chunked import chunked_refusal
from zonal.execution.hierarchy import hierarchy_refusal
from zonal.execution.sparse import sparse_refusal
from zonal.execution.streaming import streaming_refusal
from zonal.features import Harmonics, SymmetricPowers, feature_map, hashing
from zonal.formula import Term
from zonal.kernels import transforms
from zonal.memory import KeyValues, Memory
from zonal.memory.base import features_refusal
from zonal.memory.lift import harmonics_of

PATHS = ("dense", "tiled", "chunked", "streaming", "sparse")


class Block(NamedTuple):
    """The queries [start, stop) and the keys [lo, hi) that any of them may see; ``whole``: every one of them sees all of these."""

    start: int
    stop: int
    lo: int
    hi: int
    whole: bool


@dataclass(frozen=True)
class Span:
    """Which keys each query may see, as rules: what ``Visibility`` holds query by query.

    causal: queries see nothing later. chunk: only whole chunks of this size before their own. left, right: a window.
    edges: borders of packed documents, 0 … keys, or None.
    """

    causal: bool = False
    include_self: bool = True
    chunk: int | None = None
    left: int | None = None
    right: int | None = None
    edges: tuple[int, ...] | None = None

    def interval(self, t: int, queries: int, keys: int, start: int, end: int) -> tuple[int, int]:
        """[lo, hi) of query t in the document [start, end)."""
        tied = self.causal or self.chunk is not None or self.left is not None
        position = t + (keys - queries if tied else 0)
        lo, hi = start, end
        if self.chunk is not None:
            hi = min(hi, start + (position - start) // self.chunk * self.chunk)
        elif self.causal:
            hi = min(hi, position + self.include_self)
        if self.left is not None:
            lo = max(lo, position - self.left)
            if self.right is not None:
                hi = min(hi, position + self.right + 1)
        return lo, max(hi, 0)

    def blocks(self, queries: int, keys: int, size: int) -> tuple[Block, ...]:
        """The queries in blocks of ``size`` with their ranges of keys."""
        return _blocks(self, queries, keys, size)

    @property
    def free(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.chunk is None and self.left is None and self.edges is None


@functools.lru_cache(maxsize=256)
def _blocks(span: Span, queries: int, keys: int, size: int) -> tuple[Block, ...]:
    edges = span.edges or (0, keys)
    found, document = [], 0
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        while span.edges is not None and edges[document + 1] <= start:
            document += 1
        last = document
        while span.edges is not None and edges[last + 1] < stop:
            last += 1
        first_lo, first_hi = span.interval(start, queries, keys, edges[document], edges[document + 1])
        last_lo, last_hi = span.interval(stop - 1, queries, keys, edges[last], edges[last + 1])
        # both ends of the interval only ever move forward within a document, so that the block's ends tell all
        found.append(
            Block(
                start,
                stop,
                first_lo,
                max(last_hi, first_lo),
                last == document and first_hi == last_hi and first_lo == last_lo,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Problem:
    """A call as the planner sees it. Hashable, so that a plan is made once for each.

    B, H, Hkv, T, S, D, P: batch, query heads, key heads, queries, new keys, dims of keys and values. itemsize: bytes of a number in
    the computing type. span, padded, row_bias, col_bias, slopes, decays: the prior. score_passes: of the score over all pairs. operations, coefficients, clamped: the link.
    bias_batch: sequences that have a log prior of their own, B or 1. features: its exact map, None without a finite one. shifts, by_query: steps of an
    anchor that solves, and whether each query needs an inverse of its own; harmonics: the features of keys that it solves with, None = keys as they are. top: how many keys a row keeps, 0 = all; search: what finds them, with the bits of all
    spaces together. terms: the distances of a score that is a sum of such, where a kernel of distances runs.
    spans: tokens of the nodes of a tree, level by level, () = no tree.
    kind: of the memory that a path which carries one would have; past: tokens in the memory given; keeps: whether one is returned.
    without_kernel: why torch's tiles would run in the compiled kernel's place, None = the kernel runs; without_sums: the same of the
    kernel for sums over features, and without_ridge of that for ridge read-outs, on the chunked path; without_decode: of the kernel for a
    few tokens after a memory, on the streaming path, and without_sparse of that for candidates, on the sparse path.
    refused: paths that cannot run this at any price, with the reason.
    """

    B: int
    H: int
    Hkv: int
    T: int
    S: int
    D: int
    P: int
    itemsize: int
    device: torch.device
    tags: Tags
    span: Span
    padded: bool = False
    row_bias: bool = False
    col_bias: bool = False
    slopes: bool = False
    bias_batch: int = 1
    decays: bool = False
    score_passes: int = 0
    operations: int = 0
    coefficients: int = 0
    clamped: bool = False
    features: SymmetricPowers | None = None
    harmonics: Harmonics | None = None
    shifts: int = 0
    by_query: bool = False
    top: int = 0
    search: LSH | None = None
    terms: tuple[Term, ...] = ()
    spans: tuple[int, ...] = ()
    gradients: bool = False
    coefficient_gradients: bool = False
    bias_gradients: bool = False
    kind: str = "keys"
    past: int = 0
    keeps: bool = False
    without_kernel: str | None = None
    without_sums: str | None = None
    without_decode: str | None = None
    without_ridge: str | None = None
    without_sparse: str | None = None
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def groups(self) -> int:
        return self.H // self.Hkv

    @property
    def iterates(self) -> bool:
        """Whether the anchor makes a plan by iteration."""
        return self.tags.couples and not self.spans

    @property
    def biased(self) -> bool:
        return self.row_bias or self.col_bias or self.slopes

    def __str__(self) -> str:
        kv = f" (kv {self.Hkv})" if self.Hkv != self.H else ""
        past = f" after {self.past} tokens" if self.past else ""
        return f"B={self.B} H={self.H}{kv} T={self.T} S={self.S} D={self.D} P={self.P}{past}"


class Held(NamedTuple):
    """What a call goes on from: the kind of memory and how many tokens it holds (for a window of keys: still holds)."""

    kind: str
    tokens: int

    @staticmethod
    def of(memory: Memory) -> "Held":
        return Held(memory.kind, memory.tokens.length if isinstance(memory, KeyValues) else memory.count)


def problem_of(call: Call, held: Held | None = None, device: torch.device | None = None) -> Problem:
    """The problem of a prepared call that goes on from what is held, and leaves a memory, too.

    ``device`` stands in for the call's own, for calls of meta tensors.
    """
    bound, anchor, bias = call.bound, call.bound.anchor, call.bias
    batch, heads, queries, keys, key_dim, value_dim = call.shape
    learned = call.coefficients.requires_grad
    tilted = any(x is not None and x.requires_grad for x in (bias.row, bias.col, call.log_decay))
    gradients = torch.is_grad_enabled() and (
        call.requires_grad or learned or tilted
        or any(p.requires_grad for p in bound.anchor_params.values())
    )  # fmt: skip
    refused = refusals(call, held)
    kind = Memory.kind_for(call.operator, call.head_dim) if held is None else held.kind
    features = None if call.tags.solves or any(path == "chunked" for path, _ in refused) else feature_map(bound.link)
    return Problem(
        B=batch, H=heads, Hkv=bound.kv_heads, T=queries, S=keys, D=key_dim, P=value_dim, itemsize=call.coefficients.dtype.itemsize,
        device=call.device if device is None else device, tags=call.tags, span=_span(call), padded=call.visibility.key_mask is not None,
        row_bias=bias.row is not None, col_bias=bias.col is not None, slopes=bias.slope is not None,
        bias_batch=max(1 if x is None else x.shape[0] for x in (bias.row, bias.col)), decays=call.log_decay is not None,
        score_passes=0 if bound.score.bilinear else bound.score.passes(call.head_dim), operations=bound.link.operations, coefficients=call.coefficients.shape[0], clamped=bound.link.domain is not None,
        features=features, harmonics=harmonics_of(bound) if kind == "ridge" else None, shifts=anchor.shifts if isinstance(anchor, Ridge) else 0, by_query=isinstance(anchor, Ridge) and anchor.by_query,
        top=anchor.k if isinstance(anchor, TopK) else 0, search=_search(call), terms=_terms(call),
        spans=anchor.spans(keys) if isinstance(anchor, Hierarchical) else (),
        gradients=gradients, coefficient_gradients=gradients and learned, bias_gradients=gradients and tilted,
        kind=kind, past=0 if held is None else held.tokens,
        keeps=held is not None, without_kernel=(transport if call.tags.couples else tiled).without_kernel(call), without_sums=native_sums.refusal(call, None if held is None else held.kind),
        without_decode=(native_ridge_decode if kind in ("ridge", "fading") else native_decode).refusal(call, kind), without_ridge=native_ridge.refusal(call, held is not None),
        without_sparse=native_sparse.refusal(call), refused=refused,
    )  # fmt: skip


def _search(call: Call) -> LSH | None:
    """The search of an anchor, with the bits of all spaces together."""
    anchor = call.bound.anchor
    search = anchor.search if isinstance(anchor, TopK) else None
    if not isinstance(search, LSH):
        return None
    spaces = hashing.spaces(call.bound.score)
    bits = search.sized(call.shape[3], spaces).bits
    assert bits is not None
    return replace(search, bits=min(bits * spaces, MOST_BITS))


def _terms(call: Call) -> tuple[Term, ...]:
    """Distances; with log priors they run as functions of a product, in the tile kernel."""
    if call.bound.score.bilinear or not call.bias.empty:
        return ()
    return call.bound.score.terms(call.shape[4] if call.raw is not None else call.k.shape[3]) or ()


def refusals(call: Call, held: Held | None) -> tuple[tuple[str, str], ...]:
    """Paths that cannot run the call, whatever there is of time and memory, with what stands in the way."""
    found = [(path, path_refusal(path, call, held)) for path in PATHS]
    return tuple((path, reason) for path, reason in found if reason is not None)


def path_refusal(path: str, call: Call, held: Held | None) -> str | None:
    """What keeps one path from running the call, or None."""
    if path == "streaming":
        reason = streaming_refusal(call)
        declared = any(isinstance(prior, Decay) for prior in call.bound.priors)
        by_sums = (
            (held is None or held.kind != "keys")
            and not call.tags.solves
            and features_refusal(call.bound, call.head_dim) is None
        )
        if reason is None and call.log_decay is not None and call.chunk is not None and by_sums and not declared:
            reason = "a decay together with whole chunks is not kept as sums (a memory made with kind='keys' takes it)"
    elif path == "chunked":
        reason = chunked_refusal(call)
        if reason is None and held is not None and held.kind == "keys":
            reason = "a memory of keys and values is not carried as sums (one made without kind='keys' holds sums where the operator allows it)"
    elif path == "sparse":
        reason = sparse_refusal(call)
    else:
        reason = tiled.refusal(call.bound.anchor) if path == "tiled" else None
        if path == "tiled" and isinstance(call.bound.anchor, Hierarchical):
            reason = hierarchy_refusal(call)
        if reason is None and held is not None and held.tokens and held.kind != "keys":
            reason = f"it needs the keys themselves, and a memory of kind {held.kind!r} has only sums (one made with kind='keys' keeps them)"
    return _untransformed(path, call) if reason is None and transforms.active() else reason


def _untransformed(path: str, call: Call) -> str | None:
    """Why torch.func's transforms (vmap, grad, jvp, …) cannot pass through a path, or None."""
    if call.tags.couples:
        return "its iteration asks how far it is, which the transforms of torch.func cannot tell"
    if path == "dense":
        return "its solve asks whether it went well, which torch.func.vmap cannot" if call.tags.solves else None
    if path == "tiled":
        reason = tiled.without_kernel(call)
        return (
            None
            if reason is None
            else f"torch's tiles do not know the transforms of torch.func, and the compiled kernel is not for this call: {reason}"
        )
    if path in ("chunked", "sparse"):
        return "its gradients are its own, which the transforms of torch.func do not know"
    return "a memory asks for numbers, which torch.func.vmap cannot give"


def _span(call: Call) -> Span:
    seen, window = call.visibility, next((p for p in call.bound.priors if isinstance(p, Window)), None)
    edges = None if seen.edges is None or not seen.packed else tuple(seen.edges.tolist())
    return Span(
        causal=call.causal and call.chunk is None, include_self=call.include_self, chunk=call.chunk,
        left=None if window is None else window.left, right=None if window is None else window.right, edges=edges,
    )  # fmt: skip


__all__ = ["PATHS", "Block", "Held", "Problem", "Span", "path_refusal", "problem_of", "refusals"]

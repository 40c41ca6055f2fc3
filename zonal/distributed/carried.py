"""Sums over earlier stretches: an exclusive scan over the ranks, and attention from what it gives."""

import torch
from torch import Tensor

from zonal.distributed.layout import Layout
from zonal.distributed.ranks import Ranks, tied
from zonal.errors import ArgumentError
from zonal.execution.call import Call, empty_memory, resumed, span
from zonal.execution.plan import choose, run
from zonal.memory import Memory
from zonal.memory.sent import blank, received, sent
from zonal.stretch import Join, Tensors


def before(ranks: Ranks, place: Layout, carried: Tensors, join: Join, tokens: Tensors) -> Tensors:
    """What earlier stretches of the document of this stretch's first token leave, in 1 + log2(ranks - 1) messages.

    After each message a rank knows twice as many ranks before it. What is joined is associative. ``carried`` is what
    the last document of this stretch leaves, made from ``tokens``. Where this rank needs nothing, the result is of no
    use.
    """
    held, known = ranks.shifted(tied(carried, tokens), 1), 1
    while known < ranks.size - 1:
        earlier = ranks.shifted(held, known)
        mine = place.earlier(place.rank, known)
        theirs = place.earlier(place.rank, 2 * known) - mine
        held, known = tied(join(earlier, theirs, held, mine) if theirs else held, earlier), 2 * known
    return held


def attended(ranks: Ranks, place: Layout, call: Call, path: str) -> Tensor:
    """y (B, H, T, P) of a call whose operator keeps its past as sums."""
    _check(place, call, path)
    cut, tokens = place.cut, call.new_tokens
    empty = blank(empty_memory(call), tokens)
    local = empty.extended(tokens.span(cut.last, tokens.length)) if cut.last < tokens.length else empty
    names = tuple(sent(local))

    def memory_of(count: int, tensors: Tensors) -> Memory:
        return received(empty, count, dict(zip(names, tensors, strict=True))) if count else empty

    def join(a: Tensors, count: int, b: Tensors, more: int) -> Tensors:
        return tuple(sent(memory_of(count, a).followed_by(memory_of(more, b)))[name] for name in names)

    made_from = tuple(x for x in (tokens.k, tokens.v, tokens.log_decay, tokens.key_bias) if x is not None)
    earlier = before(ranks, place, tuple(sent(local).values()), join, made_from)
    memory = memory_of(place.earlier(place.rank, place.rank), earlier)
    head = resumed(span(call, 0, cut.head), memory)
    parts = [run(choose(head, path), head)[0]]
    if cut.rest is not None:
        rest = span(call, cut.head, tokens.length, cut.rest)
        parts.append(run(choose(rest, path), rest)[0])
    return tied((torch.cat(parts, 2) if len(parts) > 1 else parts[0],), earlier)[0]


def _check(place: Layout, call: Call, path: str) -> None:
    """Raises: ArgumentError, on every rank, for paths and stretches that do not fit."""
    name = call.operator.name
    if path not in ("auto", "chunked", "streaming"):
        raise ArgumentError(
            f"sequence_parallel: operator {name!r} continues from sums over earlier stretches, which path {path!r} "
            "cannot. Use path='auto', 'chunked' or 'streaming'."
        )
    size = call.chunk
    if size is not None and any(place.earlier(rank, rank) % size for rank in range(len(place.lengths))):
        raise ArgumentError(
            f"sequence_parallel: operator {name!r} reads whole chunks of {size} tokens, so that stretches must hold "
            f"whole chunks of their documents; received stretches of {list(place.lengths)} tokens. Choose other "
            "lengths."
        )


__all__ = ["attended", "before"]

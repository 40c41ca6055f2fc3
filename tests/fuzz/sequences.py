"""Random sequences of a memory's verbs, against a memory that keeps all keys and absorbs what should be left."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from memories import BATCH, DIM, GROUPS, KV, NAMES, VALUE, operator

import zonal
from zonal.errors import ArgumentError, NonFiniteError
from zonal.memory import Memory

VERBS = (
    "absorb", "absorb", "padded", "span", "merge", "before", "subtract", "subtract-end", "forget", "fork", "file",
    "rows",
    "steps", "call", "poison", "nothing",
)  # fmt: skip
DTYPES = {"float64": 1e-7, "float32": 1e-2, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Sequence:
    """Verbs with their numbers of tokens. name: of an operator of the matrix."""

    name: str
    verbs: tuple[tuple[str, int], ...]
    dtype: str = "float64"
    seed: int = 0


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    verbs = draw(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 6)), min_size=1, max_size=8))
    return Sequence(
        draw(st.sampled_from(NAMES)),
        tuple(verbs),
        draw(st.sampled_from((*DTYPES, "float64"))),
        draw(st.integers(0, 99)),
    )


class Piece:
    """Tokens of one verb, in the type of the memory. name: of their span."""

    def __init__(self, count: int, draw: torch.Generator, dtype: torch.dtype, padded: bool, name: str | None) -> None:
        self.q, self.k, self.v = (
            torch.randn(BATCH, heads, count, dim, generator=draw, dtype=torch.float64).to(dtype)
            for heads, dim in ((KV * GROUPS, DIM), (KV, DIM), (KV, VALUE))
        )
        self.mask = torch.rand(BATCH, count, generator=draw) > 0.4 if padded else None
        self.name = name

    def into(self, memory: Memory) -> Memory:
        dtype = memory.form.dtype
        return memory.absorb(self.k.to(dtype), self.v.to(dtype), self.mask, span=self.name)


@torch.no_grad()
def check_sequence(each: Sequence) -> None:
    """Raise AssertionError where a memory reads otherwise than one of all keys, or a verb changes its operand."""
    dtype, draw = getattr(torch, each.dtype), torch.Generator().manual_seed(each.seed)
    op = operator(each.name).to(torch.promote_types(dtype, torch.float32))

    def empty(kind: str | None = None, dtype: torch.dtype = dtype) -> Memory:
        return Memory.empty(op, BATCH, KV, DIM, VALUE, dtype, kind=kind)

    memory, pieces = empty(), list[Piece]()
    q = torch.randn(BATCH, KV * GROUPS, 2, DIM, generator=draw, dtype=torch.float64).to(dtype)
    for number, (verb, count) in enumerate(each.verbs):
        name = f"s{number}" if verb == "span" else None
        piece = Piece(count, draw, dtype, verb == "padded", name)
        before = memory.read(q)
        found = _applied(verb, memory, pieces, piece, empty)
        assert torch.equal(memory.read(q), before), f"{verb} changed the memory that it was called on"
        if found is not None:
            memory, pieces = found
    assert memory.count <= sum(piece.k.shape[2] for piece in pieces)  # rows that are stacked are without common padding
    op = operator(each.name)
    expected = empty("keys", torch.float64)
    for piece in pieces:
        expected = piece.into(expected)
    exact, got = expected.read(q.double()), memory.read(q).double()
    assert torch.isfinite(got).all() or not torch.isfinite(exact).all()
    for other in (torch.float64, torch.float32, torch.bfloat16):  # queries of another type than the tokens
        assert memory.read(q.to(other)).dtype == other
    error, size = float((got - exact).abs().max()), float(exact.abs().max())
    assert error <= DTYPES[each.dtype] * (1 + size), f"off by {error:.3g} of {size:.3g}"


def _applied(verb: str, memory: Memory, pieces: list[Piece], piece: Piece, empty) -> tuple[Memory, list[Piece]] | None:
    """The memory after a verb and what it should hold; None where the verb is refused."""
    if verb in ("absorb", "padded"):
        return piece.into(memory), [*pieces, piece]
    if verb == "fork":
        return memory.fork(), pieces
    if verb == "rows":
        return Memory.stack(list(memory.unbind())) if not memory.parts else memory.gather([0, 1]), pieces
    if verb == "file":
        with tempfile.TemporaryDirectory() as folder:
            memory.save(Path(folder) / "memory")
            return Memory.load(Path(folder) / "memory", memory.operator), pieces
    if verb == "poison":
        piece.v.fill_(math.nan)
        try:
            piece.into(memory)
        except NonFiniteError:
            return None
        assert not piece.v.numel()
        return None
    if verb == "steps":
        decoder = memory.decoder()
        for at in range(piece.k.shape[2]):
            decoder.step(*(x[:, :, at : at + 1] for x in (piece.q, piece.k, piece.v)))
        return decoder.memory(), [*pieces, piece]
    if verb == "call":
        _, after = zonal.attention(piece.q, piece.k, piece.v, memory.operator, causal=True, memory=memory)
        return after, [*pieces, piece]
    try:
        return _joined(verb, memory, pieces, piece, empty)
    except ArgumentError:
        return None


def _joined(verb: str, memory: Memory, pieces: list[Piece], piece: Piece, empty) -> tuple[Memory, list[Piece]] | None:
    """``_applied`` of verbs that an operator or the state of a memory may refuse."""
    if verb == "span":
        return piece.into(memory), [*pieces, piece]
    other = piece.into(empty())
    if verb == "merge":
        return memory.merge(other), [*pieces, piece]
    if verb == "before":
        return other.merge(memory), [piece, *pieces]
    if memory.operator.anchor.solves and memory.operator.anchor.mode == "running_max":
        return None  # the largest key that was ever seen stays
    if verb == "subtract":
        return other.merge(memory).subtract(other), pieces
    if verb == "subtract-end":
        return memory.merge(other).subtract(other), pieces
    if verb == "forget":
        named = [each for each in pieces if each.name is not None]
        if named:
            return memory.forget(named[0].name), [each for each in pieces if each is not named[0]]
    return None


__all__ = ["Sequence", "check_sequence", "sequences"]

"""Named spans: to forget one is never to have absorbed it, for every kind of memory, at the ends and in the middle."""

import pytest
import torch
from matrix import OPERATORS
from memories import BATCH, EXPECTED, KV, NAMES, TOKENS, Span, close, empty, operator, queries, span
from torch import Tensor

from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError
from zonal.memory import Memory

CUTS = {"a": (0, 8), "b": (8, 12), "c": (12, 20)}
"""Whole chunks of 4, for operators that have them; three tokens without a name come last."""
WITHOUT_WINDOW = [name for name in NAMES if "window" not in name]


def named(memory: Memory, tokens: Span, *names: str) -> Memory:
    for name in names:
        part = tokens.part(*CUTS[name])
        memory = memory.absorb(part.k, part.v, part.mask, span=name)
    return memory


def same(a: Memory, b: Memory) -> None:
    """The same tensors, bit for bit, and the same counts."""
    mine, theirs = a.tensors(), b.tensors()
    assert (a.count, mine.keys()) == (b.count, theirs.keys())
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_forgetting_is_never_having_absorbed(name: str, gone: str, padded: bool) -> None:
    """Bit for bit where the rest came under names; the peak of a ridge that follows it comes back as well."""
    op, tokens = operator(name), span(padded)
    left = [n for n in CUTS if n != gone]
    forgotten, never = named(empty(op), tokens, *CUTS).forget(gone), named(empty(op), tokens, *left)
    same(forgotten, never)
    assert forgotten.spans() == never.spans()
    assert torch.equal(forgotten.read(queries()), never.read(queries()))
    # against one pass over the other tokens, without any name
    pieces = [tokens.part(*CUTS[n]) for n in left]
    mask = None if tokens.mask is None else torch.cat([p.mask for p in pieces if p.mask is not None], 1)
    rest = Span(torch.cat([p.k for p in pieces], 2), torch.cat([p.v for p in pieces], 2), mask)
    close(forgotten.read(queries()), rest.into(empty(op)).read(queries()))
    last = tokens.part(20, TOKENS)
    close(last.into(forgotten).read(queries()), last.into(rest.into(empty(op))).read(queries()))


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_tokens_without_a_name_stay(name: str) -> None:
    """Before, between and after spans, in several calls, read in between."""
    op, tokens, q = operator(name), span(True), queries()
    memory = tokens.part(0, 8).into(empty(op))
    memory = named(memory, tokens, "b")
    for piece in ((12, 13), (13, 16)):
        memory = tokens.part(*piece).into(memory)
        memory.read(q)
    part = tokens.part(16, 20)
    memory = memory.absorb(part.k, part.v, part.mask, span="d")
    memory = tokens.part(20, 22).into(memory)
    assert [(s.name, s.start, s.count) for s in memory.spans()] == [("b", 8, 4), ("d", 16, 4)]

    def absorbed(*pieces: tuple[int, int]) -> Memory:
        found = empty(op)
        for piece in pieces:
            found = tokens.part(*piece).into(found)
        return found

    close(memory.read(q), absorbed((0, 22)).read(q))
    close(memory.forget("b").read(q), absorbed((0, 8), (12, 22)).read(q))
    close(memory.forget("d").read(q), absorbed((0, 16), (20, 22)).read(q))
    neither = memory.forget("b").forget("d")
    close(neither.read(q), absorbed((0, 8), (12, 16), (20, 22)).read(q))
    assert (neither.parts, neither.spans(), neither.count) == ((), (), 14)
    more = tokens.part(22, TOKENS)
    close(more.into(memory.forget("b")).read(q), absorbed((0, 8), (12, TOKENS)).read(q))


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_a_span_in_several_calls(name: str) -> None:
    op, tokens, q = operator(name), span(True), queries()
    memory = named(empty(op), tokens, "a").open("b")
    for piece in ((8, 9), (9, 11), (11, 12)):
        memory = tokens.part(*piece).into(memory)
    still_open = memory.forget("a")
    close(tokens.part(12, 20).into(still_open).close().read(q), tokens.part(8, 20).into(empty(op)).read(q))
    memory = tokens.part(12, 20).into(memory.close())
    assert [(s.name, s.count) for s in memory.spans()] == [("a", 8), ("b", 4)]
    close(memory.forget("b").read(q), tokens.part(12, 20).into(tokens.part(0, 8).into(empty(op))).read(q))


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_merge_joins_spans(name: str) -> None:
    op, tokens, q = operator(name), span(True), queries()
    left, right = named(empty(op), tokens, "a", "b"), named(empty(op), tokens, "c")
    merged = left.merge(right)
    same(merged, named(empty(op), tokens, "a", "b", "c"))
    assert [s.name for s in merged.spans()] == ["a", "b", "c"]
    same(merged.forget("b"), named(empty(op), tokens, "a", "c"))
    # a memory without names gets one as it comes
    plain = tokens.part(8, 12).into(empty(op))
    library = named(empty(op), tokens, "a").merge(plain, span="b").merge(right)
    close(library.forget("b").read(q), named(empty(op), tokens, "a", "c").read(q))
    close(library.subtract(right).forget("a").read(q), plain.read(q))
    assert library.subtract(right.merge(named(empty(op), tokens, "a"))).count == 4


@pytest.mark.parametrize(
    "name", ["softmax", "squared_affine", "retention", "ska-1", "ska-paper", "ska-fading", "yat-decay", "sko-chunk"]
)
def test_save_fork_and_unnamed(name: str, tmp_path) -> None:
    op, tokens = operator(name), span(True)
    memory = tokens.part(20, TOKENS).into(named(empty(op), tokens, *CUTS))
    memory.save(tmp_path / "m")
    for loaded in (Memory.load(tmp_path / "m"), Memory.load(tmp_path / "m", op)):
        assert (loaded.spans(), loaded.nbytes) == (memory.spans(), memory.nbytes)
        same(loaded.forget("b"), memory.forget("b"))
    fork = memory.fork()
    storages = {x.untyped_storage().data_ptr() for x in memory.contents().values() if x.numel()}
    assert not storages & {x.untyped_storage().data_ptr() for x in fork.contents().values() if x.numel()}
    assert fork.forget_("a") is fork
    assert [s.name for s in memory.spans()] == ["a", "b", "c"]
    assert memory.unnamed().nbytes == memory.bytes_at(memory.count)
    same(memory.unnamed(), memory)


@pytest.mark.parametrize("name", ["squared_affine", "retention", "ska-1", "ska-fading"])
def test_what_a_span_costs(name: str) -> None:
    """Its tokens while they take less than its sums would; never more than these."""
    op = operator(name)
    state = empty(op).nbytes
    memory = empty(op)
    for count in (1, 2, 5, 400):
        tokens = span(seed=count, tokens=count)
        before = memory.nbytes
        memory = tokens.into(memory.open(f"n{count}")).close()
        kept = memory.spans()[-1].nbytes
        assert memory.nbytes - before == kept + (memory.bytes_at(memory.count) - memory.bytes_at(memory.count - count))
        decay = BATCH * KV * count * 8 if name in ("retention", "ska-fading") else 0
        assert kept == min(tokens.k.nbytes + tokens.v.nbytes + decay, state)
    keys = operator("softmax")
    two = span(tokens=7).into(empty(keys).open("x")).close()
    assert two.nbytes == span(tokens=7).into(empty(keys)).nbytes == two.spans()[0].nbytes


@pytest.mark.parametrize("name", ["softmax", "squared_affine", "retention", "ska-1", "ska-fading"])
def test_gradients_through_what_is_left(name: str) -> None:
    op, q = operator(name), queries()
    tokens = span()
    k, v = tokens.k.requires_grad_(), tokens.v.requires_grad_()
    forgotten = named(empty(op), tokens, *CUTS).forget("b").read(q).square().sum()
    never = named(empty(op), tokens, "a", "c").read(q).square().sum()
    for a, b in zip(torch.autograd.grad(forgotten, (k, v)), torch.autograd.grad(never, (k, v)), strict=True):
        close(a, b)
        assert not a[:, :, 8:12].any()
        assert a[:, :, 12:20].any()


@pytest.mark.parametrize("name", ["softmax", "linear", "squared_affine", "retention", "ska-1", "ska-fading"])
def test_many_single_steps(name: str) -> None:
    """A decoder's tokens are put into their part some at a time; at no moment is one of them missing."""
    op, tokens, q = operator(name), span(tokens=80), queries()
    memory, rest = tokens.part(0, 5).into(empty(op).open("a")).open("b"), empty(op)
    for t in range(5, 80):
        memory = tokens.part(t, t + 1).into(memory)
        rest = tokens.part(t, t + 1).into(rest)
        if t in (5, 36, 37, 60, 79):
            close(memory.forget("a").read(q), rest.read(q))
            close(memory.fork().close().forget("b").read(q), tokens.part(0, 5).into(empty(op)).read(q))
            assert memory.spans()[1].count == t - 4
            close(memory.gather([1]).forget("a").read(q[1:]), rest.read(q)[1:])


def test_sums_that_begin_to_fade() -> None:
    """Plain sums that learn what time is take their spans with them."""
    op, tokens, q = m.linear().double(), span(), queries()
    decay = -torch.rand(BATCH, KV, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    last = tokens.part(12, 20)
    memory = named(empty(op), tokens, "a", "b").absorb(last.k, last.v, log_decay=decay, span="c")
    assert memory.kind == "decayed"
    expected = named(empty(op), tokens, "a").absorb(last.k, last.v, log_decay=decay, span="c")
    close(memory.forget("b").read(q), expected.read(q))
    close(memory.forget("c").read(q), named(empty(op), tokens, "a", "b").read(q))


@pytest.mark.parametrize("name", ["softmax", "squared_affine", "retention", "ska-1", "ska-fading", "sko-chunk"])
def test_attention_extends_the_open_part(name: str) -> None:
    """Every path leaves the spans as absorb does."""
    import zonal

    op, tokens = operator(name), span()
    q = queries().new_zeros(BATCH, KV, TOKENS, tokens.k.shape[3]).normal_(generator=torch.Generator().manual_seed(4))

    def run(path: str) -> tuple[Tensor, Memory]:
        memory, rows = empty(op).open("a"), []
        for start, stop in ((0, 8), (8, 12), (12, 13), (13, 20)):
            if start == 8:
                memory = memory.close().open("b")
            if start == 12:
                memory = memory.close()
            y, memory = zonal.attention(
                q[:, :, start:stop],
                tokens.k[:, :, start:stop],
                tokens.v[:, :, start:stop],
                op,
                causal=True,
                memory=memory,
                path=path,
            )
            rows.append(y)
        return torch.cat(rows, 2), memory

    expected = tokens.part(12, 20).into(named(empty(op), tokens, "a"))
    whole = zonal.attention(q[:, :, :20], tokens.k[:, :, :20], tokens.v[:, :, :20], op, causal=True, path="dense")
    for path in ("auto", "streaming", "dense" if name == "softmax" else "chunked"):
        y, memory = run(path)
        close(y, whole)
        assert [(s.name, s.count) for s in memory.spans()] == [("a", 8), ("b", 4)]
        close(memory.forget("b").read(queries()), expected.read(queries()))


@pytest.mark.parametrize("name", ["ska-1", "ska-fading"])
def test_parts_keep_tokens_as_they_were_weighed(name: str) -> None:
    """An action mask and a gate hold for what is left of a span's neighbours, whichever way they came."""
    import zonal

    op, tokens, q = operator(name), span(True), queries()
    stored = torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(6)) > 0.4
    gate = torch.rand(BATCH, KV, TOKENS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert tokens.mask is not None

    def absorbed(memory: Memory, *names: str) -> Memory:
        for one in names:
            piece = slice(*CUTS[one])
            memory = memory.absorb(
                tokens.k[:, :, piece],
                tokens.v[:, :, piece],
                tokens.mask[:, piece],
                None,
                None,
                stored[:, piece],
                gate[:, :, piece],
                span=one,
            )
        return memory

    expected = absorbed(empty(op), "a", "c")
    same(absorbed(empty(op), *CUTS).forget("b"), expected)
    assert not torch.allclose(expected.read(q), named(empty(op), tokens, "a", "c").read(q))
    for path in ("streaming", "chunked"):
        memory = empty(op)
        for one, (start, stop) in CUTS.items():
            piece = slice(start, stop)
            k = tokens.k[:, :, piece]
            _, memory = zonal.attention(
                k, k, tokens.v[:, :, piece], op, causal=True, memory=memory.open(one), path=path,
                key_padding_mask=tokens.mask[:, piece],
                action_mask=stored[:, piece], key_gate=gate[:, :, piece],
            )  # fmt: skip
        close(memory.close().forget("b").read(q), expected.read(q))


def test_decays_a_token_go_with_their_span() -> None:
    """What came before a forgotten span fades by the others alone, and their ridge is given back where it would have
    been.
    """
    op, tokens, q = m.ska(power=1, fading=True).double(), span(True), queries()
    decay = -torch.rand(BATCH, KV, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def absorbed(*names: str, label: bool = True) -> Memory:
        memory = empty(op)
        for one in names:
            part, piece = tokens.part(*CUTS[one]), slice(*CUTS[one])
            memory = memory.absorb(part.k, part.v, part.mask, decay[:, :, piece], span=one if label else None)
        return memory

    for gone in CUTS:
        left = [one for one in CUTS if one != gone]
        same(absorbed(*CUTS).forget(gone), absorbed(*left))
        close(absorbed(*CUTS).forget(gone).read(q), absorbed(*left, label=False).read(q))
        assert not torch.allclose(absorbed(*CUTS).read(q), absorbed(*left).read(q))


def test_decoding_in_single_precision_keeps_spans() -> None:
    """The compiled decoder's short cut must not lose the record."""
    import zonal

    op = m.squared_affine()
    k, v, q = (torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
    with torch.no_grad():
        memory = Memory.empty(op, 1, 1, 8, 8).absorb(k[:, :, :4], v[:, :, :4], span="a")
        plain = Memory.empty(op, 1, 1, 8, 8)
        for t in (4, 5):
            one = slice(t, t + 1)
            _, memory = zonal.attention(q[:, :, one], k[:, :, one], v[:, :, one], op, causal=True, memory=memory)
            _, plain = zonal.attention(q[:, :, one], k[:, :, one], v[:, :, one], op, causal=True, memory=plain)
        assert [s.name for s in memory.spans()] == ["a"]
        assert torch.allclose(memory.forget("a").read(q), plain.read(q), atol=1e-6)


@pytest.mark.parametrize("name", ["squared_affine", "retention", "ska-1"])
def test_autocast_does_not_shorten_sums(name: str) -> None:
    op = OPERATORS[name]()
    k, v = (torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    start = Memory.empty(op, 1, 2, 4, 4)

    def run() -> Memory:
        memory = start.absorb(k, v, span="a").open("b")
        for t in range(6):
            memory = memory.absorb(k[:, :, t : t + 1], v[:, :, t : t + 1])
        return memory.close().absorb(v, k, span="c").forget("a")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    same(got, run())


def test_windows() -> None:
    """A span that is out of sight goes without trace; one whose leaving would bring others back is refused."""
    op, tokens, q = operator("softmax-window"), span(), queries()
    short = tokens.part(0, 2).into(empty(op))
    part = tokens.part(2, 4)
    short = short.absorb(part.k, part.v, span="x")
    close(short.forget("x").read(q), tokens.part(0, 2).into(empty(op)).read(q))
    memory = named(empty(op), tokens, *CUTS)
    assert torch.equal(memory.forget("a").read(q), memory.read(q))
    with pytest.raises(ArgumentError, match=r"let go of 14 tokens.*Read the tokens again"):
        memory.forget("c")
    assert memory.count == 20


REFUSED = {
    "taken": (lambda a: a.absorb(*a.kv, span="a"), "a span 'a' already, of 8 tokens. Forget it first"),
    "empty": (lambda a: a.absorb(*a.kv, span=""), "must be a string that is not empty"),
    "number": (lambda a: a.open(7), "must be a string"),
    "unknown": (lambda a: a.forget("aa"), "Did you mean 'a'"),
    "merge of two": (lambda a: a.merge(a.fork()), "a span 'a' already"),
    "name of the named": (
        lambda a: a.merge(a.other.merge(a.other_span), span="z"),
        "has spans of its own, so 'z' cannot name all",
    ),
    "subtract unknown": (
        lambda a: a.subtract(a.other_span),
        r"span 'z' was never absorbed here \(spans: \['a', 'b'\]\)",
    ),
    "subtract another length": (lambda a: a.subtract(a.longer), "span 'a' has 8 tokens here and 4 there"),
    "subtract nameless": (lambda a: a.subtract(a.other), "where tokens belong that have no name cannot be told"),
    "too much": (lambda a: a.subtract(a.merge(a.other)), "holds 16 tokens, this one only 12"),
    "NaN": (lambda a: a.absorb(a.kv[0] * float("nan"), a.kv[1], span="z"), "nothing was absorbed"),
}


@pytest.mark.parametrize("name", ["softmax", "squared_affine", "retention", "ska-1"])
@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_remedy_and_change_nothing(what: str, name: str) -> None:
    op, tokens = operator(name), span()
    memory = named(empty(op), tokens, "a", "b")
    part = tokens.part(0, 4)
    more = {
        "kv": (part.k, part.v),
        "other": part.into(empty(op)),
        "other_span": empty(op).absorb(part.k, part.v, span="z"),
        "longer": empty(op).absorb(part.k, part.v, span="a"),
    }
    for key, value in more.items():
        object.__setattr__(memory, key, value)
    before, spans, count = memory.read(queries()), memory.spans(), memory.count
    act, words = REFUSED[what]
    with pytest.raises((ArgumentError, ArithmeticError), match=words):
        act(memory)
    assert torch.equal(memory.read(queries()), before)
    assert (memory.spans(), memory.count) == (spans, count)


def test_nothing_was_ever_named() -> None:
    memory = span().into(empty(m.linear().double()))
    with pytest.raises(ArgumentError, match="no span was ever named here"):
        memory.forget("a")
    with pytest.raises(ArgumentError, match=r"span 'z' was never absorbed here \(spans: none\)"):
        memory.subtract(empty(m.linear().double()).absorb(span(tokens=4).k, span(tokens=4).v, span="z"))


def test_spans_are_whole_chunks() -> None:
    op, tokens = operator("sko-chunk"), span()
    memory = tokens.part(0, 3).into(empty(op))
    with pytest.raises(ArgumentError, match="holds whole chunks of 4 tokens, and the memory stands at 3"):
        memory.open("x")
    with pytest.raises(ArgumentError, match="whole chunks of 4 tokens, and the memory stands at 6"):
        empty(op).absorb(tokens.k[:, :, :6], tokens.v[:, :, :6], span="x")
    assert any(isinstance(p, prior.ChunkCausal) for p in OPERATORS["sko-chunk"]().prior)
    assert EXPECTED["sko-chunk"] == "features"


def test_spans_that_come_and_go_leave_no_rounding() -> None:
    """Float32 sums after 300 large spans came and went are those that never saw them; by subtraction their digits would
    be gone.
    """
    op = m.squared_affine()
    k, v = (
        torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0)),
        torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(1)),
    )
    memory = Memory.empty(op, 1, 1, 4, 4).absorb(k, v, span="stays")
    kept, taken = memory, memory.unnamed()
    for seed in range(300):
        large = 1000 * torch.randn(1, 1, 50, 4, generator=torch.Generator().manual_seed(seed))
        memory = memory.absorb(large, large, span="goes").forget("goes")
        other = Memory.empty(op, 1, 1, 4, 4).absorb(large, large)
        taken = taken.merge(other).subtract(other)
    same(memory, kept)
    assert (taken.tensors()["state"] - kept.tensors()["state"]).abs().max() > 1e-3

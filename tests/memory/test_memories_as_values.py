"""Every memory of every operator: absorb, read, merge, subtract, fork, bytes, gradients, against the definition on all
keys.
"""

import itertools
from pathlib import Path

import pytest
import torch
from matrix import OPERATORS
from memories import BATCH, DIM, EXPECTED, KINDS, KV, NAMES, TOKENS, VALUE, close, draw, empty, operator, queries, span
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError
from zonal.memory import KeyValues, Memory, RidgeStatistics


@pytest.mark.parametrize("name", NAMES)
def test_kind(name: str) -> None:
    op = operator(name)
    assert Memory.kind_for(op, DIM) == EXPECTED[name]
    memory = empty(op)
    assert memory.kind == EXPECTED[name]
    assert type(memory) is KINDS[memory.kind]
    assert (memory.count, memory.batch) == (0, BATCH)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_read_is_the_definition(name: str, padded: bool) -> None:
    """A query after the last token, which every mask lets see all of them, gets what the dense form gives it."""
    op, tokens = operator(name), span(padded)
    bare = op.replace(prior=tuple(p for p in op.prior if not isinstance(p, prior.Causal | prior.ChunkCausal)))
    # causal with one more, masked key: the query stands one past the last token
    q = queries()[:, :, :1]
    own = torch.zeros(BATCH, KV, 1, DIM, dtype=torch.float64)
    mask = torch.cat(
        [
            torch.ones(BATCH, TOKENS, dtype=torch.bool) if tokens.mask is None else tokens.mask,
            torch.zeros(BATCH, 1, dtype=torch.bool),
        ],
        1,
    )
    k, v = torch.cat([tokens.k, own], 2), torch.cat([tokens.v, own[..., :VALUE]], 2)
    free = any(isinstance(p, prior.Window | prior.ALiBi) for p in op.prior) or op.tags.window > 0
    if free:  # these count positions: the query stands at the last token itself
        k, v, mask = tokens.k, tokens.v, mask[:, :-1]
    expected = (
        zonal.attention(q, k, v, bare, causal=True, key_padding_mask=mask, path="dense")
        if not (free and op.anchor.solves)
        else None
    )
    got = tokens.into(empty(op)).read(q)
    if expected is None:
        expected = tokens.into(empty(op, "keys")).read(q)
    close(got, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_and_kinds_agree(name: str, padded: bool) -> None:
    """One token or many at a time, constant memory or all keys, in place or not: one function."""
    op, tokens, q = operator(name), span(padded), queries()
    expected = tokens.into(empty(op, "keys")).read(q)
    close(tokens.into(empty(op)).read(q), expected)
    for cuts in ((0, 1, 2, 3, 9, 23), (0, 4, 8, 23), (0, 0, 22, 22, 23)):
        memory, other = empty(op), empty(op)
        for start, stop in itertools.pairwise(cuts):
            part = tokens.part(start, stop)
            memory = part.into(memory)
            memory.read(q)  # reading in between changes nothing
            assert other.absorb_(part.k, part.v, part.mask) is other
        assert memory.count == other.count == TOKENS
        close(memory.read(q), expected)
        close(other.read(q), expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_in_place_is_no_other_object(name: str) -> None:
    """What a verb returns, and what a decoder holds, is another memory, also where nothing was to be done."""
    op, tokens, q = operator(name), span(), queries()
    memory = tokens.into(empty(op))
    nothing, decoder, expected = tokens.part(0, 0), memory.decoder(), memory.read(q)
    for one in (
        nothing.into(memory), memory.merge(empty(op)), memory.unnamed(), memory.close(), decoder.memory(),
        zonal.attention(q[:, :, :0], nothing.k, nothing.v, op, causal=True, memory=memory)[1],
    ):  # fmt: skip
        one.absorb_(tokens.k, tokens.v)
        close(memory.read(q), expected, 1e-12)
        assert decoder.memory().count == memory.count == TOKENS
    memory.absorb_(tokens.k, tokens.v)
    close(decoder.memory().read(q), expected, 1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cut", [0, 8, 16, 23])
@pytest.mark.parametrize("name", NAMES)
def test_merge_is_the_memory_of_both(name: str, cut: int, padded: bool) -> None:
    op, tokens, q = operator(name), span(padded), queries()
    first, second = tokens.part(0, cut).into(empty(op)), tokens.part(cut, TOKENS).into(empty(op))
    merged = first.merge(second)
    close(merged.read(q), tokens.into(empty(op)).read(q))
    assert merged.count == TOKENS
    # and goes on as any other
    more = span(seed=20, tokens=4)
    close(more.into(merged).read(q), more.into(tokens.into(empty(op))).read(q))
    assert first.merge_(second) is first
    close(first.read(q), merged.read(q), 0)


@pytest.mark.parametrize("name", NAMES)
def test_merge_is_associative(name: str) -> None:
    op, tokens, q = operator(name), span(), queries()
    a, b, c = (tokens.part(*cut).into(empty(op)) for cut in ((0, 8), (8, 12), (12, 23)))
    close(a.merge(b).merge(c).read(q), a.merge(b.merge(c)).read(q))


@pytest.mark.parametrize("padded", [False, True])
# the first tokens of what is left are not to be had from sums
@pytest.mark.parametrize("name", [name for name in NAMES if "window" not in name and name != "local_global-first"])
def test_subtract_undoes_merge(name: str, padded: bool) -> None:
    op, tokens, q = operator(name), span(padded), queries()
    first, second = tokens.part(0, 8).into(empty(op)), tokens.part(8, TOKENS).into(empty(op))
    rest = first.merge(second).subtract(first)
    assert rest.count == second.count
    if name != "ska-paper":  # its ridge follows the largest key ever seen
        close(rest.read(q), second.read(q), 1e-8)
    merged = first.merge(second)
    assert merged.subtract_(first) is merged
    close(merged.read(q), rest.read(q), 0)
    nothing = (
        second.subtract(tokens.part(8, TOKENS).into(empty(op))) if second.count % 4 == 0 or op.prior == () else None
    )
    if nothing is not None:
        assert nothing.count == 0
        assert nothing.read(q).abs().max() < 1e-6


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NAMES
        if EXPECTED[name] in ("keys", "ridge", "features") and "window" not in name and "decay" not in name
    ],
)
def test_subtract_the_end(name: str) -> None:
    """Where order allows it, the newest tokens can be taken out as well."""
    op, tokens, q = operator(name), span(), queries()
    first, second = tokens.part(0, 8).into(empty(op)), tokens.part(8, 20).into(empty(op))
    rest = first.merge(second).subtract(second)
    if name != "ska-paper":
        close(rest.read(q), first.read(q), 1e-8)


@pytest.mark.parametrize("cut", [8, 12])
@pytest.mark.parametrize("name", [name for name in NAMES if EXPECTED[name] in ("decayed", "fading")])
def test_the_end_of_what_fades_is_told_from_its_beginning(name: str, cut: int, tmp_path: Path) -> None:
    """The end would have to be taken from sums in which the beginning has faded: refused, like tokens that were
    absorbed and not merged.
    """
    op, tokens, q = operator(name), span(), queries()
    a, b, c = (tokens.part(*part).into(empty(op)) for part in ((0, cut), (cut, 2 * cut - 4), (2 * cut - 4, TOKENS)))
    for whole in (a.merge(b).merge(c), a.merge(b.merge(c))):
        for end in (c, b.merge(c)):
            with pytest.raises(ArgumentError, match=r"the other memory is the end of this one.*span=…"):
                whole.subtract(end)
    pair = a.merge(b)
    with pytest.raises(ArgumentError, match="border after these tokens is unknown"):
        tokens.part(0, 2 * cut - 4).into(empty(op)).subtract(a)
    pair.save(tmp_path / "pair")
    for same in (
        pair,
        Memory.load(tmp_path / "pair"),
        pair.fork(),
        pair.gather([0, 1]),
        Memory.stack(list(pair.unbind())),
    ):
        close(same.subtract(a).read(q), b.read(q), 1e-8)
        with pytest.raises(ArgumentError, match="the other memory is the end of this one"):
            same.subtract(b)
    whole = a.merge(b.merge(c))
    close(whole.subtract(a).subtract(b).read(q), c.read(q), 1e-8)
    close(a.merge(b).merge(c).subtract(a.merge(b)).read(q), c.read(q), 1e-8)
    assert pair.subtract(tokens.part(0, 2 * cut - 4).into(empty(op))).count == 0
    with pytest.raises(ArgumentError, match=r"Memory.subtract: .*(faded more|unknown)"):
        pair.subtract(b.merge(a))


@pytest.mark.parametrize("last", [1, 2])
def test_a_middle_cannot_be_subtracted(last: int) -> None:
    """A window keeps its tokens, in place of earlier ones that only the sums have."""
    op, tokens = m.local_global(window=3).double(), span()
    a, b, c = (tokens.part(*part).into(empty(op)) for part in ((0, 5), (5, 10), (10, 10 + last)))
    whole = a.merge(b).merge(c)
    for part in (b, c):
        with pytest.raises(ArgumentError, match="is the middle or the end of this one"):
            whole.subtract(part)
    close(whole.subtract(a).read(queries()), b.merge(c).read(queries()))


def test_a_beginning_may_end_like_what_follows() -> None:
    """As documents do that end with the same token."""
    op, tokens, q = m.local_global(window=3).double(), span(tokens=10), queries()
    for x in (tokens.k, tokens.v):
        x[:, :, 9] = x[:, :, 4]
    a, b = (tokens.part(*part).into(empty(op)) for part in ((0, 5), (5, 10)))
    close(a.merge(b).subtract(a).read(q), b.read(q))


@pytest.mark.parametrize("name", NAMES)
def test_a_memory_is_printed_in_one_line_and_moves(name: str) -> None:
    op = operator(name)
    memory = span(tokens=8).into(empty(op))
    shown = repr(memory)
    assert shown.startswith(
        f"{type(memory).__name__}(operator '{op.name}', 8 tokens, {memory.nbytes} bytes, form (batch 2, heads 2, "
    )
    assert "tensor" not in shown
    assert "\n" not in shown
    there = memory.to("meta")
    assert type(there) is type(memory)
    assert (there.count, there.form) == (8, memory.form._replace(device=torch.device("meta")))
    assert {n: (x.shape, x.dtype) for n, x in there.tensors().items()} == {
        n: (x.shape, x.dtype) for n, x in memory.tensors().items()
    }
    assert all(x.device.type == "meta" for x in there.tensors().values())
    assert torch.equal(memory.to("cpu").read(queries()), memory.read(queries()))


def test_a_memory_with_spans_is_printed_and_moves() -> None:
    tokens, q = span(tokens=8), queries()
    memory = empty(operator("ska-1")).absorb(tokens.k, tokens.v, span="a").absorb(tokens.k, tokens.v, span="b")
    assert repr(memory).endswith(", spans ['a', 'b'])")
    there = memory.to("cpu")
    assert there.spans() == memory.spans()
    assert torch.equal(there.forget("a").read(q), memory.forget("a").read(q))
    assert all(x.device.type == "meta" for x in memory.to("meta").contents().values())


@pytest.mark.parametrize("name", ["linear", "retention", "ska-1", "ska-fading"])
def test_subtracting_nothing_changes_nothing(name: str) -> None:
    op = operator(name)
    memory = span(tokens=6).into(empty(op)).merge(span(tokens=4, seed=5).into(empty(op)))
    rest = memory.subtract(empty(op))
    assert rest.count == 10
    assert all(torch.equal(x, rest.tensors()[key]) for key, x in memory.tensors().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_memory_is_a_value(name: str) -> None:
    """No verb without underscore changes what it is called on; a fork shares nothing."""
    op, tokens, q = operator(name), span(), queries()
    memory = tokens.part(0, 8).into(empty(op))
    before = memory.read(q).clone()
    fork = memory.fork()
    left, right = tokens.part(8, 12).into(memory), tokens.part(12, 16).into(memory)
    expected = tokens.part(12, 16).into(tokens.part(0, 8).into(empty(op))).read(q)
    close(right.read(q), expected)
    memory.merge(left)
    assert torch.equal(memory.read(q), before)
    tensors = {x.untyped_storage().data_ptr() for x in memory.tensors().values() if x.numel()}
    assert not tensors & {x.untyped_storage().data_ptr() for x in fork.tensors().values() if x.numel()}
    memory.absorb_(tokens.part(8, 12).k, tokens.part(8, 12).v)
    assert torch.equal(fork.read(q), before)
    close(memory.read(q), left.read(q))


@pytest.mark.parametrize("verb", ["absorb", "call", "step"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_absorbed_may_be_overwritten(name: str, recorded: bool, verb: str) -> None:
    """As where a program puts the next tokens into the same tensors."""
    op, tokens, later, q = operator(name), span(tokens=2), span(seed=5, tokens=4), queries()
    k, v = (x.requires_grad_(recorded and verb != "step") for x in (tokens.k, tokens.v))
    if verb == "absorb":
        memory = empty(op).absorb(k, v)
    elif verb == "call":
        _, memory = zonal.attention(q[:, :, :2], k, v, op, causal=True, memory=empty(op))
    else:
        decoder = empty(op).decoder()
        decoder.step(q[:, :, :1], k[:, :, :1], v[:, :, :1])
        memory = decoder.memory()
    with torch.no_grad():
        before = later.into(memory.fork()).read(q)
        k.fill_(3.0)
        v.fill_(7.0)
        assert torch.equal(later.into(memory).read(q), before)


def test_the_bytes_of_a_declared_decay_are_known_before_the_first_token() -> None:
    memory = empty(m.softmax(prior=prior.Decay((0.9,))))
    assert span().into(memory).nbytes == memory.bytes_at(TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    """Constant memories stay constant while they are absorbed into and read; the others count what they hold."""
    op, tokens, q = operator(name), span(), queries()
    memory = empty(op)
    sizes = []
    for start in range(TOKENS):
        sizes.append(memory.nbytes)
        assert memory.bytes_at(start) == memory.nbytes
        memory = tokens.part(start, start + 1).into(memory)
        memory.read(q)
    token = BATCH * KV * (DIM + VALUE) * 8
    chunk = next((p.size for p in op.prior if isinstance(p, prior.ChunkCausal)), None)
    if EXPECTED[name] == "windowed":
        assert [size - sizes[0] for size in sizes] == [token * min(n, op.tags.window) for n in range(TOKENS)]
    elif EXPECTED[name] != "keys" and chunk is None:
        assert len(set(sizes)) == 1
    elif chunk is not None:
        assert [size - sizes[0] for size in sizes] == [token * (n % chunk) for n in range(TOKENS)]
    elif "window" in name:
        assert sizes[-1] == sizes[-2]
    elif "decay" not in name:
        assert sizes == [token * n for n in range(TOKENS)]
    held = sum(x.numel() * x.element_size() for x in memory.tensors().values())
    derived = BATCH * KV * memory.gram.shape[-1] ** 2 * 8 if isinstance(memory, RidgeStatistics) else 0
    assert memory.nbytes == held + derived


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow(name: str, padded: bool) -> None:
    """Through absorb, merge and read to keys, values, queries and what the operator learned: as for all keys kept."""
    op = operator(name)
    tokens, q = span(padded), queries().requires_grad_()
    tokens.k.requires_grad_()
    tokens.v.requires_grad_()
    leaves = [q, tokens.k, tokens.v, *op.parameters()]

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((y * draw(*y.shape, seed=4)).sum(), leaves, materialize_grads=True)

    expected = gradients(tokens.into(empty(op, "keys")).read(q))
    merged = tokens.part(0, 12).into(empty(op)).merge(tokens.part(12, TOKENS).into(empty(op)))
    for memory in (tokens.part(9, TOKENS).into(tokens.part(0, 9).into(empty(op))), merged):
        for a, b in zip(gradients(memory.read(q)), expected, strict=True):
            close(a, b, 1e-8)


@pytest.mark.parametrize("name", ["squared_affine", "ridge", "ska-1", "softmax"])
def test_memory_follows_its_operator_through_training(name: str) -> None:
    """Statistics do not depend on what is learned: after a step of training, reading uses the new values."""
    op, tokens, q = operator(name), span(), queries()
    memory = tokens.into(empty(op))
    before = memory.read(q)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.add_(0.2)
    close(memory.read(q), tokens.into(empty(op, "keys")).read(q))
    assert name == "softmax" or not torch.allclose(memory.read(q), before)


@pytest.mark.parametrize("name", ["squared_affine", "ska-1", "retention", "softmax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_are_single_or_better(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]()
    memory = Memory.empty(op, BATCH, KV, DIM, VALUE, dtype)
    tokens = span()
    memory = memory.absorb(tokens.k.to(dtype), tokens.v.to(dtype))
    y = memory.read(queries().to(dtype))
    assert y.dtype == dtype
    for value in memory.tensors().values():
        if value.is_floating_point():
            assert value.dtype == dtype if name == "softmax" else torch.finfo(value.dtype).bits >= 32
    exact = Memory.empty(op.double(), BATCH, KV, DIM, VALUE, torch.float64).absorb(
        tokens.k.to(dtype).double(), tokens.v.to(dtype).double()
    )
    expected = exact.read(queries().to(dtype).double())
    assert (y.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps * (1 + expected.abs().max())


@pytest.mark.parametrize("make", [m.linear, m.softmax, lambda: m.ska(power=0, fading=True)])
def test_what_padding_holds_is_no_decay(make) -> None:
    op, tokens, q = make().double(), span(True), queries()
    assert tokens.mask is not None
    decay = -draw(BATCH, KV, TOKENS, seed=5).abs()
    poisoned = decay.masked_fill(~tokens.mask[:, None], float("nan"))
    close(
        empty(op).absorb(tokens.k, tokens.v, tokens.mask, poisoned).read(q),
        empty(op).absorb(tokens.k, tokens.v, tokens.mask, decay).read(q),
        0,
    )
    y, expected = (
        zonal.attention(q, tokens.k, tokens.v, op, causal=True, key_padding_mask=tokens.mask, log_decay=x)
        for x in (poisoned, decay)
    )
    close(y, expected, 0)


def test_per_token_decay_and_key_bias() -> None:
    op, tokens, q = m.linear().double(), span(True), queries()
    decay, bias = -draw(BATCH, KV, TOKENS, seed=5).abs(), draw(BATCH, KV, TOKENS, seed=6)
    all_keys = empty(op, "keys").absorb(tokens.k, tokens.v, tokens.mask, decay, bias)
    sums = empty(op).absorb(tokens.k, tokens.v, tokens.mask, decay, bias)
    assert sums.kind == "decayed"  # the plain sums learned what time is
    close(sums.read(q), all_keys.read(q))
    pieces = empty(op, "decayed")
    for start in range(0, TOKENS, 5):
        s = slice(start, start + 5)
        pieces.absorb_(
            tokens.k[:, :, s],
            tokens.v[:, :, s],
            None if tokens.mask is None else tokens.mask[:, s],
            decay[..., s],
            bias[..., s],
        )
    close(pieces.read(q), all_keys.read(q))
    # a mask, a decay or a bias that only later tokens have
    mixed = empty(op, "keys").absorb(tokens.k, tokens.v)
    assert isinstance(mixed, KeyValues)
    later = mixed.absorb(tokens.k, tokens.v, tokens.mask, decay, bias)
    sums = empty(op).absorb(tokens.k, tokens.v).absorb(tokens.k, tokens.v, tokens.mask, decay, bias)
    close(later.read(q), sums.read(q))

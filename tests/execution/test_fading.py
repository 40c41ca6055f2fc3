"""Ridge and Koopman read-outs whose past fades, against their recurrence written out; blocks, steps and memories
against the definition.
"""

from typing import Any

import pytest
import torch
from execution.chunks import assert_same
from matrix import randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, prior
from zonal import mechanisms as m
from zonal.errors import ArgumentError, NonFiniteError, PathError
from zonal.execution.paths.blocks import block_length
from zonal.memory import FadingStatistics

R, P = 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(
    tokens: int = 23, keys: int | None = None, batch: int = 2, r: int = R, strongest: float = 0.3, seed: int = 0
) -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2, and log decays."""
    keys = tokens if keys is None else keys
    decay = -strongest * torch.rand(
        batch, 2, keys, generator=torch.Generator().manual_seed(seed + 3), dtype=torch.float64
    )
    return [
        draw(batch, 4, tokens, r, seed=seed),
        draw(batch, 2, keys, r, seed=seed + 1),
        draw(batch, 2, keys, P, seed=seed + 2),
        decay,
    ]


def by_hand(operator: Operator, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """G, M and C of one sequence and head, token by token; a query reads before its own token is taken in."""
    fitted = operator.anchor
    assert isinstance(fitted, anchor.Koopman)
    params = operator.bind(1, 1).anchor_params
    rho, r = fitted.ridge(params, 1).item(), k.shape[1]
    gram, moved, cross, before, rows = (
        rho * torch.eye(r, dtype=k.dtype),
        torch.zeros(r, r).to(k),
        torch.zeros(v.shape[1], r).to(k),
        torch.zeros(r).to(k),
        [],
    )
    for t in range(len(k)):
        inverse = torch.linalg.inv(gram)
        x = inverse @ q[t]
        for _ in range(fitted.shifts):
            x = inverse @ moved @ x
        rows.append(cross @ x * fitted.output_scale(params, 1).item())
        rate, z = decay[t].exp(), k[t] / max(1.0, k[t].norm().item())
        pseudo = torch.zeros(r).to(k)
        pseudo[t % r] = (r * rho * (1 - rate)).sqrt()
        gram = rate * gram + torch.outer(z, z) + torch.outer(pseudo, pseudo)
        moved, cross, before = rate * moved + torch.outer(z, before), rate * cross + torch.outer(v[t], z), z
    return torch.stack(rows)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_definition_is_the_recurrence(power: int) -> None:
    operator = randomised(m.ska(power=power, fading=True))
    q, k, v, decay = sample(17)
    y = zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path="dense")
    for b, h in ((0, 0), (1, 3)):
        expected = by_hand(operator, q[b, h], k[b, h // 2], v[b, h // 2], decay[b, h // 2])
        assert torch.allclose(y[b, h], expected, rtol=0, atol=1e-11 * (1 + expected.abs().max().item()))


CASES: dict[str, dict[str, object]] = {
    "plain": {}, "nothing fades": {"strongest": 0.0}, "fast": {"strongest": 3.0},
    "late queries": {"tokens": 3, "keys": 23}, "one token": {"tokens": 1},
    "wide": {"tokens": 70, "r": 16}, "padded": {}, "documents": {"batch": 1},
}  # fmt: skip


@pytest.mark.parametrize("path", ["chunked", "streaming"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("power", [0, (2, 0, 1, 1)])
def test_decays_a_token(power: int | tuple[int, ...], case: str, path: str) -> None:
    """Outputs, and gradients with respect to decays as well."""
    operator, tensors = randomised(m.ska(power=power, fading=True)), [x.requires_grad_() for x in sample(**CASES[case])]  # type: ignore[arg-type]
    q, k, v, decay = tensors
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(5)) > 0.3 if case == "padded" else None
    edges = torch.tensor([0, 1, 8, 23]) if case == "documents" else None

    def run(path: str) -> Tensor:
        return zonal.attention(
            q, k, v, operator, causal=True, log_decay=decay, key_padding_mask=mask, cu_seqlens=edges, path=path
        )

    assert_same(run(path), run("dense"), [*tensors, *operator.parameters()])


def test_without_decay_it_is_the_plain_form() -> None:
    q, k, v, decay = sample(40)
    fading, plain = m.ska(power=1, fading=True).double(), m.ska(power=1).double()
    for path in ("dense", "chunked"):
        assert torch.allclose(
            zonal.attention(q, k, v, fading, causal=True, log_decay=0 * decay, path=path),
            zonal.attention(q, k, v, plain, causal=True),
            atol=1e-11,
        )


def test_what_faded_is_forgotten() -> None:
    """Recall of a key stored long ago, beside the same key's newer value: with a fading past only the newer one is
    left.
    """
    k = torch.eye(8, dtype=torch.float64)[torch.arange(64) % 8][None, None]
    v = torch.arange(64, dtype=torch.float64)[None, None, :, None] // 8
    with torch.no_grad():
        kept, faded = (
            Memory.empty(op, 1, 1, 8, 1, torch.float64).absorb(k, v, log_decay=decay).read(k[:, :, :8])
            for op, decay in (
                (m.ridge(eps=1e-3), None),
                (m.ridge(eps=1e-3, fading=True), torch.full((1, 1, 64), -0.25, dtype=torch.float64)),
            )
        )
    assert torch.allclose(kept, torch.full_like(kept, 3.5), atol=1e-3)
    assert (faded > 6.8).all()


def test_blocks_are_cut_where_the_past_fades_fast() -> None:
    """A strong decay anywhere shortens blocks, down to a token, and nothing is lost."""
    decay = torch.zeros(1, 2, 64, dtype=torch.float64)
    assert block_length(decay, 32) == 32
    decay[0, 1, 40:44] = -7.0
    assert block_length(decay, 32) == 1
    decay[0, 1, 41:44] = 0
    assert block_length(decay, 32) == 32
    decay[0, 1, 40] = 0
    q, k, v, _ = sample(64, batch=1)
    operator = m.ska(power=1, fading=True).double()
    decay[0, 0, 30] = -6.0
    decay[0, 1, 32:40] = -0.8
    got, expected = (
        zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path=path) for path in ("chunked", "dense")
    )
    assert (got - expected).abs().max() < 1e-10 * expected.abs().max()


def test_single_precision_and_the_planner() -> None:
    q, k, v, decay = sample(300, r=16, strongest=0.05)
    operator = m.ska(power=1, fading=True)
    expected = zonal.attention(q, k, v, operator.double(), causal=True, log_decay=decay, path="dense")
    got = zonal.attention(q.float(), k.float(), v.float(), operator.float(), causal=True, log_decay=decay.float())
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    explained = zonal.explain(m.ska(fading=True), (1, 4, 4096, 32), causal=True)
    assert (explained.path, explained.memory_kind) == ("chunked", "fading")


# -- memories --------------------------------------------------------------------------------------------------------


def span(operator: Operator, start: int, stop: int, padded: bool) -> Memory:
    _, k, v, decay = sample(23)
    mask = (
        torch.rand(2, 23, generator=torch.Generator().manual_seed(5)) > 0.3
        if padded
        else torch.ones(2, 23, dtype=torch.bool)
    )
    part = slice(start, stop)
    return Memory.empty(operator, 2, 2, R, P, torch.float64).absorb(
        k[:, :, part], v[:, :, part], mask[:, part], decay[:, :, part]
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("power", [0, 2])
def test_merging_turns_the_ridge_to_its_place(power: int, padded: bool) -> None:
    """Spans of any length, each made from nothing: merged in any order of brackets, and the oldest taken out again."""
    operator, q = m.ska(power=power, fading=True).double(), draw(2, 4, 3, R, seed=9)
    a, b, c = (span(operator, *cut, padded) for cut in ((0, 7), (7, 9), (9, 23)))
    whole = span(operator, 0, 23, padded)
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c))):
        assert isinstance(merged, FadingStatistics)
        assert torch.allclose(merged.read(q), whole.read(q), atol=1e-11)
        assert torch.allclose(merged.level, whole.level, atol=1e-13)  # type: ignore[attr-defined]
        assert torch.allclose(merged.subtract(a).read(q), b.merge(c).read(q), atol=1e-9)
        assert torch.allclose(merged.subtract(a).subtract(b).read(q), c.read(q), atol=1e-9)
        assert merged.subtract(whole).count == 0


def test_taking_out_what_is_not_there() -> None:
    operator = m.ska(power=1, fading=True).double()
    a, whole = span(operator, 0, 7, False), span(operator, 0, 23, False)
    with pytest.raises(ArgumentError, match="border after these tokens is unknown"):
        whole.subtract(a)
    slower = a.merge(
        Memory.empty(operator, 2, 2, R, P, torch.float64).absorb(
            *sample(1)[1:3], log_decay=torch.zeros(2, 2, 1).double()
        )
    )
    with pytest.raises(ArgumentError, match="not its beginning"):
        slower.subtract(span(operator, 0, 8, False))


@torch.no_grad()
def test_a_learned_ridge_that_moves_is_seen() -> None:
    operator = m.ska(power=1, fading=True).double()
    q, k, v, decay = sample(60, strongest=0.1)
    memory = Memory.empty(operator, 2, 2, R, P, torch.float64).absorb(k, v, log_decay=decay)
    before = memory.read(q)
    operator.learned_parts["anchor_raw_ridge"].add_(1.0)
    assert not torch.allclose(memory.read(q), before, atol=1e-3)
    assert torch.equal(
        memory.read(q), Memory.empty(operator, 2, 2, R, P, torch.float64).absorb(k, v, log_decay=decay).read(q)
    )


def rates(tokens: int) -> Tensor:
    """Log decays (1, 5, tokens): three constant rates, rates of all sizes mixed, and bursts that leave almost
    nothing.
    """
    decay = torch.tensor([0.5, 0.9, 0.999, 0.99, 0.999], dtype=torch.float64).log()[None, :, None].repeat(1, 1, tokens)
    decay[:, 3] = -(10 ** (draw(1, tokens, seed=4) - 2)).clamp(max=2.0)
    decay[:, 4, 100::97] = -12.0
    decay[:, 4, 101::970] = -3.0
    return decay


@torch.no_grad()
def test_ten_thousand_tokens_of_decode_at_any_rate() -> None:
    """A key head for each way to fade, read without and with a Koopman step; 7,000 nats of decay pass where the rate is
    0.5.
    """
    tokens, operator = 10_000, m.ska(power=(0, 1) * 5, fading=True).double()
    q, k, v = draw(1, 10, tokens, 6, seed=0), draw(1, 5, tokens, 6, seed=1), draw(1, 5, tokens, 3, seed=2)
    decay = rates(tokens)

    def run(path: str, last: int = tokens) -> Tensor:
        return zonal.attention(
            *(x[:, :, :last] for x in (q, k, v)), operator, causal=True, log_decay=decay[:, :, :last], path=path
        )

    decoded, chunked, dense = run("streaming"), run("chunked"), run("dense", 200)
    for expected in (dense, chunked):
        error, size = (
            (decoded[:, :, : expected.shape[2]] - expected).flatten(2).norm(dim=-1),
            expected.flatten(2).norm(dim=-1),
        )
        assert (error < 1e-9 * size).all(), error / size


@torch.no_grad()
def test_a_decoder_in_single_precision_where_much_fades() -> None:
    """Calls of one token each that hand the memory on, past the 30 nats after which an inverse kept from token to token
    has no digit left.
    """
    operator = m.ska(power=1, fading=True)
    tokens = 320
    q, k, v = (draw(1, 5, tokens, 6, seed=seed).float() for seed in range(3))
    decay, memory, rows = rates(tokens).float(), None, []
    for t in range(tokens):
        now = slice(t, t + 1)
        y, memory = zonal.attention(
            *(x[:, :, now] for x in (q, k, v)),
            operator,
            causal=True,
            log_decay=decay[:, :, now],
            memory=memory,
            return_memory=True,
        )
        rows.append(y)
    expected = zonal.attention(
        q.double(), k.double(), v.double(), operator, causal=True, log_decay=decay.double(), path="dense"
    )
    error, size = (torch.cat(rows, 2) - expected).flatten(2).norm(dim=-1), expected.flatten(2).norm(dim=-1)
    assert (error < 1e-5 * size).all(), error / size


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (m.ska, {"chunk": 4}, "neither windows nor whole chunks"),
        (m.ska, {"running_max": True}, "fades a constant ridge"),
        (m.ska, {"compact": True}, "fades sums in float64"),
        (m.ridge, {"relative": 0.1}, "fades a constant ridge"),
    ],
)
def test_what_cannot_fade_is_not_declared(make: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"cannot be run: .*{words}"):
        make(fading=True, **given)
    plain = make(**given)
    with pytest.raises(ArgumentError, match=f"cannot be run: .*{words}"):
        zonal.attention(*sample()[:3], plain.replace(prior=(*plain.prior, prior.Decay())), causal=True)


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (m.yat().replace(anchor=anchor.Ridge(), prior=prior.Decay()), "only the plain product"),
        (m.ridge().replace(prior=prior.ALiBi()), "position bias"),
    ],
)
def test_operators_that_mean_nothing(operator: Operator, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"cannot be run: .*{words}"):
        zonal.attention(*sample()[:3], operator, causal=True)


def test_calls_that_mean_nothing() -> None:
    q, k, v, decay = sample()
    operator = m.ska(power=1, fading=True).double()
    with pytest.raises(ArgumentError, match="only for causal=True"):
        zonal.attention(q, k, v, operator)
    with pytest.raises(
        ArgumentError, match=r"log_decay must be None, unless it declares .* as mechanisms.ska\(fading=True\)"
    ):
        zonal.attention(q, k, v, m.ska(), causal=True, log_decay=decay)
    with pytest.raises(ArgumentError, match="must be <= 0"):
        zonal.attention(q, k, v, operator, causal=True, log_decay=-decay)
    with pytest.raises(ArgumentError, match="key_bias must be None"):
        zonal.attention(q, k, v, operator, causal=True, key_bias=decay)
    with pytest.raises(NonFiniteError, match="decay more slowly"):
        zonal.attention(q, k, v, operator, causal=True, log_decay=torch.full_like(decay, float("-inf")), path="dense")
    y = zonal.attention(*(x.requires_grad_() for x in (q, k, v)), operator, causal=True, path="chunked")
    with pytest.raises(PathError, match="no second derivative"):
        torch.autograd.grad(y.sum(), q, create_graph=True)

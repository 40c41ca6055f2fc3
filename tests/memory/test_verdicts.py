"""Memories that say what they do not know: support, verdicts, rates that hold, and what stays as more evidence
arrives.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from memories import BATCH, GROUPS, KV, NAMES, close, draw, empty, operator, queries, span

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError, FileFormatError
from zonal.memory import Criterion, Memory, Reading
from zonal.memory.criterion import Evidence
from zonal.theory.oset import OSet, Verdict

R, P = 16, 8


def unit(*shape, seed):
    return F.normalize(draw(*shape, seed=seed), dim=-1)


def blank(op=None, heads=1, batch=1, kind=None):
    return Memory.empty(op or m.ridge(), batch, heads, R, P, torch.float64, kind=kind)


def filled(op=None, tokens=R // 2, heads=1, batch=1, seed=0, kind=None):
    return blank(op, heads, batch, kind).absorb(
        unit(batch, heads, tokens, R, seed=seed), draw(batch, heads, tokens, P, seed=seed + 1)
    )


def stages(memory, tokens, seed=3):
    """The memory, and what it becomes token by token."""
    yield memory
    for k, v in zip(
        unit(1, 1, tokens, R, seed=seed).split(1, 2), draw(1, 1, tokens, P, seed=seed + 1).split(1, 2), strict=True
    ):
        memory = memory.absorb(k, v)
        yield memory


def accepting(q, threshold):
    """The o-set of queries with that much support; its stages are memories."""
    return OSet(lambda memory: memory.support(q) > threshold)


# --- support ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ridge", "ska-1", "ska-2", "ska-paper", "ska-mixed", "ska-relative"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_leverage_of_sums_is_that_of_the_keys(name, padded):
    """1 - q^T P q / q^T P_0 q from r x r sums equals k_q^T (K + rho I)^-1 k_q / K(q, q) from the keys."""
    op, tokens = operator(name).requires_grad_(False), span(padded, tokens=8 if padded else 4)
    found = [tokens.into(empty(op, kind)).support(queries()) for kind in (None, "keys")]
    assert found[0].shape == (BATCH, KV * GROUPS, 3)
    assert 0.001 < float(found[0].min()) < float(found[0].max()) < 1
    close(*found)


def test_one_key_by_hand():
    rho = 0.1
    memory = blank(m.ridge(eps=rho, learn_ridge=False, key_limit=None)).absorb(
        2 * torch.eye(R, dtype=torch.float64)[:1].view(1, 1, 1, R), torch.ones(1, 1, 1, P, dtype=torch.float64)
    )
    q = torch.zeros(1, 1, 4, R, dtype=torch.float64)
    q[0, 0, 0, 0], q[0, 0, 1, 1], q[0, 0, 2, :2] = 3, 1, 1
    close(memory.support(q)[0, 0], torch.tensor([4 / (4 + rho), 0, 2 / (4 + rho), 0], dtype=torch.float64))
    assert bool((blank().support(q) < 1e-12).all())


def test_a_kept_key_is_supported_by_its_likeness():
    """exp of a cosine over tau: f(q) and f(k) have the cosine exp((x - 1) / tau), of which the share is the square."""
    memory = blank(m.cosine(temperature=0.5)).absorb(unit(1, 1, 5, R, seed=0), draw(1, 1, 5, P, seed=1))
    q, k = unit(1, 1, 7, R, seed=2), unit(1, 1, 5, R, seed=0)
    close(memory.support(q), ((q @ k.mT).amax(-1) / 0.5 - 2).mul(2).exp(), 1e-6)
    close(memory.support(k), torch.ones(1, 1, 5, dtype=torch.float64), 1e-6)


def test_the_mass_of_a_sum_is_more_than_any_key_gives():
    q, memory = unit(1, 1, 50, R, seed=4), filled(m.squared_affine(), 4)
    kept = filled(m.squared_affine(), 4, kind="keys")
    assert bool((memory.support(q) >= kept.support(q).sqrt() - 1e-12).all())
    close(memory.support(unit(1, 1, 4, R, seed=0)), torch.ones(1, 1, 4, dtype=torch.float64))


NO_EVIDENCE = {"sko", "sko-fractional", "sko-reproducing", "sko-chunk", "sko-chebyshev", "retention"}
NO_EVIDENCE |= {"local_global", "local_global-hedgehog", "local_global-learned", "local_global-first"}


@pytest.mark.parametrize("name", NAMES)
def test_every_memory_gives_verdicts_or_says_why_not(name):
    memory = span(padded=True).into(empty(operator(name)))
    if name in NO_EVIDENCE:
        with pytest.raises(ArgumentError, match="has no evidence for a verdict"):
            memory.read(queries(), report=True)
        return
    reading = memory.read(queries(), report=True)
    assert isinstance(reading, Reading)
    assert torch.equal(reading.values, memory.read(queries()))
    assert reading.verdict.shape == reading.support.shape == (BATCH, KV * GROUPS, 3)
    assert reading.verdict.dtype == torch.int8
    assert bool(((reading.support >= 0) & (reading.support <= 1)).all())
    assert reading.rate is None


def test_gradients_of_support_are_exact_and_finite_where_a_query_is_zero():
    memory = filled()
    assert torch.autograd.gradcheck(memory.support, (draw(1, 1, 3, R, seed=5).requires_grad_(),))
    q = torch.zeros(1, 1, 2, R, dtype=torch.float64, requires_grad=True)
    assert bool(torch.isfinite(torch.autograd.grad(memory.support(q).sum(), q)[0]).all())


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ridge", "ska", "squared_affine", "cosine", "yat"])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_what_has_support_keeps_it_while_tokens_come(name, threshold):
    q = torch.cat([unit(1, 1, 20, R, seed=3), unit(1, 1, 40, R, seed=6)], 2)
    history = list(stages(blank(getattr(m, name)()), 20))
    oset = accepting(q, threshold)
    assert oset.withdrawn(history) is None
    assert int(oset.at(history[0]).sum()) == 0 < int(oset.at(history[-1]).sum())


def test_merging_is_evidence_too():
    q, parts = unit(1, 1, 50, R, seed=9), [filled(seed=seed, tokens=4) for seed in range(3)]
    assert (
        accepting(q, 0.4).withdrawn([parts[0], parts[0].merge(parts[1]), parts[0].merge(parts[1]).merge(parts[2])])
        is None
    )


def large(memory):
    return memory.absorb(100 * unit(1, 1, 1, R, seed=7), draw(1, 1, 1, P, seed=8))


def later(memory):
    return memory.absorb(unit(1, 1, 40, R, seed=7), draw(1, 1, 40, P, seed=8))


@pytest.mark.parametrize(
    ("op", "then"),
    [
        pytest.param(lambda: m.ska(running_max=True, key_limit=None), large, id="a ridge that follows the largest key"),
        pytest.param(lambda: m.ridge(relative=0.5, key_limit=None), large, id="a ridge that follows the mean key"),
        pytest.param(
            lambda: m.ska(fading=True),
            lambda a: a.absorb(
                torch.zeros(1, 1, 40, R).double(),
                torch.zeros(1, 1, 40, P).double(),
                log_decay=torch.full((1, 1, 40), -0.3).double(),
            ),
            id="fading",
        ),
        pytest.param(lambda: m.cosine().replace(prior=(zonal.prior.Window(4, 0),)), later, id="a window"),
    ],
)
def test_where_support_has_to_be_withdrawn(op, then):
    """The answer itself shrinks or is gone there, so that to go on accepting would be wrong."""
    memory = filled(op(), 4)
    q = unit(1, 1, 4, R, seed=0)
    history = [memory, then(memory)]
    found = accepting(q, 0.6).withdrawn(history)
    assert found is not None
    assert found.place == 1
    before, after = (history[i].read(q).norm(dim=-1) for i in (0, 1))
    assert bool(
        ((after < 0.8 * before) | ((history[0].read(q) - history[1].read(q)).norm(dim=-1) > 0.2 * before))[
            found.records
        ].all()
    )


def test_to_forget_is_no_continuation():
    q = unit(1, 1, 4, R, seed=0)
    memory = (
        blank()
        .absorb(q, draw(1, 1, 4, P, seed=1), span="a")
        .absorb(unit(1, 1, 3, R, seed=2), draw(1, 1, 3, P, seed=3), span="b")
    )
    assert accepting(q, 0.8).withdrawn([memory, memory.forget("b")]) is None
    assert accepting(q, 0.8).withdrawn([memory, memory.forget("a")]) is not None


def test_a_label_changes_only_when_evidence_about_its_key_does_and_never_to_undecided():
    k, v = unit(1, 1, 4, R, seed=0), draw(1, 1, 4, P, seed=1)
    memory = blank().absorb(k, v, span="first")
    orthogonal = torch.linalg.svd(k[0, 0]).Vh[4:6].view(1, 1, 2, R)  # to all four keys
    elsewhere = memory.absorb(orthogonal, draw(1, 1, 2, P, seed=2), span="elsewhere")
    again = elsewhere.absorb(k[:, :, :1], v[:, :, :1], span="again")
    against = again.absorb(k[:, :, :2], -v[:, :, :2], span="against")
    assert [one.read(k, report=True).verdict[0, 0].tolist() for one in (memory, elsewhere, again, against)] == [
        [1] * 4,
        [1] * 4,
        [1] * 4,
        [-1, -1, 1, 1],
    ]
    criterion = Criterion()
    decided = OSet(lambda one: criterion.verdict(Evidence(*one.read(k, report=criterion)[2:4])) != Verdict.UNDECIDED)
    assert decided.withdrawn([memory, elsewhere, again, against]) is None
    assert against.forget("against").read(k, report=True).verdict[0, 0].tolist() == [1] * 4


def test_one_token_moves_an_answer_by_no_more_than_what_is_open():
    """|dy| <= |v - W z| sqrt(q^T P q) / 2, and q^T P q = (1 - support) |q|^2 / rho: reached where z is the query and as
    large as the ridge.
    """
    rho = 0.1
    memory = filled(m.ridge(eps=rho, learn_ridge=False, key_limit=None), 10)
    q, v = draw(1, 1, 30, R, seed=20), draw(1, 1, 1, P, seed=40)
    for z in (
        0.5 * draw(1, 1, 1, R, seed=30),
        unit(1, 1, 1, R, seed=31),
        rho**0.5 * q[:, :, :1] / q[0, 0, 0].norm() / (1 - memory.support(q[:, :, :1])).sqrt(),
    ):
        moved = (memory.absorb(z, v).read(q) - memory.read(q)).norm(dim=-1)
        limit = (v - memory.read(z)).norm() * ((1 - memory.support(q)) / rho).sqrt() * q.norm(dim=-1) / 2
        assert bool((moved <= limit + 1e-12).all())
    close(moved[..., 0], limit[..., 0])


def test_a_decoder_s_steps_leave_the_same_evidence():
    op, q = m.ska(power=1), unit(1, 1, 9, R, seed=3)
    k, v = unit(1, 1, 12, R, seed=4), draw(1, 1, 12, P, seed=5)
    whole, memory = blank(op).absorb(k, v), blank(op)
    with torch.no_grad():
        for t in range(12):
            _, memory = zonal.attention(
                k[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], op, causal=True, memory=memory
            )
            assert float((memory.support(k[:, :, : t + 1])).min()) > 0.8
        close(memory.support(q), whole.support(q), 1e-8)


def test_a_query_of_nothing_is_undecided():
    q = torch.full((1, 1, 1, R), float("nan"), dtype=torch.float64)
    assert filled().read(q, report=True).verdict.tolist() == [[[Verdict.UNDECIDED]]]


# --- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ridge", "squared_affine"])
def test_the_stated_rate_holds_on_other_strangers_and_at_every_earlier_time(name):
    history = list(stages(blank(getattr(m, name)()), R // 2))
    rate, others = 0.05, unit(1, 1, 4000, R, seed=11)
    criterion = history[-1].calibrate(unit(1, 1, 1999, R, seed=10), rate, least=0.0)
    shares = [
        float((one.read(others, report=criterion).verdict != Verdict.UNDECIDED).double().mean()) for one in history
    ]
    assert shares == sorted(shares)
    assert shares[-1] <= rate + 4 * math.sqrt(2 * rate / 2000)
    assert shares[-1] >= rate / 2
    assert (
        float(
            (history[-1].read(unit(1, 1, R // 2, R, seed=3), report=criterion).verdict == Verdict.ACCEPTED)
            .double()
            .mean()
        )
        == 1
    )


def test_the_rate_is_exact_in_counting():
    """Of n strangers and one more, in any order, at most rate (n + 1) are above the threshold that the n set."""
    strangers, memory = unit(1, 1, 99, R, seed=12), filled()
    criterion = memory.calibrate(strangers, 0.1, least=0.0)
    assert isinstance(criterion.support, tuple)
    assert int((memory.support(strangers) > criterion.support[0]).sum()) == 9  # 90 of 99 are not: 1 - 90 / 100 = 0.1


def test_what_is_stated_ends_where_the_memory_is_fuller_than_it_was():
    memory, strangers = filled(), unit(1, 1, 200, R, seed=13)
    criterion = memory.calibrate(strangers, 0.05)
    assert memory.read(strangers, report=criterion).rate == 0.05
    assert later(memory).read(strangers, report=criterion).rate is None
    assert (
        float((later(memory).read(strangers, report=criterion).verdict == Verdict.ACCEPTED).double().mean()) > 0.9
    )  # more keys than directions


def test_thresholds_are_a_head_each():
    memory = Memory.empty(m.ridge(), 2, 2, R, P, torch.float64).absorb(
        unit(2, 2, 6, R, seed=0) * torch.tensor([1.0, 0.1]).view(1, 2, 1, 1), draw(2, 2, 6, P, seed=1)
    )
    criterion = memory.calibrate(unit(2, 4, 100, R, seed=2), 0.1, least=0.0)
    assert isinstance(criterion.support, tuple)
    assert len(criterion.support) == 4
    assert min(criterion.support[:2]) > max(criterion.support[2:])


# --- claims and spans ------------------------------------------------------------------------------------------------


def test_claims_are_accepted_contradicted_or_not_known():
    k, v = unit(1, 1, R // 2, R, seed=0), draw(1, 1, R // 2, P, seed=1)
    memory = blank().absorb(k, v)
    strangers = unit(1, 1, 300, R, seed=14)
    criterion = memory.calibrate(strangers, 0.01, stored=(k, v), miss=0.2)
    right = memory.read(k, report=criterion, claim=v)
    assert (
        torch.equal(right.verdict, torch.full((1, 1, R // 2), int(Verdict.ACCEPTED), dtype=torch.int8))
        or int((right.verdict == Verdict.CONTRADICTED).sum()) <= 1
    )
    assert bool((memory.read(k, report=criterion, claim=v.roll(1, 2)).verdict == Verdict.CONTRADICTED).all())
    unknown = memory.read(strangers, report=criterion, claim=draw(1, 1, 300, P, seed=15))
    assert float((unknown.verdict == Verdict.UNDECIDED).double().mean()) > 0.95


@pytest.mark.parametrize("kind", [None, "keys"])
def test_a_claim_is_judged_before_the_gain(kind):
    """SKA's layers double and triple what they read; a value is what was stored."""
    k, v = unit(1, 1, 4, R, seed=0), draw(1, 1, 4, P, seed=1)
    memory = blank(m.ska(power=0), kind=kind).absorb(k, v)
    assert memory.read(k, report=True, claim=v).verdict.tolist() == [[[1, 1, 1, 1]]]


def test_what_a_full_memory_mixes_up_its_spans_give_away():
    """Twice as many pairs as directions: the answer is a mixture, and the span that holds the pair says otherwise."""
    memory = blank()
    for i in range(8):
        memory = memory.absorb(unit(1, 1, 4, R, seed=2 * i), draw(1, 1, 4, P, seed=2 * i + 1), span=f"s{i}")
    reading = memory.read(unit(1, 1, 4, R, seed=0), report=True)
    assert float(reading.support.min()) > 0.9
    assert reading.residual is not None
    assert bool((reading.verdict == Verdict.CONTRADICTED).all())
    assert memory.unnamed().read(unit(1, 1, 4, R, seed=0), report=True).residual is None


def test_a_cache_holds_every_value_against_its_answer():
    k, v = unit(1, 1, 6, R, seed=0), draw(1, 1, 6, P, seed=1)
    memory = blank(m.cosine(temperature=0.02)).absorb(k, v).absorb(k[:, :, :1], -v[:, :, :1])
    assert memory.read(k, report=True).verdict.tolist() == [[[-1, 1, 1, 1, 1, 1]]]
    assert memory.read(unit(1, 1, 3, R, seed=5), report=True).verdict.tolist() == [[[0, 0, 0]]]


# --- values, files, errors -------------------------------------------------------------------------------------------


def test_a_criterion_is_saved_whole(tmp_path):
    criterion = filled(heads=2, batch=1).calibrate(unit(1, 2, 200, R, seed=16), 0.02)
    criterion.save(tmp_path / "criterion.json")
    assert Criterion.load(tmp_path / "criterion.json") == criterion
    (tmp_path / "other.json").write_text('{"kind": "model"}')
    (tmp_path / "damaged.json").write_text('{"kind": "criterion", "support": 7}')
    (tmp_path / "newer.json").write_text('{"kind": "criterion", "colour": 7}')
    for name, words in (
        ("other", "holds something else"),
        ("damaged", r"does not fit.*\[0, 1\]"),
        ("newer", "does not fit.*colour"),
        ("none", "does not exist"),
    ):
        with pytest.raises(FileFormatError, match=words):
            Criterion.load(tmp_path / f"{name}.json")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        pytest.param(
            lambda a, q: Criterion(support=1.5),
            r"support must lie in \[0, 1\], received 1.5. Let Memory.calibrate",
            id="support",
        ),
        pytest.param(lambda a, q: Criterion(residual=(0.1, -1.0)), r"residual must lie in \[0, 1\]", id="residual"),
        pytest.param(lambda a, q: Criterion(support=float("nan")), r"support must lie in \[0, 1\]", id="nan"),
        pytest.param(lambda a, q: Criterion(support=()), r"support must lie in \[0, 1\]", id="none"),
        pytest.param(lambda a, q: Criterion(rate=2.0), r"rate must lie in \[0, 1\]", id="rate"),
        pytest.param(lambda a, q: Criterion(rate=(0.1, 0.2)), r"rate must lie in \[0, 1\]", id="rates"),
        pytest.param(lambda a, q: Criterion(miss=(0.1,)), r"miss must lie in \[0, 1\]", id="misses"),
        pytest.param(lambda a, q: Criterion(tokens=-1), "tokens must be a whole number", id="tokens"),
        pytest.param(lambda a, q: Criterion(tokens=True), "tokens must be a whole number", id="tokens of truth"),
        pytest.param(
            lambda a, q: a.calibrate(q, 1.2), r"rate must lie in \[0, 1\], received 1.2", id="calibrated rate"
        ),
        pytest.param(
            lambda a, q: a.calibrate(q, 0.01),
            r"50 queries cannot show rate 0.01: at least 99 of each head. Give more",
            id="too few",
        ),
        pytest.param(lambda a, q: a.calibrate(q, 0.0), "only a rate above 0", id="never"),
        pytest.param(lambda a, q: a.calibrate(q, 0.1, least=-0.1), r"least must lie in \[0, 1\]", id="least"),
        pytest.param(
            lambda a, q: a.calibrate(q, 0.1, stored=(q, torch.zeros(1, 1, 50, P).double()), miss=3.0),
            r"miss must lie in \[0, 1\]",
            id="miss",
        ),
        pytest.param(
            lambda a, q: a.read(q, report=0.9), "report must be True, False or a Criterion, received 0.9", id="report"
        ),
        pytest.param(
            lambda a, q: a.read(q, report=Criterion(support=(0.5, 0.5))),
            "a support for 2 heads and the queries have 1",
            id="heads",
        ),
        pytest.param(lambda a, q: a.read(q, claim=q), r"Ask for the verdict: read\(q, report=True", id="claim unasked"),
        pytest.param(
            lambda a, q: a.read(q, report=True, claim=q),
            r"claim must have the shape of what is read, \(1, 1, 50, 8\)",
            id="claim shape",
        ),
        pytest.param(
            lambda a, q: a.read(q, report=True, claim=torch.full((1, 1, 50, P), float("nan")).double()),
            "claim must be finite",
            id="claim of nothing",
        ),
        pytest.param(
            lambda a, q: a.read(q, report=True, claim=[1]), "claim must be a torch.Tensor, received list", id="claims"
        ),
        pytest.param(
            lambda a, q: a.calibrate(q.numpy(), 0.1), "calibrate: strangers must be a torch.Tensor", id="arrays"
        ),
        pytest.param(
            lambda a, q: a.calibrate(q, 0.1, stored=q), r"a pair \(q, v\).*received Tensor", id="stored queries"
        ),
        pytest.param(lambda a, q: a.calibrate(q, 0.1, stored=(q,)), r"a pair \(q, v\)", id="stored without values"),
        pytest.param(lambda a, q: a.calibrate(q, 0.1, stored=(q, [1])), "stored v must be a torch.Tensor", id="list"),
        pytest.param(lambda a, q: a.calibrate(q * float("nan"), 0.1), "finite queries", id="strangers of nothing"),
        pytest.param(
            lambda a, q: a.support(q[..., 1:]), r"Memory.support: q must be .*received \(1, 1, 50, 15\)", id="query"
        ),
        pytest.param(lambda a, q: filled(m.retention()).support(q), "Memory.support: .* has no evidence", id="fades"),
        pytest.param(
            lambda a, q: filled(m.retention()).read(q, report=True),
            "Memory.read: .*'decayed' of operator 'retention' has no evidence.*use an operator that solves",
            id="decayed",
        ),
        pytest.param(
            lambda a, q: filled(m.sko(), kind="keys").support(q), "K may be negative.*positive kernel", id="signed"
        ),
        pytest.param(
            lambda a, q: filled(m.ska(fading=True), kind="keys").support(q), r"kind='fading'", id="faded keys"
        ),
    ],
)
def test_bad_input(act, words):
    memory, q = filled(), unit(1, 1, 50, R, seed=17)
    before = memory.read(q)
    with pytest.raises(ArgumentError, match=words):
        act(memory, q)
    assert torch.equal(memory.read(q), before)


def test_a_criterion_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Criterion().support = 0.1  # type: ignore[misc]

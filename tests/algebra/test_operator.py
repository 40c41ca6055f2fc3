"""Operators as values: configuration, replacement, heads, refusals, the ledger."""

import copy
import io
import json
from collections.abc import Callable

import pytest
import torch
from matrix import DECLARED, OPERATORS

import zonal
from zonal import Operator, anchor, ledger, link, prior, score
from zonal import mechanisms as m
from zonal.algebra.prior import visibility
from zonal.errors import ArgumentError
from zonal.features import Features, TensorSketch


def test_configuration_round_trip() -> None:
    for name, make in OPERATORS.items():
        operator = make()
        again = Operator.from_config(json.loads(json.dumps(operator.config())))
        assert again.config() == operator.config(), name
        for slot in SLOTS:
            assert getattr(again, slot) == getattr(operator, slot), name
        assert hash(again.link) == hash(operator.link), name


def test_declarations_are_frozen() -> None:
    for name, kind in DECLARED.items():
        assert kind.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
        assert "__dataclass_params__" in vars(kind), name


SLOTS = {"score": score.Cosine(), "link": link.Yat(), "anchor": anchor.Ridge(eps=10.0), "prior": (prior.Causal(),)}


@pytest.mark.parametrize("slot", SLOTS)
def test_slots_are_frozen(slot: str) -> None:
    operator = m.ridge()
    with pytest.raises(ArgumentError, match=rf"slot '{slot}' cannot be assigned.*operator\.replace\({slot}="):
        setattr(operator, slot, SLOTS[slot])
    with pytest.raises(ArgumentError, match=rf"slot '{slot}' cannot be deleted"):
        delattr(operator, slot)
    assert getattr(operator, slot) == getattr(m.ridge(), slot)


@torch.no_grad()
@pytest.mark.parametrize("path", ["auto", "chunked", "streaming"])
def test_a_replaced_anchor_is_seen_on_paths_that_repeat_calls(path: str) -> None:
    operator = m.ridge()
    q, k, v = (torch.randn(1, 2, 100, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    before = [zonal.attention(q, k, v, operator, causal=True, path=path) for _ in range(2)][1]
    new = operator.replace(anchor=anchor.Ridge(eps=10.0))
    for _ in range(2):
        got, expected = (zonal.attention(q, k, v, new, causal=True, path=way) for way in (path, "dense"))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert (got - before).abs().max() > 1e-2


def test_frozen_slots_copy_save_and_move() -> None:
    operator = m.ska(power=1).for_heads(2)
    with torch.no_grad():
        operator.learned_parts["anchor_eta"].fill_(7.0)
    file = io.BytesIO()
    torch.save(operator, file)
    file.seek(0)
    fresh = m.ska(power=1).for_heads(2)
    fresh.load_state_dict(operator.state_dict())
    for other in (
        copy.deepcopy(operator),
        copy.copy(operator),
        torch.load(file, weights_only=False),
        operator.replace(),
        fresh,
        copy.deepcopy(operator).double(),
    ):
        assert (other.score, other.link, other.anchor, other.prior) == (
            operator.score,
            operator.link,
            operator.anchor,
            operator.prior,
        )
        assert other.learned_parts["anchor_eta"].tolist() == [7.0, 7.0]
        with pytest.raises(ArgumentError, match="cannot be assigned"):
            other.anchor = anchor.Row()


def test_replace_keeps_what_stays() -> None:
    operator = m.ska(power=1)
    with torch.no_grad():
        operator.learned_parts["anchor_eta"].fill_(7.0)
    same = operator.replace(link=link.Yat(), score=score.Cosine())
    assert same.learned_parts["anchor_eta"].item() == 7.0
    other = operator.replace(anchor=anchor.Koopman(power=2))
    assert other.learned_parts["anchor_eta"].item() == 1.5
    assert operator.learned_parts["anchor_eta"].item() == 7.0


@pytest.mark.parametrize("priors", [(prior.Causal(), prior.Decay()), (prior.Decay(), prior.Causal())])
def test_a_prior_that_moves_keeps_what_it_learned(priors: tuple[prior.Prior, ...]) -> None:
    operator = m.retention()
    with torch.no_grad():
        operator.learned_parts["prior0_log_rate"].fill_(-1.0)
    moved = operator.replace(prior=priors).replace(prior=priors[::-1])
    assert moved.learned()["rates"] == operator.learned()["rates"]
    other = operator.replace(prior=prior.Decay((0.5,)))
    assert other.learned()["rates"] == pytest.approx([0.5])


def test_for_heads_makes_rows_independent() -> None:
    operator = m.sko(degrees=(2.0, 3.0)).for_heads(8)
    assert operator.learned_parts["link_weight"].shape == (8, 4)
    assert m.ska(power=1).for_heads(8, 2).learned_parts["anchor_raw_ridge"].shape == (2,)
    q, k, v = (torch.randn(1, 8, 5, 4) for _ in range(3))
    assert torch.equal(
        zonal.attention(q, k, v, operator, causal=True, path="dense"),
        zonal.attention(q, k, v, m.sko(degrees=(2.0, 3.0)), causal=True, path="dense"),
    )


def test_fewer_heads_than_rows_takes_them_evenly() -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).view(1, 1, 1, -1)
    two = m.sko(degrees=(2.0, 3.0, 4.0, 5.0)).bind(2, 2)
    expected = m.sko(degrees=(3.0, 5.0)).bind(2, 2)
    assert torch.allclose(two.link.value(x, two.coefficients), expected.link.value(x, expected.coefficients))
    with pytest.raises(ArgumentError, match="one number must divide the other"):
        m.retention().bind(3, 3)


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (lambda: Operator(score.Dot(), link.Yat(), anchor.Row()), "defined on"),
        (lambda: m.sko().replace(anchor=anchor.Row()), "may be negative and cancel"),
        (lambda: m.ridge().replace(prior=prior.ALiBi()), "drop the prior"),
        (lambda: Operator(score.NegativeDistance(), link.Identity(), anchor.Ridge()), "positive definite"),
        (lambda: Operator(score.Cosine(temperature=0.5), link.Yat(), anchor.Row()), "temperature >= 1"),
        (lambda: m.softmax(prior=(prior.Window(8), prior.Window(3))), "prior Window is declared twice; declare one"),
        (lambda: m.retention().replace(prior=(prior.Decay(), prior.Causal(), prior.Decay((0.5,)))), "prior Decay is"),
    ],
)
def test_meaningless_combinations_say_why_when_run(operator: object, words: str) -> None:
    q, k, v = (torch.randn(1, 4, 5, 4) for _ in range(3))
    with pytest.raises(ArgumentError, match=words):
        zonal.attention(q, k, v, operator(), causal=True)  # type: ignore[operator]


def test_signed_row_can_be_asked_for() -> None:
    """Its rows are divided by sums of weights that are negative, too."""
    counted = m.sko(degrees=(3.0,), manifold_dim=1).double()
    q, k, v = (torch.randn(1, 4, 5, size, dtype=torch.float64) for size in (4, 4, 3))
    weights = zonal.attention(q, k, torch.eye(5, dtype=torch.float64).expand(1, 4, 5, 5), counted, causal=True)
    assert (weights < 0).any()
    y = zonal.attention(q, k, v, counted.replace(anchor=anchor.Row(allow_signed=True)), causal=True)
    torch.testing.assert_close(y, weights / weights.sum(-1, keepdim=True) @ v)


def test_a_signed_map_is_refused_by_name_and_allowed_with_a_warning_in_the_ledger() -> None:
    """What may happen is what the ledger and explain say: near a sum of zero the output grows, and at zero it is 0."""
    signed = Operator(Features(TensorSketch(8), dim=2), link.Identity(), anchor.Row())
    q = torch.tensor([[1.0, 1e-4], [1.0, 0.0], [1.0, -1.0]]).view(1, 1, 3, 2)
    k, v = torch.tensor([[1.0, 0.0], [-1.0, 1.0]]).view(1, 1, 2, 2), torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    with pytest.raises(
        ArgumentError, match=r"a sum of Features scores, which may be negative and cancel.*allow_signed=True"
    ):
        zonal.attention(q, k, v, signed)
    dot = Operator(score.Dot(scale=1.0), link.Identity(), anchor.Row())
    with pytest.raises(ArgumentError, match="a sum of Dot scores"):
        zonal.attention(q, k, v, dot)
    allowed = dot.replace(anchor=anchor.Row(allow_signed=True))
    y = zonal.attention(q, k, v, allowed, path="dense").flatten()
    # weights 1 and -1 + 1e-4, which leave 1e-4; 1 and -1, which leave nothing; 1 and -2, which leave -1
    assert y[0] == pytest.approx((1 + 2 * (-1 + 1e-4)) / 1e-4, rel=1e-2)
    assert y[1] == 0
    assert y[2] == pytest.approx(3.0)
    page = str(zonal.explain(allowed, (1, 1, 3, 2)))
    assert "a row's sum may come near zero, and its output grow without bound" in page
    assert "grow without bound" not in str(zonal.explain(m.squared_affine(), (1, 1, 3, 2)))


def test_parts_must_be_parts() -> None:
    with pytest.raises(ArgumentError, match="link must be one of the library's or your own"):
        Operator(link=score.Dot())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: prior.Window(2.5), "Window: left must be a whole number >= 0, received 2.5"),
        (lambda: prior.Window(2, True), "Window: right must be a whole number"),
        (lambda: prior.Window(-1), "Window: left must be a whole number >= 0"),
        (lambda: prior.Window("a"), "Window: left must be a whole number"),
        (lambda: prior.ChunkCausal(2.5), "ChunkCausal: size must be a whole number >= 1"),
        (lambda: prior.ChunkCausal(True), "ChunkCausal: size must be a whole number"),
        (lambda: prior.ALiBi(()), "at least one slope is required"),
        (lambda: Operator(readout="x"), "Operator: readout must be None, 'head' or 'concat', received 'x'"),
        (lambda: Operator(layer_init="x"), "Operator: layer_init must be 'default'.*received 'x'"),
        (lambda: m.softmax(scale=float("nan")), "Dot: scale must be finite, received nan"),
        (lambda: m.softmax(prior=prior.ALiBi((1.0, float("inf")))), "ALiBi: slopes must be finite"),
        (lambda: m.rewa(weights=(float("inf"), 1.0, 1.0)), "Product: weights must be finite"),
        (lambda: m.rewa_oscillatory(frequencies=(float("nan"),)), "Oscillatory: frequencies must be finite"),
        (lambda: m.polynomial_square((1.0, float("nan"))), "PolynomialSquare: polynomial must be finite"),
        (lambda: m.polynomial_square(eps=0.5), "polynomial_square: eps is of the Yat.*received eps=0.5 without one"),
        (lambda: m.polynomial_square(degree=2, floor=0.1), "polynomial_square: a fit finds its own floor"),
        (lambda: m.softmax(prior=prior.ALiBi), "one of the library's or your own, received <class"),  # type: ignore[arg-type]
        (lambda: m.softmax(prior="alibi"), "prior must be one of the library's or your own, received 'alibi'"),  # type: ignore[arg-type]
        (lambda: m.ska(eta=float("nan")), "Koopman: eta must be finite"),
        (lambda: m.sinkhorn(rho=(None, float("inf"))), "UnbalancedPlan: rho must be finite"),
        (lambda: m.local_global(weight=float("inf")), "LocalGlobal: weight must be finite"),
        (lambda: m.hedgehog(init_scale=float("inf")), "LearnedExp: init_scale must be finite"),
    ],
)
def test_settings_out_of_range_are_refused_when_they_are_declared(made: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        made()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sofmax", "Did you mean 'softmax'"),
        ("ska(pwer=1)", "Did you mean 'power'"),
        ("ska(1)", "keyword arguments only"),
        ("ska(power=", "cannot be read"),
        ("ska(power=1+)", "cannot be read"),
        ("ska(power=open('x'))", "must be a literal"),
        ("__import__('os')", "keyword arguments only"),
        ("yat(eps='a')", "must be a finite number"),
        ("yat(eps=-1)", "eps must be > 0"),
        ("ska(power=0.5)", "whole number"),
    ],
)
def test_bad_specs(spec: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        m.resolve(spec)


def test_specs() -> None:
    assert m.resolve("sq").config()["link"] == m.squared_affine().config()["link"]
    assert m.resolve("sko(degrees=(2, 3))").link == m.sko(degrees=(2.0, 3.0)).link
    assert m.resolve("ska( power = 1 )").anchor == anchor.Koopman(power=1)


def test_ledger_names_the_row_gauge_for_softmax() -> None:
    text = ledger.text(m.softmax().moves())
    assert "row gauge" in text
    assert "hence the link is exp(a x)" in text


@pytest.mark.parametrize("name", m.names())
def test_learned_is_plain_json(name: str) -> None:
    learned = m.resolve(name).learned()
    assert json.loads(json.dumps(learned)) == learned
    assert len(learned["kernel_curve"]["x"]) == len(learned["kernel_curve"]["heads"][0])


def test_parts_of_unlike_numbers_of_heads_are_read_together() -> None:
    learned = m.sko(degrees=(2.0, 3.0, 4.0, 5.0, 2.0, 3.0)).replace(prior=prior.Decay()).learned()
    assert len(learned["rates"]) == len(learned["kernel_curve"]["heads"]) == 12


def test_positions_of_masks() -> None:
    """Intervals against a mask written out in full."""
    cu = torch.tensor([0, 3, 10])
    t = torch.arange(10)
    document = (t >= 3).long()
    start = torch.where(document == 0, 0, 3)
    same = document[:, None] == document[None, :]
    cases = {
        "causal": ((), dict(causal=True, include_self=True), (t[None] <= t[:, None]) & same),
        "strict": ((), dict(causal=True, include_self=False), (t[None] < t[:, None]) & same),
        "chunk": (
            (prior.ChunkCausal(2),),
            dict(causal=False, include_self=True),
            (t[None] < (start + (t - start) // 2 * 2)[:, None]) & same,
        ),
        "window": (
            (prior.Window(2, 1),),
            dict(causal=False, include_self=True),
            ((t[:, None] - t[None]) <= 2) & ((t[None] - t[:, None]) <= 1) & same,
        ),
    }
    for name, (priors, arguments, expected) in cases.items():
        seen = visibility(10, 10, priors, cu_seqlens=cu, **arguments)
        mask = seen.tile(0, 10, 0, 10, torch.device("cpu"))
        assert mask is not None
        assert torch.equal(mask[0, 0], expected), name
        assert torch.equal(seen.count(torch.device("cpu"))[0, 0], expected.sum(-1)), name


def test_a_frozen_operator_stays_frozen_in_copies() -> None:
    frozen, free = m.sko().requires_grad_(False), m.sko()
    with torch.no_grad():
        for operator, trained in ((frozen, False), (free, True)):
            for copied in (operator.for_heads(4), operator.replace(prior=prior.Causal()), operator.for_dim(8)):
                flags = {value.requires_grad for value in copied.learned_parts.values()}
                assert flags == {trained}

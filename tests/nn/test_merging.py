"""Merging of tokens: what is exact (equal tokens, padding, un-merging), what a schedule does, and what is refused."""

import pytest
import torch
from nn.layers import tokens

from zonal import anchor, prior
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.nn import Attention, Block, Draws, Mamba2, Merged, MergeSchedule, SwiGLU
from zonal.nn.merging import matched

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
SPECS = ("softmax", "cosine", "yat", "sko", "linear", "squared_affine", "rewa", "rewa_operator")


def layer(spec="softmax", **options):
    torch.manual_seed(0)
    made = Attention(12, 2, spec, head_dim=16 if spec == "rewa_operator" else 6, causal=False, **options).double()
    for linear in (made.query, made.key, made.value, made.output):
        torch.nn.init.normal_(linear.weight, 0.0, 0.5)
    return made


def plans():
    """Each kind of plan, iterated until nothing moves; one learns the masses of its tokens."""
    exact = {"tolerance": 1e-13, "limit": 20_000}
    return {
        "balanced": anchor.Plan(**exact),
        "learned": anchor.Plan(learn=True, **exact),
        "rows exact": anchor.UnbalancedPlan(rho=(None, 0.7), **exact),
        "both wished": anchor.UnbalancedPlan(rho=(1.5, 0.7), **exact),
        "in a range": anchor.BoundedPlan(low=0.5, high=1.5, **exact),
    }


@pytest.mark.parametrize("path", ["dense", "tiled"])
@pytest.mark.parametrize("name", plans())
def test_the_mass_of_a_bucket_is_its_part_of_a_plan(name, path):
    """The plan is unique, so that equal tokens have equal parts of it, and their bucket the sum: to 1e-9, gradients
    too; without masses it is another plan.
    """
    made, x, counts = (
        layer(m.softmax().replace(anchor=plans()[name])),
        (tokens(1, 5) / 2).requires_grad_(),
        torch.tensor([1, 3, 1, 2, 4]),
    )
    if made.query_mass is not None:
        for gate in (made.query_mass, made.key_mass):
            torch.nn.init.normal_(gate.projection.weight, 0.0, 0.3, generator=torch.Generator().manual_seed(5))
    whole, bucketed = made(x.repeat_interleave(counts, 1), path=path), made(x, mass=counts[None].double(), path=path)
    torch.testing.assert_close(bucketed.repeat_interleave(counts, 1), whole, rtol=1e-9, atol=1e-9)
    weight = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad((whole * weight).sum(), (x, *made.parameters()))
    found = torch.autograd.grad((bucketed.repeat_interleave(counts, 1) * weight).sum(), (x, *made.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert (made(x, path=path).repeat_interleave(counts, 1) - whole).abs().max() > 1e-3


@pytest.mark.parametrize("spec", SPECS)
def test_a_mass_is_that_many_equal_tokens(spec):
    """A layer on buckets with masses gives each of equal tokens what it gets among its copies; gradients too.

    Without masses it does not.
    """
    made, x, counts = layer(spec), tokens(1, 5).requires_grad_(), torch.tensor([1, 3, 1, 2, 4])
    copies = x.repeat_interleave(counts, 1)
    whole = made(copies)
    bucketed = made(x, mass=counts[None].double())
    torch.testing.assert_close(bucketed.repeat_interleave(counts, 1), whole, **TOLERANCE)
    weight = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad((whole * weight).sum(), (x, *made.parameters()))
    found = torch.autograd.grad((bucketed.repeat_interleave(counts, 1) * weight).sum(), (x, *made.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert (made(x).repeat_interleave(counts, 1) - whole).abs().max() > 1e-3


def test_a_mass_of_zero_is_padding():
    made, x = layer(), tokens()
    mask = torch.arange(13)[None] < torch.tensor([[13], [9]])
    torch.testing.assert_close(made(x, mass=mask.double()), made(x, key_padding_mask=mask), **TOLERANCE)
    count, none = layer("sko"), torch.zeros(2, 13, dtype=torch.float64)
    torch.testing.assert_close(count(x, mass=mask.double()), count(x, key_padding_mask=mask), **TOLERANCE)
    torch.testing.assert_close(count(x, mass=mask * 0.01), count(x, key_padding_mask=mask), **TOLERANCE)
    assert count(x, mass=none).isfinite().all()
    plan = layer("sinkhorn")
    torch.testing.assert_close(plan(x, mass=mask.double()), plan(x, key_padding_mask=mask), **TOLERANCE)
    assert plan(x, mass=none).isfinite().all()


def test_equal_tokens_merge_first_and_nothing_is_lost():
    """Six pairs of equal tokens, one of each at an even place and one at an odd, become six buckets, and come back as
    they were.
    """
    x = tokens(1, 6)[0]
    doubled = torch.stack([x[[3, 0, 5, 1, 2, 4]], x[[2, 5, 0, 4, 3, 1]]], 1).flatten(0, 1)[None]
    state = Merged.of(doubled).without(6)
    assert torch.equal(state.mass, torch.full((1, 6), 2.0, dtype=torch.float64))
    torch.testing.assert_close(state.unmerged(), doubled, **TOLERANCE)
    assert torch.equal(
        Merged.of(doubled).without(3).mass.sort().values, torch.tensor([[1.0] * 6 + [2.0] * 3], dtype=torch.float64)
    )


def test_un_merging_and_pooling():
    x = tokens(2, 9).requires_grad_()
    state = Merged.of(x).without(4).without(2)
    assert (state.x.shape, state.carrier.size) == ((2, 3, 12), 3)
    assert torch.equal(state.mass.sum(1), torch.full((2,), 9.0, dtype=torch.float64))
    back = state.unmerged()
    for row in range(2):
        for bucket in range(3):
            inside = state.carrier.labels[row] == bucket
            assert inside.sum() == state.mass[row, bucket]
            torch.testing.assert_close(
                back[row, inside], x[row, inside].mean(0).expand(int(inside.sum()), -1), **TOLERANCE
            )
    torch.testing.assert_close(state.pooled(), x.mean(1), **TOLERANCE)
    torch.testing.assert_close(back.mean(1), x.mean(1), **TOLERANCE)
    grad = torch.autograd.grad(back.square().sum(), x)[0]
    assert grad.isfinite().all()
    assert (grad != 0).all()


def test_refinement_by_rounds():
    """Each round's carrier refines the next; half of the tokens and more go in several rounds, to a single one."""
    state = Merged.of(tokens(1, 11))
    for count in (2, 3, 5):
        after = state.without(count)
        assert state.carrier.refines(after.carrier)
        assert not after.carrier.refines(state.carrier)
        state = after
    assert state.carrier.size == 1
    torch.testing.assert_close(Merged.of(tokens(1, 11)).without(10).x, tokens(1, 11).mean(1, keepdim=True), **TOLERANCE)


def test_the_most_alike_are_joined():
    """By hand on unit vectors: even places look among odd ones, the best pair goes."""
    angles = torch.tensor([[0.0, 1.0, 2.0, 2.1, 0.4]], dtype=torch.float64)
    x = torch.stack([angles.cos(), angles.sin()], -1)
    one = matched(x, torch.ones(1, 5), 1).to
    assert torch.equal(one, torch.tensor([[0, 1, 2, 2, 3]]))
    two = matched(x, torch.ones(1, 5), 2).to
    assert torch.equal(two, torch.tensor([[0, 1, 2, 2, 1]]))


def test_padding_goes_first_and_changes_no_mean():
    x, mask = tokens(1, 8), torch.tensor([[True, True, False, True, True, True, False, True]])
    state = Merged.of(x, mask).without(2)
    real = Merged.of(x[mask][None])
    assert torch.equal(state.mass, real.mass)
    torch.testing.assert_close(state.x, real.x, **TOLERANCE)
    assert Merged.of(x, torch.zeros(1, 8, dtype=torch.bool)).without(7).x.isfinite().all()


def test_masses_are_counted_in_float32():
    state = Merged.of(torch.ones(1, 601, 4, dtype=torch.bfloat16)).without(600)
    assert state.mass.item() == 601
    assert state.x.dtype == torch.bfloat16


def test_schedules():
    assert MergeSchedule((0.0, 0.5, 0.9)).counts(49) == (49, 25, 3)
    assert MergeSchedule.even(0.6, 4).counts(49) == (49, 37, 28, 21)
    assert MergeSchedule.early(0.6, 4).counts(49) == (49, 20, 20, 20)
    assert MergeSchedule.even(0.0, 3).counts(7) == (7, 7, 7)
    assert MergeSchedule([0.99]).counts(1) == (1,)
    assert MergeSchedule((0, 0.2)) == MergeSchedule((0.0, 0.2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: MergeSchedule((0.0, 1.0)),
            r"1 before layer 1 leaves no token: it is the share of those present that goes. Take a smaller one",
        ),
        (lambda: MergeSchedule((-0.1,)), "received -0.1 before layer 0. 0 merges nothing"),
        (lambda: MergeSchedule((float("nan"),)), "received nan"),
        (lambda: MergeSchedule(()), "one per layer, received"),
        (lambda: MergeSchedule("0.5"), "numbers in .0, 1., one per layer"),
        (lambda: MergeSchedule.even(1.0, 4), "1 leaves no token. Take a smaller one"),
        (lambda: MergeSchedule.early(0.5, 1), "at least 2 layers"),
        (lambda: Merged.of(tokens()).without(13), "of 13 tokens at least one must stay, .* received 13. Merge fewer"),
        (lambda: Attention(12, 2, "softmax").double()(tokens(), mass=torch.ones(2, 13)), "a bucket holds later tokens"),
        (
            lambda: layer(m.softmax(prior=prior.Causal()))(tokens(), mass=torch.ones(2, 13)),
            "tokens of a causal layer cannot be merged",
        ),
        (
            lambda: layer("ridge")(tokens(), mass=torch.ones(2, 13)),
            "operator 'ridge' has Ridge. Use one of those anchors, or do not merge",
        ),
        (lambda: layer(rotary=True)(tokens(), mass=torch.ones(2, 13)), "no single position"),
        (lambda: layer(m.softmax(prior=prior.Window(3)))(tokens(), mass=torch.ones(2, 13)), "no single position"),
        (lambda: layer()(tokens(), mass=torch.ones(2, 12)), r"floating numbers of shape \(2, 13\)"),
        (
            lambda: layer()(tokens(), mass=torch.ones(2, 13), key_padding_mask=torch.ones(2, 13, dtype=torch.bool)),
            "in place of a key_padding_mask",
        ),
        (
            lambda: Block(Mamba2(12, state=8, head_dim=6), SwiGLU(12, 8))(tokens().float(), mass=torch.ones(2, 13)),
            "nn.Mamba2: mass .of merged tokens. is for layers of Attention",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_a_block_hands_masses_on():
    block = Block(layer(), SwiGLU(12, 8)).double()
    block.mlp.reset_parameters(Draws(std=0.3))
    x = tokens(1, 4)
    torch.testing.assert_close(
        block(x, mass=torch.tensor([[2.0, 1.0, 1.0, 1.0]], dtype=torch.float64))[:, [0, 0, 1, 2, 3]],
        block(x[:, [0, 0, 1, 2, 3]]),
        **TOLERANCE,
    )

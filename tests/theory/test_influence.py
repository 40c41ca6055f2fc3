"""Influence sets: (I | R_n) ... (I | R_1) against paths counted by hand, against derivatives, and against the source's
product without I.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zonal
from zonal.algebra.prior import ALiBi, Causal, ChunkCausal, Window
from zonal.errors import ArgumentError
from zonal.theory import influence


def relation(tokens, seed, share=0.25):
    return torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(seed)) < share


def paths(layers):
    """Pairs joined by a path that rests or steps once a layer, found token by token."""
    tokens = layers[0].shape[0]
    found = torch.zeros(tokens, tokens, dtype=torch.bool)
    for target in range(tokens):
        reached = {target}
        for layer in reversed(layers):
            reached |= {s for t in reached for s in range(tokens) if layer[t, s]}
        found[target, sorted(reached)] = True
    return found


def stack(layers, x, seed=3):
    """Attention of four numbers a token under masks of any shape, each layer added to what it read; a row that sees
    nothing adds nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        q, k, v = (x @ torch.randn(x.shape[-1], x.shape[-1], generator=generator, dtype=x.dtype) for _ in range(3))
        scores = (q @ k.T).masked_fill(~layer, float("-inf"))
        x = x + torch.where(layer.any(1, keepdim=True), scores.softmax(-1).nan_to_num(), 0) @ v
    return x


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 10_000))
def test_reach_is_the_paths_through_the_layers(tokens, count, seed):
    layers = [relation(tokens, seed + index) for index in range(count)]
    found = influence.reach(layers)
    assert torch.equal(found, paths(layers))
    depths = influence.depth(layers)
    for index in range(count):
        assert torch.equal((depths >= 0) & (depths <= index + 1), paths(layers[: index + 1]))
    assert torch.equal(depths == influence.NEVER, ~found)
    assert torch.equal(depths == 0, torch.eye(tokens, dtype=torch.bool))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10_000))
def test_depth_of_one_layer_is_the_shortest_path(tokens, seed):
    mask = relation(tokens, seed)
    found = influence.depth(mask)
    for n in range(tokens):
        assert torch.equal((found >= 0) & (found <= n), paths([mask] * n) if n else torch.eye(tokens, dtype=torch.bool))
    assert int(found.max()) < tokens


@pytest.mark.parametrize(("window", "tokens"), [(1, 9), (3, 20), (64, 200), (7, 1)])
def test_a_window_reaches_back_by_its_length_a_layer(window, tokens):
    place = torch.arange(tokens)
    distance = place[:, None] - place
    expected = torch.where(distance >= 0, (distance + window - 1).div(window, rounding_mode="floor"), influence.NEVER)
    assert torch.equal(influence.depth((Causal(), Window(window)), tokens), expected)
    assert torch.equal(
        influence.reach([(Causal(), Window(window)), (Causal(), Window(2 * window))], tokens),
        (distance >= 0) & (distance <= 3 * window),
    )


def test_priors_are_relations_of_their_own():
    assert torch.equal(
        influence.visible(ChunkCausal(2), 5).int(),
        torch.tensor([[0] * 5, [0] * 5, [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1] * 4 + [0]], dtype=torch.int32),
    )
    assert torch.equal(influence.visible((), 4, causal=True, include_self=False), torch.ones(4, 4).tril(-1).bool())
    # a prior that only favours forbids nothing
    assert bool(influence.reach(ALiBi(), 4).all())
    # what a token of an open chunk had, no later token of that chunk ever sees
    assert int(influence.depth(ChunkCausal(3), 6)[1, 0]) == influence.NEVER


def test_leading_axes_are_relations_side_by_side():
    batch = torch.stack([relation(6, seed) for seed in range(4)]).view(2, 2, 6, 6)
    last = relation(6, 9)
    found, depths = influence.reach([batch, last]), influence.depth([batch, last])
    assert found.shape == depths.shape == (2, 2, 6, 6)
    for i in range(2):
        for j in range(2):
            assert torch.equal(found[i, j], paths([batch[i, j], last]))
            assert torch.equal(influence.depth(batch)[i, j], influence.depth(batch[i, j]))
            assert torch.equal(depths[i, j], influence.depth([batch[i, j], last]))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.integers(1, 3), st.integers(0, 10_000))
def test_no_derivative_leaves_the_set(tokens, count, seed):
    layers = [relation(tokens, seed + index, 0.3) for index in range(count)]
    x = torch.randn(tokens, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert not bool((influence.support(lambda x: stack(layers, x), x) & ~influence.reach(layers)).any())


@pytest.mark.parametrize("count", [2, 3])
def test_without_self_loops_the_products_of_the_masks_leave_pairs_out(count):
    """Corollary 5.1 of the source has R^n.

    Where a mask lacks the diagonal a token keeps what it had all the same, so that R^n is no upper set.
    """
    mask = influence.visible(Causal(include_self=False), 6)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = influence.support(lambda x: stack([mask] * count, x), x)
    alone = torch.linalg.matrix_power(mask.double(), count) > 0
    assert int((found & ~alone).sum()) > 6  # not the diagonal only
    assert torch.equal(found, influence.reach([mask] * count))  # whose bound is met here


def test_the_set_is_an_upper_one():
    """What it holds need not matter: two layers that undo each other leave the identity."""
    turn = torch.tensor([[0, 1], [1, 0]], dtype=torch.bool)
    x = torch.randn(2, 3, dtype=torch.float64)
    found = influence.support(lambda x: (x + x.flip(0)) / 2 + (x - x.flip(0)) / 2, x)
    assert torch.equal(found, torch.eye(2, dtype=torch.bool))
    assert bool(influence.reach([turn, turn]).all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_support_needs_no_gradients_from_its_caller(mode):
    with mode():
        found = influence.support(lambda x: x.cumsum(-2), torch.randn(3, 2))
    assert torch.equal(found, torch.ones(3, 3, dtype=torch.bool).tril())


def test_support_is_of_each_row_of_a_batch():
    x = torch.randn(3, 5, 2)
    found = influence.support(lambda x: x.cumsum(1)[:, 1:], x)
    assert torch.equal(found, torch.ones(4, 5, dtype=torch.bool).tril(1).expand(3, 4, 5))
    # a part of the outputs that no input moves has an empty row
    assert not bool(influence.support(lambda x: torch.ones(5, 2), x[0]).any())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: influence.reach(Causal()), "Pass tokens="),
        (lambda: influence.reach([]), "at least one layer"),
        (
            lambda: influence.depth(torch.ones(3, 4, dtype=torch.bool)),
            r"\(\.\.\., tokens, tokens\).*received torch.bool of shape \(3, 4\)",
        ),
        (lambda: influence.reach(torch.ones(3, 3)), "must be bool.*received torch.float32"),
        (
            lambda: influence.reach(torch.ones(3, dtype=torch.bool)),
            r"must be bool.*received torch.bool of shape \(3,\)",
        ),
        (
            lambda: influence.reach([relation(3, 0), relation(4, 0)]),
            r"one number of tokens are required, received \[3, 4\]",
        ),
        (lambda: influence.reach(relation(3, 0), tokens=5), r"received \[3, 5\]"),
        (lambda: influence.reach(["causal"], tokens=3), "a tuple of priors, received 'causal'"),
        (lambda: influence.depth("window", tokens=3), "a tuple of priors, received 'w'"),
        (lambda: influence.visible(Causal(), 0), "tokens must be a whole number >= 1, received 0"),
        (lambda: influence.support(lambda x: x.sum(), torch.randn(3, 2)), r"received \(\)"),
        (lambda: influence.support(lambda x: x, torch.arange(6).view(3, 2)), "floating numbers"),
    ],
)
def test_what_is_no_relation_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_the_public_name():
    assert zonal.influence is influence


def test_outputs_without_rows_have_no_support():
    assert influence.support(lambda x: x, torch.randn(1, 0, 2)).shape == (1, 0, 0)


def test_a_function_may_change_its_input():
    x = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    assert influence.support(lambda x: x.relu_(), x).tolist() == [[True, False], [False, False]]
    assert x[0, 1] == -1

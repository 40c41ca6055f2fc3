"""Scores, links and anchors that a user declares: what may be declared, and that every path computes it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import zonal
from zonal.algebra import anchor, link, prior, score
from zonal.errors import ArgumentError, PathError


@dataclass(frozen=True)
class Quiet(anchor.Anchor):
    """W = K / (1 + sum over visible keys of K)."""

    def weights(self, blocks: anchor.Blocks) -> Tensor:
        kernel = blocks.qk.exp() if blocks.log else blocks.qk
        return kernel / (1 + kernel.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Manhattan(score.Score):
    """Minus the sum of absolute differences."""

    def prepare_query(self, q: Tensor, params: score.Params, scale: float | None) -> Tensor:
        return q

    def prepare_key(self, k: Tensor, params: score.Params) -> Tensor:
        return k

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


@pytest.mark.parametrize("base", [score.Cosine, link.Yat, anchor.Count, anchor.SumAnchor, anchor.PlanAnchor])
def test_what_kernels_know_is_not_subclassed(base: type) -> None:
    root = base.slot.capitalize()
    with pytest.raises(ArgumentError, match=rf"class Mine: {base.__name__} cannot be subclassed.*from {root} instead"):
        type("Mine", (base,), {})


@pytest.mark.parametrize("base", [prior.Prior, prior.Causal])
def test_priors_are_not_added(base: type) -> None:
    with pytest.raises(ArgumentError, match=r"class _Mine: priors cannot be added.*key_padding_mask"):
        type("_Mine", (base,), {})


@pytest.mark.parametrize(
    ("base", "name"), [(link.Link, "log_space"), (anchor.Anchor, "family"), (anchor.Anchor, "top")]
)
def test_what_kernels_read_is_not_declared(base: type, name: str) -> None:
    """A link that said log_space was passed over for exp; such anchors failed inside of the planner and tiles."""
    with pytest.raises(
        ArgumentError, match=rf"class Mine: {name} says which kernels compute the library's {base.slot}s"
    ):
        type("Mine", (base,), {name: True})


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (lambda self, q, k: Manhattan.pair(self, q, k)[:, :1], r"\(1, 1, 9, 9\) of torch\.float32"),
        (lambda self, q, k: -k.abs().sum(-1)[..., None, :], r"\(1, 2, 1, 9\) of torch\.float32"),
        (lambda self, q, k: Manhattan.pair(self, q, k).double(), r"\(1, 2, 9, 9\) of torch\.float64"),
    ],
)
@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_a_score_gives_one_number_a_pair(given: Callable[..., Tensor], shape: str, path: str) -> None:
    """The dense path gave the scores of one head to all, and other paths torch's errors."""
    mine = dataclass(frozen=True)(type("Mine", (Manhattan,), {"pair": given}))
    operator = zonal.Operator(mine(), link.Exp(), anchor.Row())
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    with pytest.raises(
        ArgumentError, match=rf"score Mine: pair of q \(1, 2, 9, 4\).*\(1, 2, 9, 9\) of.*It gave {shape}"
    ):
        zonal.attention(q, k, v, operator, path=path)


def test_scores_that_are_dot_products_have_no_pair_of_their_own() -> None:
    """Sums took the dot product, and tiles the pair."""
    mine = dataclass(frozen=True)(type("Mine", (Manhattan,), {"bilinear": True}))
    with pytest.raises(ArgumentError, match=r"bilinear = True of score Mine says .* and it has a method pair"):
        zonal.Operator(mine(), link.Identity(), anchor.Raw())


@dataclass(frozen=True)
class Homogeneous(score.Score):
    """The dot product of vectors with ones appended."""

    bilinear = True

    def prepare_query(self, q: Tensor, params: score.Params, scale: float | None) -> Tensor:
        return torch.nn.functional.pad(q, (0, 1), value=1.0)

    def prepare_key(self, k: Tensor, params: score.Params) -> Tensor:
        return torch.nn.functional.pad(k, (0, 1), value=1.0)


@dataclass(frozen=True)
class Wide(score.Score):
    """The same, which says how many numbers it makes."""

    bilinear = True
    prepare_query, prepare_key = Homogeneous.prepare_query, Homogeneous.prepare_key

    def width(self, dim: int) -> int:
        return dim + 1


def test_a_score_says_how_many_numbers_it_makes() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    silent, told = (zonal.Operator(one, link.Identity(), anchor.Raw()) for one in (Homogeneous(), Wide()))
    refused = (
        r"score Homogeneous: width\(4\) must say how many.* It says 4, and .* of 5\. Give the class a method width"
    )
    for path in ("auto", "dense", "streaming"):
        with pytest.raises(ArgumentError, match=refused):
            zonal.attention(q, k, v, silent, causal=True, path=path)
    with pytest.raises(ArgumentError, match=refused):
        zonal.Memory.empty(silent, 1, 2, 4, 4).absorb(k, v)
    expected = ((q @ k.mT + 1).tril() @ v)[:, :, -1:]
    torch.testing.assert_close(zonal.attention(q, k, v, told, causal=True)[:, :, -1:], expected)
    torch.testing.assert_close(zonal.Memory.empty(told, 1, 2, 4, 4).absorb(k, v).read(q[:, :, -1:]), expected)


@dataclass(frozen=True)
class Halved(anchor.Anchor):
    """W = K (K_kk + 1)^-1 / 2: a solution of its own."""

    solves = True

    def weights(self, blocks: anchor.Blocks) -> Tensor:
        assert blocks.kk is not None
        return torch.linalg.solve(
            blocks.kk + torch.eye(blocks.kk.shape[-1], dtype=blocks.kk.dtype), blocks.qk / 2, left=False
        )


def test_an_own_anchor_that_solves_keeps_keys() -> None:
    """Its memory was made as ridge statistics, which failed with an AssertionError."""
    operator = zonal.Operator(score.Dot(scale=1.0), link.Identity(), Halved())
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64).unbind(0)
    memory = zonal.Memory.empty(operator, 1, 2, 4, 4, torch.float64)
    assert memory.kind == "keys"
    filled = memory.absorb(k, v)
    expected = q @ torch.linalg.solve(k @ k.mT + torch.eye(9, dtype=k.dtype), k, left=True).mT @ v / 2
    torch.testing.assert_close(filled.read(q), expected)
    torch.testing.assert_close(zonal.attention(q, k, v, operator), expected)
    assert "keys" in str(zonal.explain(operator, q.shape, k.shape, causal=True))
    with pytest.raises(ArgumentError, match=r"has no evidence for a verdict: anchor Halved may solve in any way"):
        filled.read(q, report=True)


@pytest.mark.parametrize("evidence", [link.Exp(), link.SquaredAffine()])
def test_an_own_anchor_weighs_rows_on_every_path_and_in_memories(evidence: link.Link) -> None:
    operator = zonal.Operator(score.Cosine(temperature=1.0), evidence, Quiet())
    q, k, v = torch.randn(3, 1, 2, 1100, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    cosines = torch.nn.functional.normalize(q.double(), dim=-1) @ torch.nn.functional.normalize(k.double(), dim=-1).mT
    kernel = evidence.value(cosines, operator.bind(2, 2).coefficients).tril()
    expected = (kernel / (1 + kernel.sum(-1, keepdim=True))) @ v.double()
    for path in ("auto", "dense", "streaming"):
        found = zonal.attention(q, k, v, operator, causal=True, path=path)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    memory = zonal.Memory.empty(operator, 1, 2, 4, 4).absorb(k, v)
    torch.testing.assert_close(memory.read(q[:, :, -1:]).double(), expected[:, :, -1:], atol=2e-6, rtol=0)
    for path in ("tiled", "chunked"):
        with pytest.raises(PathError, match=r"anchor Quiet may weigh a row in any way"):
            zonal.attention(q, k, v, operator, causal=True, path=path)


@dataclass(frozen=True)
class Columns(anchor.Anchor):
    """Weights that sum to one over the queries of a key."""

    couples = True

    def weights(self, blocks: anchor.Blocks) -> Tensor:
        return blocks.qk.softmax(-2)


def test_an_own_anchor_that_couples_queries_is_not_read_query_by_query() -> None:
    operator = zonal.Operator(anchor=Columns())
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    torch.testing.assert_close(zonal.attention(q, k, v, operator), (q @ k.mT / 2).softmax(-2) @ v)
    with pytest.raises(ArgumentError, match=r"must not be causal.*leaks the future"):
        zonal.attention(q, k, v, operator, causal=True)
    with pytest.raises(ArgumentError, match=r"a memory read query by query would give other answers"):
        zonal.Memory.empty(operator, 1, 2, 4, 4)


@dataclass(frozen=True)
class RowSums(anchor.Anchor):
    """Sums in place of weights, a mistake that broadcasting would hide."""

    def weights(self, blocks: anchor.Blocks) -> Tensor:
        return blocks.qk.sum(-1, keepdim=True)


def test_weights_of_another_shape_are_told() -> None:
    operator = zonal.Operator(score.Cosine(temperature=1.0), link.SquaredAffine(), RowSums())
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    told = r"RowSums\.weights: .*\(1, 2, 5, 5\), were required, received \(1, 2, 5, 1\)"
    for path in ("auto", "dense"):
        with pytest.raises(ArgumentError, match=told):
            zonal.attention(q, k, v, operator, causal=True, path=path)


def test_a_declaration_is_a_dataclass() -> None:
    class Plain(link.Link):
        def value(self, x: Tensor, c: Tensor) -> Tensor:
            return x

    with pytest.raises(ArgumentError, match=r"class Plain must be a frozen dataclass"):
        zonal.Operator(link=Plain())

    @dataclass
    class Melted(link.Link):
        def value(self, x: Tensor, c: Tensor) -> Tensor:
            return x

    with pytest.raises(ArgumentError, match=r"class Melted must be a frozen dataclass"):
        zonal.Operator(link=Melted())


@dataclass(frozen=True)
class Knots(link.Link):
    """l(x) = 1 + x^2, with a field of any kind."""

    positive = True

    at: object = ()

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return 1 + x.square()


@pytest.mark.parametrize("value", [[1.0, 2.0], {"a": 1.0}, torch.ones(2), np.ones(2), np.float32(1), ((1.0, []),)])
def test_fields_are_plain_values(value: object) -> None:
    """Calls failed with "unhashable type", or a memory could not be saved after it was filled."""
    with pytest.raises(ArgumentError, match=r"Knots: at must be a number.* Write a list as a tuple"):
        zonal.Operator(score.Cosine(), Knots(value))


@pytest.mark.parametrize("value", [1, 2.0, "text", None, ((1.0, 2.0), 3), link.Yat(eps=1.0)])
def test_plain_values_are_kept_in_files(value: object, tmp_path: Path) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    memory = zonal.Memory.empty(zonal.Operator(score.Cosine(), Knots(value)), 1, 2, 4, 4).absorb(k, v)
    memory.save(tmp_path / "memory")
    torch.testing.assert_close(zonal.Memory.load(tmp_path / "memory").read(q), memory.read(q))


@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0)])
def test_own_numbers_have_an_axis_of_heads(value: object) -> None:
    """They failed with an AttributeError, or in a layer with an IndexError."""

    @dataclass(frozen=True)
    class Scaled(link.Link):
        def initial(self) -> dict[str, Tensor]:
            return {"by": value}  # type: ignore[dict-item]

    with pytest.raises(ArgumentError, match=r"initial\(\) and fixed\(\) of Scaled must give .* received by="):
        zonal.Operator(score.Cosine(), Scaled(), anchor.Count())


def test_an_own_score_has_its_own_gradients() -> None:
    operator = zonal.Operator(score=Manhattan())
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 40, 3, dtype=torch.float64).unbind(0)]
    q, k, v = leaves
    scores = -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)
    y = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf")).softmax(-1) @ v
    expected = torch.autograd.grad(y.square().sum(), leaves)
    for path in ("auto", "tiled", "dense"):
        found = torch.autograd.grad(zonal.attention(q, k, v, operator, causal=True, path=path).square().sum(), leaves)
        for each, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(each, exact, atol=1e-10, rtol=1e-8)


def test_a_score_may_leave_queries_as_they_are() -> None:
    """Where all heads share one, sums took the keys of such a score unprepared."""

    @dataclass(frozen=True)
    class Tripled(score.Score):
        bilinear = True

        def prepare_query(self, q: Tensor, params: score.Params, scale: float | None) -> Tensor:
            return q

        def prepare_key(self, k: Tensor, params: score.Params) -> Tensor:
            return 3 * k

    (q, k), v = torch.randn(2, 1, 1, 40, 4).unbind(0), torch.randn(1, 2, 40, 4)
    operator = zonal.Operator(Tripled(), link.Identity(), anchor.Raw())
    found = zonal.attention(q, k, v, operator, causal=True, path="chunked")
    torch.testing.assert_close(found, (3 * q @ k.mT).tril() @ v)

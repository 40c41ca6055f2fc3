"""The kernels for sums over features, C++ (sums.cpp) and Triton: polynomial links, in time linear in the tokens."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal.formula import Formula
from zonal.kernels import abi
from zonal.kernels.abi import Anchor, Arguments, dense_last, empty
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, on_cuda, only_first
from zonal.kernels.tile import padded

FAMILY = Family("sums", trial=lambda code, _: _trial(code))
_FEATURES = ("squares", "roots", "left", "right", "run_end", "degree", "place")
_STATES, _BY_KEY = ("initial", "final", "dfinal", "dinitial"), ("running", "favour", "dmass")
_SHAPES = {
    **dict.fromkeys(_FEATURES, "F"), **dict.fromkeys(_STATES, "B Hkv F width"), **dict.fromkeys(_BY_KEY, "B Hkv S"),
    "low_left": "low", "low_right": "low", "q": "B H T D", "k": "B Hkv S D", "v": "B Hkv S P", "scale": "H",
    "coefficients": "H numbers", "monomials": "H powers", "before": "B", "index": "places S", "present": "places",
    "lo": "places T", "hi": "places T", "edges": "edges", "y": "B H T P", "factor": "B H T", "apart": "B H T",
    "dy": "B H T P", "dq": "parts B q_heads T D", "dk": "parts B k_heads S D", "dv": "B Hkv S P", "dscale": "B H",
    "dcoefficients": "tasks groups learned", "dmonomials": "tasks groups powers",
}  # fmt: skip
_SUMS = abi.Struct("sums.hpp", "Sums", _SHAPES)
_DOTS = abi.Struct("sums.cpp", "Dots", {"a": "B H T P", "b": "B H T P", "out": "B H T"})


@dataclass(frozen=True)
class SumsSpec:
    """One call's rules: y_t = factor_t sum_s l(S_ts) v_s, S_ts = scale_h f(q_t) . f(k_s), as in ``TileSpec``.

    degree, lowest: of the powers of S in l, whose features are those of ``features.SymmetricPowers``. anchor,
    normalise: as in ``TileSpec``. keeps: the state after the last key is wanted. positive: l is never negative, so
    that a row whose sum nearly vanishes has cancelled.
    learned: how many of the coefficients may have gradients.
    left, nodes: where left > 0, vectors are [a, b_1, …, b_nodes] with ``left`` numbers in a. Their features are
    a ⊗ b_1, …, a ⊗ b_nodes, so that f(q) . f(k) is a product of two dot products. Only with degree and lowest 1,
    scale 1 and without ``normalise``.
    """

    link: Formula
    degree: int
    lowest: int
    anchor: Anchor
    normalise: bool = False
    keeps: bool = False
    positive: bool = False
    learned: int = 0
    left: int = 0
    nodes: int = 1

    @property
    def guards(self) -> bool:
        """Whether to look for rows whose terms cancel. Features of degree 1 keep the sign of their input."""
        return self.positive and self.anchor == "row" and self.degree > 1

    def dimension(self, dim: int) -> int:
        """How many features a vector of ``dim`` numbers has."""
        if self.left:
            return self.left * (dim - self.left)
        return sum(math.comb(dim + power - 1, power) for power in range(self.lowest, self.degree + 1))


class SumsInputs(NamedTuple):
    """q (B, H or 1, T, D) and k (B, Hkv or 1, S, D). All heads share a single head, and the scale then has no gradient.

    v (B, Hkv, S, P). scale (H,), coefficients (H, n) of the formula, monomials (H, degree + 1) of the powers.

    initial: the state before the first key, (B, Hkv, features, P, one more with the row anchor). before (B,): how many
    keys are in it. log_decay: (B or 1, Hkv, S) <= 0, 0 on padding; queries are then the last positions. key_bias: (B,
    Hkv, S). key_mask: bool (B, S).
    lo, hi: int64 (T,), the keys that each query may see before the mask; None for ``summed``, which takes ``Places``.
    segment_start (T,): where each query's document begins, None = a single document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    coefficients: Tensor
    monomials: Tensor
    initial: Tensor | None = None
    before: Tensor | None = None
    log_decay: Tensor | None = None
    key_bias: Tensor | None = None
    key_mask: Tensor | None = None
    lo: Tensor | None = None
    hi: Tensor | None = None
    segment_start: Tensor | None = None

    def by_head(self) -> "SumsInputs":
        """With a head of queries and keys for every head that shares one."""
        heads, kv_heads = self.scale.shape[0], self.v.shape[1]
        return self._replace(q=self.q.expand(-1, heads, -1, -1), k=self.k.expand(-1, kv_heads, -1, -1))

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, Hkv, T, S, D, P."""
        batch, kv_heads, keys, value_dim = self.v.shape
        return batch, self.scale.shape[0], kv_heads, self.q.shape[2], keys, self.q.shape[3], value_dim


class Tables(NamedTuple):
    """How the kernel computes the features of a map. Each is a product of two low features, ordered by the first one.

    low_left, low_right: rows of products among the low features (the first 1 + D rows are 1 and the vector).
    left, right, degree: of each feature. run_end: the end of the run in which left is constant and right rises by one.
    place: the feature's index in ``features.SymmetricPowers``. squares, roots: its weight there, squared and plain.
    """

    low_left: Tensor
    low_right: Tensor
    left: Tensor
    right: Tensor
    run_end: Tensor
    degree: Tensor
    place: Tensor
    squares: Tensor
    roots: Tensor


def _monomials(degree: int, lowest: int, dim: int) -> list[tuple[int, ...]]:
    """The indices of every feature, in the order of ``features.SymmetricPowers``, which memories keep."""
    found: list[tuple[int, ...]] = []
    for power in range(lowest, degree + 1):
        if power == 2 and degree == 2:  # by cyclic distance, the opposite point once
            pairs = [
                (i, (i + j) % dim) for j in range(dim // 2 + 1) for i in range(dim // 2 if j and 2 * j == dim else dim)
            ]
            found += [tuple(sorted(pair)) for pair in pairs]
        else:
            found += itertools.combinations_with_replacement(range(dim), power)
    return found


@functools.lru_cache(maxsize=64)
def tables(degree: int, lowest: int, dim: int) -> Tables:
    """The tables of all powers from ``lowest`` to ``degree`` of vectors of ``dim`` numbers."""
    half = (degree + 1) // 2
    rows: dict[tuple[int, ...], int] = {(): 0, **{(i,): 1 + i for i in range(dim)}}
    low = [(0, 0)] * (1 + dim)
    for power in range(2, half + 1):
        for each in itertools.combinations_with_replacement(range(dim), power):
            low.append((rows[each[:1]], rows[each[1:]]))
            rows[each] = len(low) - 1
    made = []
    for place, each in enumerate(_monomials(degree, lowest, dim)):
        cut = len(each) // 2
        square = math.factorial(len(each)) // math.prod(math.factorial(times) for times in Counter(each).values())
        made.append((rows[each[:cut]], rows[each[cut:]], len(each), place, square))
    made.sort()
    ends = [len(made)] * len(made)
    for a in range(len(made) - 2, -1, -1):
        follows = made[a + 1][:2] == (made[a][0], made[a][1] + 1)
        ends[a] = ends[a + 1] if follows else a + 1
    left, right, power, place, squares = (
        torch.tensor(column, dtype=torch.int32, device="cpu") for column in zip(*made, strict=True)
    )
    low_left, low_right = (torch.tensor(column, dtype=torch.int32, device="cpu") for column in zip(*low, strict=True))
    return Tables(
        low_left,
        low_right,
        left,
        right,
        torch.tensor(ends, dtype=torch.int32, device="cpu"),
        power,
        place,
        squares.float(),
        squares.double().sqrt().float(),
    )


@functools.lru_cache(maxsize=64)
def product_tables(left: int, nodes: int, dim: int) -> Tables:
    """The tables of a ⊗ b_1, …, a ⊗ b_nodes for vectors [a, b_1, …, b_nodes] of ``dim`` numbers, ``left`` in a."""
    rest = dim - left
    i, j = (torch.arange(n, dtype=torch.int32, device="cpu") for n in (left, rest))
    size = rest // nodes
    ones = torch.ones(left * rest, dtype=torch.float32, device="cpu")
    low = torch.zeros(1 + dim, dtype=torch.int32, device="cpu")
    return Tables(
        low,
        low,
        left=(1 + i).repeat_interleave(rest),
        right=(1 + left + j).repeat(left),
        run_end=((1 + i) * rest).repeat_interleave(rest),
        degree=ones.int(),
        place=((j // size * left + i[:, None]) * size + j % size).flatten(),
        squares=ones,
        roots=ones,
    )


class Places(NamedTuple):
    """Which keys each query sees, in the format of the kernel: int32, contiguous.

    index (B or 1, S): the real keys in order, then the others; present (B or 1,): how many are real.
    lo, hi (B or 1, T): the places in ``index`` that each query sees, hi >= lo.
    edges (documents + 1,): borders of documents among the queries.
    """

    index: Tensor
    present: Tensor
    lo: Tensor
    hi: Tensor
    edges: Tensor


def places(key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, keys: int) -> Places:
    """The visibility of a call. lo, hi: int64 (T,), the keys each query may see before ``key_mask`` (B, S).

    segment_start (T,): where each query's document begins, None = a single document.
    """
    hi = torch.maximum(lo, hi)
    if segment_start is None:
        edges = torch.tensor([0, lo.shape[0]], dtype=torch.int32, device="cpu")
    else:
        edges = torch.nn.functional.pad(
            torch.unique_consecutive(segment_start, return_counts=True)[1].cumsum(0), (1, 0)
        ).to(torch.int32)
    if key_mask is None:
        index = torch.arange(keys, dtype=torch.int32, device="cpu")[None]
        present = torch.tensor([keys], dtype=torch.int32, device="cpu")
        return Places(index, present, lo.to(torch.int32)[None], hi.to(torch.int32)[None], edges)
    # intervals become intervals of places among the keys that are there
    index = torch.argsort(~key_mask, dim=1, stable=True).to(torch.int32)
    rank = torch.nn.functional.pad(key_mask.cumsum(1), (1, 0)).to(torch.int32)
    return Places(index, rank[:, -1].contiguous(), rank[:, lo].contiguous(), rank[:, hi].contiguous(), edges)


def _arguments(inputs: SumsInputs, seen: Places, spec: SumsSpec, split: int, shares: int = 0) -> Arguments:
    """Of a call, without its queries, keys and values."""
    batch, heads, kv_heads, queries, keys, dim, value_dim = inputs.sizes
    table = tables(spec.degree, spec.lowest, dim) if spec.left == 0 else product_tables(spec.left, spec.nodes, dim)
    call = Arguments(_SUMS, {
        "B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "D": dim, "P": value_dim,
        "F": table.left.shape[0], "low": table.low_left.shape[0], "powers": inputs.monomials.shape[1],
        "segments": seen.edges.shape[0] - 1, "by_batch": seen.lo.shape[0] > 1, "numbers": inputs.coefficients.shape[1],
        "anchor": abi.ANCHORS[spec.anchor], "normalise": spec.normalise, "split": split, "offset": keys - queries,
        "guards": spec.guards, "shares": shares, "left_part": spec.left,
    }, {
        "places": seen.lo.shape[0], "edges": seen.edges.shape[0], "width": value_dim + (spec.anchor == "row"),
    })  # fmt: skip
    for name in ("scale", "coefficients", "monomials", "initial", "before"):
        call.point(name, getattr(inputs, name))
    for name in (*_FEATURES, "low_left", "low_right"):
        call.point(name, getattr(table, name))
    for name, x in zip(seen._fields, seen, strict=True):
        call.point(name, x)
    decay, bias = inputs.log_decay, inputs.key_bias
    call.point("running", None if decay is None else decay.double().cumsum(-1).expand(batch, -1, -1))
    call.point("favour", None if bias is None else bias.double().exp())
    return call


def _point_at_tokens(call: Arguments, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Let a call point to its queries, keys and values. One head of queries or keys may stand for all."""
    call.point("q", dense_last(q, torch.float32).expand(-1, call.shape("q")[1], -1, -1))
    call.point("k", dense_last(k, torch.float32).expand(-1, call.shape("k")[1], -1, -1))
    call.point("v", v)


def _split(batch: int, kv_heads: int, segments: int, value_dim: int) -> int:
    """Parts of the values. With fewer heads than threads each head is split, which computes features more than once."""
    return max(1, min(torch.get_num_threads() // max(batch * kv_heads * segments, 1), value_dim // 8))


def forward(inputs: SumsInputs, spec: SumsSpec) -> Results:
    """``summed`` with the visibility that lo, hi and the masks of the inputs give."""
    return summed(inputs, places_of(inputs), spec)


def _trial(code: Formula) -> Results:
    x = torch.full((1, 8, 256, 24), 0.125, dtype=torch.float32, device="cpu")
    ends = torch.arange(257, dtype=torch.int64, device="cpu")
    numbers = torch.full((8, 8), 0.5, dtype=torch.float32, device="cpu")
    inputs = SumsInputs(x, x, x, numbers[0], numbers, numbers[:, :3], lo=ends[:-1] * 0, hi=ends[1:])
    return forward(inputs, SumsSpec(code, 2, 0, "row"))


def places_of(inputs: Any) -> Places:
    """Which keys the queries of ``SumsInputs`` or ``RidgeInputs`` see, by lo, hi and the masks."""
    assert inputs.lo is not None
    assert inputs.hi is not None
    return places(inputs.key_mask, inputs.lo, inputs.hi, inputs.segment_start, inputs.v.shape[2])


def prepared(inputs: SumsInputs, seen: Places, spec: SumsSpec) -> Callable[[Tensor, Tensor, Tensor], Results]:
    """``summed`` for other q, k and v of these shapes: what does not depend on them is worked out once."""
    batch, _, kv_heads, _, _, _, value_dim = inputs.sizes
    given = _arguments(inputs, seen, spec, _split(batch, kv_heads, seen.edges.shape[0] - 1, value_dim))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Results:
        call = given.copy()
        _point_at_tokens(call, q, k, v)
        y, factor = call.new("y"), call.new("factor")
        final = call.new("final") if spec.keeps else empty(0)
        apart = call.new("apart", zero=True) if spec.guards else empty(0, dtype=torch.uint8)
        call.run(FAMILY.load(spec.link).zonal_sums_forward)
        return y, factor, final, apart

    return run


def summed(inputs: SumsInputs, seen: Places, spec: SumsSpec) -> Results:
    """(y (B, H, T, P), the row's factor (B, H, T), the state after the last key, which rows used no state (B, H, T)).

    The first three are float32, the last uint8. The state is empty unless ``spec.keeps``, the last unless
    ``spec.guards``.

    With a positive link and the row anchor, a row whose sum over features cancelled to less than 1/256 of the possible
    sum of its terms is summed through the link, key by key. With ``initial`` that is impossible: a row below 2^-16 of
    it, a tenth or more of which may be rounding, is NaN.
    """
    return prepared(inputs, seen, spec)(*inputs[:3])


def backward(
    grads: Gradients, inputs: SumsInputs, results: Results, spec: SumsSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v in their own types, and of the state before the first key.

    In float64 and if asked for: those of scale, coefficients, monomials, log_decay and key_bias.
    """
    (dy, dfinal), (y, factor, final, apart), seen = grads, results, places_of(inputs)
    assert dy is not None
    batch, heads, kv_heads, _, _, _, value_dim = inputs.sizes
    segments, groups = seen.edges.shape[0] - 1, heads // kv_heads
    split = _split(batch, kv_heads, segments, value_dim)
    tasks = batch * kv_heads * segments * split
    q_heads, k_heads = inputs.q.shape[1], inputs.k.shape[1]
    shares = 0
    if (q_heads, k_heads) != (heads, kv_heads):
        shares = min(kv_heads * segments * split, max(1, 2 * torch.get_num_threads() // max(batch, 1)))
    learned = spec.learned if "coefficients" in asked else 0
    call = _arguments(inputs, seen, spec, split, shares)
    _point_at_tokens(call, *inputs[:3])
    call.set(
        {"learned": learned},
        {"parts": shares or split, "tasks": tasks, "groups": groups, "q_heads": q_heads, "k_heads": k_heads},
    )
    call.point("y", y)
    call.point("factor", factor)
    call.point("apart", apart if spec.guards else None)
    call.point("dy", dy)
    call.point("dfinal", dfinal if spec.keeps else None)
    fades = bool(asked & {"log_decay", "key_bias"})
    dq, dk, dv = call.new("dq"), call.new("dk"), call.new("dv")
    dinitial = call.new("dinitial") if "initial" in asked else None
    dmass = call.new("dmass", zero=True) if spec.anchor == "row" and fades else None
    dscale = call.new("dscale", zero=True) if "scale" in asked else None
    dcoefficients = call.new("dcoefficients", zero=True) if learned else None
    dmonomials = call.new("dmonomials", zero=True) if "monomials" in asked else None
    call.run(FAMILY.load(spec.link).zonal_sums_backward)

    def by_head(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.view(batch, kv_heads, segments * split, groups, -1).sum((0, 2)).view(heads, -1)

    # log of what each key counts
    counted = ddecay = None
    if fades:
        counted = _dots(inputs.v, dv, spec) + (0 if dmass is None else dmass)
    if counted is not None and "log_decay" in asked:
        of_rows = None if spec.anchor == "row" else _dots(dy, y, spec)
        ddecay = decay_gradient(inputs, counted, of_rows, dfinal if spec.keeps else None, final)
    coefficients = by_head(dcoefficients)
    return (
        dq[0], dk[0], dv, None if dscale is None else dscale.sum(0),
        None if coefficients is None else padded(coefficients, inputs.coefficients), by_head(dmonomials), dinitial,
        ddecay, counted,
    )  # fmt: skip


def decay_gradient(
    inputs: SumsInputs, counted: Tensor, rows: Tensor | None, dfinal: Tensor | None, final: Tensor
) -> Tensor:
    """The gradient of ``log_decay``, float64, from ``counted`` (B, Hkv, S), that of the log of each key's weight.

    Weights of a row scale with e^c_t, those of a key with e^-c_s. Where a row is divided by its sum, e^c_t cancels, and
    ``rows`` is None. Otherwise rows is dy . y per row, (B, H, T) float64.
    """
    (kv_heads, keys), queries = counted.shape[1:], inputs.q.shape[2]
    assert inputs.log_decay is not None
    running, offset = -counted, keys - queries
    if rows is not None:
        running[..., max(offset, 0) :] += rows.unflatten(1, (kv_heads, -1)).sum(2)[..., max(-offset, 0) :]
    if dfinal is not None and keys:
        running[..., -1] += (dfinal.double() * final).sum((-1, -2))
    # rates that are the operator's own are one row for the whole batch
    return running.flip(-1).cumsum(-1).flip(-1).sum_to_size(inputs.log_decay.shape)


def _dots(a: Tensor, b: Tensor, spec: SumsSpec) -> Tensor:
    """Σ_p a_tp b_tp of two tensors (B, H, T, P) taken as float32, float64 (B, H, T)."""
    batch, heads, length, width = a.shape
    call = Arguments(_DOTS, {"B": batch, "H": heads, "T": length, "P": width})
    call.point("a", a)
    call.point("b", b)
    out = call.new("out")
    call.run(FAMILY.load(spec.link).zonal_sums_dots)
    return out


def _shapes(inputs: SumsInputs, spec: SumsSpec) -> Results:
    batch, heads, kv_heads, queries, _, dim, value_dim = inputs.sizes
    q, rows, width = inputs.q, (batch, heads, queries), value_dim + int(spec.anchor == "row")
    return (
        q.new_empty((*rows, value_dim), dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((batch, kv_heads, spec.dimension(dim), width) if spec.keeps else (0,), dtype=torch.float32),
        q.new_empty(rows if spec.guards else (0,), dtype=torch.uint8),
    )


sums = Op(
    "feature_sums",
    SumsInputs,
    SumsSpec,
    results=4,
    learned=("q", "k", "v", "scale", "coefficients", "monomials", "initial", "log_decay", "key_bias"),
    bodies={"cpu": Body(forward, backward), "cuda": on_cuda("sums_forward", "sums_backward")},
    shapes=_shapes,
    fixed=(1, 3),
    refusal=only_first("chunked"),
)
"""``SumsSpec``'s equation. The results are those of ``summed``; y and the state have gradients."""

__all__ = [
    "FAMILY",
    "Places",
    "SumsInputs",
    "SumsSpec",
    "Tables",
    "decay_gradient",
    "places",
    "places_of",
    "prepared",
    "product_tables",
    "summed",
    "sums",
    "tables",
]

"""The kernels for ridge and Koopman read-outs, C++ (ridge.cpp) and Triton: linear in the tokens.

y_t = C_t P_t (M_t P_t)^powers_h scale_h q_t over the keys that each query sees, P = (G + ridge I)^-1.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.errors import NonFiniteError
from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments, dense_last, empty, plain, zeros
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, on_cuda, only_first
from zonal.kernels.sums import Places, places

FAMILY = Family("ridge", FORMULAS["identity"])
DOUBLE = 1
"""The outcome of a document that ran in float64, because float32 would have lost three digits."""
_INDEFINITE = 2
_RIDGE = abi.Struct("ridge.hpp", "Ridge")


class Before(NamedTuple):
    """A memory before the first key, in float64: gram (B, Hkv, r, r), cross (B, Hkv, P, r); for powers above 0 also
    shift (B, Hkv, r, r) and last (B, Hkv, r)."""

    gram: Tensor | None = None
    cross: Tensor | None = None
    shift: Tensor | None = None
    last: Tensor | None = None


class RidgeInputs(NamedTuple):
    """q (B, H, T, r), k (B, Hkv, S, r), v (B, Hkv, S, P), scale (H,), and rho (Hkv,), the ridge.

    gram to last: ``Before``. key_mask, lo, hi, segment_start: as in ``SumsInputs``. edges: borders of packed documents,
    (documents + 1,), None without packing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    rho: Tensor
    gram: Tensor | None = None
    cross: Tensor | None = None
    shift: Tensor | None = None
    last: Tensor | None = None
    key_mask: Tensor | None = None
    lo: Tensor | None = None
    hi: Tensor | None = None
    segment_start: Tensor | None = None
    edges: Tensor | None = None

    @property
    def before(self) -> Before:
        """The memory before the first key."""
        return Before(self.gram, self.cross, self.shift, self.last)

    @property
    def documents(self) -> int:
        """How many there are, one without packing."""
        return 1 if self.edges is None else self.edges.shape[0] - 1


class RidgeSpec(NamedTuple):
    """powers: of each head. limit: longer keys are shortened to it, 0: none are."""

    powers: tuple[int, ...]
    limit: float = 0.0


@functools.lru_cache(maxsize=64)
def _powers(powers: tuple[int, ...]) -> Tensor:
    return torch.tensor(powers, dtype=torch.int64, device="cpu")


def _arguments(inputs: RidgeInputs, seen: Places, spec: RidgeSpec) -> Arguments:
    (q, k, v), before = inputs[:3], inputs.before
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    pair, places = (batch, kv_heads), seen.lo.shape[0]
    call = Arguments(_RIDGE, {
        "B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "D": dim, "P": value_dim,
        "segments": seen.edges.shape[0] - 1, "by_batch": places > 1, "power": max(spec.powers), "limit": spec.limit,
    })  # fmt: skip
    call.point("q", dense_last(q, torch.float32), (batch, heads, queries, dim), strides="qs")
    call.point("k", dense_last(k, torch.float32), (*pair, keys, dim), strides="ks")
    call.point("v", dense_last(v, torch.float32), (*pair, keys, value_dim), strides="vs")
    call.point("scale", plain(inputs.scale, torch.float32), (heads,))
    call.point("ridge", plain(inputs.rho, torch.float64), (kv_heads,))
    call.point("powers", _powers(spec.powers), (heads,))
    call.point("index", seen.index, (places, keys))
    call.point("lo", seen.lo, (places, queries))
    call.point("hi", seen.hi, (places, queries))
    call.point("edges", seen.edges, seen.edges.shape)
    for name, x, shape in zip(before._fields, before, _memory(inputs), strict=True):
        call.point(name, None if x is None else plain(x, torch.float64), shape)
    return call


def _memory(inputs: RidgeInputs) -> tuple[tuple[int, ...], ...]:
    """Shapes of the four parts of ``Before``."""
    (batch, kv_heads, _, dim), value_dim = inputs.k.shape, inputs.v.shape[3]
    square = (batch, kv_heads, dim, dim)
    return square, (batch, kv_heads, value_dim, dim), square, square[:3]


def _run(call: Arguments, function: object) -> None:
    if call.run(function) == _INDEFINITE:
        raise NonFiniteError(
            "attention: kernel + ridge is not positive definite in float64 (or not finite). "
            "Look for keys that are not finite, or raise the ridge."
        )


def read(inputs: RidgeInputs, seen: Places, spec: RidgeSpec) -> tuple[Tensor, Tensor]:
    """(y (B, H, T, P) float32, bool (B, Hkv, documents): which ran in float64, as float32 would lose three digits).

    Raises: NonFiniteError when G + ridge I is not positive definite, which keys that are not finite cause.
    """
    q, v = inputs.q, inputs.v
    y, outcome = empty(*q.shape[:3], v.shape[3]), empty(*v.shape[:2], seen.edges.shape[0] - 1, dtype=torch.int32)
    call = _arguments(inputs, seen, spec)
    call.point("y", y, y.shape)
    call.point("outcome", outcome, outcome.shape)
    _run(call, FAMILY.load().zonal_ridge_forward)
    return y, outcome == DOUBLE


def _places_of(inputs: RidgeInputs) -> Places:
    assert inputs.lo is not None
    assert inputs.hi is not None
    return places(inputs.key_mask, inputs.lo, inputs.hi, inputs.segment_start, inputs.k.shape[2])


def forward(inputs: RidgeInputs, spec: RidgeSpec) -> Results:
    """``read`` for whom the inputs' lo, hi and masks say."""
    return read(inputs, _places_of(inputs), spec)


def backward(
    grads: Gradients, inputs: RidgeInputs, results: Results, spec: RidgeSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v, float32, of scale and rho, and of the memory where asked for, float64."""
    (dy,), (q, k, v, *_), (_, doubled) = grads, inputs, results
    assert dy is not None
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    seen, groups = _places_of(inputs), heads // kv_heads
    tasks, started = batch * kv_heads * (seen.edges.shape[0] - 1), bool(asked & set(Before._fields))
    memory = [None if x is None or not started else zeros(*x.shape, dtype=torch.float64) for x in inputs.before]
    # an unfinished sum a task, so that the order of threads does not matter
    dscale, drho = zeros(tasks, groups, dtype=torch.float64), zeros(tasks, dtype=torch.float64)
    # the kernel sets them to zero where it adds to them: to do so here would bring all of them from far away once more
    dq, dk, dv = (empty(*x.shape) for x in (q, k, v))
    call = _arguments(inputs, seen, spec)
    call.point("outcome", torch.where(doubled, DOUBLE, 0).to(torch.int32).flatten(), (tasks,))
    call.point("dy", dense_last(dy, torch.float32), (*q.shape[:3], v.shape[3]), strides="dys")
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv), ("dscale", dscale), ("dridge", drho)):
        call.point(name, x, x.shape)
    for name, x, shape in zip(Before._fields, memory, _memory(inputs), strict=True):
        call.point(f"d{name}", x, shape)
    _run(call, FAMILY.load().zonal_ridge_backward)
    of_heads = dscale.view(batch, kv_heads, -1, groups).sum((0, 2)).view(heads)
    return dq, dk, dv, of_heads, drho.view(batch, kv_heads, -1).sum((0, 2)), *memory


def _shapes(inputs: RidgeInputs, spec: RidgeSpec) -> Results:
    q, k = inputs[:2]
    y = q.new_empty((*q.shape[:3], inputs.v.shape[3]), dtype=torch.float32)
    return y, q.new_empty((*k.shape[:2], inputs.documents), dtype=torch.bool)


ridge = Op(
    "ridge",
    RidgeInputs,
    RidgeSpec,
    results=2,
    learned=("q", "k", "v", "scale", "rho", *Before._fields),
    cpu=Body(forward, backward),
    cuda=on_cuda("ridge_forward", "ridge_backward"),
    shapes=_shapes,
    fixed=(1,),
    refusal=only_first("chunked"),
)
"""The read-outs as (y, which documents of which key heads ran in float64)."""

__all__ = ["DOUBLE", "FAMILY", "Before", "RidgeInputs", "RidgeSpec", "read", "ridge"]

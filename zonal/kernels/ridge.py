"""The kernels for ridge and Koopman read-outs, C++ (ridge.cpp) and Triton: linear in the tokens.

y_t = C_t P_t (M_t P_t)^powers_h scale_h q_t over the keys that each query sees, P = (G + ridge I)^-1. In C++ the past
may fade, as ``memory.GramStatistics`` says: G, M, C and the ridge are multiplied by a rate per token, and each token
gives back in one direction what the ridge has lost in all.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.errors import NonFiniteError
from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, on_cuda, only_first
from zonal.kernels.sums import Places, places_of

FAMILY = Family("ridge", FORMULAS["identity"], trial=lambda *_: _trial())
DOUBLE = 1
"""The outcome of a document that ran in float64, because float32 would have lost three digits."""
_INDEFINITE = 2
_MEMORY = {
    "gram": "B Hkv D D", "cross": "B Hkv P D", "shift": "B Hkv D D", "last": "B Hkv D", "level": "B Hkv D",
}  # fmt: skip
_SHAPES = {
    "q": "B H T D", "k": "B Hkv S D", "v": "B Hkv S P", "scale": "H", "ridge": "Hkv", "powers": "H",
    "index": "places S", "lo": "places T", "hi": "places T", "edges": "edges", "y": "B H T P", "dy": "B H T P",
    "outcome": "B Hkv segments", "dq": "B H T D", "dk": "B Hkv S D", "dv": "B Hkv S P",
    "dscale": "B Hkv segments groups", "dridge": "B Hkv segments", "decay": "B Hkv S", "ddecay": "B Hkv S",
    "passed": "B", **_MEMORY,
    **{f"d{name}": shape for name, shape in _MEMORY.items()},
}  # fmt: skip
_RIDGE = abi.Struct("ridge.hpp", "Ridge", _SHAPES)


class Before(NamedTuple):
    """A memory before the first key, in float64: gram (B, Hkv, r, r), cross (B, Hkv, P, r); for powers above 0 also
    shift (B, Hkv, r, r) and last (B, Hkv, r); level (B, Hkv, r), what is left of the ridge where the past fades."""

    gram: Tensor | None = None
    cross: Tensor | None = None
    shift: Tensor | None = None
    last: Tensor | None = None
    level: Tensor | None = None


class RidgeInputs(NamedTuple):
    """q (B, H, T, r), k (B, Hkv, S, r), v (B, Hkv, S, P), scale (H,), and rho (Hkv,), the ridge.

    gram to level: ``Before``. log_decay (B or 1, Hkv, S) <= 0, 0 on padding, None where nothing fades; passed (B,): the
    keys in the memory, for calls that fade. key_mask, lo, hi, segment_start: as in ``SumsInputs``. edges: borders of
    packed documents, (documents + 1,), None without packing.
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
    level: Tensor | None = None
    log_decay: Tensor | None = None
    passed: Tensor | None = None
    key_mask: Tensor | None = None
    lo: Tensor | None = None
    hi: Tensor | None = None
    segment_start: Tensor | None = None
    edges: Tensor | None = None

    @property
    def before(self) -> Before:
        """The memory before the first key."""
        return Before(self.gram, self.cross, self.shift, self.last, self.level)

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
    """Of a call, without its queries, keys and values."""
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = inputs.q.shape, inputs.v.shape
    places, edges = seen.lo.shape[0], seen.edges.shape[0]
    call = Arguments(_RIDGE, {
        "B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "D": dim, "P": value_dim,
        "segments": edges - 1, "by_batch": places > 1, "power": max(spec.powers), "limit": spec.limit,
    }, {"places": places, "edges": edges, "groups": heads // kv_heads})  # fmt: skip
    for name in ("scale", *_MEMORY):
        call.point(name, getattr(inputs, name))
    call.point("ridge", inputs.rho)
    call.point("passed", inputs.passed)
    if inputs.log_decay is not None:
        call.point("decay", inputs.log_decay.expand(batch, -1, -1))
    call.point("powers", _powers(spec.powers))
    for name in ("index", "lo", "hi", "edges"):
        call.point(name, getattr(seen, name))
    return call


def _run(call: Arguments, function: object) -> None:
    if call.run(function) == _INDEFINITE:
        raise NonFiniteError(
            "attention: kernel + ridge is not positive definite in float64 (or not finite). "
            "Look for keys that are not finite, raise the ridge, or let the past decay more slowly."
        )


def _point_at_tokens(call: Arguments, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Let a call point to its queries, keys and values."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        call.point(name, x)


def prepared(inputs: RidgeInputs, seen: Places, spec: RidgeSpec) -> Callable[[Tensor, Tensor, Tensor], Results]:
    """``read`` for other q, k and v of these shapes: what does not depend on them is worked out once."""
    given = _arguments(inputs, seen, spec)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Results:
        call = given.copy()
        _point_at_tokens(call, q, k, v)
        y, outcome = call.new("y"), call.new("outcome")
        _run(call, FAMILY.load().zonal_ridge_forward)
        return y, outcome == DOUBLE

    return run


def read(inputs: RidgeInputs, seen: Places, spec: RidgeSpec) -> Results:
    """(y (B, H, T, P) float32, bool (B, Hkv, documents): which ran in float64, as float32 would lose three digits).

    Raises: NonFiniteError when G + ridge I is not positive definite, which keys that are not finite cause.
    """
    return prepared(inputs, seen, spec)(*inputs[:3])


def forward(inputs: RidgeInputs, spec: RidgeSpec) -> Results:
    """``read`` with the visibility that lo, hi and the masks of the inputs give."""
    return read(inputs, places_of(inputs), spec)


def _trial() -> Results:
    x = torch.full((1, 8, 256, 32), 0.125, dtype=torch.float32, device="cpu")
    ends = torch.arange(257, dtype=torch.int64, device="cpu")
    inputs = RidgeInputs(x, x, x, x[0, :, 0, 0], x[0, :, 0, 0].double(), lo=ends[:-1] * 0, hi=ends[1:])
    return forward(inputs, RidgeSpec((0,) * 8))


def backward(
    grads: Gradients, inputs: RidgeInputs, results: Results, spec: RidgeSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v, float32, of scale and rho, and of the memory and log_decay where asked for, float64."""
    (dy,), (_, doubled) = grads, results
    call = _arguments(inputs, places_of(inputs), spec)
    _point_at_tokens(call, *inputs[:3])
    call.point("outcome", torch.where(doubled, DOUBLE, 0))
    call.point("dy", dy)
    # the kernel sets them to zero where it adds to them: to do so here would bring all of them from far away once more
    tokens = [call.new(name) for name in ("dq", "dk", "dv")]
    # an unfinished sum a task, so that the order of threads does not matter
    dscale, drho = call.new("dscale", zero=True), call.new("dridge", zero=True)
    started = bool(asked & set(Before._fields))
    memory = [
        None if x is None or not started else call.new(f"d{name}", zero=True)
        for name, x in zip(Before._fields, inputs.before, strict=True)
    ]
    rates = call.new("ddecay", zero=True) if "log_decay" in asked else None
    _run(call, FAMILY.load().zonal_ridge_backward)
    if rates is not None and inputs.log_decay is not None:
        rates = rates.sum_to_size(inputs.log_decay.shape)
    return *tokens, dscale.sum((0, 2)).flatten(), drho.sum((0, 2)), *memory, rates


def _shapes(inputs: RidgeInputs, spec: RidgeSpec) -> Results:
    q, k = inputs[:2]
    y = q.new_empty((*q.shape[:3], inputs.v.shape[3]), dtype=torch.float32)
    return y, q.new_empty((*k.shape[:2], inputs.documents), dtype=torch.bool)


ridge = Op(
    "ridge",
    RidgeInputs,
    RidgeSpec,
    results=2,
    learned=("q", "k", "v", "scale", "rho", *Before._fields, "log_decay"),
    bodies={"cpu": Body(forward, backward), "cuda": on_cuda("ridge_forward", "ridge_backward")},
    shapes=_shapes,
    fixed=(1,),
    refusal=only_first("chunked"),
)
"""The read-outs as (y, which documents of which key heads ran in float64)."""

__all__ = ["DOUBLE", "FAMILY", "Before", "RidgeInputs", "RidgeSpec", "prepared", "read", "ridge"]

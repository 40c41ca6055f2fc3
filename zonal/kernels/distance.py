"""The kernels for attention by distance, C++ (distance.cpp) and Triton."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS, Formula, Term
from zonal.kernels import abi
from zonal.kernels.abi import Arguments
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, on_cuda, only_first
from zonal.kernels.tile import SHAPES, TileInputs, TileSpec, parts_of, point_at, rows_and_keys

CODE = FORMULAS["exp"]
"""Its weights are exponentials, whatever the distances."""
FAMILY = Family("distance", CODE, trial=lambda code, _: _trial(code))
TERMS = WAVES = 8
"""The most distances of a sum, and the most waves, that the kernel takes."""
_KINDS = {"euclidean": 0, "squared": 1, "sphere": 2, "hyperbolic": 3, "product": 4}
_TERM = abi.Struct("distance.hpp", "Term")
_SHAPES = {"weights": "B H T terms", "dweights": "B H T terms", **{f"call.{name}": x for name, x in SHAPES.items()}}
_WEIGHS = {"weights": ("weighs.batch", "weighs.head", "weighs.token")}
_DISTANCE = abi.Struct("distance.hpp", "Distance", _SHAPES, _WEIGHS)


@dataclass(frozen=True)
class DistanceSpec:
    """The rules of a call: y_t = factor_t sum_s K_ts v_s, log K_ts = x_ts = sum_f w_tf d_f(q_t, k_s), d_f by ``terms``.

    waves: n > 0 makes log K = sum_k a_k e^(-b_k d) cos(c_k d) of d = max(-x, 0) instead, with coefficients (a, b, c)
    per head. rules: link exp, anchor and visibility, as in ``TileSpec``; no norms and no scale.
    """

    rules: TileSpec
    terms: tuple[Term, ...]
    waves: int = 0


class DistanceInputs(NamedTuple):
    """Points q (B, H, T, D) and k (B, Hkv, S, D); v (B, Hkv, S, P); weights (B, H, T, terms).

    coefficients: (H, 3 waves). Masks are as in ``TileInputs``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    coefficients: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def tiles(self) -> TileInputs:
        """As the tile kernels take them; nothing is scaled."""
        ones = torch.ones(self.q.shape[1], dtype=torch.float32, device=self.q.device)
        return TileInputs(self.q, self.k, self.v, ones, self.coefficients, self.key_mask, self.cu_seqlens)


def _arguments(inputs: DistanceInputs, spec: DistanceSpec) -> tuple[Arguments, ctypes.CDLL, int]:
    """The arguments of the kernel, its library, and the width of a point in the kernel's layout."""
    shared, library = inputs.tiles, FAMILY.load()
    sizes = rows_and_keys(shared, spec.rules)
    numbers = {f"call.{name}": number for name, number in sizes.items()}
    numbers |= {"count": len(spec.terms), "dim": inputs.q.shape[3], "waves": spec.waves}
    call = Arguments(_DISTANCE, numbers, sizes | {"edges": shared.documents + 1, "terms": len(spec.terms)})
    point_at(call, shared, prefix="call.")
    call.point("weights", inputs.weights)
    terms = b"".join(_TERM.pack(_KINDS[term.kind], *term[1:]) for term in spec.terms)
    call.point_at_bytes("terms", terms)
    width = int(library.zonal_distance_width(call.packed()))
    call.set({"call.D": width})
    return call, library, width


def forward(inputs: DistanceInputs, spec: DistanceSpec) -> Results:
    """(y (B, H, T, P), factor (B, H, T)) in float32. With the row anchor factor is log sum_s K, as in tile kernels."""
    call, library, _ = _arguments(inputs, spec)
    y, factor = call.new("call.y", dtype=torch.float32), call.new("call.factor")
    call.run(library.zonal_distance_forward)
    return y, factor


def _trial(code: Formula) -> Results:
    x = torch.full((1, 8, 128, 64), 0.125, dtype=torch.float32, device="cpu")
    spec = DistanceSpec(TileSpec(code, "row"), (Term("euclidean", 0, 32, 1e-3), Term("sphere", 32, 32, 1e-3)))
    return forward(DistanceInputs(x, x, x, x[..., :2], x[0, :, :0, 0]), spec)


def backward(
    grads: Gradients, inputs: DistanceInputs, results: Results, spec: DistanceSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v and weights, float32, and of the coefficients in float64."""
    (dy,), (y, factor) = grads, results
    split, places = parts_of(inputs.tiles)
    learned = 3 * spec.waves if "coefficients" in asked else 0
    call, library, width = _arguments(inputs, spec)
    call.set(
        {"call.learned": learned, "call.split": split, "call.places": places},
        {"learned": learned, "split": split, "places": places, "columns": width + inputs.v.shape[3]},
    )  # fmt: skip
    call.point("call.y", y, torch.float32)
    call.point("call.factor", factor)
    call.point("call.dy", dy, torch.float32)
    call.new("call.sums")
    found = [call.new(f"call.d{name}", dtype=torch.float32) for name in "qkv"]
    dweights = call.new("dweights")
    dcoefficients = call.new("call.dcoefficients", zero=True) if learned else None
    call.run(library.zonal_distance_backward)
    return *found, dweights, None if dcoefficients is None else dcoefficients.sum((0, 1))


def _shapes(inputs: DistanceInputs, spec: DistanceSpec) -> Results:
    q, rows = inputs.q, inputs.q.shape[:3]
    return q.new_empty((*rows, inputs.v.shape[3]), dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


distance = Op(
    "distance",
    DistanceInputs,
    DistanceSpec,
    results=2,
    learned=("q", "k", "v", "weights", "coefficients"),
    bodies={"cpu": Body(forward, backward), "cuda": on_cuda("distance_forward", "distance_backward")},
    shapes=_shapes,
    fixed=(1,),
    refusal=only_first("tiled"),
)
"""(y, factor) of ``DistanceSpec``'s equation."""

__all__ = ["CODE", "FAMILY", "TERMS", "WAVES", "DistanceInputs", "DistanceSpec", "backward", "distance", "forward"]

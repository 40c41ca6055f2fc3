"""The tile kernels, C++ (tile.cpp) and Triton: operators whose weights are a function of a dot product.

One kernel serves every operator with weights K_ts = l(S_ts) B_ts times a factor per row,
S_ts = scale_h f(q_t) . f(k_s), with f the identity or x / |x|:

    y_t = factor_t sum_s K_ts v_s,   factor_t = 1 / sum_s K_ts (row), 1 / visible keys (count), 1 (raw),
    log B_ts = row_t + col_s - slope_h |position_t - s|.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import Formula
from zonal.kernels import abi
from zonal.kernels.abi import TYPES, Anchor, Arguments
from zonal.kernels.native import Family, load
from zonal.kernels.op import Body, Gradients, Op, Results, on_cuda, only_first

FAMILY = Family("tile", trial=lambda code, dtype: _trial(code, dtype))
SHAPES = {
    "q": "B H T D", "k": "B Hkv S D", "v": "B Hkv S P", "scale": "H", "coefficients": "H numbers", "key_mask": "B S",
    "edges": "edges", "row": "B H T", "col": "B H S", "slope": "H", "y": "B H T P", "rest": "B H T P",
    "factor": "B H T", "dy": "B H T P", "dq": "B H T D", "dk": "B Hkv S D", "dv": "B Hkv S P",
    "sums": "places S columns", "dscale": "split B H", "dcoefficients": "split B H learned", "drow": "B H T",
    "dcol": "split B H S",
}  # fmt: skip
CALL = abi.Struct("common.hpp", "Call", SHAPES)


@dataclass(frozen=True)
class TileSpec:
    """One call's rules. Query t stands at position t + S - T when causal, chunked or windowed, else at t.

    anchor: what the row is multiplied by. normalise: unit queries and keys; 0 stays 0.
    causal: keys s < position + include_self. chunk > 0: keys s < chunk * floor(position / chunk) instead. left, right:
    keys from position - left to position + right (None = no window; right None = no limit there). Packed documents come
    as cu_seqlens. inference: no gradient will be asked for, and nothing is kept for backward. learned: how many of the
    coefficients may have gradients.
    """

    link: Formula
    anchor: Anchor
    normalise: bool = False
    causal: bool = True
    include_self: bool = True
    chunk: int = 0
    left: int | None = None
    right: int | None = None
    inference: bool = False
    learned: int = 0


class TileInputs(NamedTuple):
    """q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, P); scale (H,), coefficients (H, n); key_mask: bool (B, S).

    cu_seqlens: borders of packed documents, int64. row (B or 1, H, T), col (B or 1, H, S), slope (H,): the log prior,
    each None where it is absent. The Triton kernel has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    coefficients: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    row: Tensor | None = None
    col: Tensor | None = None
    slope: Tensor | None = None

    @property
    def documents(self) -> int:
        """How many packed documents there are, 0 without packing."""
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def rows_and_keys(inputs: TileInputs, spec: TileSpec) -> dict[str, int]:
    """The numbers of ``Call`` that follow from shapes and rules."""
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = inputs.q.shape, inputs.v.shape
    return {
        "B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "D": dim, "P": value_dim,
        "documents": inputs.documents, "causal": spec.causal, "include_self": spec.include_self, "chunk": spec.chunk,
        "left": -1 if spec.left is None else spec.left, "right": keys + queries if spec.right is None else spec.right,
        "numbers": inputs.coefficients.shape[1], "anchor": abi.ANCHORS[spec.anchor], "normalise": spec.normalise,
        "split": 1, "places": torch.get_num_threads(),
    }  # fmt: skip


def point_at(call: Arguments, inputs: TileInputs, dtype: torch.dtype = torch.float32, prefix: str = "") -> None:
    """Let a ``Call`` point to a call's tensors, with q, k and v in ``dtype``. prefix: of members in a larger struct."""
    for name, x in zip("qkv", inputs[:3], strict=True):
        call.point(f"{prefix}{name}", x, dtype)
    edges = inputs.cu_seqlens
    call.point(f"{prefix}scale", inputs.scale)
    call.point(f"{prefix}coefficients", inputs.coefficients)
    call.point(f"{prefix}key_mask", inputs.key_mask)
    call.point(f"{prefix}edges", None if edges is None else edges.to("cpu"))
    call.point(f"{prefix}slope", inputs.slope)
    for name, x in (("row", inputs.row), ("col", inputs.col)):
        call.point(f"{prefix}{name}", None if x is None else x.expand(inputs.q.shape[0], -1, -1))


def parts_of(inputs: TileInputs) -> tuple[int, int]:
    """(number of parts that backward splits the queries into, number of buffers for their sums).

    With fewer heads than threads queries are split, and each part needs sums of its own.
    """
    (batch, _, queries, _), kv_heads, threads = inputs.q.shape, inputs.k.shape[1], torch.get_num_threads()
    split = max(1, min(-(-threads // max(batch * kv_heads, 1)), -(-queries // 64)))
    return split, threads if split == 1 else split * batch * kv_heads


def _library(link: Formula, q: Tensor, v: Tensor) -> ctypes.CDLL:
    """The library for these tokens. Those that multiply pairs of bfloat16 take even dimensions."""
    pairs = q.dtype == torch.bfloat16 and q.shape[3] % 2 == 0 and v.shape[3] % 2 == 0
    return load(link, FAMILY.source, FAMILY.isa(link, torch.bfloat16 if pairs else torch.float32))


def _trial(code: Formula, dtype: torch.dtype) -> Results:
    x = torch.full((1, 8, 256, 64), 0.125, dtype=dtype, device="cpu")
    numbers = torch.full((8, 8), 0.5, dtype=torch.float32, device="cpu")
    return forward(TileInputs(x, x, x, numbers[0], numbers), TileSpec(code, "row", inference=True))


def forward(inputs: TileInputs, spec: TileSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, H, T, P), factor (B, H, T), rest). In log space with the row anchor, factor is log sum_s K.

    q, k, v and y are of one type: float32, bfloat16 or float16. ``rest`` is the rounding error of y in 16 bits.
    Backward takes dy . y with it, as a rounded y would spoil gradients that cancel. It is empty in float32 and when no
    gradient is asked for.
    """
    q, _, v = inputs[:3]
    dtype = q.dtype
    call = Arguments(CALL, rows_and_keys(inputs, spec), {"edges": inputs.documents + 1})
    call.set({"type": TYPES[dtype]})
    point_at(call, inputs, dtype)
    y, factor = call.new("y", dtype=dtype), call.new("factor")
    kept = not spec.inference and dtype != torch.float32
    rest = call.new("rest", dtype=dtype) if kept else q.new_empty(0)
    call.run(_library(spec.link, q, v).zonal_forward)
    return y, factor, rest


def backward(
    grads: Gradients, inputs: TileInputs, results: Results, spec: TileSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k, v in their types, of scale (H,), of coefficients (H, n) in float64, 0 if not learned, and of
    row and col.
    """
    (dy,), (q, _, v, _, coefficients, *_), (y, factor, rest) = grads, inputs, results
    assert dy is not None
    scaled, learned, dtype = "scale" in asked, spec.learned if "coefficients" in asked else 0, q.dtype
    split, places = parts_of(inputs)
    call = Arguments(CALL, rows_and_keys(inputs, spec), {"edges": inputs.documents + 1})
    numbers = {"type": TYPES[dtype], "learned": learned, "split": split}
    call.set(numbers, {"places": places, "columns": q.shape[3] + v.shape[3]})
    point_at(call, inputs, dtype)
    call.point("y", y, dtype)
    call.point("rest", rest if rest.numel() else None, dtype)
    call.point("factor", factor)
    call.point("dy", dy, dtype)
    call.new("sums")
    found = tuple(call.new(name, dtype=dtype) for name in ("dq", "dk", "dv"))
    dscale = call.new("dscale", zero=True) if scaled else None
    dcoefficients = call.new("dcoefficients", zero=True) if learned else None
    drow = call.new("drow", zero=True) if "row" in asked else None
    dcol = call.new("dcol", zero=True) if "col" in asked else None
    call.run(_library(spec.link, q, v).zonal_backward)
    dc = None if dcoefficients is None else padded(dcoefficients.sum((0, 1)), coefficients)
    return (
        *found,
        None if dscale is None else dscale.sum((0, 1)),
        dc,
        _of(inputs.row, drow),
        _of(inputs.col, None if dcol is None else dcol.sum(0)),
    )


def _of(x: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient of a part of the prior that all sequences may share."""
    return None if x is None or gradient is None else gradient.sum_to_size(x.shape)


def padded(gradient: Tensor, coefficients: Tensor) -> Tensor:
    """Of the learned coefficients (H, learned), with zeros for the constants behind them: (H, n)."""
    return torch.nn.functional.pad(gradient, (0, coefficients.shape[1] - gradient.shape[1]))


def shapes(inputs: TileInputs, spec: TileSpec) -> Results:
    """Empty results of ``forward``."""
    q, shape = inputs.q, (*inputs.q.shape[:3], inputs.v.shape[3])
    kept = q.device.type == "cpu" and q.dtype != torch.float32 and not spec.inference
    return q.new_empty(shape), q.new_empty(shape[:3], dtype=torch.float32), q.new_empty(shape if kept else 0)


_CUDA = on_cuda("forward", "backward")
tile = Op(
    "tile",
    TileInputs,
    TileSpec,
    results=3,
    learned=("q", "k", "v", "scale", "coefficients", "row", "col"),
    bodies={
        "cpu": Body(forward, backward),
        # it has no log prior
        "cuda": Body(_CUDA.forward, lambda *given: (*_CUDA.backward(*given), None, None)),
    },
    shapes=shapes,
    fixed=(1, 2),
    mapped=("tttppme---", "ttt"),
    refusal=only_first("tiled"),
)
"""y_t = factor_t sum_s K_ts v_s as (y, factor, rest) of ``forward``."""

__all__ = [
    "CALL", "FAMILY", "SHAPES", "TileInputs", "TileSpec", "backward", "forward", "padded", "parts_of", "point_at",
    "rows_and_keys", "shapes", "tile",
]  # fmt: skip

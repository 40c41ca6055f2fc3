"""The kernel for a few tokens after a memory of sums, also before a window: decode.cpp, CPU, float32 and shorter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.score import FeatureLayer
from zonal.algebra.score.feature_layer import underflow_error
from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import TYPES, Anchor, Arguments, address, dense_last, empty
from zonal.kernels.features import blocks_of
from zonal.kernels.native import Family
from zonal.kernels.sums import tables

FAMILY = Family("decode", FORMULAS["identity"], cuda=False)
_DECODER = abi.Struct("decode.cpp", "Decoder", {
    "scale": "H", "weights": "scaled F", "roots": "roots", "tails": "powers E", "near": "H", "share": "H",
    "query.weight": "query.heads D query.rows", "key.weight": "key.heads D key.rows",
})  # fmt: skip
_STEP = abi.Struct("decode.cpp", "Step")
_OFF, _LOST = 2, 3


@dataclass(frozen=True)
class DecodeSpec:
    """The rules of a decoder: y_t = factor_t sum_s D_ts l(S_ts) v_s, over the tokens of a memory and those up to t.

    D_ts is the product of what the tokens after s leave of the past, 1 where nothing fades.

    Token t itself is included with include_self only.

    shape: (B, H, Hkv, D, P). degree, lowest: of the powers of S in l. anchor, normalise: as in ``TileSpec``.
    positive: whether l >= 0 everywhere; a row with a negative sum is then NaN.
    """

    shape: tuple[int, int, int, int, int]
    degree: int
    lowest: int
    anchor: Anchor
    positive: bool
    include_self: bool
    normalise: bool = False


class Maps(NamedTuple):
    """The feature maps of queries and of keys, where the kernel makes them: the spec's degree is then of features."""

    query: FeatureLayer
    key: FeatureLayer


@dataclass(frozen=True)
class WindowSpec:
    """The last ``size`` keys, and the ``first`` ones of a sequence, weigh e^{near_h q . k}. All others weigh share_h
    times what the decoder's own rules say of keys times key_scale. Rows are divided by the sum of both.

    near, share: (H,).
    """

    size: int
    first: int
    near: Tensor
    share: Tensor
    key_scale: float


@dataclass
class Window:
    """The keys and values that a decoder with a window keeps one by one, in one of ``TYPES``. Steps change it in place.

    k (B, Hkv, room, D), v (B, Hkv, room, P): the last ones end at place ``end``, where there is room for the new ones;
    ``held`` (B,) int64 of them are real, at most the window's size. opening_k, opening_v (B, Hkv, first, ·): the first
    ones that have left the window, ``opened`` (B,) int64 of them.
    """

    k: Tensor
    v: Tensor
    end: int
    held: Tensor
    opening_k: Tensor
    opening_v: Tensor
    opened: Tensor


class Decoder:
    """The kernel with the rules and numbers that stay from token to token. It may be used by several threads.

    scale (H,): of S_ts = scale_h f(q_t) . f(k_s). weights (H or 1, features): the link's coefficient per feature.
    maps: S_ts = phi(scale_h q_t) . phi(k_s) instead. window: with the keys of a window, which each step is given.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        scale: Tensor,
        weights: Tensor,
        maps: Maps | None = None,
        window: WindowSpec | None = None,
    ) -> None:
        batch, heads, kv_heads, dim, value_dim = spec.shape
        self.spec = spec
        self._guarded = "" if maps is None else maps.query.name
        made = dim if maps is None else _width(maps.key)
        roots, tails = _of_powers(spec, made) if spec.degree > 2 else (None, None)
        call = Arguments(_DECODER, {
            "B": batch, "H": heads, "Hkv": kv_heads, "D": dim, "E": made, "P": value_dim, "F": weights.shape[1],
            "degree": spec.degree, "lowest": spec.lowest, "heads_weigh": weights.shape[0] > 1,
            "anchor": abi.ANCHORS[spec.anchor], "positive": spec.positive, "normalise": spec.normalise,
            "include_self": spec.include_self, "key_scale": 1.0,
        }, {
            "scaled": weights.shape[0], "roots": 0 if roots is None else roots.shape[0], "powers": spec.degree - 1,
        })  # fmt: skip
        for name, x in (("scale", scale), ("weights", weights), ("roots", roots), ("tails", tails)):
            call.point(name, x)
        for name, layer in () if maps is None else maps._asdict().items():
            call.set({f"{name}.{key}": value for key, value in _sizes(layer).items()})
            call.point(f"{name}.weight", None if layer.weight is None else layer.weight.mT)
            call.point_at_bytes(f"{name}.blocks", blocks_of(layer.activations))
        if window is not None:
            call.set({"window": window.size, "first": window.first, "key_scale": window.key_scale})
            call.point("near", window.near)
            call.point("share", window.share)
        self._kept, self._rules, self._window = call, call.packed(), window
        self._state = batch, kv_heads, weights.shape[1], value_dim + (spec.anchor == "row")
        self._function = FAMILY.load().zonal_decode

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        count: int,
        padding: Tensor,
        into: Tensor | None = None,
        keep: Tensor | None = None,
        window: Window | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """y (B, H, T, P) in the type of q, and the state after the tokens, in a new tensor or ``into`` another.

        None when the environment says ZONAL_KERNELS=off. The kernel reads the variable itself, ten times faster than
        ``os.environ``.

        q (B, H, T, D), k (B, Hkv, T, D), v (B, Hkv, T, P), all of one of ``TYPES``; state (B, Hkv, features, P,
        or P + 1 with the row anchor) float32 and padding (B,) int64, contiguous. count: tokens in the state, padding
        included. into: like the state, and may be the state itself. keep (B, Hkv, T) float32, contiguous: what each
        token leaves of the state before it; None where nothing fades. window: the kept keys of a decoder with a
        ``WindowSpec``, in the type of q; the new ones are added to them.

        Raises: ArgumentError where all features of some vector are 0 and may not be; nothing has changed then.
        """
        qs, ks, vs, (batch, heads, tokens, _) = q.stride(), k.stride(), v.stride(), q.shape
        if not qs[3] == ks[3] == vs[3] == 1 or q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = (dense_last(x, x.dtype) for x in (q, k, v))
            qs, ks, vs = q.stride(), k.stride(), v.stride()
        dtype, (_, _, kv_heads, dim, value_dim) = q.dtype, self.spec.shape
        # Allocated first, in the memory of the state before the last. A small y there would move states to new pages.
        after = torch.empty_like(state) if into is None else into
        # empty_like takes half the time of empty, which is a good part of a short step
        like_q = value_dim == dim and q.is_contiguous()
        y = torch.empty_like(q) if like_q else empty(batch, heads, tokens, value_dim, dtype=dtype)
        step = _STEP.pack(
            address(q, dtype, (batch, heads, tokens, dim), strided=True),
            address(k, dtype, (batch, kv_heads, tokens, dim), strided=True),
            address(v, dtype, (batch, kv_heads, tokens, value_dim), strided=True), *qs, *ks, *vs, tokens, TYPES[dtype],
            address(state, torch.float32, self._state), address(after, torch.float32, self._state), count,
            address(padding, torch.int64, (batch,)), address(y, dtype, (batch, heads, tokens, value_dim)),
            address(keep, torch.float32, (batch, kv_heads, tokens)), *self._places(window, dtype, tokens),
        )  # fmt: skip
        failed = self._function(self._rules, step)
        if not failed:
            if window is not None:
                window.end += tokens
            return y, after
        if failed == _OFF:
            return None
        if failed == _LOST:
            raise underflow_error(self._guarded, torch.float32)
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")

    def _places(self, window: Window | None, dtype: torch.dtype, tokens: int) -> tuple[int, ...]:
        """The last members of a step. Raises: TypeError for a window that does not fit the rules, or has no room."""
        if window is None or self._window is None:
            if window is not None or self._window is not None:
                raise TypeError("kernel: a window is required by decoders with a WindowSpec, and by no others.")
            return (0,) * 8
        (batch, _, kv_heads, dim, value_dim), room, first = self.spec.shape, window.k.shape[2], self._window.first
        if window.end + tokens > room:
            raise TypeError(f"kernel: room for {tokens} tokens at place {window.end} was required, there are {room}.")
        return (
            address(window.k, dtype, (batch, kv_heads, room, dim)),
            address(window.v, dtype, (batch, kv_heads, room, value_dim)),
            address(window.opening_k, dtype, (batch, kv_heads, first, dim)),
            address(window.opening_v, dtype, (batch, kv_heads, first, value_dim)),
            address(window.held, torch.int64, (batch,)), address(window.opened, torch.int64, (batch,)), room,
            window.end,
        )  # fmt: skip


def _of_powers(spec: DecodeSpec, made: int) -> tuple[Tensor, Tensor]:
    """The ``roots`` and ``tails`` of the kernel's rules for powers above 2 of a product of ``made`` numbers."""
    table = tables(spec.degree, spec.lowest, made)
    roots = empty(table.roots.shape[0]).scatter_(0, table.place.long(), table.roots)
    tails = [[math.comb(made - i + power - 2, power - 1) for i in range(made)] for power in range(2, spec.degree + 1)]
    return roots[1 - spec.lowest + made :].clone(), torch.tensor(tails, dtype=torch.int32, device="cpu")


def _width(layer: FeatureLayer) -> int:
    """The number of features of a layer."""
    made = sum(each.count for each in layer.activations)
    return layer.left * (made - layer.left) if layer.left else made


def _sizes(layer: FeatureLayer) -> Mapping[str, int]:
    """The members of the kernel's ``Map`` besides the matrix and functions of a layer."""
    heads, rows = (1, 0) if layer.weight is None else layer.weight.shape[:2]
    return {
        "heads": heads, "rows": rows, "count": len(layer.activations),
        "made": sum(each.count for each in layer.activations), "unit": layer.unit, "softmax": layer.softmax,
        "left": layer.left, "nodes": layer.nodes, "guarded": bool(layer.name),
    }  # fmt: skip


__all__ = ["FAMILY", "DecodeSpec", "Decoder", "Maps", "Window", "WindowSpec"]

"""The kernels of ridge and Koopman read-outs.

By default it compiles, with keys of every size and values of 64 numbers: in bfloat16 powers 0, 1 and 2 of a causal
call, and power 2 with packed documents, grouped queries, a memory and in float64; in other types power 2 of a causal
call.
"""

import torch
from torch import Tensor

from tools.triton_aot.compiler import Family, Kind, Variant, name_of
from zonal.kernels.ridge import Before, RidgeInputs, RidgeSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.ridge_backward import backward_in
from zonal.kernels.triton.ridge_forward import forward_in
from zonal.kernels.triton.sizes import RIDGE_LARGEST

# by what a report calls a link
POWERS = {"ridge-0": 0, "ridge-1": 1, "ridge-2": 2}
MASKS = ("causal", "packed", "gqa", "memory", "double")  # double: a causal call in float64


def default(links: list[str], dtypes: list[str]) -> list[Kind]:
    """The first type has all powers with the first mask and the last power with every mask; others the last power."""
    first, last = dtypes[0], links[-1]
    return [
        *((link, MASKS[0], first) for link in links[:-1]),
        *((last, mask, first) for mask in MASKS),
        *((last, MASKS[0], dtype) for dtype in dtypes[1:]),
    ]


def launches(variant: Variant, tokens: int = 16384) -> list[tiles.Launch]:
    """The kernels of a forward and a backward with all gradients."""
    power, dtype, dim = POWERS[variant.link], getattr(torch, variant.dtype), variant.dim
    memory, packed = variant.mask == "memory", variant.mask == "packed"
    batch, heads = 1 if packed else 2, 8
    kv_heads = heads // 4 if variant.mask == "gqa" else heads

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    documents = 4
    lo, hi, starts = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), None
    if packed:
        lo = starts = hi // (tokens // documents) * (tokens // documents)
    q, k, v = (
        meta(batch, heads, tokens, dim),
        meta(batch, kv_heads, tokens, dim),
        meta(batch, kv_heads, tokens, RIDGE_LARGEST),
    )
    scale, rho = meta(heads, kind=torch.float32), meta(kv_heads, kind=torch.float32)
    before = Before()
    if memory:
        square, last = (
            meta(batch, kv_heads, dim, dim, kind=torch.float64),
            meta(batch, kv_heads, dim, kind=torch.float64),
        )
        before = Before(
            square,
            meta(batch, kv_heads, RIDGE_LARGEST, dim, kind=torch.float64),
            square if power else None,
            last if power else None,
        )
    edges = meta(documents + 1, kind=torch.int64) if packed else None
    inputs, spec = (
        RidgeInputs(q, k, v, scale, rho, *before, lo=lo, hi=hi, segment_start=starts, edges=edges),
        RidgeSpec((power,) * heads, 1.0),
    )
    asked = frozenset(("q", "k", "v", "scale", "rho", *(Before._fields if memory else ())))
    with tiles.recorded((variant.device // 10, variant.device % 10)) as found:
        results = forward_in(inputs, spec, variant.mask == "double")
        backward_in(results[:1], inputs, spec, asked, variant.mask == "double")
    # forward's kernels run again for backward
    return list({(launch.kernel, launch.constants.get("REVERSE")): launch for launch in found}.values())


def title(launch: tiles.Launch) -> str:
    """The kernel's name, and which way it goes."""
    reverse = launch.constants.get("REVERSE")
    return name_of(launch) if reverse is None else f"{name_of(launch)} {'backwards' if reverse else 'forwards'}"


FAMILY = Family(
    about="the kernels for ridge read-outs",
    links=tuple(POWERS),
    masks=MASKS,
    dims=(24, 32, 48, 56, 64),
    kernels="sums, carry, inverse, factor, read, rows_back, row_sums, keys_back or steps_back",
    default=default,
    launches=launches,
    title=title,
)

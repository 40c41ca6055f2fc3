"""The kernels of attention by distance.

By default a causal call of each kind is compiled in every type and size, and in bfloat16 the first kind with
every mask.
"""

import itertools

import torch
from torch import Tensor

from tools.triton_aot.compiler import Family, Kind, Variant, name_of
from tools.triton_aot.tile import MASKS
from zonal.formula import FORMULAS, Term
from zonal.kernels.distance import DistanceInputs, DistanceSpec
from zonal.kernels.tile import TileSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.distance_backward import backward
from zonal.kernels.triton.distance_forward import forward

# (m, n, p) by the size of a point; the last is cut in tiles of sixteen
PARTS = {96: (32, 32, 32), 48: (16, 16, 16), 16: (6, 5, 5)}
# by what a report calls a link: whether there is a dot product, and how many waves
KINDS = {"rewa": (False, 0), "rewa-dot": (True, 0), "rewa_oscillatory": (False, 2)}


def default(links: list[str], dtypes: list[str]) -> list[Kind]:
    """All kinds with the first mask, and every mask with the first kind in the first type."""
    first, *others = MASKS
    return [
        *((link, first, dtype) for link, dtype in itertools.product(links, dtypes)),
        *((links[0], mask, dtypes[0]) for mask in others),
    ]


def launches(variant: Variant, tokens: int = 4096) -> list[tiles.Launch]:
    """The kernels of a forward, a backward with all gradients and a decoding step."""
    mask, dtype, dim = MASKS[variant.mask], getattr(torch, variant.dtype), variant.dim
    product, waves = KINDS[variant.link]
    batch, heads = 1 if mask.packed else 2, 8
    m, n, p = PARTS[dim]
    terms = (
        Term("euclidean", 0, m, 1e-4),
        Term("sphere", m, n, 1e-4),
        Term("hyperbolic", m + n, p, 1e-4, p**-0.5),
        *([Term("product", 0, dim)] if product else []),
    )
    rules = TileSpec(FORMULAS["exp"], "row", causal=mask.causal, left=mask.left, right=mask.right)
    spec = DistanceSpec(rules, terms, waves)

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    q, k = meta(batch, heads, tokens, dim), meta(batch, heads // mask.groups, tokens, dim)
    weights, coefficients = (
        meta(batch, heads, tokens, len(terms), kind=torch.float32),
        meta(heads, 3 * waves, kind=torch.float32),
    )
    padding = meta(batch, tokens, kind=torch.bool) if mask.key_mask else None
    edges = meta(9, kind=torch.int32) if mask.packed else None
    with tiles.recorded((variant.device // 10, variant.device % 10)) as found:
        inputs = DistanceInputs(q, k, k, weights, coefficients, padding, edges)
        results = forward(inputs, spec)
        backward(results[:1], inputs, results, spec, frozenset(("q", "k", "v", "weights", "coefficients")))
        # packed documents have as many queries as keys: they are never decoded
        few = meta(batch, heads, 1, dim)
        forward(inputs._replace(q=few, weights=weights[:, :, :1], cu_seqlens=None), spec)
    return list({(title(launch), launch.constants.get("FIRST")): launch for launch in found}.values())


def title(launch: tiles.Launch) -> str:
    """The kernel's name; a forward whose keys are split is called so."""
    name = name_of(launch).removeprefix("distance_")
    return "decode" if launch.constants.get("SPLIT") and name == "forward" else name


FAMILY = Family(
    about="the kernels for attention by distance",
    links=tuple(KINDS),
    masks=tuple(MASKS),
    dims=tuple(PARTS),
    kernels="notes, forward, decode, keys, queries, combine or row_products",
    default=default,
    launches=launches,
    title=title,
    only=True,
)

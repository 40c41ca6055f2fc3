"""The tile kernels. By default every link is compiled with the masks that need least and most, in every type and head
size, and one link with each mask: some 1,400 kernels for both devices, which take about an hour on one core.
"""

import itertools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tools.triton_aot.compiler import Family, Kind, Variant
from zonal.formula import Formula
from zonal.kernels.tile import TileInputs, TileSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.backward import backward
from zonal.kernels.triton.forward import DECODE_QUERIES, forward

_LINKS = "zonal.kernels.triton.links:"


class Link(NamedTuple):
    """A link as an operator uses it: its code, how many coefficients are learned, the anchor, and normalisation."""

    code: Formula
    learned: int
    anchor: Literal["row", "count", "raw"]
    normalise: bool


LINKS: dict[str, Link] = {
    "horner": Link(Formula("horner", triton=_LINKS + "horner", domain=(-1.0, 1.0)), 6, "count", True),
    "exp": Link(Formula("exp", log=True), 0, "row", False),
    "yat": Link(Formula("yat", triton=_LINKS + "yat", domain=(-1.0, 1.0), constants=(0.01,)), 0, "row", True),
    "squared_affine": Link(Formula("squared_affine", triton=_LINKS + "squared_affine"), 1, "row", True),
}


class Mask(NamedTuple):
    """Who sees whom. queries: how many the decoding step has, or with ``alone`` the backward pass too."""

    causal: bool = True
    left: int | None = None
    right: int | None = None
    key_mask: bool = False
    packed: bool = False
    groups: int = 1
    queries: int = 1
    alone: bool = False


MASKS: dict[str, Mask] = {
    "causal": Mask(),
    "window": Mask(causal=False, left=512, right=512),
    "padding": Mask(key_mask=True),
    "packed": Mask(packed=True),
    # numbers that are 1 are known to the compiler
    "one": Mask(groups=4, alone=True),
    # as many rows a program as decoding ever has
    "gqa": Mask(groups=4, queries=DECODE_QUERIES),
    "all": Mask(causal=False, left=512, right=512, key_mask=True, packed=True, groups=4, queries=DECODE_QUERIES),
}
# masks that ask for least and for most; the link with most to hold: six coefficients and their gradients
_ENDS, _FULLEST = ("causal", "all"), "horner"


def default(links: list[str], dtypes: list[str]) -> list[Kind]:
    """All links with ``_ENDS``, and every mask with the link that needs most."""
    fullest = [link for link in links if link == _FULLEST]
    return [*itertools.product(links, _ENDS, dtypes), *itertools.product(fullest, MASKS, dtypes)]


def launches(variant: Variant, tokens: int = 4096) -> list[tiles.Launch]:
    """The kernels of a forward, a backward with all gradients and a decoding step."""
    link, mask, dtype = LINKS[variant.link], MASKS[variant.mask], getattr(torch, variant.dtype)
    spec = TileSpec(
        link.code,
        link.anchor,
        link.normalise,
        causal=mask.causal,
        left=mask.left,
        right=mask.right,
        learned=link.learned,
    )
    batch, heads = 1 if mask.packed else 2, 8

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    scale, coefficients = (
        meta(heads, kind=torch.float32),
        meta(heads, link.learned + len(link.code.constants), kind=torch.float32),
    )
    few = meta(batch, heads, mask.queries, variant.dim)
    q = few if mask.alone else meta(batch, heads, tokens, variant.dim)
    k = meta(batch, heads // mask.groups, tokens, variant.dim)
    padding = meta(batch, tokens, kind=torch.bool) if mask.key_mask else None
    edges = meta(9, kind=torch.int32) if mask.packed else None
    with tiles.recorded((variant.device // 10, variant.device % 10)) as found:
        inputs = TileInputs(q, k, k, scale, coefficients, padding, edges)
        results = forward(inputs, spec)
        backward(results[:1], inputs, results, spec, frozenset(("q", "k", "v", "scale", "coefficients")))
        # packed documents have as many queries as keys: they are never decoded
        forward(inputs._replace(q=few, cu_seqlens=None), spec)
    return list({launch.kernel: launch for launch in found}.values())


FAMILY = Family(
    about="the tile kernels",
    links=tuple(LINKS),
    masks=tuple(MASKS),
    dims=(64, 80, 128),  # 80 is laid in tiles of 128 columns
    kernels="forward, decode, combine, keys, queries or row_products",
    default=default,
    launches=launches,
)

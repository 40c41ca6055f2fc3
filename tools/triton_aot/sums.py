"""The kernels for sums over features.

By default every link is compiled with the causal mask, and every mask with the link that has most features, in every
type and head size. --sample compiles what results/benchmarks/triton_sums_aot.json holds, in some twenty minutes on two
cores.
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from tools.triton_aot.compiler import DEVICES, DTYPES, Family, Kind, Variant, name_of
from tools.triton_aot.tile import Link
from zonal.formula import FORMULAS
from zonal.kernels.sums import SumsInputs, SumsSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.sums_backward import backward
from zonal.kernels.triton.sums_forward import forward

# degree of the polynomial and the lowest power its features have, by link
LINKS: dict[str, tuple[Link, int, int]] = {
    "squared_affine": (Link(FORMULAS["squared_affine"], 1, "row", True), 2, 0),
    "gegenbauer": (Link(replace(FORMULAS["polynomial"], domain=(-1.0, 1.0)), 3, "count", True), 2, 0),
    "identity": (Link(FORMULAS["identity"], 0, "row", False), 1, 1),
    "ssd": (Link(FORMULAS["identity"], 0, "raw", False), 1, 1),
}
MASKS = ("causal", "padding", "packed", "gqa", "memory", "decay")  # decay: of sums that a memory goes on from
# (link, masks, head sizes) of --sample: sums that stay and that fade, and the state of Mamba
SAMPLE = (("squared_affine", ("packed", "decay"), (16, 32, 64)), ("ssd", ("decay",), (64, 128)))


def sample() -> list[Variant]:
    """``SAMPLE`` in every type on every device."""
    return [
        Variant(link, mask, dtype, dim, device)
        for link, masks, dims in SAMPLE for mask, dtype, dim, device in itertools.product(masks, DTYPES, dims, DEVICES)
    ]  # fmt: skip


def default(links: list[str], dtypes: list[str]) -> list[Kind]:
    """All links with the first mask, all masks with one link."""
    pairs = [*((link, MASKS[0]) for link in links), *((links[0], mask) for mask in MASKS[1:])]
    return [(*pair, dtype) for pair, dtype in itertools.product(pairs, dtypes)]


def launches(variant: Variant, tokens: int = 16384) -> list[tiles.Launch]:
    """The kernels of a forward and a backward with all gradients."""
    (link, degree, lowest), dtype = LINKS[variant.link], getattr(torch, variant.dtype)
    memory, packed = variant.mask in ("memory", "decay"), variant.mask == "packed"
    spec = SumsSpec(link.code, degree, lowest, link.anchor, link.normalise, keeps=memory, learned=link.learned)
    batch, heads, dim = 1 if packed else 2, 8, variant.dim
    kv_heads = heads // 4 if variant.mask == "gqa" else heads

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    lo = torch.zeros(tokens, dtype=torch.int64)
    hi = torch.arange(1, tokens + 1)
    starts = torch.arange(tokens) // 5000 * 5000 if packed else None
    q, k = meta(batch, heads, tokens, dim), meta(batch, kv_heads, tokens, dim)
    scale, coefficients = (
        meta(heads, kind=torch.float32),
        meta(heads, link.learned + len(link.code.constants), kind=torch.float32),
    )
    monomials = meta(heads, degree + 1, kind=torch.float32)
    mask = meta(batch, tokens, kind=torch.bool) if variant.mask == "padding" else None
    initial = (
        meta(batch, kv_heads, spec.dimension(dim), dim + (spec.anchor == "row"), kind=torch.float32) if memory else None
    )
    before = meta(batch, kind=torch.float64) if memory else None
    decay = meta(batch, kv_heads, tokens, kind=torch.float32) if variant.mask == "decay" else None
    seen = mask, lo if starts is None else starts, hi, starts
    inputs = SumsInputs(q, k, k, scale, coefficients, monomials, initial, before, decay, None, *seen)
    asked = frozenset(("q", "k", "v", "scale", "coefficients", "monomials", *(("initial",) if memory else ())))
    with tiles.recorded((variant.device // 10, variant.device % 10)) as found:
        results = y, _, final, _ = forward(inputs, spec)
        backward((y, final if memory else None), inputs, results, spec, asked)
    # the same kernel for keys and for queries, for pairs and for the rest, forwards and backwards
    return list(
        {
            (launch.kernel, *(launch.constants.get(name) for name in ("OF_KEYS", "SQUARES", "REVERSE"))): launch
            for launch in found
        }.values()
    )


def title(launch: tiles.Launch) -> str:
    """The kernel's name, and for what."""
    constants = launch.constants
    words = {"OF_KEYS": ("queries", "keys"), "SQUARES": ("rest", "pairs"), "REVERSE": ("forwards", "backwards")}
    return " ".join([name_of(launch), *(words[name][constants[name]] for name in words if name in constants)])


FAMILY = Family(
    about="the kernels for sums over features",
    links=tuple(LINKS),
    masks=MASKS,
    dims=(16, 32, 64, 128),
    kernels="absorb, carry, read, read_back, keys_back or row_products",
    default=default,
    launches=launches,
    title=title,
    sample=sample,
)

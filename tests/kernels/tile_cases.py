"""Calls of a tile kernel and what must come out of them: link x anchor x mask, in float64 by the definition."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from zonal import Operator, anchor, link, prior, score
from zonal.algebra import definition
from zonal.formula import Formula
from zonal.kernels.tile import TileSpec

_LINKS = "zonal.kernels.triton.links:"
# the declaration, the kernel's code for it, how many of its coefficients are learned
LINKS: dict[str, tuple[link.Link, Formula, int]] = {
    "exp": (link.Exp(), Formula("exp", log=True), 0),
    "identity": (link.Identity(), Formula("identity", triton=_LINKS + "identity"), 0),
    "horner": (link.Gegenbauer((3.0,), 4), Formula("horner", triton=_LINKS + "horner", domain=(-1.0, 1.0)), 4),
    "yat": (link.Yat(0.1), Formula("yat", triton=_LINKS + "yat", domain=(-1.0, 1.0), constants=(0.1,)), 0),
    "euclidean": (link.Exp(), Formula("euclidean", triton=_LINKS + "euclidean", log=True, constants=(0.1,)), 0),
    "squared_affine": (
        link.SquaredAffine(learn_bias=True),
        Formula("squared_affine", triton=_LINKS + "squared_affine"),
        1,
    ),
    "polynomial_square": (
        link.PolynomialSquare((0.04, 1.0, 0.3), floor=0.01, learn=True),
        Formula("polynomial_square", triton=_LINKS + "polynomial_square", constants=(0.01,)),
        3,
    ),
}
ANCHORS: dict[str, anchor.Anchor] = {"row": anchor.Row(allow_signed=True), "count": anchor.Count(), "raw": anchor.Raw()}


@dataclass(frozen=True)
class Mask:
    """Shapes, and who sees whom."""

    queries: int = 21
    keys: int = 21
    key_dim: int = 5
    value_dim: int = 3
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    causal: bool = True
    include_self: bool = True
    chunk: int = 0
    left: int | None = None
    right: int | None = None
    packed: tuple[int, ...] = ()
    padding: bool = False
    normalise: bool = True
    strided: bool = False


MASKS: dict[str, Mask] = {
    "causal": Mask(queries=37, keys=37),
    "strict": Mask(include_self=False, normalise=False, value_dim=17),
    "bidirectional": Mask(causal=False, queries=18, keys=37, key_dim=17),
    "window": Mask(left=6, queries=20, keys=35),
    "window-both-sides": Mask(causal=False, left=4, right=17, queries=19, keys=33, strided=True),
    "chunk": Mask(causal=False, chunk=5, queries=17, keys=23, normalise=False),
    "packed": Mask(packed=(0, 1, 7, 19, 33), queries=33, keys=33),
    "packed-chunk": Mask(causal=False, packed=(0, 3, 18, 21), chunk=4, left=9),
    "packed-bidirectional": Mask(causal=False, packed=(0, 17, 20), queries=20, keys=20),
    "padding": Mask(batch=2, padding=True, queries=18, keys=18),
    "padding-bidirectional": Mask(batch=2, padding=True, causal=False, queries=3, normalise=False),
    "gqa": Mask(heads=4, kv_heads=2, queries=17, keys=17),
    "fewer-queries": Mask(queries=3, keys=33, normalise=False, strided=True),
    "more-queries": Mask(queries=33, keys=7),
    "one-token": Mask(queries=1, keys=1),
    "no-keys": Mask(queries=3, keys=0, causal=False),
    "decode": Mask(queries=3, keys=70, heads=2),
    "decode-window": Mask(queries=2, keys=90, heads=4, kv_heads=2, left=40, padding=True),
    "alone": Mask(packed=tuple(range(34)), queries=33, keys=33),
}


# for the tiles that calls have: just past the border of one, at each width that tile sizes are chosen by
OFF_MASKS: dict[str, Mask] = {
    "off-64": Mask(queries=133, keys=131, key_dim=64, value_dim=64),
    "off-128": Mask(causal=False, left=40, right=17, queries=133, keys=135, key_dim=128, value_dim=100),
    "off-256": Mask(queries=70, keys=67, key_dim=256, value_dim=130, batch=2, padding=True),
    "off-decode-64": Mask(queries=3, keys=517, key_dim=64, value_dim=64, heads=2),
    "off-decode-128": Mask(queries=3, keys=517, key_dim=128, value_dim=128),
    "off-decode-256": Mask(queries=3, keys=517, key_dim=256, value_dim=256),
}


# for a device: many tiles of the kernels' own sizes, and the head sizes that tile sizes are chosen by
LARGE_MASKS: dict[str, Mask] = {
    "long-causal": Mask(queries=700, keys=700, key_dim=64, value_dim=64, batch=2, heads=4, kv_heads=2),
    "long-128": Mask(queries=515, keys=515, key_dim=128, value_dim=128, heads=2, kv_heads=2, strided=True),
    "long-padding": Mask(queries=300, keys=611, key_dim=80, value_dim=96, batch=2, padding=True),
    "long-window": Mask(causal=False, left=200, right=100, queries=640, keys=640, key_dim=64, value_dim=64),
    "long-packed": Mask(packed=(0, 1, 130, 400, 401, 640), queries=640, keys=640, key_dim=64, value_dim=64, heads=2),
    "long-256": Mask(queries=200, keys=200, key_dim=200, value_dim=256),
    "long-decode": Mask(queries=1, keys=5000, key_dim=128, value_dim=128, heads=8, kv_heads=2),
    "long-decode-16": Mask(queries=16, keys=3000, key_dim=64, value_dim=64, heads=8, kv_heads=2, padding=True),
}


@dataclass(frozen=True)
class Case:
    """One call."""

    link: str
    anchor: Literal["row", "count", "raw"]
    mask: str
    dtype: torch.dtype = torch.float32
    size: float = 1.0  # of the entries of q and k

    @property
    def name(self) -> str:
        extra = "" if self.size == 1 else f"/{self.size:g}"
        return f"{self.link}/{self.anchor}/{self.mask}/{str(self.dtype).removeprefix('torch.')}{extra}"

    @property
    def repeats(self) -> bool:
        """Whether a second run is compared bit by bit."""
        return self.mask in ("gqa", "decode-window") and self.anchor == "row"

    @property
    def rules(self) -> Mask:
        return (MASKS | OFF_MASKS | LARGE_MASKS)[self.mask]

    @property
    def spec(self) -> TileSpec:
        rules = self.rules
        return TileSpec(
            LINKS[self.link][1],
            self.anchor,
            rules.normalise,
            causal=rules.causal,
            include_self=rules.include_self,
            chunk=rules.chunk,
            left=rules.left,
            right=rules.right,
        )


def _cases() -> dict[str, Case]:
    """Each link with each mask, under anchors that take turns, in float32; each mask in 16 bits; large, small and
    clustered scores.
    """
    kinds = list(ANCHORS)
    found = [
        Case(name, kinds[(i + j) % len(kinds)], mask) for i, mask in enumerate(MASKS) for j, name in enumerate(LINKS)
    ]
    for index, mask in enumerate(MASKS):
        name, kind = list(LINKS)[index % len(LINKS)], list(ANCHORS)[index % 5 % len(ANCHORS)]
        found.append(Case(name, kind, mask, torch.bfloat16))
        if index % 3 == 0:
            found.append(Case(name, kind, mask, torch.float16))
    found += [Case("squared_affine", "row", mask) for mask in ("gqa", "decode-window")]  # also run twice
    # y is v and no gradient reaches q and k, however small the weight is
    found += [
        Case(name, "row", "alone", dtype)
        for name in ("yat", "squared_affine")
        for dtype in (torch.bfloat16, torch.float16)
    ]
    found += [
        Case(name, "row", "strict", size=size)
        for name in ("exp", "euclidean", "yat", "squared_affine")
        for size in (1e-4, 10.0)
    ]
    return {case.name: case for case in found}


def _rest() -> dict[str, Case]:
    """The other triples of a link, an anchor and a mask, for a device: the interpreter takes a quarter of a second for
    each.
    """
    found = [Case(name, kind, mask) for mask in MASKS for name in LINKS for kind in ANCHORS]
    return {case.name: case for case in found if case.name not in CASES}


def _large() -> dict[str, Case]:
    """Each link with the anchor it has in an operator, in each type."""
    kinds = {"exp": "row", "horner": "count", "yat": "row", "squared_affine": "row"}
    found = [
        Case(name, kind, mask, dtype)
        for mask in LARGE_MASKS for name,
        kind in kinds.items() for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]  # fmt: skip
    return {case.name: case for case in found}


def _off() -> dict[str, Case]:
    """Each of those masks with entries of two bytes and of four."""
    found = [
        Case(("exp", "yat")[index % 2], "row", mask, dtype)
        for index, mask in enumerate(OFF_MASKS)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return {case.name: case for case in found}


CASES = _cases()
OFF = _off()
REST = _rest()
LARGE = _large()


@dataclass
class Inputs:
    """Tensors of a call, as ``forward`` of a kernel takes them, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    coefficients: Tensor
    dy: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs. Among normalised rows some are so short or so long that their squares are not in float32, or 0."""
    generator, rules = torch.Generator().manual_seed(seed), case.rules

    def draw(heads: int, tokens: int, dim: int) -> Tensor:
        if rules.strided:  # every axis has a stride of its own
            x = torch.randn(rules.batch, tokens, heads, 2 * dim, generator=generator)[..., ::2].transpose(1, 2)
        else:
            x = torch.randn(rules.batch, heads, tokens, dim, generator=generator)
        return x.to(case.dtype)

    q, k = (
        draw(rules.heads, rules.queries, rules.key_dim) * case.size,
        draw(rules.kv_heads, rules.keys, rules.key_dim) * case.size,
    )
    if case.link == "identity" and case.anchor == "row":
        q, k = q.abs(), k.abs()  # sums of signed scores may vanish
    if rules.normalise:
        for x, sizes in ((q, (1e-20, 1e-30, 0.0, 1e20)), (k, (1e-30, 1e20, 1e-20, 0.0))):
            for token, size in zip(range(1, x.shape[2], 3), sizes, strict=False):
                x[:, :, token] *= 0.0 if case.dtype == torch.float16 else size
    v, dy = draw(rules.kv_heads, rules.keys, rules.value_dim), draw(rules.heads, rules.queries, rules.value_dim)
    code, learned = LINKS[case.link][1:]
    coefficients = 0.3 * torch.randn(rules.heads, learned, generator=generator)
    if case.link == "horner":
        coefficients[:, 0] = 2.0
    constants = torch.tensor(code.constants).expand(rules.heads, -1)
    scale = torch.rand(rules.heads, generator=generator) * 0.5 + 0.5
    mask = None
    if rules.padding:
        mask = torch.rand(rules.batch, rules.keys, generator=generator) > 0.4
        mask[0, : rules.keys // 2] = False  # the first queries see nothing
    return Inputs(
        q, k, v, scale, torch.cat([coefficients, constants], 1).contiguous(), dy, mask,
        torch.tensor(rules.packed, dtype=torch.int32) if rules.packed else None,
    )  # fmt: skip


NAMES = ("y", "dq", "dk", "dv", "dscale", "dcoefficients")


def defined(case: Case, data: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """y and its gradients with respect to q, k, v, scale and the learned coefficients, by the definition in
    ``dtype``.
    """
    rules, learned = case.rules, LINKS[case.link][2]
    priors: tuple[prior.Prior, ...] = ()
    if rules.causal:
        priors += (prior.Causal(rules.include_self),)
    if rules.chunk:
        priors += (prior.ChunkCausal(rules.chunk),)
    if rules.left is not None:
        priors += (prior.Window(rules.left, rules.right),)
    # prepared with a scale of 1, and given each head's own afterwards
    how = score.Cosine() if rules.normalise else score.Dot(scale=1.0)
    operator = Operator(how, _unbounded(LINKS[case.link][0]), ANCHORS[case.anchor], prior=priors)
    leaves = [
        x.to(dtype).requires_grad_() for x in (data.q, data.k, data.v, data.scale, data.coefficients[:, :learned])
    ]
    bound = operator.bind(rules.heads, rules.kv_heads)
    q, k, v, scale, coefficients = (x.to(torch.promote_types(dtype, torch.float32)) for x in leaves)
    q = bound.score.prepare_query(q, bound.score_params, None) * scale[:, None, None]
    k = bound.score.prepare_key(k, bound.score_params).repeat_interleave(bound.groups, 1)
    seen = prior.visibility(
        rules.queries,
        rules.keys,
        priors,
        causal=rules.causal,
        include_self=rules.include_self,
        key_padding_mask=data.key_mask,
        cu_seqlens=data.cu_seqlens,
    )
    bound = replace(
        bound,
        link=LINKS[case.link][0],
        score=_Negative(LINKS[case.link][1].constants[0]) if case.link == "euclidean" else bound.score,
    )
    weights = definition.weights(bound, coefficients.T[:, :, None, None], q, k, seen, prior.Bias())
    y = (weights @ v.repeat_interleave(bound.groups, 1)).to(dtype)
    found = torch.autograd.grad(y, leaves, data.dy.to(y), allow_unused=True)
    return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True))]


@dataclass(frozen=True)
class _Negative(score.Score):
    """eps - sqrt(max(x, 0) + eps^2) of the dot product x of prepared vectors."""

    eps: float

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return self.eps - ((q @ k.transpose(-1, -2)).clamp_min(0) + self.eps**2).sqrt()


def _unbounded(declared: link.Link) -> link.Link:
    """A link that any score may be declared with; the link itself is put in afterwards."""
    return declared if declared.domain is None else link.Identity()


def failure(case: Case, data: Inputs, got: list[Tensor]) -> str | None:
    """Where ``got`` is further from float64 than twice the definition in the same type and a floor of rounding; None if
    nowhere.
    """
    truth, reference = defined(case, data, torch.float64), defined(case, data, case.dtype)
    magnified = 1.0
    # an absolute error of a score becomes a relative one; a cosine is at most 1, however long its vectors are
    if case.link == "exp" and data.k.shape[2] and not case.rules.normalise:
        magnified = max(
            1.0,
            (data.q.double() @ data.k.double().repeat_interleave(data.q.shape[1] // data.k.shape[1], 1).mT)
            .abs()
            .max()
            .item()
            / 8,
        )
    # where a row's weights are small, its gradients are differences of numbers that are large; alone they cancel in the
    # definition, to the bit
    if case.link in ("yat", "squared_affine", "polynomial_square") and case.anchor == "row":
        magnified = 8.0
    for name, a, b, t in zip(NAMES, got, reference, truth, strict=True):
        if not t.numel():
            continue
        if not bool(torch.isfinite(a).all()):
            return f"{case.name}: {name} is not finite"
        if case.rules.normalise and name in ("dq", "dk"):  # as gradients of unit vectors
            length = torch.linalg.vector_norm((data.q if name == "dq" else data.k).double(), dim=-1, keepdim=True)
            if bool(a.where(length == 0, 0).any()):
                return f"{case.name}: {name} of a vector of zeros is not zero"
            a, b, t = a.double() * length, b.double() * length, t * length
        size = max(1.0, t.abs().max().item())
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        # a gradient of a parameter sums over all rows, whose rounding grows with the root of their number
        terms = data.q[..., 0].numel() ** 0.5 if t.ndim < 4 else 1.0
        floor = 16 * terms * torch.finfo(torch.float32).eps * size * magnified
        if case.dtype != torch.float32:
            # a row's sum over keys is taken out of its gradients by way of y, which has been rounded
            floor += (2 if name == "y" else 4) * terms * torch.finfo(case.dtype).eps * size
        if error > 2 * allowed + floor:
            return (
                f"{case.name}: {name} is off by {error:.3g}, the definition in the same type by "
                f"{allowed:.3g}, of {size:.3g}"
            )
    return None

"""Calls with sums over features and what must come out of them: operator x shape and mask, memories among them, in
float64 by the dense path.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.nn.recurrence import ssd

OPERATORS: dict[str, Callable[[], Operator]] = {
    "sq": lambda: m.squared_affine(learn_bias=True),
    "sq-count": lambda: m.squared_affine(learn_bias=True).replace(anchor=anchor.Count()),
    "sq-raw": lambda: m.squared_affine().replace(anchor=anchor.Raw()),
    "sq-strict": lambda: m.squared_affine(learn_bias=True).replace(prior=prior.Causal(include_self=False)),
    "sq-chunk": lambda: m.squared_affine().replace(prior=prior.ChunkCausal(5)),
    "sko": lambda: m.sko(degrees=(2.0,), manifold_dim=6),
    "sko-1": lambda: m.sko(degrees=(1.0,), manifold_dim=6),
    "square": lambda: Operator(
        score.Cosine(learn_temperature=True), link.PolynomialSquare((0.2, 0.7), floor=0.01, learn=True), anchor.Row()
    ),
    "linear": m.linear,
    "identity": lambda: Operator(score.Dot(), link.Identity(), anchor.Count()),
    "ssd": ssd,
}


@dataclass(frozen=True)
class Shape:
    """Sizes, and who sees whom. cuts: where the call is cut in pieces that hand on a memory. decay, bias: what tokens
    fade by and count.

    level: of values that differ little, so that gradients through a row's sum are small beside what they are
        differences of.
    """

    queries: int = 43
    keys: int = 43
    key_dim: int = 6
    value_dim: int = 5
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    causal: bool = True
    padding: bool = False
    packed: tuple[int, ...] = ()
    strided: bool = False
    cuts: tuple[int, ...] = ()
    decay: bool = False
    bias: bool = False
    level: float = 0.0
    lengths: tuple[float, ...] = ()  # that vectors of q and k take in turns


SHAPES: dict[str, Shape] = {
    "causal": Shape(),
    "whole": Shape(queries=48, keys=48, key_dim=8, value_dim=16),
    "wide": Shape(queries=20, keys=20, key_dim=17, value_dim=3),
    "gqa": Shape(heads=4, kv_heads=2, queries=20, keys=20, value_dim=17),
    "padding": Shape(batch=2, padding=True, queries=38, keys=38),
    "bidirectional": Shape(causal=False, queries=20, keys=45),
    "bidirectional-padding": Shape(causal=False, queries=18, keys=37, batch=2, padding=True),
    "late": Shape(queries=9, keys=60, strided=True),
    "early": Shape(queries=44, keys=30),
    "packed": Shape(packed=(0, 1, 5, 37, 40, 59), queries=59, keys=59),
    "packed-bidirectional": Shape(packed=(0, 3, 40, 50), queries=50, keys=50, causal=False),
    "short": Shape(queries=7, keys=7),
    "one": Shape(queries=1, keys=1),
    "memory": Shape(queries=37, keys=37, cuts=(0, 16, 17, 37), heads=2, kv_heads=1, padding=True),
    "memory-bidirectional": Shape(causal=False, queries=33, keys=33, cuts=(0, 33)),
    "decay": Shape(heads=2, kv_heads=1, queries=39, keys=39, decay=True, bias=True, padding=True),
    "decay-packed": Shape(packed=(0, 5, 37, 40), queries=40, keys=40, decay=True),
    "decay-late": Shape(queries=22, keys=50, decay=True),
    "decay-memory": Shape(queries=37, keys=37, cuts=(0, 20, 37), decay=True),
    "bias": Shape(causal=False, queries=20, keys=37, bias=True),
    "broad": Shape(queries=20, keys=20, key_dim=70, decay=True),
    "level": Shape(queries=31, keys=31, level=4.0),
    "lengths": Shape(queries=41, keys=41, lengths=(1e-20, 1.0, 1e-30, 0.0, 1e20)),
}
# for a device, in the tiles that calls have
LARGE: dict[str, Shape] = {
    "long-64": Shape(queries=5000, keys=5000, key_dim=64, value_dim=64, heads=4, kv_heads=2),
    "long-32": Shape(queries=1500, keys=1500, key_dim=32, value_dim=48, batch=2, padding=True),
    "long-16": Shape(queries=2000, keys=2000, key_dim=16, value_dim=16, heads=2, strided=True),
    "long-8": Shape(queries=700, keys=700, key_dim=8, value_dim=64),
    "long-128": Shape(queries=9000, keys=9000, key_dim=128, value_dim=128),
    "long-packed": Shape(packed=(0, 1, 130, 1400, 1401, 3000), queries=3000, keys=3000, key_dim=32, value_dim=32),
    "long-bidirectional": Shape(causal=False, queries=900, keys=3000, key_dim=64, value_dim=64),
    "long-memory": Shape(queries=3000, keys=3000, key_dim=32, value_dim=32, cuts=(0, 1000, 3000), heads=2),
    "long-decay": Shape(
        queries=3000, keys=3000, key_dim=64, value_dim=64, cuts=(0, 1000, 3000), heads=4, kv_heads=2, decay=True
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    operator: str
    shape: str
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.operator}/{self.shape}/{self.dtype}"

    @property
    def rules(self) -> Shape:
        return SHAPES[self.shape] if self.shape in SHAPES else LARGE[self.shape]


# the operator with most to it in most shapes; others where they differ: the anchors with each kind of mask, the
# degrees, the maps
_TURNS = {
    "whole": "square", "padding": "sq-raw", "bidirectional": "sq-count", "bidirectional-padding": "sq-count",
    "late": "sq-strict", "early": "sko",
    "packed": "sq-chunk", "packed-bidirectional": "sq-count", "short": "sq-count", "one": "sq-count",
    "memory-bidirectional": "sko-1",
    "decay-packed": "sq-raw", "decay-memory": "linear", "broad": "linear",
}  # fmt: skip


def _cases() -> dict[str, Case]:
    """Each shape and each operator, each anchor with each kind of mask, and each type."""
    # the gradient of few keys against their own sum is what rounding leaves of it
    found = [Case(_TURNS.get(shape, "sq"), shape) for shape in SHAPES]
    found += [Case(operator, "decay-memory") for operator in ("identity", "ssd")]
    # in 16 bits a row of few and small weights is rounded, and its gradient against its own sum is what that leaves:
    # other anchors, other maps
    found += [Case("sq", "level", dtype) for dtype in ("bfloat16", "float16")]
    found += [
        Case("sq-count", "causal", "bfloat16"),
        Case("ssd", "decay-memory", "bfloat16"),
        Case("sq-count", "packed", "float16"),
        Case("linear", "memory", "float16"),
    ]
    return {case.name: case for case in found}


def _rest() -> dict[str, Case]:
    """More of both, for a device: the interpreter takes half a second for each."""
    found = [Case("sq", shape) for shape in SHAPES if shape not in ("short", "one", "broad")]
    found += [
        Case(operator, shape)
        for operator in OPERATORS
        for shape in ("causal", "memory")
        if (operator, shape) != ("sq-chunk", "memory")
    ]
    found += [Case(operator, "decay") for operator in ("sq-raw", "linear")]
    found += [Case(operator, "packed") for operator in ("sq-count", "linear", "sq-chunk", "square")]
    found += [
        Case(operator, shape, dtype)
        for dtype in ("bfloat16", "float16")
        for operator, shape in (("sq-count", "gqa"), ("linear", "memory"), ("ssd", "decay-memory"))
    ]
    return {case.name: case for case in found if case.name not in CASES}


CASES = _cases()
REST = _rest()
LONG = {
    case.name: case
    for case in [
        Case(operator, shape, dtype)
        for operator, shape, dtype in itertools.product(("sq", "sq-count", "linear"), LARGE, DTYPES)
        # of 128 numbers there are more squares than sums are kept of
        if (operator == "linear" or LARGE[shape].key_dim < 128) and (operator != "sq" or dtype == "float32")
    ]
}  # fmt: skip


@dataclass
class Inputs:
    """Tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    edges: Tensor | None
    operator: Operator
    log_decay: Tensor | None = None
    key_bias: Tensor | None = None

    def to(self, dtype: torch.dtype, device: str) -> "Inputs":
        def moved(x: Tensor) -> Tensor:
            there = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
            return there.copy_(x.detach()).requires_grad_()

        own = copy.deepcopy(self.operator).to(device)
        return Inputs(
            moved(self.q), moved(self.k), moved(self.v), None if self.mask is None else self.mask.to(device),
            None if self.edges is None else self.edges.to(device), own.double() if dtype == torch.float64 else own,
            *(None if x is None else x.detach().to(device,
            torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (self.log_decay, self.key_bias)),
        )  # fmt: skip


def inputs(case: Case) -> Inputs:
    generator, rules = torch.Generator().manual_seed(0), case.rules

    def draw(heads: int, tokens: int, dim: int) -> Tensor:
        if rules.strided:  # every axis has a stride of its own
            x = torch.randn(rules.batch, tokens, heads, 2 * dim, generator=generator)[..., ::2].transpose(1, 2)
        else:
            x = torch.randn(rules.batch, heads, tokens, dim, generator=generator)
        return x.to(DTYPES[case.dtype])

    q, k = draw(rules.heads, rules.queries, rules.key_dim), draw(rules.kv_heads, rules.keys, rules.key_dim)
    v = draw(rules.kv_heads, rules.keys, rules.value_dim)
    for step, size in enumerate(rules.lengths):
        q[:, :, step :: len(rules.lengths)] *= size
        k[:, :, len(rules.lengths) - step :: len(rules.lengths)] *= size
    if rules.level:
        v = 0.1 * v + rules.level
    mask = None
    if rules.padding:
        mask = torch.rand(rules.batch, rules.keys, generator=generator) > 0.3
        mask[0, :4] = False
    operator = OPERATORS[case.operator]().for_heads(rules.heads, rules.kv_heads)
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    log_decay, key_bias = (torch.randn(rules.batch, rules.kv_heads, rules.keys, generator=generator) for _ in range(2))
    # some tokens end what came before them
    log_decay = -torch.nn.functional.softplus(3 * log_decay - 2)
    return Inputs(
        q, k, v, mask, torch.tensor(rules.packed, dtype=torch.int32) if rules.packed else None, operator,
        log_decay if rules.decay else None,
        key_bias if rules.bias else None,
    )  # fmt: skip


def attended(case: Case, data: Inputs, path: str) -> list[Tensor]:
    """y, the state that is left where there are pieces, and the gradients of both: with respect to q, k, v and what the
    operator learns.
    """
    rules = case.rules
    options = {"causal": rules.causal, "path": path}
    kind = "decayed" if rules.decay else None

    def of(x: Tensor | None, part: slice) -> Tensor | None:
        return None if x is None else x[..., part]

    state = None
    if rules.cuts and path == "chunked":
        memory = Memory.empty(
            data.operator,
            rules.batch,
            rules.kv_heads,
            rules.key_dim,
            rules.value_dim,
            dtype=data.q.dtype,
            device=data.q.device,
            kind=kind,
        )
        parts = []
        for start, stop in itertools.pairwise(rules.cuts):
            part = slice(start, stop)
            y, memory = zonal.attention(
                data.q[:, :, part], data.k[:, :, part], data.v[:, :, part], data.operator, memory=memory,
                key_padding_mask=of(data.mask, part), log_decay=of(data.log_decay, part),
                key_bias=of(data.key_bias, part), **options,
            )  # fmt: skip
            parts.append(y)
        y, state = torch.cat(parts, 2), memory.state  # type: ignore[attr-defined]
    else:
        y = zonal.attention(
            data.q,
            data.k,
            data.v,
            data.operator,
            key_padding_mask=data.mask,
            cu_seqlens=data.edges,
            log_decay=data.log_decay,
            key_bias=data.key_bias,
            **options,
        )
        if rules.cuts:
            empty = Memory.empty(
                data.operator,
                rules.batch,
                rules.kv_heads,
                rules.key_dim,
                rules.value_dim,
                dtype=data.q.dtype,
                device=data.q.device,
                kind=kind,
            )
            state = empty.absorb(data.k, data.v, data.mask, data.log_decay, data.key_bias).state  # type: ignore[attr-defined]
    assert isinstance(y, Tensor)
    generator = torch.Generator().manual_seed(1)
    loss = (y.double() * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)).sum()
    if state is not None:
        loss = (
            loss
            + (state.double() * torch.randn(state.shape, generator=generator, dtype=torch.float64).to(y.device)).sum()
        )
    leaves = [
        data.q,
        data.k,
        data.v,
        *(x for x in (data.log_decay, data.key_bias) if x is not None),
        *data.operator.parameters(),
    ]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
    return [x.detach().cpu() for x in (y, *(() if state is None else (state,)), *gradients)]


def failure(case: Case, data: Inputs, got: list[Tensor]) -> str | None:
    """Where ``got`` is further from float64 than twice the dense path in the same type and a floor of rounding; None if
    nowhere.
    """
    truth, reference = (
        attended(case, data.to(torch.float64, "cpu"), "dense"),
        attended(case, data.to(DTYPES[case.dtype], "cpu"), "dense"),
    )
    rules = case.rules
    names = [
        "y",
        *(["state"] if rules.cuts else []),
        "dq",
        "dk",
        "dv",
        *(["decays"] if rules.decay else []),
        *(["biases"] if rules.bias else []),
    ]
    for index, (a, b, t) in enumerate(zip(got, reference, truth, strict=True)):
        name = names[index] if index < len(names) else f"parameter {index - len(names)}"
        if not t.numel():
            continue
        if a.shape != t.shape or a.dtype != b.dtype or not bool(torch.isfinite(a).all()):
            return f"{case.name}: {name} is {a.dtype} {tuple(a.shape)}, finite: {bool(torch.isfinite(a).all())}"
        if rules.lengths and name in ("dq", "dk"):  # as gradients of unit vectors
            length = torch.linalg.vector_norm((data.q if name == "dq" else data.k).double(), dim=-1, keepdim=True)
            if bool(a.where(length == 0, 0).any()):
                return f"{case.name}: {name} of a vector of zeros is not zero"
            a, b, t = a.double() * length, b.double() * length, t * length
        size = max(1.0, t.abs().max().item())
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        # a gradient of a parameter sums over all rows
        terms = data.q[..., 0].numel() ** 0.5 if index >= len(names) else 1.0
        # on some processors numpy, which the interpreter multiplies with, is 1.2 times 32 roundings off
        floor = 48 * terms * torch.finfo(torch.float32).eps * size
        if case.dtype != "float32":  # weights, features and what is read are rounded to it
            floor += (
                (2 if name == "y" else 1 if rules.level else 6) * terms * torch.finfo(DTYPES[case.dtype]).eps * size
            )
        if error > 2 * allowed + floor:
            return (
                f"{case.name}: {name} is off by {error:.3g}, the dense path in the same type by "
                f"{allowed:.3g}, of {size:.3g}"
            )
    return None

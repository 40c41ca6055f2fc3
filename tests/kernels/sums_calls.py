"""Calls with sums over features and what must come out of them: operator x shape and mask, memories among them, in
float64 by the dense path.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernels.calls import (
    DTYPES,
    Inputs,
    Shape,
    at_once,
    drawing,
    edges,
    empty,
    in_pieces,
    learned,
    padded,
    with_gradients,
)
from torch import Tensor

from zonal import Operator, anchor, link, prior, score
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


def inputs(case: Case) -> Inputs:
    generator, rules = torch.Generator().manual_seed(0), case.rules
    draw = drawing(rules, case.dtype, generator)
    q, k = draw(rules.heads, rules.queries, rules.key_dim), draw(rules.kv_heads, rules.keys, rules.key_dim)
    v = draw(rules.kv_heads, rules.keys, rules.value_dim)
    for step, size in enumerate(rules.lengths):
        q[:, :, step :: len(rules.lengths)] *= size
        k[:, :, len(rules.lengths) - step :: len(rules.lengths)] *= size
    if rules.level:
        v = 0.1 * v + rules.level
    mask = padded(rules, generator)
    operator = learned(OPERATORS[case.operator](), rules, generator)
    log_decay, key_bias = (torch.randn(rules.batch, rules.kv_heads, rules.keys, generator=generator) for _ in range(2))
    # some tokens end what came before them
    log_decay = -torch.nn.functional.softplus(3 * log_decay - 2)
    return Inputs(
        q, k, v, mask, edges(rules), operator,
        log_decay if rules.decay else None,
        key_bias if rules.bias else None,
    )  # fmt: skip


def attended(case: Case, data: Inputs, path: str) -> list[Tensor]:
    """y, the state that is left where there are pieces, and the gradients of both: with respect to q, k, v and what the
    operator learns.
    """
    rules = case.rules
    if not rules.cuts:
        return with_gradients(data, [at_once(rules, data, path)])
    if path == "chunked":
        y, memory = in_pieces(rules, data, path)
    else:
        y = at_once(rules, data, path)
        memory = empty(rules, data).absorb(data.k, data.v, data.mask, data.log_decay, data.key_bias)
    return with_gradients(data, [y, memory.state])  # type: ignore[attr-defined]


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

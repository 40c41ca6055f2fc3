"""Attention by distance in many shapes, and how near to float64 it must come: points on themselves, opposite, at zero
and far out among them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernels.calls import DTYPES, Inputs, Shape, by_path, drawing, edges, further, learned, padded
from torch import Tensor

from zonal import Operator, anchor, link, metric, prior, score
from zonal import mechanisms as m

_PARTS = (metric.Hyperbolic(scale=0.4), metric.Sphere(eps=1e-3), metric.SquaredEuclidean(), metric.Euclidean())


def by(kind: metric.Metric, divided: anchor.Anchor | None = None) -> Operator:
    return Operator(score.NegativeDistance(kind), link.Exp(), divided or anchor.Row())


OPERATORS: dict[str, Callable[[], Operator]] = {
    "rewa": lambda: m.rewa(temperature=0.4),
    "rewa-gates-dot": lambda: m.rewa(gates=(0.0, 0.5, 1.0), temperature=0.5, dot=0.4),
    "rewa-adaptive": lambda: m.rewa(parts=(1, 0, 3), adaptive=True, temperature=0.3),
    "rewa_oscillatory": lambda: m.rewa_oscillatory((1.0, -0.5), (0.5, 0.2), (3.0, -5.0)),
    "other-order": lambda: by(metric.Product(_PARTS, learn=False, weights=(0.5, 1.0, 2.0, 1.0))),
    "count": lambda: by(metric.Product(), anchor.Count()),
    "raw": lambda: by(metric.Sphere(), anchor.Raw()),
    "window": lambda: m.rewa(prior=prior.Window(6)),
    "window-two-sided": lambda: m.rewa(prior=prior.Window(6, 9)),
    "chunk": lambda: m.rewa(prior=prior.ChunkCausal(5)),
    "strict": lambda: m.rewa(prior=prior.Causal(include_self=False)),
}
SHAPES: dict[str, Shape] = {
    "odd": Shape(queries=19, keys=19),
    "gqa": Shape(heads=2, kv_heads=1, queries=17, keys=17, key_dim=3),
    "bidirectional": Shape(causal=False, queries=5, keys=19, strided=True),
    "padding": Shape(batch=2, padding=True, queries=9, keys=9),
    "packed": Shape(packed=(0, 1, 7, 17), queries=17, keys=17),
    "early": Shape(queries=17, keys=9),
    "one": Shape(queries=1, keys=1),
    "decode": Shape(queries=2, keys=40, heads=2, kv_heads=1, key_dim=3),
    "clustered": Shape(queries=18, keys=18),
    "memory": Shape(queries=9, keys=9, cuts=(0, 5, 6, 9), key_dim=3),
}
# for a device, in the tiles that calls have
LARGE: dict[str, Shape] = {
    "long-96": Shape(queries=700, keys=700, key_dim=96, value_dim=96, heads=4, kv_heads=2),
    "long-48": Shape(queries=515, keys=515, key_dim=48, value_dim=48, batch=2, padding=True),
    "long-16": Shape(queries=640, keys=640, key_dim=16, value_dim=16, packed=(0, 1, 130, 400, 401, 640)),
    "long-decode": Shape(queries=1, keys=5000, key_dim=96, value_dim=96, heads=8, kv_heads=2),
    "long-256": Shape(queries=150, keys=150, key_dim=256, value_dim=256),
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
        return (SHAPES | LARGE)[self.shape]


_CASES = (
    Case("rewa-gates-dot", "odd"),
    Case("rewa_oscillatory", "gqa"),
    Case("rewa-adaptive", "bidirectional"),
    Case("rewa", "padding"),
    Case("other-order", "packed"),
    Case("count", "padding"),
    Case("raw", "early"),
    Case("window", "odd"),
    Case("window-two-sided", "bidirectional"),
    Case("chunk", "packed"),
    Case("strict", "one"),
    Case("rewa", "decode"),
    Case("rewa", "clustered"),
    Case("rewa", "memory"),
    Case("rewa", "odd", "bfloat16"),
    Case("rewa-gates-dot", "one", "bfloat16"),
    Case("count", "one", "float16"),
    Case("rewa_oscillatory", "one", "float16"),
)
CASES = {case.name: case for case in _CASES}
LONG = {
    case.name: case
    for case in (
        Case(name, shape, dtype)
        for name in ("rewa", "rewa-gates-dot", "rewa_oscillatory")
        for shape in LARGE
        for dtype in DTYPES
    )
}


def inputs(case: Case) -> Inputs:
    """Tensors of a case; what the operator learns is away from where it begins."""
    generator, rules = torch.Generator().manual_seed(0), case.rules
    draw = drawing(rules, case.dtype, generator)
    q, k = draw(rules.heads, rules.queries, rules.key_dim), draw(rules.kv_heads, rules.keys, rules.key_dim)
    if (
        case.shape == "clustered"
    ):  # three places, and opposite to them; near, on themselves, at zero, and so far that a radius is cut
        place = torch.arange(rules.keys)
        k = k[:, :, place % 3] * (1 - 2 * (place % 2))[:, None] + 1e-4 * draw(rules.kv_heads, rules.keys, rules.key_dim)
        k[:, :, 7], k[:, :, 9] = 0, 100 * k[:, :, 9]
        k[:, :, 12:] = k[:, :, :6]
        q = k.clone()
    mask = padded(rules, generator)
    operator = learned(OPERATORS[case.operator](), rules, generator)
    v = draw(rules.kv_heads, rules.keys, rules.value_dim)
    return Inputs(q, k, v, mask, edges(rules), operator)


def attended(case: Case, data: Inputs, path: str) -> list[Tensor]:
    """``by_path``."""
    return by_path(case.rules, data, path, "tiled")


def failure(case: Case, data: Inputs, got: list[Tensor]) -> str | None:
    """Where ``got`` is further from float64 than rounding, of five digits in float32; None if nowhere."""
    truth = attended(case, data.to(torch.float64, "cpu"), "dense")
    return further(case.name, case.dtype, data, got, truth, lambda name: 2e-5)

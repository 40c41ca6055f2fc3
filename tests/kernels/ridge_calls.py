"""Ridge and Koopman read-outs in many shapes, and how near to float64 they must come: memories, padding and documents
among them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from kernels.calls import DTYPES, Inputs, Shape, by_path, drawing, edges, further, learned, padded
from torch import Tensor

from zonal import Operator, anchor, link, prior, score
from zonal import mechanisms as m

OPERATORS: dict[str, Callable[[], Operator]] = {
    "ridge": m.ridge,
    "ska-0": lambda: m.ska(power=0),
    "ska-1": lambda: m.ska(power=1),
    "ska-2": lambda: m.ska(power=2),
    "fixed": lambda: m.ridge(learn_ridge=False),
    "limited": lambda: Operator(score.Dot(scale=1.0, key_limit=1.5), link.Identity(), anchor.Koopman(power=1)),
    "with-itself": lambda: m.ska(power=1).replace(prior=prior.Causal(include_self=True)),
    "short-chunks": lambda: m.ska(power=1, chunk=5),
    "long-chunks": lambda: m.ska(power=2, chunk=21),
    "steep": lambda: m.ska(power=1, eps=1e-2),
    "unlimited": lambda: m.ridge(eps=1e-3, key_limit=None),
    "unlimited-ska": lambda: m.ska(power=1, eps=1e-3, key_limit=None),
}
SHAPES: dict[str, Shape] = {
    "odd": Shape(),
    "whole": Shape(queries=48, keys=48, key_dim=16, value_dim=16),
    "r24": Shape(queries=37, keys=37, key_dim=24, value_dim=20),
    "r56": Shape(queries=19, keys=19, key_dim=56, value_dim=40),
    "gqa": Shape(heads=4, kv_heads=2, queries=17, keys=17),
    "padding": Shape(batch=2, padding=True, queries=25, keys=25),
    "late": Shape(queries=9, keys=60, strided=True),
    "early": Shape(queries=44, keys=30),
    "packed": Shape(packed=(0, 1, 5, 25, 28), queries=28, keys=28),
    "one": Shape(queries=1, keys=1),
    "short": Shape(queries=23, keys=23),
    "two": Shape(queries=2, keys=2, heads=2, kv_heads=2, key_dim=64, value_dim=64),
    "many": Shape(queries=120, keys=120, key_dim=8, value_dim=4),
    "memory": Shape(queries=37, keys=37, cuts=(0, 16, 17, 37)),
    "padded-memory": Shape(queries=30, keys=30, cuts=(0, 10, 30), batch=2, padding=True),
}
# for a device, in the blocks that calls have
LARGE: dict[str, Shape] = {
    "long-24": Shape(queries=1500, keys=1500, key_dim=24, value_dim=64, heads=4, kv_heads=2),
    "long-56": Shape(queries=2000, keys=2000, key_dim=56, value_dim=64, batch=2, padding=True),
    "long-64": Shape(queries=3000, keys=3000, key_dim=64, value_dim=64, heads=2),
    "long-packed": Shape(packed=(0, 1, 130, 1400, 1401, 3000), queries=3000, keys=3000, key_dim=48, value_dim=32),
    "long-memory": Shape(queries=1500, keys=1500, key_dim=32, value_dim=32, cuts=(0, 1000, 1500), heads=2),
    "long-late": Shape(queries=70, keys=2500, key_dim=64, value_dim=64),
}


@dataclass(frozen=True)
class Case:
    operator: str
    shape: str
    dtype: str = "float32"
    nan_key: int | None = None

    @property
    def name(self) -> str:
        return f"{self.operator}/{self.shape}/{self.dtype}" + ("" if self.nan_key is None else "/NaN key")

    @property
    def rules(self) -> Shape:
        return (SHAPES | LARGE)[self.shape]


def _cases() -> dict[str, Case]:
    """Powers in turn over the shapes, the second where keys are padded, documents begin and memories are handed on;
    every operator; every type.
    """
    powers = {"r56": 2, "padding": 2, "packed": 2, "memory": 2, "r24": 1, "gqa": 1, "late": 1, "odd": 1}
    found = [Case(f"ska-{powers.get(shape, 0)}", shape) for shape in SHAPES if shape != "many"]
    found += [Case(operator, "short") for operator in OPERATORS if operator[:3] != "ska" and operator != "steep"]
    found += [Case("steep", "many"), Case("unlimited", "two")]
    found += [Case("ska-1", "short", dtype) for dtype in ("bfloat16", "float16")]
    return {case.name: case for case in found}


CASES = _cases()
NAN_KEYS = {case.name: case for case in (Case(f"ska-{power}", "short", nan_key=20) for power in range(3))}
LONG = {
    case.name: case
    for case in itertools.starmap(Case, itertools.product(("ska-0", "ska-1", "ska-2"), LARGE, DTYPES))
    if case.dtype == "float32" or case.operator != "ska-2"
}  # fmt: skip


def inputs(case: Case) -> Inputs:
    """Tensors of a case; what the operator learns is away from where it begins."""
    generator, rules = torch.Generator().manual_seed(0), case.rules
    draw = drawing(rules, case.dtype, generator, 0.25)  # some keys are longer than their limit
    q, k = draw(rules.heads, rules.queries, rules.key_dim), draw(rules.kv_heads, rules.keys, rules.key_dim)
    v = draw(rules.kv_heads, rules.keys, rules.value_dim)
    if (
        case.operator == "steep"
    ):  # keys along three directions: G grows to some hundred thousand ridges, and beside them P stays at one over it
        basis = torch.linalg.qr(torch.randn(rules.key_dim, rules.key_dim, generator=generator))[0]
        k = k[..., :3] @ basis[:3] * rules.key_dim**0.25
        v = k @ torch.randn(rules.key_dim, rules.value_dim, generator=generator) + 0.1 * v
    if case.operator.startswith("unlimited"):  # |z|^2 / rho is some ten thousands
        k = k * rules.key_dim**0.25
    mask = padded(rules, generator)
    if case.nan_key is not None:
        k[:, :, case.nan_key] = float("nan")
    operator = learned(OPERATORS[case.operator](), rules, generator)
    return Inputs(q, k, v, mask, edges(rules), operator)


def attended(case: Case, data: Inputs, path: str) -> list[Tensor]:
    """``by_path``."""
    return by_path(case.rules, data, path, "chunked")


def failure(case: Case, data: Inputs, got: list[Tensor]) -> str | None:
    """Where ``got`` is further from float64 than rounding: of the inputs' type, and of float32 through P <= 1 / rho =
    10; None if nowhere. Queries that see a key that is NaN must be NaN, and those before them as they are without it.
    """
    truth = attended(case, replace(data, k=data.k.nan_to_num()).to(torch.float64, "cpu"), "dense")
    if case.nan_key is not None:  # a query does not see its own key; gradients are NaN
        first = case.nan_key + 1
        if not bool(got[0][:, :, first:].isnan().all()):
            return f"{case.name}: y is not NaN where the key is seen"
        got, truth = [got[0][:, :, :first]], [truth[0][:, :, :first]]
    # float32 products of P, and of its products with gradients; where steep P is ten times as large, and so is x
    eps = torch.finfo(torch.float32).eps * (20 if case.operator == "steep" else 1)
    return further(case.name, case.dtype, data, got, truth, lambda name: (64 if name == "y" else 512) * eps)

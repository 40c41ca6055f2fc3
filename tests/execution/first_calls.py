"""First calls of processes: `MALLOC_PERTURB_=1 python first_calls.py` writes a JSON line a case.

Each case runs in a fork of a process that has imported the library and called nothing. New memory holds garbage: NaN in
tensors, and 1e38 in float32 or 1e303 in float64 in what kernels allocate. Errors are relative to the largest entry of
the dense result in float64.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from matrix import Case, Inputs, inputs, randomised
from torch import Tensor

from zonal import Memory, Operator, anchor
from zonal import mechanisms as m
from zonal.algebra.hashing import LSH

SHAPE = Case(kv_heads=2, queries=71, keys=71, key_dim=7, value_dim=5)
OPERATORS: dict[str, Callable[[], Operator]] = {
    "softmax": m.softmax,
    "squared_affine": m.squared_affine,
    "retention": m.retention,
    "yat": m.yat,
    "rewa": m.rewa,
    "ridge": m.ridge,
    "ska": lambda: m.ska(power=1),
    "searched": lambda: m.softmax().replace(anchor=anchor.TopK(5, LSH(tables=1, bits=1, window=SHAPE.keys))),
}
RUNS = {
    "dense": ("softmax",),
    "tiled": ("softmax", "yat", "rewa"),
    "chunked": ("squared_affine", "retention", "ska"),
    "streaming": ("squared_affine", "ridge"),
    "sparse": ("searched",),
    "decode": ("retention", "ridge"),
}
"""The operators that run on a path; "decode" is a decoder, token by token."""


class FirstCall(NamedTuple):
    path: str
    operator: str
    dtype: torch.dtype


CALLS = [
    FirstCall(path, name, dtype)
    for path, names in RUNS.items()
    for name in names
    for dtype in (torch.float32, torch.float64)
]


def decoded(operator: Operator, given: Inputs) -> Tensor:
    batch, kv_heads, tokens, width = given.v.shape
    memory = Memory.empty(operator, batch, kv_heads, given.k.shape[3], width, given.q.dtype, given.q.device)
    decoder = memory.decoder()
    steps = [
        decoder.step(*(x[:, :, t : t + 1].detach() for x in (given.q, given.k, given.v))).clone() for t in range(tokens)
    ]
    return torch.cat(steps, 2)


def results(operator: Operator, given: Inputs, path: str) -> list[Tensor]:
    """y, and but for a decoder all gradients."""
    if path == "decode":
        with torch.no_grad():
            return [decoded(operator, given)]
    y = given.run(operator, path)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad((y * weight).sum(), [*given.leaves, *operator.parameters()])
    return [y, *found]


def error(call: FirstCall) -> float:
    operator, given = randomised(OPERATORS[call.operator]()).to(call.dtype), inputs(SHAPE).to(call.dtype)
    found = results(operator, given, call.path)
    exact = results(operator.double(), given.to(torch.float64), "dense")
    worst = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=False)]
    return max(worst) if all(x.isfinite().all() for x in (*found, *exact)) else float("inf")


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for call in CALLS:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(2)
            line = json.dumps([call.path, call.operator, str(call.dtype), error(call)])
            os.write(sys.stdout.fileno(), f"{line}\n".encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, call


if __name__ == "__main__":
    main()

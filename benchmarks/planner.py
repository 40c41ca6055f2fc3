"""How near the planner's choice is to the best path, on a fixed list of calls that no rate was set by.

Every path that can run a call is timed; the choice counts as good when it takes at most 1.3 times as long as the best
one. A third of the calls go on from a memory. A path whose first run takes over eight times as long as the best is not
timed again, and one that is estimated to take over fifty times as long as the choice is not timed.
"""

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms
from zonal.errors import ArgumentError, PathError
from zonal.execution import machine as machines
from zonal.execution import plan
from zonal.execution.call import prepare, resumed
from zonal.memory import Memory

WITHIN = 1.3
REQUIRED = 0.95
_SLOWER = 8.0
_HOPELESS = 50.0
_SHORT = 150 * 150
_MEMORY = 4 << 30


@dataclass(frozen=True)
class Case:
    """One call. past: tokens of the memory that it goes on from, None = none."""

    spec: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    causal: bool = True
    gradients: bool = False
    past: int | None = None

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        parts = [f"{self.spec} B{self.batch} H{self.heads}{kv} T{self.queries} S{self.keys} d{self.dim}"]
        parts += [] if self.causal else ["bidirectional"]
        parts += ["+grad"] if self.gradients else []
        parts += [] if self.past is None else [f"after {self.past}"]
        return " ".join(parts)


SPECS = ("softmax", "sko", "squared_affine", "linear", "ska(power=0)", "ska(power=1)", "retention", "yat", "rewa")
# (batch, heads, key heads, queries, keys, dim, causal, gradients)
SHAPES = (
    (3, 8, 8, 24, 24, 24, True, False), (12, 4, 4, 80, 80, 40, True, True), (2, 12, 4, 144, 144, 48, True, False),
    (1, 8, 8, 400, 400, 56, False, False), (1, 4, 4, 1200, 1200, 24, True, True),
)  # fmt: skip
# (batch, heads, key heads, tokens, dim, past)
AFTER = ((2, 8, 8, 1, 40, 700), (1, 8, 4, 12, 24, 3000), (1, 8, 8, 90, 32, 500))
# longer ones, and one query over many keys, for some
EXTRA = (
    ("softmax", 1, 8, 8, 3000, 3000, 40, True, False), ("squared_affine", 1, 4, 4, 3000, 3000, 24, True, False),
    ("linear", 1, 4, 4, 6000, 6000, 48, True, False), ("ska(power=1)", 1, 4, 4, 3000, 3000, 40, True, False),
    ("retention", 1, 4, 4, 3000, 3000, 24, True, True), ("sko", 3, 8, 8, 1, 2500, 48, True, False),
    ("softmax", 2, 8, 8, 1, 900, 24, True, False), ("squared_affine", 2, 8, 8, 1, 2500, 24, True, False),
)  # fmt: skip


# other shapes, on which the rates and counts of the planner were set
DEVELOPMENT = (
    (2, 8, 8, 32, 32, 32, True, False), (8, 4, 4, 100, 100, 32, True, True), (1, 8, 2, 200, 200, 64, True, False),
    (1, 8, 8, 512, 512, 48, False, False), (1, 4, 4, 1000, 1000, 32, True, True),
    (1, 8, 8, 2000, 2000, 32, True, False), (4, 8, 8, 1, 2000, 64, True, False), (1, 2, 2, 700, 700, 16, True, False),
    (6, 8, 8, 16, 300, 40, True, False),
)  # fmt: skip
DEVELOPMENT_AFTER = (
    (2, 4, 4, 1, 64, 400), (1, 8, 8, 8, 48, 2000), (1, 8, 8, 64, 16, 1000), (1, 8, 4, 200, 32, 200),
    (4, 8, 8, 1, 24, 4000),
)  # fmt: skip


def _product(shapes: tuple[tuple[Any, ...], ...], after: tuple[tuple[int, ...], ...]) -> list[Case]:
    cases = [
        Case(spec, *shape[:6], causal=shape[6] or spec == "retention", gradients=shape[7])
        for spec, shape in itertools.product(SPECS, shapes)
    ]
    return cases + [Case(spec, b, h, kv, t, t, d, past=past) for spec in SPECS for b, h, kv, t, d, past in after]


def development() -> list[Case]:
    """The calls on which the rates and counts of the planner were set: none of them is held out."""
    return _product(DEVELOPMENT, DEVELOPMENT_AFTER)


def held_out() -> list[Case]:
    """The calls of the benchmark."""
    return _product(SHAPES, AFTER) + [
        Case(spec, *shape[:6], causal=shape[6], gradients=shape[7]) for spec, *shape in EXTRA
    ]


class Inputs:
    """The tensors of a case, its operator and its memory."""

    def __init__(self, case: Case, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, tokens: int) -> Tensor:
            x = torch.randn(case.batch, heads, tokens, case.dim, generator=generator).to(device)
            return x.requires_grad_(case.gradients)

        self.case = case
        self.q, self.k, self.v = (
            draw(case.heads, case.queries), draw(case.kv_heads, case.keys), draw(case.kv_heads, case.keys),
        )  # fmt: skip
        made = mechanisms.resolve(case.spec).for_heads(case.heads, case.kv_heads, dim=case.dim)
        self.operator = made.to(device).requires_grad_(case.gradients)
        self.memory: Memory | None = None
        if case.past is not None:
            empty = Memory.empty(self.operator, case.batch, case.kv_heads, case.dim, case.dim, device=device)
            with torch.no_grad():
                self.memory = empty.absorb(*(draw(case.kv_heads, case.past) for _ in range(2)))

    def choice(self) -> plan.Choice:
        """What the planner takes."""
        call = prepare(self.operator, self.q, self.k, self.v, causal=self.case.causal)
        if self.memory is not None:
            call = resumed(call, self.memory)
        return plan.choose(call)

    def run(self, path: str) -> Any:
        """One call by a path, with its gradients."""
        y = zonal.attention(
            self.q, self.k, self.v, self.operator, causal=self.case.causal, path=path, memory=self.memory
        )
        if self.case.gradients:
            wanted = [self.q, self.k, self.v, *self.operator.parameters()]
            torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        return y


def check(inputs: Inputs, paths: list[str]) -> None:
    """The gate: each path of a short call against the definition in float64, but for the worst hundredth of its rows.

    There a sum of features may divide by a kernel near zero.
    """
    case, exact = inputs.case, [x.detach().double() for x in (inputs.q, inputs.k, inputs.v)]
    with torch.no_grad():
        reference = zonal.attention(*exact, inputs.operator, causal=case.causal, path="dense")
        for path in paths:
            got = inputs.run(path)
            error = (got.double() - reference).abs().amax(-1, keepdim=True)
            usual = error <= error.flatten().quantile(0.99)
            common.gate(f"{case}, path {path}", torch.where(usual, got, reference.to(got)), reference, 2e-3)


def timed(works: dict[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """The median seconds of each, in turns; of those that are hopeless the first run."""
    first: dict[str, float] = {}
    for name, work in works.items():
        work()
        start = time.perf_counter()
        work()
        first[name] = time.perf_counter() - start
    least = min(first.values())
    near = {name: work for name, work in works.items() if first[name] <= _SLOWER * least}
    found: dict[str, list[float]] = {name: [] for name in near}
    start = time.perf_counter()
    while time.perf_counter() - start < budget * len(near) or len(next(iter(found.values()))) < 3:
        for name, work in near.items():
            begun = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begun)
    medians = {name: common.Quantiles.of(values).median for name, values in found.items()}
    return {**first, **medians}


def measured(cases: list[Case], device: torch.device, budget: float) -> Iterator[dict[str, Any]]:
    """One row a case: the choice, the time of every path, and what was estimated."""
    for case in cases:
        inputs = Inputs(case, device)
        with torch.set_grad_enabled(case.gradients):
            made = inputs.choice()
            estimates: dict[str, float] = {}
            for estimate in reversed(made.estimates):
                if estimate.peak_bytes < _MEMORY and estimate.seconds < _HOPELESS * made.estimates[0].seconds:
                    estimates[estimate.path] = estimate.seconds
            if inputs.memory is None and not case.gradients and case.queries * case.keys <= _SHORT:
                check(inputs, sorted(estimates))
            works = {path: functools.partial(inputs.run, path) for path in sorted({*estimates, made.path})}
            try:
                seconds = timed(works, budget)
            except PathError as error:
                raise AssertionError(f"{case}: {error}") from error
        best = min(seconds, key=lambda path: seconds[path])
        ratio = seconds[made.path] / seconds[best]
        yield {
            "case": str(case), "chosen": made.path, "route": str(made.routes[0]), "best": best, "ratio": ratio,
            "good": ratio <= WITHIN, "seconds": seconds, "estimated_seconds": estimates,
        }  # fmt: skip


def part_of(text: str) -> tuple[int, int]:
    """(2, 3) for 2/3. Raises: ArgumentError for other words."""
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    number, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= parts:
        raise ArgumentError(f"bench: --part must be like 2/3, the second of three parts, received {text!r}.")
    return number, parts


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 when the planner's choice is good on the required share of the calls, else 1."""
    made = common.parser(__doc__ or "", "planner", by_machine=True)
    made.add_argument(
        "--budget", type=float, default=0.1, help="seconds for each path of a call (default: %(default)s)"
    )
    made.add_argument("--development", action="store_true", help="the calls that rates were set on; no record")
    made.add_argument("--part", default="1/1", help="only the first, second, … of so many parts: 2/3")
    options = made.parse_args(argv)
    number, parts = part_of(options.part)
    part = options.quick or options.development or parts > 1
    if part:
        common.spare_record(options)
    device = common.prepare(options)
    start = common.circumstances(device)
    cases = (development() if options.development else held_out())[number - 1 :: parts]
    if options.quick:
        cases = [case for case in cases if case.queries * case.keys <= 64 * 64][:6]
    if not cases:
        raise ArgumentError(f"bench planner: --part {options.part} has no calls. Ask for fewer parts.")
    rows = []
    for row in measured(cases, device, 0.02 if options.quick else options.budget):
        rows.append(row)
        times = ", ".join(f"{path} {common.milliseconds(took)}" for path, took in row["seconds"].items())
        verdict = f"{'ok ' if row['good'] else 'OFF'} {row['ratio']:5.2f}x"
        print(f"{verdict}  {row['case']}: chose {row['route']}; {times}", flush=True)
    ratios = [row["ratio"] for row in rows]
    share = sum(row["good"] for row in rows) / max(len(rows), 1)
    summary = {
        "cases": len(rows), "after_a_memory": sum("after" in row["case"] for row in rows), "within": WITHIN,
        "share": share, "required": REQUIRED, "median_ratio": common.Quantiles.of(ratios).median,
        "worst_ratio": max(ratios),
    }  # fmt: skip
    of = f"{share:.1%} of {len(rows)} calls (required {REQUIRED:.0%})"
    print(f"within {WITHIN}x of the best path on {of}; worst {max(ratios):.2f}x")
    machine = machines.machine_for(device)
    settings = {"budget_seconds": options.budget, "part": options.part, "machine": machine.to_dict()}
    about = (__doc__ or "").partition("\n")[0]
    common.report(options.out, "planner", about, settings, rows, summary, start)
    return 0 if share >= REQUIRED or part else 1


if __name__ == "__main__":
    sys.exit(main())

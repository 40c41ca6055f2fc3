"""How often the planner's choice is the best path, or near it, on a grid of 76 calls.

Every path that can run a call is checked against the float64 definition (on short calls), then timed; the planner's
choice counts as good when it takes at most 1.3 times as long as the best path. The peer of each ratio is that best
path. Operators that declare a search are checked where it meets every key, and timed on independent numbers.

A path is left out where it has been more than five times slower, on a smaller call of the same operator, than a path
whose time grows no faster, and where it would need more than the memory limit.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms
from zonal.algebra.anchor import TopK
from zonal.algebra.hashing import LSH
from zonal.execution import plan
from zonal.execution.call import prepare

WITHIN = 1.3
REQUIRED = 0.9
_SLOWER = 5.0
_MEMORY = 6 << 30
# how the time of a path grows with the number of tokens, for an operator that keeps keys and for one that keeps sums
_GROWTH = {"dense": 2, "tiled": 2, "chunked": 1, "streaming": 1, "sparse": 1}

SPECS = ("softmax", "sko", "squared_affine", "linear", "ska(power=0)", "retention", "yat", "rewa")
# with a search for the largest entries of a row
SEARCHED: dict[str, Callable[[], zonal.Operator]] = {
    "softmax, searched": lambda: mechanisms.softmax().replace(anchor=TopK(64, LSH())),
    "rewa, searched": lambda: mechanisms.rewa().replace(anchor=TopK(64, LSH())),
}  # fmt: skip
# (batch, heads, key heads, queries, keys, dim, causal, gradients): one row serves several operators
SHAPES = {
    "tiny": (4, 4, 4, 16, 16, 16, True, False),
    "short, training": (16, 4, 4, 64, 64, 32, True, True),
    "short, many heads": (2, 16, 4, 128, 128, 64, True, False),
    "256, training": (8, 4, 4, 256, 256, 16, True, True),
    "512, bidirectional": (1, 8, 8, 512, 512, 64, False, False),
    "1024, training": (1, 4, 4, 1024, 1024, 32, True, True),
    "2048": (1, 8, 2, 2048, 2048, 64, True, False),
    "decode": (4, 8, 8, 1, 4096, 64, True, False),
    "4096": (1, 4, 4, 4096, 4096, 16, True, False),
    "8192": (1, 2, 2, 8192, 8192, 32, True, False),
    "16, training": (1, 8, 8, 16, 16, 64, True, True),
    "decode, short": (1, 8, 8, 1, 300, 32, True, False),
}
EXTRA = (
    ("softmax", "8192"), ("sko", "decode, short"), ("squared_affine", "16, training"), ("linear", "8192"),
    *((spec, name) for spec in SEARCHED for name in ("tiny", "512, bidirectional", "2048")),
    ("softmax, searched", "8192"), ("softmax, searched", "1024, training"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of the grid."""

    spec: str
    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    causal: bool
    gradients: bool

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        return (
            f"{self.spec} B{self.batch} H{self.heads}{kv} T{self.queries} S{self.keys} "
            f"d{self.dim}{'' if self.causal else ' bidirectional'}{' +grad' if self.gradients else ''}"
        )


def grid() -> list[Case]:
    """The calls, small ones first, so that hopeless paths are found out cheaply."""
    usual = list(SHAPES)[:8]
    chosen = [(spec, name) for name in usual for spec in SPECS] + list(EXTRA)
    cases = []
    for spec, name in chosen:
        batch, heads, kv_heads, queries, keys, dim, causal, gradients = SHAPES[name]
        # a decay has a meaning only with time
        cases.append(
            Case(spec, name, batch, heads, kv_heads, queries, keys, dim, causal or spec == "retention", gradients)
        )
    return sorted(cases, key=lambda case: case.queries * case.keys)


@dataclass
class Inputs:
    """The tensors of a case, and the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    operator: zonal.Operator
    case: Case

    @staticmethod
    def of(case: Case, device: torch.device) -> "Inputs":
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, tokens: int) -> Tensor:
            return (
                torch.randn(case.batch, heads, tokens, case.dim, generator=generator)
                .to(device)
                .requires_grad_(case.gradients)
            )

        q, k, v = draw(case.heads, case.queries), draw(case.kv_heads, case.keys), draw(case.kv_heads, case.keys)
        made = SEARCHED[case.spec]() if case.spec in SEARCHED else mechanisms.resolve(case.spec)
        operator = made.for_heads(case.heads, case.kv_heads).to(device).requires_grad_(case.gradients)
        return Inputs(q, k, v, torch.randn(q.shape, generator=generator).to(device), operator, case)

    def attend(self, path: str) -> Tensor:
        return zonal.attention(self.q, self.k, self.v, self.operator, causal=self.case.causal, path=path)

    def run(self, path: str) -> Tensor:
        y = self.attend(path)
        if self.case.gradients:
            torch.autograd.grad(
                (y * self.weight).sum(), [self.q, self.k, self.v, *self.operator.parameters()], allow_unused=True
            )
        return y

    def plan(self) -> plan.Plan:
        return plan.choose(prepare(self.operator, self.q, self.k, self.v, causal=self.case.causal))


def check(device: torch.device, longest: int = 300) -> None:
    """The gate: each path of each operator against the definition in float64, on the short calls of the grid.

    In float64 every row; in float32 all but the worst hundredth of the rows, where a sum of features may divide by a
    kernel near zero.
    """
    for case in grid():
        if case.batch * case.queries * case.keys > longest * longest:
            continue
        inputs = Inputs.of(case, device)
        exact = Inputs(
            *(x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.weight)), inputs.operator, case
        )
        with torch.no_grad():
            reference = exact.attend("dense")
            for path in candidates(inputs):
                if path == "sparse" and case.keys > LSH().window:
                    continue
                common.gate(f"{case}, path {path}, float64", exact.attend(path), reference, 1e-8)
                got = inputs.attend(path)
                error = (got.double() - reference).abs().amax(-1, keepdim=True)
                usual = error <= error.flatten().quantile(0.99)
                common.gate(f"{case}, path {path}", torch.where(usual, got, reference.to(got)), reference, 2e-3)


def candidates(inputs: Inputs) -> list[str]:
    """Paths that the planner does not refuse."""
    return [estimate.path for estimate in inputs.plan().estimates]


class Hopeless:
    """What has been seen to lose, operator by operator."""

    def __init__(self) -> None:
        self._seen: list[tuple[Case, dict[str, float]]] = []

    def add(self, case: Case, seconds: dict[str, float]) -> None:
        self._seen.append((case, seconds))

    def reason(self, case: Case, path: str, growth: dict[str, int]) -> str | None:
        """Why a path cannot win this case, or None."""
        for earlier, seconds in self._seen:
            smaller = earlier.queries <= case.queries and earlier.keys <= case.keys and earlier.queries > 1
            if earlier.spec != case.spec or path not in seconds or not smaller:
                continue
            for other, time in seconds.items():
                if growth[other] <= growth[path] and seconds[path] > _SLOWER * time:
                    return f"{seconds[path] / time:.0f}x slower than {other} on {earlier}"
        return None


def measured(cases: list[Case], device: torch.device, budget: float) -> Iterator[dict[str, Any]]:
    """One row a case: the choice, the time of every path, the estimates."""
    hopeless = Hopeless()
    for case in cases:
        inputs = Inputs.of(case, device)
        chosen = inputs.plan()
        keeps_keys = zonal.Memory.kind_for(inputs.operator, case.dim) == "keys"
        growth = {**_GROWTH, "streaming": 2 if keeps_keys else 1}
        skipped = dict(chosen.refused)
        works = {}
        for estimate in chosen.estimates:
            reason = hopeless.reason(case, estimate.path, growth)
            if estimate.peak_bytes > _MEMORY:
                reason = f"needs about {estimate.peak_bytes / 2**30:.1f} GB"
            if reason is None or estimate.path == chosen.path:
                works[estimate.path] = functools.partial(inputs.run, estimate.path)
            else:
                skipped[estimate.path] = reason
        times = common.interleaved(works, device, rounds=7, budget=budget, cap=4.0)
        seconds = {path: common.Quantiles.of(values).median for path, values in times.items()}
        hopeless.add(case, seconds)
        best = min(seconds, key=lambda path: seconds[path])
        yield {
            "case": str(case), "name": case.name, "operator": case.spec, "batch": case.batch, "heads": case.heads,
            "kv_heads": case.kv_heads,
            "queries": case.queries, "keys": case.keys, "dim": case.dim, "causal": case.causal,
            "gradients": case.gradients,
            "chosen": chosen.path, "best": best, "ratio": seconds[chosen.path] / seconds[best],
            "good": seconds[chosen.path] <= WITHIN * seconds[best],
            "seconds": {path: vars(common.Quantiles.of(values)) for path, values in times.items()},
            "estimated_seconds": {estimate.path: estimate.seconds for estimate in chosen.estimates},
            "not_timed": skipped,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 when the planner's choice is good on the required share of the grid, else 1."""
    made = common.parser(__doc__ or "", "planner")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument(
        "--budget",
        type=float,
        default=1.5,
        help="seconds for the timing of one call of the grid (default: %(default)s)",
    )
    made.add_argument("--only", default="", help="only cases whose description contains this text")
    options = made.parse_args(argv)
    device = common.prepare(options)
    start = common.circumstances(device)
    cases = [case for case in grid() if options.only in str(case)]
    if options.quick:
        cases = [case for case in cases if case.queries * case.keys <= 64 * 64][:6]
    print("checking every path against the float64 definition …", flush=True)
    check(device, 64 if options.quick else 300)
    rows = []
    for row in measured(cases, device, 0.1 if options.quick else options.budget):
        rows.append(row)
        times = ", ".join(f"{path} {common.milliseconds(q['median'])}" for path, q in row["seconds"].items())
        print(
            f"{'ok ' if row['good'] else 'OFF'} {row['ratio']:5.2f}x  {row['case']}: chose {row['chosen']}; {times}",
            flush=True,
        )
    share = sum(row["good"] for row in rows) / max(len(rows), 1)
    ratios = common.Quantiles.of([row["ratio"] for row in rows] or [1.0])
    worst = max((row["ratio"] for row in rows), default=1.0)
    summary = {
        "cases": len(rows),
        "within": WITHIN,
        "share": share,
        "required": REQUIRED,
        "median_ratio": ratios.median,
        "worst_ratio": worst,
    }
    print(
        f"the choice is within {WITHIN}x of the best path on {share:.1%} of {len(rows)} calls (required "
        f"{REQUIRED:.0%}); worst {worst:.2f}x"
    )
    constants = plan.calibration.constants_for(device)
    settings = {"budget_seconds": options.budget, "constants": constants.to_dict(), "constants_note": constants.note}
    common.report(
        "-" if options.quick or options.only else options.out,
        "planner",
        (__doc__ or "").partition("\n")[0],
        settings,
        rows,
        summary,
        start,
    )
    return 0 if share >= REQUIRED or options.quick or options.only else 1


if __name__ == "__main__":
    sys.exit(main())

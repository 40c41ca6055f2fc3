"""Attention by distance (REWA) by its compiled kernel, against torch's fused attention and against distance maps in
torch.

B = 1, H = 8, points of 32 + 32 + 32 numbers, values of 96, causal, float32. The peer ``sdpa`` is
``torch.nn.functional.scaled_dot_product_attention`` of heads of 96 in the same process: a replacement, not the same
function. The peer ``maps`` is the same function written down in torch: three T x T maps of distances, their weighed sum
and a softmax, with torch's autograd. Backward includes the gradient of the weights. Memory is what a call takes at its
peak beyond its inputs.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms, store

HEADS, PART = 8, 32
PARTS = (PART, PART, PART)
OPERATORS: dict[str, Callable[[], zonal.Operator]] = {
    "rewa": lambda: mechanisms.rewa(PARTS), "rewa(dot)": lambda: mechanisms.rewa(PARTS, dot=0.1),
    "rewa_oscillatory": lambda: mechanisms.rewa_oscillatory(parts=PARTS),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row. bound: the ratio of times to reach, memory: that of bytes (None: it is only measured)."""

    operator: str = "rewa"
    tokens: int = 1024
    gradients: bool = False
    peer: str = "sdpa"
    bound: float | None = None
    memory: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.operator}, T={self.tokens}, {'forward+backward' if self.gradients else 'forward'}, "
            f"against {self.peer}"
        )


def table() -> list[Case]:
    """Forward and with backward: against fused attention, against the maps, then the other operators, and at length."""
    both = (False, True)
    return [
        *(Case(tokens=tokens, gradients=gradients, bound=2.5 if tokens == 4096 else None) for tokens in (1024,
        4096) for gradients in both),
        *(Case(tokens=4096, gradients=gradients, peer="maps", bound=0.2, memory=0.1) for gradients in both),
        *(Case(operator, 4096, gradients) for operator in OPERATORS if operator != "rewa" for gradients in both),
        *(Case(tokens=16384, gradients=gradients) for gradients in both),
    ]  # fmt: skip


def maps(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, eps: float = 1e-4) -> Tensor:
    """REWA as one would write it down; weights (H, 3), the typical distances divided out."""
    (q1, q2, q3), (k1, k2, k3) = q.split(PARTS, -1), k.split(PARTS, -1)
    plane = (torch.cdist(q1, k1).square() + eps**2).sqrt() - eps
    cosine = F.normalize(q2, dim=-1) @ F.normalize(k2, dim=-1).mT
    sphere = 2 * torch.atan2(
        (2 - 2 * cosine).clamp_min(0).add(eps**2).sqrt(), (2 + 2 * cosine).clamp_min(0).add(eps**2).sqrt()
    )
    a, b = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) * PART**-0.5 for x in (q3, k3))
    apart = (2 - 2 * F.normalize(q3, dim=-1) @ F.normalize(k3, dim=-1).mT).clamp_min(0)
    delta = ((a - b.mT) / 2).sinh().square() + a.sinh() * b.sinh().mT * apart / 4
    hyperbolic = 2 * (delta + eps**2 / 4).sqrt().asinh()
    w = weights[:, :, None, None]
    score = -(w[:, 0] * plane + w[:, 1] * sphere + w[:, 2] * hyperbolic)
    return (
        score.masked_fill(
            torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf")
        ).softmax(-1)
        @ v
    )


@dataclass
class Work:
    """The tensors of a case, the subject and the peer."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    operator: zonal.Operator

    @staticmethod
    def of(case: Case, device: torch.device) -> "Work":
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, HEADS, case.tokens, 3 * PART, generator=generator).to(device).requires_grad_(case.gradients)
            for _ in range(3)
        )
        return Work(case, q, k, v, OPERATORS[case.operator]().to(device).requires_grad_(case.gradients))

    @property
    def weights(self) -> Tensor:
        """(H, 3) as ``maps`` takes them, with their gradient."""
        bound = self.operator.bind(HEADS, HEADS)
        return -bound.score.weighed(self.q, bound.score_params, 3 * PART, None, prepared=False)[0][0, :, 0]

    def attend(self) -> Tensor:
        return zonal.attention(self.q, self.k, self.v, self.operator, causal=True, path="tiled")

    def attend_by_peer(self) -> Tensor:
        if self.case.peer == "sdpa":
            return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)
        return maps(self.q, self.k, self.v, self.weights)

    def done(self, run: Callable[[], Tensor], learned: bool) -> object:
        if not self.case.gradients:
            with torch.no_grad():
                return run()
        return torch.autograd.grad(
            run().sum(), [self.q, self.k, self.v, *(self.operator.parameters() if learned else ())]
        )

    def subject(self) -> object:
        return self.done(self.attend, True)

    def peer(self) -> object:
        return self.done(self.attend_by_peer, self.case.peer == "maps")


def gate(device: torch.device, cases: list[Case]) -> dict[str, float]:
    """Errors of output and gradients against the float64 definition, for each operator at up to 777 tokens; of the maps
    as well, whose digits are fewer.
    """
    errors: dict[str, float] = {}
    for case in cases:
        short = replace(case, tokens=min(case.tokens, 777), gradients=True, bound=None, memory=None)
        if str(short) in errors:
            continue
        work = Work.of(short, device)
        exact = Work(short, *(x.detach().double().requires_grad_() for x in (work.q, work.k, work.v)), work.operator)
        reference = zonal.attention(exact.q, exact.k, exact.v, exact.operator, causal=True, path="dense")
        truth = torch.autograd.grad(reference.sum(), [exact.q, exact.k, exact.v, *exact.operator.parameters()])
        runs = [("", work.attend, 2e-5)]
        if case.peer == "maps":
            runs.append(("the maps", work.attend_by_peer, 1e-3))
        for who, run, tolerance in runs:
            name, y = f"{short}{who and ', '}{who}", run()
            errors[name] = common.gate(name, y.detach(), reference.detach(), tolerance)
            for i, (a, b) in enumerate(
                zip(
                    torch.autograd.grad(y.sum(), [work.q, work.k, work.v, *work.operator.parameters()]),
                    truth,
                    strict=True,
                )
            ):
                common.gate(
                    f"{name}, a gradient", a, b, tolerance if i < 3 else 5 * tolerance
                )  # those of what is learned are long sums that cancel
    return errors


def measured(case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    """The row of a case."""
    work = Work.of(case, device)
    row: dict[str, Any] = {
        "row": str(case),
        **asdict(case),
        "compared": common.compare(work.subject, work.peer, device, pairs=7, budget=budget).to_dict(),
    }
    row["peak_bytes"], row["peer_peak_bytes"] = (common.peak_bytes(run, device) for run in (work.subject, work.peer))
    return row


def missed(row: dict[str, Any], case: Case) -> list[str]:
    """Which bounds of a case do not hold."""
    found = []
    if case.bound is not None and row["compared"]["ratio"]["median"] > case.bound:
        found.append(f"{case}: time")
    if case.memory is not None and row["peak_bytes"] > case.memory * row["peer_peak_bytes"]:
        found.append(f"{case}: memory")
    return found


def line(row: dict[str, Any], case: Case) -> str:
    """A row for people."""
    compared, wrong = row["compared"], missed(row, case)
    times = " against ".join(common.milliseconds(compared[side]["median"]) for side in ("subject", "peer"))
    limits = {"time": case.bound, "memory": case.memory}
    bounds = ", ".join(f"{what} at most {limit}" for what, limit in limits.items() if limit)
    goal = f"; {bounds}: {'MISSED' if wrong else 'holds'}" if bounds else ""
    memory = f"{row['peak_bytes'] / 1e6:.0f} MB against {row['peer_peak_bytes'] / 1e6:.0f}"
    return f"{common.ratio_text(compared)}  {case} ({times}, {memory}){goal}"


def before(run: common.Run, out: str) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The rows and errors of an earlier run's JSON, which had the same settings."""
    rows = common.kept(out, run.options.resume, {"budget_seconds": run.options.budget}, run.device)
    return {row["row"]: row for row in rows}, dict(store.read_json(out)["summary"]["errors"]) if rows else {}


def summary(rows: dict[str, dict[str, Any]], errors: dict[str, float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows in the order of the table, and what holds of them."""
    kept = sorted(
        rows.values(), key=lambda row: [str(case) for case in table()].index(row["row"]) if row["tokens"] >= 1024 else 0
    )
    cases = [Case(**{name: row[name] for name in Case.__dataclass_fields__}) for row in kept]
    bounds = sum((case.bound is not None) + (case.memory is not None) for case in cases)
    return kept, {
        "errors": errors,
        "bounds": bounds,
        "missed": [name for row, case in zip(kept, cases, strict=True) for name in missed(row, case)],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every bound holds, else 1."""
    run = common.Run(
        common.parser(__doc__ or "", "rewa", "budget", "only", "resume", budget=6.0, by_machine=True).parse_args(argv)
    )
    options, device = run.options, run.device
    cases = [case for case in table() if options.only in str(case)]
    if options.quick:
        cases = [replace(case, tokens=200, bound=None, memory=None) for case in cases if case.tokens == 4096]
    out = run.target
    rows, errors = before(run, out)
    cases = [case for case in cases if str(case) not in rows]
    print("checking outputs and gradients against the float64 definition …", flush=True)
    errors |= gate(device, cases)
    for case in cases:
        load = common.circumstances(device)["load_per_core"]
        rows[str(case)] = row = {**measured(case, device, run.budget), "load_per_core": load}
        print(line(row, case), flush=True)
        run.write(*summary(rows, errors), out=out)  # after each, since it may go on later
    found = summary(rows, errors)[1]
    print(f"{found['bounds'] - len(found['missed'])} of {found['bounds']} bounds hold")
    return 1 if found["missed"] and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())

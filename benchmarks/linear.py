"""Sums over features in time linear in the tokens against torch's fused attention: compiled kernel, forward and with
backward.

B = 1, H = 8, P = d, causal, float32, through a plan (``zonal.plan``) made once. The peer of every ratio is
``torch.nn.functional.scaled_dot_product_attention`` on the same tensors in the same process; that of a row with
"doubled" is the same operator on half of the tokens, so that 2 is linear. Decoding is a loop of steps of a decoder
(``Memory.decoder``) that goes on from 16k tokens; its peer is as many calls of fused attention over 16k keys and
values. "flat" is the same loop after a million tokens, and its peer that loop after a thousand. Memory is what a call
takes at its peak beyond its inputs.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms
from zonal.execution.call import prepare, resumed
from zonal.execution.paths import sums
from zonal.execution.paths.steps.sums import sums_refusal

OPERATORS: dict[str, Callable[[], zonal.Operator]] = {
    "sq": mechanisms.squared_affine, "sko2": lambda: mechanisms.sko(degrees=(2.0,)), "linear": mechanisms.linear,
    "slay": lambda: mechanisms.slay(dim=64, seed=0),
}  # fmt: skip
HEADS = 8
STEPS = 256
"""Of a loop that decodes. Its first ones find the caches as the peer has left them, full of keys."""
SHORT = 1024


@dataclass(frozen=True)
class Case:
    """One row. bound: the ratio to reach (None: it is only measured)."""

    operator: str = "sq"
    dim: int = 32
    tokens: int = 1024
    gradients: bool = False
    peer: str = "sdpa"
    bound: float | None = None

    def __str__(self) -> str:
        what = {
            "sdpa": "forward+backward" if self.gradients else "forward",
            "half": "forward, doubled",
            "decode": "decode",
            "flat": "decode, flat",
        }[self.peer]
        return f"{self.operator}, d={self.dim}, T={self.tokens}, {what}"


def table() -> list[Case]:
    """The rows with bounds, then other operators."""
    bounds: dict[tuple[int, bool], tuple[tuple[int, float], ...]] = {
        (32, False): ((1024, 0.65), (4096, 0.28), (16384, 0.08)),
        (16, False): ((1024, 0.30), (4096, 0.10), (16384, 0.03)),
        (32, True): ((1024, 0.90), (4096, 0.40), (16384, 0.12)),
    }
    cases = [
        Case("sq", dim, tokens, gradients, bound=bound)
        for (dim, gradients), rows in bounds.items()
        for tokens, bound in rows
    ]
    cases += [Case("slay", 64, tokens, bound=bound) for tokens, bound in ((4096, 0.40), (16384, 0.10))]
    cases += [Case("sq", 32, tokens, peer="half", bound=2.2) for tokens in (32768, 65536, 131072)]
    cases += [Case("sq", dim, 16384, peer="decode", bound=0.04) for dim in (16, 32)] + [
        Case("sq", 64, 16384, peer="decode")
    ]
    cases += [Case("sq", dim, 1 << 20, peer="flat", bound=1.1) for dim in (16, 32)]
    return cases + [
        Case(name, dim, 4096, gradients)
        for name, dim in (("sko2", 32), ("linear", 64), ("sq", 64))
        for gradients in (False, True)
    ]


@dataclass
class Work:
    """The tensors of a case, the subject and the peer."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    operator: zonal.Operator
    decoder: zonal.Decoder | None = None
    short: zonal.Decoder | None = None
    tokens: list[tuple[Tensor, ...]] = field(default_factory=list)
    plans: dict[int, zonal.Plan] = field(default_factory=dict)

    @staticmethod
    def of(case: Case) -> "Work":
        generator = torch.Generator().manual_seed(0)
        drawn = min(case.tokens, 16384) if case.peer == "flat" else case.tokens
        q, k, v = (
            torch.randn(1, HEADS, drawn, case.dim, generator=generator).requires_grad_(case.gradients) for _ in range(3)
        )
        work = Work(case, q, k, v, OPERATORS[case.operator]().requires_grad_(case.gradients))
        if case.peer in ("decode", "flat"):
            empty = zonal.Memory.empty(work.operator, 1, HEADS, case.dim, case.dim)
            memory = empty.absorb(k, v)
            while memory.count < case.tokens:  # the same tokens once more
                memory = memory.merge(memory)
            work.decoder, work.short = memory.decoder(), empty.absorb(k[:, :, :SHORT], v[:, :, :SHORT]).decoder()
            work.tokens = work.steps()
        return work

    def steps(self, tokens: int = 1) -> list[tuple[Tensor, ...]]:
        """Queries, keys and values of the first tokens, so many at a time, each contiguous as a layer's projections
        leave them.
        """
        return [
            tuple(x[:, :, t : t + tokens].contiguous() for x in (self.q, self.k, self.v))
            for t in range(0, STEPS * tokens, tokens)
        ]

    def decode(self, decoder: zonal.Decoder | None, tokens: list[tuple[Tensor, ...]]) -> Tensor:
        """A loop over the tokens."""
        assert decoder is not None
        return torch.cat([decoder.step(*token) for token in tokens], 2)

    def attend(self, tokens: int | None = None) -> Tensor:
        """The first tokens (None: all), by a plan that is made at the first call of this length."""
        q, k, v = (x[:, :, :tokens] for x in (self.q, self.k, self.v))
        length = q.shape[2]
        if length not in self.plans:
            self.plans[length] = zonal.plan(self.operator, q.shape, causal=True, path="chunked")
        return self.plans[length](q, k, v)

    def done(self, y: Tensor, learned: bool) -> object:
        if not self.case.gradients:
            return y
        leaves = [self.q, self.k, self.v, *(self.operator.parameters() if learned else ())]
        return torch.autograd.grad(y.sum(), leaves, allow_unused=True)

    def subject(self) -> object:
        if self.decoder is not None:
            return self.decode(self.decoder, self.tokens)
        return self.done(self.attend(), True)

    def peer(self) -> object:
        if self.case.peer == "half":
            return self.attend(self.case.tokens // 2)
        if self.case.peer == "flat":
            return self.decode(self.short, self.tokens)
        if self.case.peer == "decode":
            return torch.cat([F.scaled_dot_product_attention(q, self.k, self.v) for q, _, _ in self.tokens], 2)
        return self.done(F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True), False)


def gate(cases: Sequence[Case]) -> dict[str, float]:
    """Errors of output and gradients against the float64 definition, for each kind of row at up to 777 tokens."""
    errors: dict[str, float] = {}
    for case in cases:
        short = Case(case.operator, case.dim, min(case.tokens, 777), True)
        name = str(short)
        if case.peer in ("decode", "flat"):
            name = f"{case.operator}, d={case.dim}, steps"
            if name not in errors:
                errors[name] = _steps(name, case)
            continue
        if name in errors:
            continue
        work = Work.of(short)
        refused = sums.refusal(prepare(work.operator, work.q, work.k, work.v, causal=True))
        if refused is not None:
            raise common.GateError(f"{name}: torch would be timed, for {refused}")
        exact = [x.detach().double().requires_grad_() for x in (work.q, work.k, work.v)]
        reference = zonal.attention(exact[0], exact[1], exact[2], work.operator, causal=True, path="dense")
        got = work.attend()
        errors[name] = common.gate(name, got.detach(), reference.detach(), 2e-5)
        common.gate_gradients(name, got, [work.q, work.k, work.v], reference, exact, 1e-4)
    return errors


@torch.no_grad()
def _steps(name: str, case: Case) -> float:
    """The error of a loop of steps, one token and four at a time, against the float64 definition."""
    work, worst = Work.of(Case(case.operator, case.dim, 4 * STEPS + 200)), 0.0
    for tokens in (1, 4):
        q, k, v = (x[:, :, -STEPS * tokens :] for x in (work.q, work.k, work.v))
        before = zonal.Memory.empty(work.operator, 1, HEADS, case.dim, case.dim).absorb(
            work.k[:, :, : -STEPS * tokens], work.v[:, :, : -STEPS * tokens]
        )
        call = prepare(work.operator, q[:, :, :tokens], k[:, :, :tokens], v[:, :, :tokens], causal=True)
        refused = sums_refusal(resumed(call, before))
        if refused is not None:
            raise common.GateError(f"{name}: torch would be timed, for {refused}")
        after = Work(case, q, k, v, work.operator)
        got = after.decode(before.decoder(), after.steps(tokens))
        reference = zonal.attention(
            work.q.double(), work.k.double(), work.v.double(), work.operator, causal=True, path="dense"
        )
        worst = max(worst, common.gate(name, got, reference[:, :, -STEPS * tokens :], 2e-5))
    return worst


def measured(case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    work = Work.of(case)
    with torch.set_grad_enabled(case.gradients):
        row: dict[str, Any] = {"row": str(case), **asdict(case)}
        row["against_peer"] = common.compare(work.subject, work.peer, device, pairs=9, budget=budget).to_dict()
        row["peak_bytes"] = common.peak_bytes(work.subject)
        row["output_bytes"] = work.q[:, :, : case.tokens if work.decoder is None else STEPS].nbytes
    return row


def line(row: dict[str, Any], case: Case) -> str:
    """A row for people."""
    found, steps = row["against_peer"], STEPS if case.peer in ("decode", "flat") else 1
    time = f"{common.milliseconds(found['subject']['median'] / steps)}{' a token' if steps > 1 else ''}"
    memory = f"{row['peak_bytes'] / 1e6:.0f} MB for an output of {row['output_bytes'] / 1e6:.0f}"
    return f"{common.ratio_text(found)} of {case.peer}  {case} ({time}; {memory})"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every bound holds, else 1."""
    run = common.Run(
        common.parser(__doc__ or "", "linear", "budget", "only", budget=6.0, by_machine=True).parse_args(argv),
        only_cpu="the kernel for sums over features runs on the CPU only",
    )
    cases = [case for case in table() if run.options.only in str(case)]
    if run.options.quick:
        cases = [
            Case("sq", 8, 300),
            Case("sq", 8, 300, True),
            Case("sq", 8, 600, peer="half"),
            Case("sq", 8, 300, peer="decode"),
            Case("sq", 8, 400, peer="flat"),
        ]
    return common.bounded(run, cases, gate, lambda case: measured(case, run.device, run.budget), line)


if __name__ == "__main__":
    sys.exit(main())

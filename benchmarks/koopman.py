"""Ridge and Koopman read-outs, token-exact, against torch's fused attention: compiled kernels, forward, with backward,
and decoding.

B = 1, H = 8, values of 64 numbers, causal, float32, through a plan (``zonal.plan``) made once. The peer of every ratio
is ``torch.nn.functional.scaled_dot_product_attention`` with heads of 64 and as many tokens in the same process: a
replacement, not the same function. Decoding is a loop of steps of a decoder (``Memory.decoder``) that goes on from so
many tokens; its peer is fused attention of one query over as many keys and values, and for a row with "flat" the same
steps after 1024 tokens, so that 1 is constant. Memory is what a call takes at its peak beyond its inputs; a memory's
bytes stand beside those of the keys and values it replaces.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms, prior
from zonal.execution.call import prepare
from zonal.execution.paths import ridge
from zonal.execution.paths.steps.ridge import ridge_refusal

HEADS, VALUES = 8, 64
STEPS = 16
"""Tokens that one run decodes."""
_PIECE = 16384  # tokens absorbed at once into a memory that is to be timed


@dataclass(frozen=True)
class Case:
    """One row. bound: the ratio to reach (None: it is only measured).

    rate: by which the past fades with each token, None: it does not.
    """

    dim: int = 56
    power: int = 0
    tokens: int = 1024
    gradients: bool = False
    peer: str = "sdpa"
    bound: float | None = None
    rate: float | None = None

    @property
    def decodes(self) -> bool:
        return self.peer in ("decode", "flat")

    def __str__(self) -> str:
        what = {
            "sdpa": "forward+backward" if self.gradients else "forward",
            "decode": "decode",
            "flat": "decode, flat",
        }[self.peer]
        return f"{self.kind}, T={self.tokens}, {what}"

    @property
    def kind(self) -> str:
        fading = "" if self.rate is None else f", rate {self.rate}"
        return f"r={self.dim}, K={self.power}{fading}"

    def operator(self) -> zonal.Operator:
        whole = mechanisms.ska(power=self.power)
        return whole if self.rate is None else whole.replace(prior=prior.Decay((self.rate,), learn=False))


def table() -> list[Case]:
    """The rows with bounds, then those that are only measured."""
    bounds: dict[tuple[int, int, bool], tuple[tuple[int, float], ...]] = {
        (56, 0, False): ((1024, 0.50), (4096, 0.20), (16384, 0.06)),
        (56, 2, False): ((1024, 0.70), (4096, 0.30), (16384, 0.10)),
        (24, 0, False): ((1024, 0.12), (4096, 0.06), (16384, 0.03)),
        (56, 0, True): ((1024, 0.40), (4096, 0.17), (16384, 0.05)),
    }
    cases = [
        Case(*kind, tokens=tokens, gradients=gradients, bound=bound)
        for (*kind, gradients), rows in bounds.items()
        for tokens, bound in rows
    ]
    cases += [Case(56, 0, tokens, bound=bound, rate=0.998) for tokens, bound in ((1024, 0.40), (4096, 0.14))]
    cases.append(Case(56, 2, 16384, peer="decode", bound=0.06))
    cases += [Case(56, 2, tokens, peer="flat", bound=1.1) for tokens in (16384, 1 << 20)]
    cases += [Case(56, 2, 4096, True), Case(24, 0, 4096, True), Case(24, 2, 4096)]
    return [*cases, *(Case(dim, power, 16384, peer="decode") for dim, power in ((56, 0), (24, 0), (24, 2)))]


def tensors(case: Case, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a case: keys longer than one are shortened by the operator."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, tokens, dim, generator=generator) for dim in (case.dim, case.dim, VALUES))
    return q / case.dim**0.5, k, v


def remembered(case: Case, operator: zonal.Operator, tokens: int) -> zonal.Memory:
    """A memory of so many tokens, one piece after another."""
    memory = zonal.Memory.empty(operator, 1, HEADS, case.dim, VALUES)
    for seed, start in enumerate(range(0, tokens, _PIECE)):
        _, k, v = tensors(case, min(_PIECE, tokens - start), seed + 1)
        memory = memory.absorb(k, v)
    return memory


class Work:
    """The tensors of a case, the subject and the peer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.operator = case.operator().requires_grad_(case.gradients)
        tokens = STEPS if case.decodes else case.tokens
        self.q, self.k, self.v = (x.requires_grad_(case.gradients) for x in tensors(case, tokens))
        self.leaves = [self.q, self.k, self.v, *self.operator.parameters()]
        shapes = (x.shape for x in (self.q, self.k, self.v))
        self.attend = zonal.plan(self.operator, *shapes, causal=True, gradients=case.gradients, path="chunked")
        self.memory = self.decoder = self.short = None
        if case.decodes:
            with torch.no_grad():
                self.memory = remembered(case, self.operator, case.tokens)
                self.decoder = self.memory.decoder()
                self.short = remembered(case, self.operator, 1024).decoder()
        generator = torch.Generator().manual_seed(1)
        length = case.tokens if case.peer != "flat" else 1
        self.plain = [
            torch.randn(1, HEADS, length, VALUES, generator=generator).requires_grad_(case.gradients) for _ in range(3)
        ]

    def decode(self, decoder: zonal.Decoder | None) -> Tensor:
        """A loop over the tokens."""
        assert decoder is not None
        tokens = [[x[:, :, t : t + 1] for x in (self.q, self.k, self.v)] for t in range(STEPS)]
        return torch.cat([decoder.step(*token) for token in tokens], 2)

    def subject(self) -> object:
        if self.case.decodes:
            return self.decode(self.decoder)
        run = functools.partial(self.attend, self.q, self.k, self.v)
        return common.passed(run, self.leaves, self.case.gradients)

    def peer(self) -> object:
        q, k, v = self.plain
        if self.case.peer == "flat":
            return self.decode(self.short)
        if self.case.peer == "decode":
            return torch.cat([F.scaled_dot_product_attention(q[:, :, t : t + 1], k, v) for t in range(STEPS)], 2)
        run = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        return common.passed(run, self.plain, self.case.gradients)


def gate(cases: Sequence[Case]) -> dict[str, float]:
    """Errors of output and gradients, and of steps, against the float64 definition, for each kind of row at 777
    tokens.
    """
    errors: dict[str, float] = {}
    for dim, power, rate in dict.fromkeys((case.dim, case.power, case.rate) for case in cases):
        work = Work(Case(dim, power, 777, True, rate=rate))
        refused = ridge.refusal(prepare(work.operator, work.q, work.k, work.v, causal=True))
        if refused is not None:
            raise common.GateError(f"{work.case.kind}: torch would be timed, for {refused}")
        exact = [x.detach().double().requires_grad_() for x in (work.q, work.k, work.v)]
        reference = zonal.attention(exact[0], exact[1], exact[2], work.operator, causal=True, path="dense")
        got = work.attend(work.q, work.k, work.v)
        name = f"{work.case.kind}, T=777"
        errors[name] = common.gate(name, got.detach(), reference.detach(), 2e-5)
        common.gate_gradients(name, got, [work.q, work.k, work.v], reference, exact, 1e-4)
        with torch.no_grad():
            q, k, v = (x.detach() for x in (work.q, work.k, work.v))
            refused = ridge_refusal(prepare(work.operator, *(x[:, :, :1] for x in (q, k, v)), causal=True))
            if refused is not None:
                raise common.GateError(f"{work.case.kind}, steps: torch would be timed, for {refused}")
            before = zonal.Memory.empty(work.operator, 1, HEADS, dim, VALUES).absorb(k[:, :, :-STEPS], v[:, :, :-STEPS])
            work.q, work.k, work.v = (x[:, :, -STEPS:] for x in (q, k, v))
            errors[f"{name}, steps"] = common.gate(
                f"{name}, steps", work.decode(before.decoder()), reference[:, :, -STEPS:].detach(), 2e-5
            )
    return errors


def measured(case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    work = Work(case)
    with torch.set_grad_enabled(case.gradients):
        row: dict[str, Any] = {"row": str(case), **asdict(case)}
        row["against_peer"] = common.compare(work.subject, work.peer, device, pairs=9, budget=budget).to_dict()
        row["peak_bytes"] = common.peak_bytes(work.subject)
        row["output_bytes"] = 4 * HEADS * VALUES * (STEPS if case.decodes else case.tokens)
        if work.memory is not None:
            row["memory_bytes"] = work.memory.nbytes
            row["keys_and_values_bytes"] = 8 * HEADS * VALUES * case.tokens
    return row


def line(row: dict[str, Any], case: Case) -> str:
    """A row for people."""
    found = row["against_peer"]
    text = f"{common.ratio_text(found, 4)} of {case.peer}  {case}"
    if not case.decodes:
        return f"{text} ({common.milliseconds(found['subject']['median'])})"
    memory = f"{row['memory_bytes'] / 1e3:.0f} kB in place of {row['keys_and_values_bytes'] / 1e3:.0f}"
    return f"{text} ({common.milliseconds(found['subject']['median'] / STEPS)} a token; a memory of {memory})"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every bound holds, else 1."""
    run = common.Run(
        common.parser(__doc__ or "", "koopman", "budget", "only", budget=6.0, by_machine=True).parse_args(argv),
        only_cpu="the kernels for ridge read-outs run on the CPU only",
    )
    cases = [case for case in table() if run.options.only in str(case)]
    if run.options.quick:
        cases = [Case(8, 1, 300), Case(8, 1, 300, True), Case(8, 1, 100, peer="decode"), Case(8, 1, 400, peer="flat")]
    return common.bounded(run, cases, gate, lambda case: measured(case, run.device, run.budget), line)


if __name__ == "__main__":
    sys.exit(main())

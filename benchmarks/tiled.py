"""Tiles against torch's fused attention: compiled kernel and torch fallback, forward and with backward, float32 and
bfloat16.

B = 1, H = 8, d = 64, causal unless a row says otherwise. The peer of a ratio is
``torch.nn.functional.scaled_dot_product_attention`` on the same tensors in the same process (packed documents: one call
a document), or, where the row says so, KeOps or FlexAttention computing the same function as the subject
(benchmarks/peers.py, on a CPU). Backward includes the gradient of what the link learns. Memory is what a call takes at
its peak beyond its inputs.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common, peers
from zonal import mechanisms
from zonal.kernels import native as native_kernels

OPERATORS: dict[str, Callable[[], zonal.Operator]] = {
    "sko": lambda: mechanisms.sko(degrees=(2.0, 3.0, 4.0, 5.0)), "yat": mechanisms.yat, "softmax": mechanisms.softmax,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row. bound: the ratio to reach (None: it is only measured)."""

    operator: str = "sko"
    tokens: int = 1024
    gradients: bool = False
    dtype: str = "float32"
    kernel: bool = True
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    causal: bool = True
    documents: int = 1
    peer: str = "sdpa"
    bound: float | None = None

    def __str__(self) -> str:
        plain = Case()
        parts = [
            self.operator,
            f"T={self.tokens}",
            "forward+backward" if self.gradients else "forward",
            self.dtype,
            "kernel" if self.kernel else "torch",
            f"H={self.heads}" if self.heads != plain.heads else "",
            f"kv={self.kv_heads}" if self.kv_heads != self.heads else "",
            f"d={self.dim}" if self.dim != plain.dim else "",
            "" if self.causal else "bidirectional",
            f"{self.documents} documents" if self.documents > 1 else "",
            f"against {self.peer}" if self.peer != plain.peer else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def edges(self) -> list[int]:
        return common.document_edges(self.documents, self.tokens)


def table() -> list[Case]:
    """The rows with bounds, then other shapes, then other peers."""
    cases = []
    for tokens, bounds in ((1024, (0.70, 0.70, 0.75, 0.50, 0.80, 1.1)), (4096, (0.85, 0.85, 0.90, 0.45, 0.70, 1.1))):
        cases += [
            Case("sko", tokens, bound=bounds[0]),
            Case("yat", tokens, bound=bounds[1]),
            Case("sko", tokens, gradients=True, bound=bounds[2]),
            Case("sko", tokens, dtype="bfloat16", bound=bounds[3]),
            Case("sko", tokens, gradients=True, dtype="bfloat16", bound=bounds[4]),
            Case("softmax", tokens, bound=bounds[5]),
        ]  # fmt: skip
    cases += [
        Case("sko", 4096, kernel=False, bound=1.4),
        Case("sko", 4096, gradients=True, kernel=False, bound=1.5),
    ]
    shapes = [
        Case(tokens=127), Case(tokens=1000), Case(tokens=4099), Case(dim=48), Case(dim=80), Case(dim=128),
        Case(heads=1, kv_heads=1),
        Case(causal=False), Case(kv_heads=2), Case(tokens=4096, documents=20),
    ]  # fmt: skip
    shapes += [Case("yat", tokens, causal=causal, peer="keops") for tokens in (1024, 4096) for causal in (True, False)]
    shapes += [Case(operator, tokens, peer="flex") for tokens in (1024, 4096) for operator in ("softmax", "yat")]
    return cases + [Case(**{**asdict(case), "gradients": gradients}) for case in shapes for gradients in (False, True)]


@dataclass
class Work:
    """The tensors of a case, the subject and the peer."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    operator: zonal.Operator
    edges: Tensor | None

    @staticmethod
    def of(case: Case, device: torch.device) -> "Work":
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, case.dtype)

        def draw(heads: int) -> Tensor:
            x = torch.randn(1, heads, case.tokens, case.dim, generator=generator)
            return x.to(device, dtype).requires_grad_(case.gradients)

        edges = None if case.documents == 1 else torch.tensor(case.edges, device=device)
        operator = OPERATORS[case.operator]().to(device).requires_grad_(case.gradients)
        return Work(case, draw(case.heads), draw(case.kv_heads), draw(case.kv_heads), operator, edges)

    def attend(self) -> Tensor:
        with common.environment(**{native_kernels.VARIABLE: "on" if self.case.kernel else "off"}):
            return zonal.attention(
                self.q, self.k, self.v, self.operator, causal=self.case.causal, cu_seqlens=self.edges, path="tiled"
            )

    def attend_by_peer(self) -> Tensor:
        if self.case.peer != "sdpa":
            return peers.load(self.case.peer, self.case.operator).attend(self.q, self.k, self.v, self.case.causal)
        parts, edges = [], self.case.edges
        for start, stop in itertools.pairwise(edges):
            q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
            parts.append(
                F.scaled_dot_product_attention(
                    q, k, v, is_causal=self.case.causal, enable_gqa=self.case.kv_heads != self.case.heads
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def done(self, run: Callable[[], Tensor], learned: bool) -> object:
        if not self.case.gradients:
            return run()
        leaves = [self.q, self.k, self.v, *(self.operator.parameters() if learned else ())]
        return torch.autograd.grad(run().sum(), leaves, allow_unused=True)

    def subject(self) -> object:
        return self.done(self.attend, True)

    def peer(self) -> object:
        return self.done(self.attend_by_peer, False)


def gate(device: torch.device, cases: Sequence[Case]) -> dict[str, float]:
    """Errors of output and gradients against the float64 definition, for each kind of row at up to 777 tokens."""
    errors: dict[str, float] = {}
    for case in cases:
        short = Case(**{**asdict(case), "tokens": min(case.tokens, 777), "gradients": True})
        name = str(short)
        if name in errors:
            continue
        work = Work.of(short, device)
        exact = [x.detach().double().requires_grad_() for x in (work.q, work.k, work.v)]
        reference = zonal.attention(
            exact[0], exact[1], exact[2], work.operator, causal=case.causal, cu_seqlens=work.edges, path="dense"
        )
        tolerance = 2e-5 if case.dtype == "float32" else 2e-2
        got = work.attend()
        errors[name] = common.gate(name, got.detach(), reference.detach(), tolerance)
        with torch.no_grad():
            common.gate(f"{name}, inference", work.attend(), reference.detach(), tolerance)
        common.gate_gradients(name, got, [work.q, work.k, work.v], reference, exact, tolerance)
        if case.peer != "sdpa":
            errors[f"{name}, the peer"] = peer_gate(short, device, tolerance)
    return errors


def peer_gate(case: Case, device: torch.device, tolerance: float) -> float:
    """The peer's error of the output; its gradients are checked too, unless it refuses to make any: its row then says
    so.
    """
    work = Work.of(case, device)
    exact = [x.detach().double().requires_grad_() for x in (work.q, work.k, work.v)]
    reference = zonal.attention(exact[0], exact[1], exact[2], work.operator, causal=case.causal, path="dense")
    still = Work.of(replace(case, gradients=False), device)
    error = common.gate(f"{case}, the peer", still.attend_by_peer(), reference.detach(), tolerance)
    try:
        found = torch.autograd.grad(work.attend_by_peer().sum(), [work.q, work.k, work.v])
    except NotImplementedError:
        return error
    for a, b in zip(found, torch.autograd.grad(reference.sum(), exact), strict=True):
        common.gate(f"{case}, a gradient of the peer", a, b, tolerance)
    return error


def present(cases: Sequence[Case], device: torch.device) -> list[Case]:
    """The cases whose peer can run; which cannot is said once for each peer."""
    kept, missing = [], {}
    for case in cases:
        try:
            if case.peer != "sdpa":
                if device.type != "cpu":
                    raise peers.PeerMissingError(f"it is set up for a CPU here, and the device is {device}")
                peers.load(case.peer, case.operator)
            kept.append(case)
        except peers.PeerMissingError as error:
            missing[case.peer] = str(error)
    for name, reason in missing.items():
        print(f"no rows against {name}: {reason}", flush=True)
    return kept


def measured(case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    """The row of a case; where the peer cannot do what is asked, its own words under "refused" in place of numbers."""
    work = Work.of(case, device)
    row: dict[str, Any] = {"row": str(case), **asdict(case)}
    with torch.set_grad_enabled(case.gradients):
        if case.peer != "sdpa":
            peer = peers.load(case.peer, case.operator)
            row["peer_version"], row["peer_how"] = peer.version, peer.how
            try:
                theirs = work.attend_by_peer()
            except NotImplementedError as error:
                row["refused"] = str(error)
                return row
            # at full length, where the gate did not look; it also compiles what is timed
            row["peer_difference"] = common.gate(
                f"{case}, peer and subject", theirs.detach(), work.attend().detach().double(), 1e-4
            )
            del theirs
            if case.gradients:
                budget *= 2  # one call of a peer takes up to 4 s
        row[f"against_{case.peer}"] = common.compare(work.subject, work.peer, device, pairs=9, budget=budget).to_dict()
        row["peak_bytes"], row[f"{case.peer}_peak_bytes"] = (
            common.peak_bytes(work.subject, device),
            common.peak_bytes(work.peer, device),
        )
    return row


def line(row: dict[str, Any], case: Case) -> str:
    """A row for people."""
    if "refused" in row:
        return f"no number  {case}: {row['refused']}"
    found = row[f"against_{case.peer}"]
    times = " against ".join(common.milliseconds(found[who]["median"]) for who in ("subject", "peer"))
    memory = f"{row['peak_bytes'] / 1e6:.0f} MB against {row[f'{case.peer}_peak_bytes'] / 1e6:.0f}"
    name = "SDPA" if case.peer == "sdpa" else case.peer
    return f"{common.ratio_text(found)} of {name}  {case} ({times}, {memory})"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when every bound holds, else 1."""
    run = common.Run(
        common.parser(__doc__ or "", "tiled", "budget", "only", budget=6.0, by_machine=True).parse_args(argv)
    )
    cases = [case for case in table() if run.options.only in str(case)]
    if run.options.quick:
        cases = [case for case in cases if case.tokens == 127]
    return common.bounded(
        run,
        present(cases, run.device),
        lambda cases: gate(run.device, cases),
        lambda case: measured(case, run.device, run.budget),
        line,
    )


if __name__ == "__main__":
    sys.exit(main())

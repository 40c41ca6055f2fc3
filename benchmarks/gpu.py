"""The Triton kernels against FlashAttention on a CUDA GPU: forward, with backward, packed documents, decoding, sums
over features, ridge read-outs; bfloat16, causal.

    python -m benchmarks.gpu [--quick] [--list] [--minutes 9]

H d = 2048 and B T = 16k (T = 32k: B = 1), so that every multiprocessor has work; decoding is one query on S keys, four
query heads a key head. The peer of every ratio is ``torch.nn.functional.scaled_dot_product_attention`` held to its
FlashAttention backend on the same tensors in the same process (packed documents: ``torch.nn.attention.varlen``). Both
are called from Python, queued one run after the other and timed in turns by CUDA events; backward includes the gradient
of what the link learns. Rates count the useful operations, 4 d a visible pair forward and 10 d backward, for both
sides, and are given as shares of a bfloat16 matrix product measured in the same process; decoding as shares of a copy.
Sums over features and ridge read-outs run in time linear in the tokens, on the chunked path; their rates, too, count
what a path over all pairs would do. Output and gradients of each kind of row are checked against the dense path in
float64 first; a kind that is wrong is named and not timed.
"""

import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import zonal
from benchmarks import common
from benchmarks.tiled import OPERATORS as TILED
from zonal import mechanisms
from zonal.errors import ArgumentError
from zonal.execution.call import prepare
from zonal.execution.paths import ridge, sums, tile

SUMS: dict[str, Callable[[], zonal.Operator]] = {
    "squared_affine": mechanisms.squared_affine,
    "linear": mechanisms.linear,
}
RIDGE: dict[str, Callable[[], zonal.Operator]] = {
    f"ska-{power}": functools.partial(mechanisms.ska, power=power) for power in (0, 1, 2)
}
OPERATORS = TILED | SUMS | RIDGE
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
DIMS = (64, 128)
SUMS_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
SUMS_DIMS = (32, 64)
RIDGE_DIMS = (32, 64)
RIDGE_LENGTHS = (2048, 16384, 65536)
MEMORIES = (1024, 4096, 16384, 65536, 131072)
WIDTH, TOKENS, GROUPS = 2048, 16384, 4
# what is checked: ragged tiles, and more than one split of the keys
_GATE_TOKENS, _GATE_KEYS, _GATE_HEADS = 777, 1031, 4
# and sums that are read
_GATE_SUMS = 3001
# of bfloat16: the weights, the output and each gradient are rounded
TOLERANCE = 2e-2
# the kernels and FlashAttention need it
_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Case:
    """One row. keys: of a decoding step, 0 = as many as tokens. width: H d."""

    operator: str
    tokens: int
    dim: int
    gradients: bool = False
    documents: int = 1
    keys: int = 0
    batch: int = 1
    width: int = WIDTH

    def __str__(self) -> str:
        length = f"decode, S={self.keys}" if self.keys else f"T={self.tokens}"
        kind = [] if self.keys else ["forward+backward" if self.gradients else "forward"]
        packed = [f"{self.documents} documents"] if self.documents > 1 else []
        return ", ".join([self.operator, length, *kind, f"d={self.dim}", f"H={self.heads}", f"B={self.batch}", *packed])

    @property
    def path(self) -> str:
        return "tiled" if self.operator in TILED else "chunked"

    @property
    def heads(self) -> int:
        return self.width // self.dim

    @property
    def kv_heads(self) -> int:
        return self.heads // GROUPS if self.keys else self.heads

    @property
    def edges(self) -> list[int]:
        return common.document_edges(self.documents, self.tokens)

    @property
    def operations(self) -> float:
        """Multiplications and additions of the products that cannot be avoided: two forward, five backward."""
        pairs = self.keys if self.keys else sum((b - a) * (b - a + 1) / 2 for a, b in itertools.pairwise(self.edges))
        return self.batch * self.heads * pairs * self.dim * (4.0 + 10.0 * self.gradients)

    @property
    def bytes(self) -> float:
        """Of keys and values, each read once."""
        return 2.0 * 2 * self.batch * self.kv_heads * (self.keys or self.tokens) * self.dim

    @property
    def short(self) -> "Case":
        """The same kind of call, small enough for the dense path in float64."""
        return replace(
            self, tokens=1 if self.keys else _GATE_SUMS if self.operator in SUMS else _GATE_TOKENS,
            keys=_GATE_KEYS if self.keys else 0, gradients=not self.keys, batch=1,
            documents=min(self.documents, 5), width=_GATE_HEADS * self.dim,
        )  # fmt: skip


def table() -> list[Case]:
    """All rows: lengths, packed documents, decoding, sums over features, ridge read-outs.

    Those of 16k tokens or keys come first: a run that --minutes cuts short has every kind of row.
    """
    cases = [
        Case(operator, tokens, dim, gradients, batch=max(1, TOKENS // tokens))
        for dim in DIMS for gradients in (False, True) for tokens in LENGTHS for operator in TILED
    ]  # fmt: skip
    cases += [
        Case(operator, TOKENS, dim, gradients, documents=32)
        for dim in DIMS
        for gradients in (False, True)
        for operator in TILED
    ]
    cases += [Case(operator, 1, dim, keys=keys) for dim in DIMS for keys in MEMORIES for operator in TILED]
    cases += [
        Case(operator, tokens, dim, gradients, batch=max(1, TOKENS // tokens))
        for lengths, dims, operators in ((SUMS_LENGTHS, SUMS_DIMS, SUMS), (RIDGE_LENGTHS, RIDGE_DIMS, RIDGE))
        for dim in dims for gradients in (False, True) for tokens in lengths for operator in operators
    ]  # fmt: skip
    return sorted(cases, key=lambda case: abs(math.log2((case.keys or case.tokens) / TOKENS)))


def flash() -> contextlib.AbstractContextManager[Any]:
    """Inside, scaled_dot_product_attention runs FlashAttention or raises."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


@dataclass
class Work:
    """The tensors of a case, the subject and the peer."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    operator: zonal.Operator
    edges: Tensor | None

    @staticmethod
    def of(case: Case, device: torch.device) -> "Work":
        """Raises: ArgumentError when the kernel would not run the case."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(heads: int, tokens: int, leaf: bool = True) -> Tensor:
            x = torch.randn(
                case.batch, heads, tokens, case.dim, generator=generator, device=device, dtype=torch.bfloat16
            )
            return x.requires_grad_(case.gradients and leaf)

        q, dy = draw(case.heads, case.tokens), draw(case.heads, case.tokens, leaf=False)
        k, v = (draw(case.kv_heads, case.keys or case.tokens) for _ in range(2))
        operator = OPERATORS[case.operator]().to(device).requires_grad_(case.gradients)
        edges = torch.tensor(case.edges, device=device, dtype=torch.int32) if case.documents > 1 else None
        call = prepare(operator, q, k, v, causal=True, cu_seqlens=edges)
        kernel = tile if case.path == "tiled" else sums if case.operator in SUMS else ridge
        reason = kernel.refusal(call)
        if reason is not None:
            raise ArgumentError(f"bench gpu: the compiled kernel was required for {case}, and would not run: {reason}.")
        return Work(case, q, k, v, dy, operator, edges)

    def attend(self) -> Tensor:
        return zonal.attention(
            self.q, self.k, self.v, self.operator, causal=True, cu_seqlens=self.edges, path=self.case.path
        )

    def flash(self) -> Tensor:
        if self.edges is not None:
            from torch.nn.attention.varlen import (
                varlen_attn,
            )  # not there before torch 2.10, and needed for these rows alone

            q, k, v = (x[0].transpose(0, 1) for x in (self.q, self.k, self.v))
            longest = max(b - a for a, b in itertools.pairwise(self.case.edges))
            y = varlen_attn(q, k, v, self.edges, self.edges, longest, longest, window_size=(-1, 0))
            assert isinstance(y, Tensor)
            return y.transpose(0, 1)[None]
        with flash():
            # the one query of a decoding step sees every key
            return F.scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=not self.case.keys, enable_gqa=self.case.heads != self.case.kv_heads
            )

    def done(self, run: Callable[[], Tensor], learned: bool) -> object:
        if not self.case.gradients:
            with torch.no_grad():
                return run()
        leaves = [self.q, self.k, self.v, *(self.operator.parameters() if learned else ())]
        return torch.autograd.grad(run(), leaves, self.dy, allow_unused=True)

    def subject(self) -> object:
        return self.done(self.attend, True)

    def peer(self) -> object:
        return self.done(self.flash, False)


def gate(device: torch.device, case: Case) -> float:
    """The error of a row's output against the dense path in float64; gradients are checked alike.

    Raises: GateError when one is off by more than TOLERANCE.
    """
    work = Work.of(case, device)
    exact = [x.detach().double().requires_grad_(case.gradients) for x in (work.q, work.k, work.v)]
    reference = zonal.attention(
        exact[0], exact[1], exact[2], work.operator, causal=True, cu_seqlens=work.edges, path="dense"
    )
    got = work.attend()
    error = common.gate(str(case), got.detach(), reference.detach(), TOLERANCE)
    if case.gradients:
        for letter, a, b in zip(
            "qkv",
            torch.autograd.grad(got, [work.q, work.k, work.v], work.dy),
            torch.autograd.grad(reference, exact, work.dy.double()),
            strict=True,
        ):
            common.gate(f"{case}, gradient of {letter}", a, b, TOLERANCE)
    return error


def compared(subject: common.Work, peer: common.Work, device: torch.device, budget: float) -> common.Compared:
    """Pairs in turns.

    A sample is as many runs as last some milliseconds: between them the host works ahead of the device, as in a model.
    """
    subject(), peer()
    runs = min(50, max(1, math.ceil(5e-3 / common.once(peer, device))))

    def many(work: common.Work) -> common.Work:
        def repeat() -> None:
            for _ in range(runs):
                work()

        return repeat

    found = common.interleaved({"subject": many(subject), "peer": many(peer)}, device, rounds=9, budget=budget)
    times = {name: [seconds / runs for seconds in values] for name, values in found.items()}
    ratios = [a / b for a, b in zip(times["subject"], times["peer"], strict=True)]
    return common.Compared(*(common.Quantiles.of(x) for x in (times["subject"], times["peer"], ratios)))


def peaks(device: torch.device, order: int = 8192) -> dict[str, float]:
    """What the device reaches here: operations a second of a bfloat16 matrix product, bytes a second read and written
    by a copy.
    """
    a, b = (torch.randn(order, order, device=device, dtype=torch.bfloat16) for _ in range(2))
    target = torch.empty_like(a)
    product = common.interleaved({"product": lambda: torch.mm(a, b, out=target)}, device, rounds=20, budget=1.0)[
        "product"
    ]
    source = torch.empty(order, order, 4, device=device)
    copied = torch.empty_like(source)
    copy = common.interleaved({"copy": lambda: copied.copy_(source)}, device, rounds=20, budget=1.0)["copy"]
    return {"matmul_flops": 2.0 * order**3 / min(product), "copy_bytes": 2.0 * source.nbytes / min(copy)}


def measured(case: Case, device: torch.device, peak: dict[str, float], budget: float) -> dict[str, Any]:
    """One row: times and ratio, rates and their shares of what the device reaches, memory."""
    work = Work.of(case, device)
    found = compared(work.subject, work.peer, device, budget)
    row: dict[str, Any] = {
        "row": str(case),
        **asdict(case),
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "against_flash": found.to_dict(),
    }
    for prefix, quantiles, run in (("", found.subject, work.subject), ("flash_", found.peer, work.peer)):
        seconds = quantiles.median
        row[f"{prefix}flops"] = case.operations / seconds
        row[f"{prefix}share"] = (
            case.bytes / seconds / peak["copy_bytes"] if case.keys else case.operations / seconds / peak["matmul_flops"]
        )
        row[f"{prefix}peak_bytes"] = common.peak_bytes(run, device)
    return row


def required(device: torch.device) -> str | None:
    """What is missing on this machine and what to do about it, or None."""
    wanted = "a CUDA device of compute capability 8.0 or later was required"
    elsewhere = (
        "Run it where there is one; `--list` prints the rows anywhere, and `python -m benchmarks.tiled` "
        "measures the CPU's kernel."
    )
    if device.type != "cuda":
        return f"bench gpu: {wanted}, received --device {device}. {elsewhere}"
    if not torch.cuda.is_available():
        return (
            f"bench gpu: {wanted}, and torch {torch.__version__} sees none (it must be a CUDA build, with a "
            f"driver). {elsewhere}"
        )
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return (
            f"bench gpu: {wanted}, and {torch.cuda.get_device_name(device)} has "
            f"{torch.cuda.get_device_capability(device)}. {elsewhere}"
        )
    return None


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark: 0 when it ran, 1 when a kernel was wrong, 2 where it cannot."""
    parser = common.parser(__doc__ or "", "gpu", "budget", "only", budget=1.0, device="cuda", by_machine=True)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no row after this long; the report says which are missing",
    )
    parser.add_argument("--list", action="store_true", help="print the rows and their operations, and end")
    options = parser.parse_args(argv)
    cases = [case for case in table() if options.only in str(case)]
    if options.quick:
        cases = [
            case
            for case in cases
            if case.dim == DIMS[0] and case.tokens <= (2048 if case.path == "chunked" else 1024) and case.keys <= 4096
        ]
    if options.list:
        print(common.table([(str(case), f"{case.operations / 1e9:.4g}") for case in cases], ("row", "GFLOP")))
        return 0
    missing = required(torch.device(options.device))
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    run, clock = common.Run(options), time.monotonic()
    device = run.device
    peak = peaks(device)
    print(
        f"{peak['matmul_flops'] / 1e12:.0f} TFLOP/s in a bfloat16 product, {peak['copy_bytes'] / 1e12:.2f} TB/s "
        "in a copy",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    errors: dict[Case, float] = {}
    wrong: dict[Case, str] = {}
    try:
        for case in cases:
            if time.monotonic() - clock > 60 * options.minutes:
                break
            if case.short not in errors | wrong:
                try:
                    errors[case.short] = gate(device, case.short)
                except common.GateError as error:
                    wrong[case.short] = str(error)
                    print(f"WRONG, and not timed: {error}", flush=True)
            if case.short in wrong:
                continue
            row = measured(case, device, peak, run.budget)
            rows.append(row)
            rates = f"{100 * row['share']:.0f}% of the device against {100 * row['flash_share']:.0f}%"
            memory = f"{row['peak_bytes'] / 1e6:.0f} MB against {row['flash_peak_bytes'] / 1e6:.0f}"
            print(
                f"{common.ratio_text(row['against_flash'])} of FlashAttention  {case} ({rates}; {memory})",
                flush=True,
            )
    finally:
        # a row that fails ends the run; the rows before it stand
        done = {row["row"] for row in rows}
        left = [str(case) for case in cases if str(case) not in done]
        told = {"errors": {str(kind): error for kind, error in errors.items()}, "wrong": list(wrong.values())}
        run.write(rows, {**told, "peaks": peak, "not_run": left})
    print(f"{len(rows)} rows" + (f", {len(left)} not run" if left else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

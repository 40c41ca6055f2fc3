"""Time, tokens a second and memory of one causal attention call from 128 to 131,072 tokens, and the longest context
that fits in a fixed memory: section 3.2 and table 11 of the SLAY paper.

B = 1, width 256 in 8 heads, float32, forward. "Matrix" is the T x T matrix written out in torch, as the paper measures
quadratic attention; it is left out where it would not fit into the memory that is free. The others go through a plan
made once. The common measure is causal ``torch.nn.functional.scaled_dot_product_attention``, here "softmax, fused", on
the same tensors, in turns in the same process. Peak memory is what a call takes beyond its inputs. "Decoder" is the
size of the memory that a decoder keeps after as many tokens. Work that takes over 20 seconds runs once.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common, scaling_page
from zonal import device_memory, mechanisms
from zonal.errors import ArgumentError

HEADS, DIM = 8, 32
LENGTHS = tuple(2**power for power in range(7, 18))
FUSED = "softmax, fused"
CAP = 20.0
"""Seconds after which work is not run again."""
LIMITS = {"64 MiB": 2**26, "1 GiB": 2**30, "16 GiB": 2**34}
MOST_TOKENS = 2**40
"""Beyond this a context counts as endless."""


@dataclass(frozen=True)
class Subject:
    """What is timed. spec: the operator whose float64 definition it is checked against. attend: (q, k, v) → the work.

    matrices: T x T matrices of float32 that each head holds at the peak.
    """

    spec: str
    attend: Callable[[Tensor, Tensor, Tensor], common.Work]
    matrices: int = 0


def planned(spec: str) -> Subject:
    operator = mechanisms.resolve(spec)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> common.Work:
        return functools.partial(zonal.plan(operator, q.shape, causal=True), q, k, v)

    return Subject(spec, attend)


def fused(q: Tensor, k: Tensor, v: Tensor) -> common.Work:
    return functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)


def softmax_matrix(q: Tensor, k: Tensor, v: Tensor) -> common.Work:
    def run() -> Tensor:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT * DIM**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    return run


def yat_matrix(q: Tensor, k: Tensor, v: Tensor) -> common.Work:
    eps = mechanisms.resolve("yat").link.eps

    def run() -> Tensor:
        x = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        weight = (x.square() / (2 + eps - 2 * x)).tril()
        return weight @ v / weight.sum(-1, keepdim=True)

    return run


SUBJECTS = {
    FUSED: Subject("softmax", fused),
    "softmax, matrix": Subject("softmax", softmax_matrix, 3),
    "yat, matrix": Subject("yat", yat_matrix, 4),
    "softmax": planned("softmax"),
    "yat": planned("yat"),
    "slay": planned(f"slay(dim={DIM}, seed=0)"),
    "performer": planned(f"performer(dim={DIM}, seed=0)"),
    "linear": planned("linear"),
    "squared_affine": planned("squared_affine"),
}


def draw(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3)]


def gate(tokens: int) -> dict[str, float]:
    """Error of each subject against the float64 definition of its operator."""
    q, k, v = draw(tokens)
    errors = {}
    for name, subject in SUBJECTS.items():
        operator = mechanisms.resolve(subject.spec)
        reference = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")
        got = subject.attend(q, k, v)()
        assert isinstance(got, Tensor)
        errors[name] = common.gate(f"{name}, T={tokens}", got, reference, 5e-5)
    return errors


def held(name: str, tokens: int) -> int:
    """Bytes of the memory from which a decoder of a subject goes on after so many tokens."""
    operator = mechanisms.resolve(SUBJECTS[name].spec)
    return zonal.Memory.empty(operator, 1, HEADS, DIM, DIM).bytes_at(tokens)


def rows_at(tokens: int, device: torch.device, budget: float) -> list[dict[str, Any]]:
    """The rows of one length, all subjects in turns."""
    q, k, v = draw(tokens)
    left = device_memory.free(device)
    works: dict[str, common.Work] = {}
    rows = {name: {"row": f"{name}, T={tokens}", "operator": name, "tokens": tokens} for name in SUBJECTS}
    for name, subject in SUBJECTS.items():
        needed = subject.matrices * 4 * HEADS * tokens * tokens
        if left is not None and needed > left:
            rows[name]["refused"] = f"takes {needed / 2**30:.0f} GiB, and {left / 2**30:.0f} GiB are free"
        else:
            works[name] = subject.attend(q, k, v)
    times = common.interleaved(works, device, rounds=5, budget=budget, cap=CAP)
    found = {name: common.Quantiles.of(seconds) for name, seconds in times.items()}
    for name, quantiles in found.items():
        rows[name] |= {
            "seconds": asdict(quantiles),
            "tokens_per_second": tokens / quantiles.median,
            "against_fused": quantiles.median / found[FUSED].median,
            "peak_bytes": common.peak_bytes(works[name]),
            "input_bytes": q.nbytes + k.nbytes + v.nbytes,
            "decoder_bytes": held(name, tokens),
        }
    return list(rows.values())


def longest(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, int | None]]]:
    """The longest context by memory. "call": the longest that was measured whose inputs and peak fit, None where none
    does; "decoder": tokens after which the memory of a decoder still fits, None where it never ends.
    """
    found: dict[str, dict[str, dict[str, int | None]]] = {"call": {}, "decoder": {}}
    for name in SUBJECTS:
        own = [row for row in rows if row["operator"] == name and "peak_bytes" in row]
        found["call"][name] = {
            limit: max((row["tokens"] for row in own if row["input_bytes"] + row["peak_bytes"] <= room), default=None)
            for limit, room in LIMITS.items()
        }
        found["decoder"][name] = {limit: _tokens_within(name, room) for limit, room in LIMITS.items()}
    return found


def _tokens_within(name: str, room: int) -> int | None:
    if held(name, MOST_TOKENS) <= room:
        return None
    low, high = 0, MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(name, middle) <= room else (low, middle)
    return low


def line(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return f"{row['row']}: {row['refused']}"
    return (
        f"{row['row']}: {common.milliseconds(row['seconds']['median'])}, {row['against_fused']:.3f} of fused softmax, "
        f"{row['tokens_per_second']:,.0f} tokens a second, {row['peak_bytes'] / 1e6:.1f} MB at the peak, "
        f"decoder {row['decoder_bytes'] / 1e6:.2f} MB"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0."""
    parser = common.parser(__doc__ or "", "scaling", "budget", "page", budget=10.0, by_machine=True)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths (default: 128 to 131072, doubling)"
    )
    run = common.Run(parser.parse_args(argv), only_cpu="peak memory is that of a process on a CPU")
    if run.options.page:
        common.write_page(run.options.out, scaling_page.html)
        return 0
    if min(run.options.tokens) < 1:
        raise ArgumentError(f"bench: --tokens must be at least 1, received {min(run.options.tokens)}.")
    lengths = [128, 256] if run.options.quick else run.options.tokens
    print("checking outputs against the float64 definition …", flush=True)
    with torch.no_grad():
        errors = gate(200 if run.options.quick else 777)
        rows: list[dict[str, Any]] = []
        for tokens in lengths:
            made = rows_at(tokens, run.device, run.budget)
            print(*map(line, made), sep="\n", flush=True)
            rows += made
    settings = {"budget_seconds": run.options.budget, "batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32"}
    run.write(rows, {"errors": errors, "longest": longest(rows)}, settings)
    common.write_page(run.target, scaling_page.html)
    if run.target != "-":
        print(f"Page: {Path(run.target).with_suffix('.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""SKO by tiles against torch's fused softmax attention, the dense recurrence and the library's dense path, T = 512 …
8k, forward and with backward.

B = 1, H = 8, d = 64, causal, float32, degrees 2–5: the setting of the issue every kernel here is measured in. The peers
are ``torch.nn.functional.scaled_dot_product_attention`` (another function, the speed to reach) and the recurrence as
the SKO paper writes it: every Gegenbauer polynomial as a full T x T matrix. The dense path is the definition by
Horner's rule, whose place the tiles take from T = 512 on. Memory is what a call allocates at its peak beyond its
inputs.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms
from zonal.algebra import gegenbauer

LENGTHS = (512, 1024, 2048, 4096, 8192)
HEADS, DIM = 8, 64
DEGREES = (2.0, 3.0, 4.0, 5.0)
# past this the full matrices of the recurrence do not fit in memory
_RECURRENCE_LIMIT = {False: 4096, True: 4096}


def recurrence(q: Tensor, k: Tensor, v: Tensor, operator: zonal.Operator) -> Tensor:
    """The paper's form: x = cos(q, k) as a matrix, R_k by the three-term recurrence, sum, causal mask, 1/M, times V."""
    x = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).clamp(-1, 1)
    weight = operator.bind(q.shape[1], k.shape[1]).link._gated(  # type: ignore[attr-defined]
        {"weight": operator.for_heads(q.shape[1]).learned_parts["link_weight"]}
    )
    phi = torch.zeros_like(x)
    for order, values in enumerate(gegenbauer.basis(x, weight.shape[1], 64)):
        phi = phi + weight[:, order].to(x).view(1, -1, 1, 1) * values
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device).view(-1, 1)
    return (phi.tril() / count) @ v


def works(
    operator: zonal.Operator, q: Tensor, k: Tensor, v: Tensor, gradients: bool
) -> dict[str, Callable[[], object]]:
    """What is timed: the subject and its peers, forward or with gradients of q, k, v and the link."""
    forward: dict[str, Callable[[], Tensor]] = {
        "tiled": lambda: zonal.attention(q, k, v, operator, causal=True, path="tiled"),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "recurrence": lambda: recurrence(q, k, v, operator),
        "dense": lambda: zonal.attention(q, k, v, operator, causal=True, path="dense"),
    }
    leaves = {name: [q, k, v, *(operator.parameters() if name != "sdpa" else ())] for name in forward}
    return {name: functools.partial(common.passed, run, leaves[name], gradients) for name, run in forward.items()}


def gate(device: torch.device) -> dict[str, float]:
    """Errors of the subject and of the recurrence against the float64 definition at a length with ragged tiles."""
    operator = mechanisms.sko(degrees=DEGREES).to(device)
    q, k, v = (torch.randn(1, HEADS, 777, DIM, device=device) for _ in range(3))
    with torch.no_grad():
        exact = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")
        return {
            "tiled": common.gate("tiled", zonal.attention(q, k, v, operator, causal=True, path="tiled"), exact, 2e-6),
            "recurrence": common.gate("recurrence", recurrence(q, k, v, operator), exact, 2e-5),
        }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when it ran."""
    parser = common.parser(__doc__ or "", "recurrence", by_machine=True)
    parser.add_argument(
        "--longest", type=int, default=LENGTHS[-1], help="leave out longer sequences (default: %(default)s)"
    )
    run = common.Run(parser.parse_args(argv))
    options, device = run.options, run.device
    errors = gate(device)
    rows = []
    for length in LENGTHS[:1] if options.quick else [n for n in LENGTHS if n <= options.longest]:
        for gradients in (False, True):
            operator = mechanisms.sko(degrees=DEGREES).to(device)
            q, k, v = (torch.randn(1, HEADS, length, DIM, device=device, requires_grad=gradients) for _ in range(3))
            work = works(operator, q, k, v, gradients)
            row: dict[str, Any] = {"T": length, "gradients": gradients}
            row["against_sdpa"] = common.compare(work["tiled"], work["sdpa"], device, pairs=7, budget=16).to_dict()
            whos = ["tiled", "sdpa"]
            if length <= _RECURRENCE_LIMIT[gradients]:
                # a pair takes half a minute at the end: there, three are enough
                pairs, budget = (7, 10.0) if length <= 1024 else (3, 40.0)
                for who in ("recurrence", "dense"):
                    row[f"against_{who}"] = common.compare(
                        work["tiled"], work[who], device, pairs=pairs, budget=budget
                    ).to_dict()
                    whos.append(who)
            row |= {f"{who}_peak_bytes": common.peak_bytes(work[who], device) for who in whos}
            rows.append(row)
            print(line(row), flush=True)
    run.write(
        rows, {"errors": errors},
        {"B": 1, "H": HEADS, "d": DIM, "degrees": DEGREES, "dtype": "float32", "causal": True}, options.out,
    )  # fmt: skip
    return 0


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    sdpa, other, dense = (common.ratio_text(row.get(f"against_{who}")) for who in ("sdpa", "recurrence", "dense"))
    kind = "forward+backward" if row["gradients"] else "forward"
    peaks = ", ".join(
        f"{name} {row[name + '_peak_bytes'] / 1e6:.0f} MB"
        for name in ("tiled", "sdpa", "recurrence", "dense")
        if name + "_peak_bytes" in row
    )
    return f"T={row['T']} {kind}: {sdpa} of SDPA, {other} of the recurrence, {dense} of dense; peak {peaks}"


if __name__ == "__main__":
    sys.exit(main())

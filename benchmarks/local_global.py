"""Local-global attention against torch's fused softmax attention, 1k to 16k tokens, and decoding against kept keys.

B = 1, H = 8, d = 64, causal, float32, a window of 64 keys, the first 4 keys exact, and a far kernel of 64 learned
features. A whole sequence is compared with ``torch.nn.functional.scaled_dot_product_attention``, forward and with
gradients of q, k, v and of what is learned; a decoder's step with one of softmax attention, which keeps every key. A
step with the heads of a layer of SmolLM2-135M (9 of queries, 3 of keys) is compared with the same step by torch.
"""

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F

import zonal
from benchmarks import common
from zonal import mechanisms
from zonal.kernels.native import VARIABLE

HEADS, DIM, WINDOW, FIRST, FEATURES = 8, 64, 64, 4, 64
LENGTHS = (1024, 4096, 16384)
STEPS = 16
SMOL_HEADS, SMOL_KV_HEADS = 9, 3
# past this a pair with gradients takes most of the time
_LONGEST_WITH_GRADIENTS = 4096


def operator() -> zonal.Operator:
    """The subject, with features of its own for each head."""
    made = mechanisms.local_global(WINDOW, f"hedgehog(size={FEATURES})", first=FIRST)
    return made.for_heads(HEADS, dim=DIM)


def gate(device: torch.device) -> float:
    """The error of the subject against the float64 definition at a length that is no multiple of its blocks."""
    subject = operator().to(device)
    q, k, v = (torch.randn(1, HEADS, 777, DIM, device=device) for _ in range(3))
    with torch.no_grad():
        found = zonal.attention(q, k, v, subject, causal=True, path="chunked")
        exact = zonal.attention(q.double(), k.double(), v.double(), subject.double(), causal=True, path="dense")
    return common.gate("chunked", found, exact, 2e-5)


def whole(length: int, gradients: bool, device: torch.device) -> dict[str, Any]:
    """A row: one call on a whole sequence."""
    subject = operator().to(device)
    q, k, v = (torch.randn(1, HEADS, length, DIM, device=device, requires_grad=gradients) for _ in range(3))

    ours = functools.partial(zonal.attention, q, k, v, subject, causal=True, path="chunked")
    theirs = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    found = common.compare(
        functools.partial(common.passed, ours, [q, k, v, *subject.parameters()], gradients),
        functools.partial(common.passed, theirs, [q, k, v], gradients),
        device, pairs=5, budget=12.0,
    )  # fmt: skip
    return {"kind": "whole", "T": length, "gradients": gradients, "against_sdpa": found.to_dict()}


def decoded(length: int, device: torch.device) -> dict[str, Any]:
    """A row: steps of a decoder after ``length`` tokens."""
    k, v = (torch.randn(1, HEADS, length, DIM, device=device) for _ in range(2))
    steps = [[torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(3)] for _ in range(STEPS)]
    memories = [
        zonal.Memory.empty(made.to(device), 1, HEADS, DIM, DIM, device=device).absorb(k, v)
        for made in (operator(), mechanisms.softmax())
    ]

    ours, theirs = (memory.decoder() for memory in memories)
    with torch.no_grad():
        found = common.compare(
            lambda: [ours.step(*step) for step in steps], lambda: [theirs.step(*step) for step in steps], device,
            pairs=7, budget=6.0,
        )  # fmt: skip
    return {
        "kind": "decode", "T": length, "steps": STEPS, "against_softmax": found.to_dict(),
        "bytes": memories[0].nbytes, "softmax_bytes": memories[1].nbytes,
    }  # fmt: skip


def compiled(length: int, device: torch.device) -> dict[str, Any]:
    """A row: steps of a decoder after ``length`` tokens, by the compiled kernel against torch."""
    sizes = SMOL_HEADS, SMOL_KV_HEADS, SMOL_KV_HEADS
    made = mechanisms.local_global(WINDOW, f"hedgehog(size={FEATURES})", weight=0.02, first=FIRST)
    subject = made.for_heads(SMOL_HEADS, SMOL_KV_HEADS, dim=DIM).to(device)
    k, v = (torch.randn(1, SMOL_KV_HEADS, length, DIM, device=device) for _ in range(2))
    steps = [[torch.randn(1, heads, 1, DIM, device=device) for heads in sizes] for _ in range(STEPS)]
    memory = zonal.Memory.empty(subject, 1, SMOL_KV_HEADS, DIM, DIM, device=device).absorb(k, v)
    decoders = memory.decoder(), memory.decoder()

    def by_torch() -> object:
        with common.environment(**{VARIABLE: "off"}):
            return [decoders[1].step(*step) for step in steps]

    with torch.no_grad():
        found = common.compare(
            lambda: [decoders[0].step(*step) for step in steps], by_torch, device, pairs=21, budget=6.0
        )
    return {"kind": "step", "T": length, "steps": STEPS, "against_torch": found.to_dict()}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when it ran."""
    run = common.Run(common.parser(__doc__ or "", "local_global", by_machine=True).parse_args(argv))
    error = gate(run.device)
    rows: list[dict[str, Any]] = []
    for length in LENGTHS[:1] if run.options.quick else LENGTHS:
        kinds = (False, True) if length <= _LONGEST_WITH_GRADIENTS else (False,)
        found = [*(whole(length, gradients, run.device) for gradients in kinds), decoded(length, run.device)]
        for row in found:
            print(line(row), flush=True)
        rows += found
    rows.append(compiled(LENGTHS[0], run.device))
    print(line(rows[-1]), flush=True)
    settings = {
        "B": 1, "H": HEADS, "d": DIM, "window": WINDOW, "first": FIRST, "features": FEATURES, "dtype": "float32",
    }  # fmt: skip
    run.write(rows, {"error": error}, settings)
    return 0


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    if row["kind"] == "decode":
        ratio = common.ratio_text(row["against_softmax"])
        return f"T={row['T']} decode: {ratio} of softmax; {row['bytes']:,} bytes against {row['softmax_bytes']:,}"
    if row["kind"] == "step":
        step = row["against_torch"]["subject"]["median"] / row["steps"]
        ratio = common.ratio_text(row["against_torch"])
        return f"T={row['T']} step with {SMOL_HEADS} and {SMOL_KV_HEADS} heads: {1e6 * step:.0f} us, {ratio} of torch"
    kind = "forward+backward" if row["gradients"] else "forward"
    return f"T={row['T']} {kind}: {common.ratio_text(row['against_sdpa'])} of SDPA"


if __name__ == "__main__":
    sys.exit(main())

"""How far memories drift over ten million tokens, and over thousands of merges and subtractions.

Each kind of memory takes a stream in chunks, and the tokens before each power of ten by steps of a decoder. A twin
takes the same numbers in float64, in chunks only. Drift is the largest difference between what both read for fixed
queries, relative to the largest number read. Times are processor times since the mark before, of a chunk and of a step:
those that a tenth of them are below, as other programs on the machine slow many of them down.
"""

import copy
import sys
import time
from typing import Any

import torch
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.memory import Memory
from zonal.memory.compact import statistics_of

DIM, CHUNK, HEADS = 8, 4096, 1
QUERIES = 32
PART = 16
"""Tokens of a part that is merged and taken out again."""
OPERATORS = {
    "features": m.squared_affine,
    "decayed": m.retention,
    "windowed": lambda: m.local_global(window=16, far="squared_affine"),
    "ridge": lambda: m.ska(power=1),
    "compact": lambda: m.ska(power=1, compact=True),
    "fading": lambda: m.ska(power=1, fading=True),
    "keys": lambda: m.softmax(prior=zonal.prior.Window(left=16)),
}
"""Operators by the kind of memory that they have."""


class Stream:
    """Tokens whose values have a mean, in a type. The same seed gives the same tokens."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self._dtype, self._draw = dtype, torch.Generator().manual_seed(seed)

    def next(self, count: int) -> tuple[Tensor, Tensor]:
        k, v = torch.randn(2, 1, HEADS, count, DIM, generator=self._draw, dtype=torch.float32)
        return k.to(self._dtype), (v + 0.5).to(self._dtype)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__ or "", "soak", by_machine=True)
    parser.set_defaults(out=f"results/soak/{common.MACHINE}.json")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of each stream (default: %(default)s)")
    parser.add_argument("--merges", type=int, default=10_000, help="merges and subtractions (default: %(default)s)")
    options = parser.parse_args(argv)
    device = common.prepare(options)
    start = common.circumstances(device)
    if options.quick:
        options.tokens, options.merges = min(options.tokens, 20_000), min(options.merges, 20)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for kind in OPERATORS:
            for dtype in (torch.float32, torch.bfloat16):
                rows += streamed(kind, dtype, options.tokens)
            rows += merged(kind, options.merges)
            for row in rows[-1:]:
                print(row, flush=True)
            summary = {
                "largest drift of a stream": max(row["drift"] for row in rows if row["part"] == "stream"),
                "largest drift of merges": max((row["drift"] for row in rows if row["part"] == "merges"), default=None),
                "largest growth of times since 100,000 tokens": max(
                    (row[name] / before[name] - 1 for row, before in since(rows) for name in ("chunk_ms", "step_us")),
                    default=None,
                ),
                "bytes are constant": all(
                    row["bytes"] == row["bytes_at_first"] for row in rows if row["part"] == "stream"
                ),
            }
            settings = {"tokens": options.tokens, "merges": options.merges, "dim": DIM, "chunk": CHUNK}
            common.report(options.out, "soak", options.about, settings, rows, summary, start)
    return 0


def since(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The end of each stream, with the same stream after 100,000 tokens."""
    streams = [row for row in rows if row["part"] == "stream"]
    early = {(row["memory"], row["dtype"]): row for row in streams if row["tokens"] == 100_000}
    most = max((row["tokens"] for row in streams), default=0)
    ends = [row for row in streams if row["tokens"] == most > 100_000]
    return [(row, early[row["memory"], row["dtype"]]) for row in ends]


def memories(kind: str, dtype: torch.dtype) -> tuple[Memory, Memory]:
    """An empty memory and its twin in float64."""
    torch.manual_seed(0)
    operator = OPERATORS[kind]().float()
    twin = copy.deepcopy(operator).double()
    return tuple(Memory.empty(each, 1, HEADS, DIM, DIM, of) for each, of in ((operator, dtype), (twin, torch.float64)))  # type: ignore[return-value]


def quick(times: list[float]) -> float:
    """The time that a tenth of them are below."""
    return sorted(times)[len(times) // 10]


def drift(memory: Memory, twin: Memory) -> float:
    q = torch.randn(1, HEADS, QUERIES, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float32)
    got, exact = memory.read(q).double(), twin.read(q.double())
    return float((got - exact).abs().max() / exact.abs().max())


def steps_before(mark: int) -> int:
    """How many of the tokens before a mark a decoder takes one by one."""
    return max(1000, mark // 1000)


def streamed(kind: str, dtype: torch.dtype, tokens: int) -> list[dict[str, Any]]:
    """A stream, measured at powers of ten and at its end."""
    (memory, twin), stream = memories(kind, dtype), Stream(dtype, 0)
    marks = sorted({10**power for power in range(3, 10) if 10**power < tokens} | {tokens})
    rows: list[dict[str, Any]] = []
    stepped = 0
    for mark in marks:
        steps, chunks, single = steps_before(mark), list[float](), list[float]()
        while memory.count < mark:
            left = mark - memory.count
            k, v = stream.next(min(CHUNK, max(left - steps, 0)) or left)
            if left <= steps:
                decoder = memory.decoder()
                for at in range(left):
                    token = [x[:, :, at : at + 1] for x in (k, k, v)]
                    began = time.process_time()
                    decoder.step(*token)
                    single.append(time.process_time() - began)
                memory, stepped = decoder.memory(), stepped + left
            else:
                began = time.process_time()
                memory = memory.absorb(k, v)
                chunks += [time.process_time() - began] * (k.shape[2] == CHUNK)
            twin = twin.absorb(k.double(), v.double())
        first = rows[0]["bytes"] if rows else memory.nbytes
        rows.append(
            {
                "part": "stream", "memory": kind, "dtype": str(dtype).removeprefix("torch."), "tokens": mark,
                "by_steps": stepped, "drift": drift(memory, twin), "bound": memory.drift, "bytes": memory.nbytes,
                "bytes_at_first": first, "condition": condition(memory),
                "chunk_ms": round(1e3 * quick(chunks), 4) if chunks else None,
                "step_us": round(1e6 * quick(single), 2),
            }
        )  # fmt: skip
    return rows


def condition(memory: Memory) -> float | None:
    """The condition number of G with its ridge; None where nothing is solved."""
    sums = statistics_of(memory)
    if sums is None:
        return None
    values = torch.linalg.eigvalsh(sums.regularised(memory.operator.bind(HEADS, HEADS)))
    return float((values[..., -1] / values[..., 0]).max())


def merged(kind: str, times: int) -> list[dict[str, Any]]:
    """A memory to which parts are merged in front and taken out again, against the memory as it was.

    No row for memories that refuse this, as a window of keys does.
    """
    memory, stream = memories(kind, torch.float32)[0], Stream(torch.float32, 1)
    empty = memory
    memory = memory.absorb(*stream.next(1000))
    before = memory
    for _ in range(times):
        part = empty.absorb(*stream.next(PART))
        try:
            memory = part.merge(memory).subtract(part)
        except ArgumentError:
            return []
    return [{"part": "merges", "memory": kind, "dtype": "float32", "merges": times, "drift": drift(memory, before)}]


if __name__ == "__main__":
    sys.exit(main())

"""How far memories drift over ten million tokens, and over thousands of merges and subtractions; whether time grows.

stream: each kind of memory takes a stream in chunks, and the tokens before each power of ten by steps of a decoder. A
twin takes the same numbers in float64, in chunks only. Drift is the largest difference between what both read for fixed
queries, relative to the largest number read.

merges: parts are merged in front of a memory and taken out again.

flat: the memory after all tokens of a stream and the memory after its first chunk do the same work in turns: absorb a
chunk, read queries, take steps of a decoder. The ratio of their times is taken pair by pair.

Where parts are named, the record keeps the others that it has; each has its commit.
"""

import copy
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import zonal
from benchmarks import common
from zonal import mechanisms as m
from zonal import store
from zonal.errors import ArgumentError
from zonal.memory import Memory
from zonal.memory.compact import statistics_of
from zonal.training.environment import commit

DIM, CHUNK, HEADS = 8, 4096, 1
QUERIES = 32
PART = 16
"""Tokens of a part that is merged and taken out again."""
STEPS = 64
"""Of a decoder, that are timed together."""
FLAT = 0.05
"""How far a ratio of times may be from 1."""
PARTS = ("stream", "merges", "flat")
TYPES = (torch.float32, torch.bfloat16)
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
    parser = common.parser(__doc__ or "", "soak", record=f"results/soak/{common.MACHINE}.json")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of each stream (default: %(default)s)")
    parser.add_argument("--merges", type=int, default=10_000, help="merges and subtractions (default: %(default)s)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds for a ratio (default: %(default)s)")
    options = parser.parse_args(argv)
    run = common.Run(options, only_cpu="memories are kept on the CPU")
    device = run.device
    if options.quick:
        options.tokens, options.merges = min(options.tokens, 20_000), min(options.merges, 20)
    settings = {"tokens": options.tokens, "merges": options.merges, "dim": DIM, "chunk": CHUNK}
    others = [part for part in PARTS if part not in options.parts]
    rows = [row for row in common.kept(options.out, bool(others), settings, device) if row["part"] in others]
    kept = store.read_json(options.out)["summary"]["parts"] if rows else {}
    parts = {name: each for name, each in kept.items() if name in others}
    parts |= {part: {"commit": commit(), "date": run.start["date"]} for part in options.parts}
    measures: dict[str, Callable[[str], list[dict[str, Any]]]] = {
        "stream": lambda kind: [row for dtype in TYPES for row in streamed(kind, dtype, options.tokens)],
        "merges": lambda kind: merged(kind, options.merges),
        "flat": lambda kind: [
            row for dtype in TYPES for row in flat(kind, dtype, options.tokens, options.budget, device)
        ],
    }
    with torch.no_grad():
        for part, kind in itertools.product(options.parts, OPERATORS):
            made = measures[part](kind)
            print(*made, sep="\n", flush=True)
            rows += made
            run.write(rows, summary(rows) | {"parts": parts}, settings)
    return 0


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    of = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    ratios = [row["ratio"]["median"] for row in of["flat"]]
    return {
        "largest drift of a stream": max((row["drift"] for row in of["stream"]), default=None),
        "largest drift of merges": max((row["drift"] for row in of["merges"]), default=None),
        "bytes are constant": all(row["bytes"] == row["bytes_at_first"] for row in of["stream"]),
        "least ratio of times": min(ratios, default=None),
        "largest ratio of times": max(ratios, default=None),
        "ratios of times": len(ratios),
        "ratios of times within 5 %": sum(abs(ratio - 1) <= FLAT for ratio in ratios),
    }


def memories(kind: str, dtype: torch.dtype) -> tuple[Memory, Memory]:
    """An empty memory and its twin in float64."""
    torch.manual_seed(0)
    operator = OPERATORS[kind]().float()
    twin = copy.deepcopy(operator).double()
    return tuple(Memory.empty(each, 1, HEADS, DIM, DIM, of) for each, of in ((operator, dtype), (twin, torch.float64)))  # type: ignore[return-value]


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
        steps = steps_before(mark)
        while memory.count < mark:
            left = mark - memory.count
            k, v = stream.next(min(CHUNK, max(left - steps, 0)) or left)
            if left <= steps:
                decoder = memory.decoder()
                for at in range(left):
                    decoder.step(*(x[:, :, at : at + 1] for x in (k, k, v)))
                memory, stepped = decoder.memory(), stepped + left
            else:
                memory = memory.absorb(k, v)
            twin = twin.absorb(k.double(), v.double())
        first = rows[0]["bytes"] if rows else memory.nbytes
        rows.append(
            {
                "part": "stream", "memory": kind, "dtype": shown(dtype), "tokens": mark,
                "by_steps": stepped, "drift": drift(memory, twin), "bound": memory.drift, "bytes": memory.nbytes,
                "bytes_at_first": first, "condition": condition(memory),
            }
        )  # fmt: skip
    return rows


def shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flat(kind: str, dtype: torch.dtype, tokens: int, budget: float, device: torch.device) -> list[dict[str, Any]]:
    """How long an old memory takes for its work, relative to a young one."""
    stream = Stream(dtype, 2)
    chunks = [stream.next(min(CHUNK, tokens)) for _ in range(16)]
    young = memories(kind, dtype)[0].absorb(*chunks[0])
    old = young
    while old.count < tokens:
        old = old.absorb(*chunks[old.count // CHUNK % len(chunks)])
    q = stream.next(QUERIES)[0]
    one = [x[:, :, :1] for x in (chunks[0][0], *chunks[0])]

    def works(memory: Memory) -> dict[str, Callable[[], Any]]:
        decoder = memory.decoder()
        return {
            "absorb a chunk": lambda: memory.absorb(*chunks[1]),
            "read": lambda: memory.read(q),
            f"{STEPS} steps": lambda: [decoder.step(*one) for _ in range(STEPS)],
        }

    rows, peer = [], works(young)
    for name, work in works(old).items():
        times = paired(work, peer[name], device, budget)
        rows.append(
            {
                "part": "flat", "memory": kind, "dtype": shown(dtype), "work": name, "tokens": old.count,
                "against_tokens": young.count, "bytes": old.nbytes, "against_bytes": young.nbytes,
                "ms": 1e3 * common.Quantiles.of([one for one, _ in times]).median,
                "against_ms": 1e3 * common.Quantiles.of([other for _, other in times]).median,
                "ratio": asdict(common.Quantiles.of([one / other for one, other in times])),
            }
        )  # fmt: skip
    return rows


def paired(
    work: Callable[[], Any], peer: Callable[[], Any], device: torch.device, budget: float
) -> list[tuple[float, float]]:
    """Seconds of both in turns, for ``budget`` seconds. Each is first in every other pair, as the first is slower."""
    common.once(work, device), common.once(peer, device)
    began, times = time.perf_counter(), list[tuple[float, float]]()
    while not times or time.perf_counter() - began < budget:
        if len(times) % 2:
            other, one = common.once(peer, device), common.once(work, device)
        else:
            one, other = common.once(work, device), common.once(peer, device)
        times.append((one, other))
    return times


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

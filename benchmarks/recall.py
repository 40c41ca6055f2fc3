"""What SKA remembers, how much, for how long, and at what cost: the value it returns by K, capacity, distractors,
exactness, bytes.

Memories are not trained: keys are random directions of length 1, values random signs, and an answer is the stored value
with the largest dot product with what was read, so nothing is learned and chance is one over the number of pairs. The
exception is "trained": decoders of one layer without a convolution, trained to name the word j after a given one, one
model for each operator, offset and seed. Every curve is a mean over independent draws. A cache of keys and values
stands beside, in recall, bytes and time.
"""

import dataclasses
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common, recall_page
from zonal import mechanisms, tasks
from zonal.evaluation import spread
from zonal.models import CausalLM, ModelConfig, build
from zonal.nn.recurrence import ssd
from zonal.training import RunResult, TrainConfig, train

POWERS = (0, 1, 2)
RANKS = (16, 32, 64, 128)
RIDGE = 1e-3
"""The paper's ε, on keys of length 1."""
SUMS = "sums of v k, as Mamba-2 without fading"
BASELINES: dict[str, Callable[[], zonal.Operator]] = {
    "linear attention": mechanisms.linear, SUMS: ssd, "softmax, a cache": mechanisms.softmax,
}  # fmt: skip
OFFSETS = (-1, 0, 1, 2, 3, 4)
SHARPNESS = 100.0
"""Queries of softmax are multiplied by it: the cache as a lookup."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the parts are; ``--quick`` takes small ones."""

    draws: int = 32
    pairs: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    distractors: tuple[int, ...] = (0, 64, 256, 1024, 4096, 16384)
    cosines: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
    distances: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
    timed: tuple[int, ...] = (1024, 4096)
    steps: int = 250
    seeds: tuple[int, ...] = (0, 1, 2)
    offsets: tuple[int, ...] = (1, 2, 3, 4)


QUICK = Sizes(
    draws=2,
    pairs=(8, 32),
    distractors=(0, 64),
    cosines=(0.0, 0.9),
    distances=(1, 8),
    timed=(256,),
    steps=4,
    seeds=(0,),
    offsets=(1,),
)


def ska(power: int, chunk: int | None = None) -> zonal.Operator:
    """Token-exact unless a chunk is given, with the ridge of this benchmark."""
    return mechanisms.ska(power=power, eps=RIDGE, chunk=chunk).requires_grad_(False)


def drawn(draws: int, count: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys (1, draws, count, rank) of length 1 and values of random signs; heads are independent draws."""
    generator = torch.Generator().manual_seed(seed)
    keys = F.normalize(torch.randn(1, draws, count, rank, generator=generator), dim=-1)
    return keys, torch.randint(0, 2, (1, draws, count, 64), generator=generator).float() * 2 - 1


def absorbed(operator: zonal.Operator, keys: Tensor, values: Tensor) -> zonal.Memory:
    """The memory of keys and values, of an operator that is not trained."""
    operator = operator.requires_grad_(False)
    empty = zonal.Memory.empty(operator, 1, keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype)
    return empty.absorb(keys, values)


def named(read: Tensor, values: Tensor) -> Tensor:
    """Which of the values (…, count, P) each read-out (…, n, P) names: (…, n) indices."""
    return (read @ values.transpose(-1, -2)).argmax(-1)


def gate() -> float:
    """The largest error of what is measured here, against the float64 definition."""
    keys, values = drawn(2, 40, 16, 0)
    errors = []
    for power in POWERS:
        exact = zonal.attention(keys.double(), keys.double(), values.double(), ska(power), causal=True, path="dense")
        errors.append(
            common.gate(f"K={power}", zonal.attention(keys, keys, values, ska(power), causal=True), exact, 1e-3)
        )
        # what is read after all tokens equals what a query one token later gets
        last = torch.cat([keys, keys[:, :, :1]], 2).double()
        after = zonal.attention(
            last, last, torch.cat([values, values[:, :, :1]], 2).double(), ska(power), causal=True, path="dense"
        )
        errors.append(
            common.gate(
                f"K={power}, memory", absorbed(ska(power), keys, values).read(keys[:, :, :1]), after[:, :, -1:], 1e-3
            )
        )
    return max(errors)


def which(sizes: Sizes) -> Iterator[Row]:
    """Which value a memory of 24 pairs returns when it is asked with a key: the share of questions by offset from the
    key's own.
    """
    count, rank = 24, 64
    keys, values = drawn(sizes.draws, count, rank, 1)
    places = torch.arange(6, 18)
    operators = {f"SKA K={power}": ska(power) for power in (*POWERS, 3)} | {
        name: make() for name, make in BASELINES.items()
    }
    for name, operator in operators.items():
        scale = SHARPNESS if name.startswith("softmax") else 1.0
        answers = named(absorbed(operator, keys, values).read(scale * keys[:, :, places]), values)
        for offset in OFFSETS:
            yield {
                "part": "which",
                "operator": name,
                "offset": offset,
                "share": float((answers == places + offset).float().mean()),
            }


def taught(
    task: tasks.Task, layers: tuple[str, ...], steps: int, threads: int, seed: int
) -> tuple[CausalLM, RunResult]:
    """A decoder of layers of one head, without a convolution, trained on a task; and what its run says."""
    config = TrainConfig(
        steps=steps, batch_size=64, learning_rate=1e-2, eval_every=steps, eval_batch_size=250, tensorboard=False,
        seed=seed,
    )  # fmt: skip
    model = build(ModelConfig(task.vocab_size, dim=64, layers=layers, heads=1, mlp="none", conv=0), seed)
    with tempfile.TemporaryDirectory() as folder, torch.enable_grad():
        return model, train(model, task, config, folder, threads=threads)


def trained(sizes: Sizes, threads: int) -> Iterator[Row]:
    """Decoders of one layer without a convolution (of two for "K=1, then K=1"), trained to name the word ``offset``
    after the one asked for.
    """
    models = {f"SKA K={power}": (f"ska(power={power})",) for power in (*POWERS, 3)}
    models |= {
        "SKA K=1, then K=1": ("ska(power=1)",) * 2,
        "SKA K=0, then K=1": ("ska(power=0)", "ska(power=1)"),
        "softmax": ("softmax",),
    }
    for name, layers in models.items():
        for offset in sizes.offsets:
            task = tasks.resolve(f"offset-{offset}", tasks.TaskSettings(length=18, pairs=16, vocab_size=64))
            for seed in sizes.seeds:
                _, result = taught(task, layers, sizes.steps, threads, seed)
                assert result.final is not None
                yield {
                    "part": "trained",
                    "operator": name,
                    "offset": offset,
                    "seed": seed,
                    "accuracy": result.final["accuracy"],
                    "seconds": result.seconds,
                }


def capacity(sizes: Sizes) -> Iterator[Row]:
    """Recall against the number of pairs: the value ``power`` after the key's own. Bytes are those of one head."""
    for rank in RANKS:
        for count in sizes.pairs:
            keys, values = drawn(sizes.draws, count, rank, 2)
            asked = torch.arange(count - max(POWERS))[-64:]
            kinds: dict[str, tuple[zonal.Operator, int, float]] = {
                f"SKA K={power}": (ska(power), power, 1.0) for power in POWERS
            }
            kinds |= {
                name: (make(), 0, SHARPNESS if name.startswith("softmax") else 1.0) for name, make in BASELINES.items()
            }
            for name, (operator, shift, scale) in kinds.items():
                memory = absorbed(operator, keys, values)
                answers = named(memory.read(scale * keys[:, :, asked]), values)
                yield {
                    "part": "capacity", "operator": name, "rank": rank, "pairs": count,
                    "recall": float((answers == asked + shift).float().mean()),
                    "bytes": memory.nbytes // sizes.draws, "cache_bytes": 4 * count * (rank + values.shape[-1]),
                }  # fmt: skip


def alike(sizes: Sizes) -> Iterator[Row]:
    """Recall of 32 pairs (r = 64) whose keys are alike: each a mix of a random direction and one that all share, with
    so large a cosine on average.
    """
    pairs, rank = 32, 64
    for cosine in sizes.cosines:
        keys, values = drawn(sizes.draws, pairs, rank, 6)
        shared, _ = drawn(sizes.draws, 1, rank, 7)
        keys = F.normalize((1 - cosine) ** 0.5 * keys + cosine**0.5 * shared, dim=-1)
        kinds: dict[str, tuple[zonal.Operator, float]] = {"SKA K=0": (ska(0), 1.0)}
        kinds |= {name: (make(), SHARPNESS if name.startswith("softmax") else 1.0) for name, make in BASELINES.items()}
        for name, (operator, scale) in kinds.items():
            right = named(absorbed(operator, keys, values).read(scale * keys), values) == torch.arange(pairs)
            yield {"part": "alike", "operator": name, "cosine": cosine, "recall": float(right.float().mean())}


def distractors(sizes: Sizes) -> Iterator[Row]:
    """Recall of 16 pairs after so many keys and values that nobody asks for, of length 1 or 0.1."""
    pairs, rank = 16, 64
    for length in (1.0, 0.1):
        for count in sizes.distractors:
            draws = max(2, sizes.draws // (1 + count // 1024))
            keys, values = drawn(draws, pairs + count, rank, 3)
            keys[:, :, pairs:] *= length
            for name, operator, scale in [(f"SKA K={power}", ska(power), 1.0) for power in POWERS[:2]] + [
                ("softmax, a cache", mechanisms.softmax(), SHARPNESS)
            ]:
                memory = absorbed(operator, keys, values)
                shift = 1 if name == "SKA K=1" else 0
                asked = torch.arange(pairs - 1)
                answers = named(memory.read(scale * keys[:, :, asked]), values[:, :, :pairs])
                yield {
                    "part": "distractors", "operator": name, "length": length, "distractors": count,
                    "recall": float((answers == asked + shift).float().mean()), "bytes": memory.nbytes // draws,
                }  # fmt: skip


def exactness(sizes: Sizes) -> Iterator[Row]:
    """Recall of the key that stood so many tokens ago, in a sequence of 128, exact to the token and with the paper's
    chunks.
    """
    rank, tokens = 128, 128
    keys, values = drawn(sizes.draws, tokens, rank, 4)
    for name, operator in {
        "exact to the token": ska(0),
        "chunks of 16": ska(0, 16),
        "chunks of 64": ska(0, 64),
    }.items():
        for distance in sizes.distances:
            read = zonal.attention(keys.roll(distance, 2), keys, values, operator, causal=True)[:, :, distance:]
            right = named(read, values) == torch.arange(tokens - distance)
            # where nothing is visible the answer is zero: no value is named
            yield {
                "part": "exactness",
                "operator": name,
                "distance": distance,
                "recall": float((right & (read.abs().amax(-1) > 0)).float().mean()),
            }


def times(sizes: Sizes, device: torch.device, budget: float) -> Iterator[Row]:
    """Seconds of forward and backward of one layer's heads, by operator, in turns."""
    heads, rank = 4, 32
    for power in (0, 2):
        for tokens in sizes.timed:
            generator = torch.Generator().manual_seed(5)
            q, k, v = (torch.randn(1, heads, tokens, rank, generator=generator).requires_grad_() for _ in range(3))

            def work(operator: zonal.Operator, inputs: tuple[Tensor, ...] = (q, k, v)) -> Callable[[], object]:
                return lambda: torch.autograd.grad(zonal.attention(*inputs, operator, causal=True).sum(), inputs)

            paper = mechanisms.ska(power=power, eps=RIDGE, key_limit=None, running_max=True, chunk=64).requires_grad_(
                False
            )
            kinds = {
                "exact to the token": ska(power),
                "chunks of 16": ska(power, 16),
                "chunks of 64": ska(power, 64),
                "paper's form, chunks of 64": paper,
                "softmax": mechanisms.softmax(),
            }
            found = common.interleaved(
                {name: work(operator) for name, operator in kinds.items()}, device, budget=budget
            )
            for name, seconds in found.items():
                yield {
                    "part": "times",
                    "operator": name,
                    "power": power,
                    "tokens": tokens,
                    "seconds": dataclasses.asdict(common.Quantiles.of(seconds)),
                }


def show(row: Row) -> str:
    """One line for who watches."""
    number = next(row[name] for name in ("share", "accuracy", "recall", "seconds") if name in row)
    number = number["median"] if isinstance(number, dict) else number
    rest = ", ".join(
        f"{name} {value}"
        for name, value in row.items()
        if name not in ("part", "operator", "share", "accuracy", "recall", "seconds")
    )
    return f"{row['part']:<12}{row['operator']:<40}{number:8.4f}  {rest}"


def summarised(rows: list[Row]) -> dict[str, Any]:
    """The findings in numbers: the offset that each K returns, the pairs that each rank holds, bytes against a
    cache.
    """
    shares = [row for row in rows if row["part"] == "which"]
    returned = {
        name: max((row for row in shares if row["operator"] == name), key=lambda row: row["share"])["offset"]
        for name in dict.fromkeys(row["operator"] for row in shares)
    }
    held: dict[str, int | None] = {}
    for operator, label in [(f"SKA K={power}", f"K={power}") for power in POWERS] + [(SUMS, "sums")]:
        for rank in RANKS:
            own = [
                row for row in rows if row["part"] == "capacity" and row["operator"] == operator and row["rank"] == rank
            ]
            held[f"{label}, r={rank}"] = max((row["pairs"] for row in own if row["recall"] >= 0.95), default=None)
    shared = {row["operator"]: row["recall"] for row in rows if row["part"] == "alike" and row["cosine"] == 0.5}
    groups: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["part"] == "trained":
            groups.setdefault((row["operator"], row["offset"]), []).append(row["accuracy"])
    learned = {
        f"{name}, offset {offset}": {"mean": (found := spread(values)).mean, "deviation": found.deviation}
        for (name, offset), values in groups.items()
    }
    return {"offset_returned": returned, "most_pairs_at_0.95": held, "alike_at_0.5": shared, "trained": learned}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and write its JSON and page; 0 when K returned the value K after the key."""
    options = common.parser(__doc__ or "", "recall", "budget", "page", budget=4.0).parse_args(argv)
    if options.page:
        common.write_page(options.out, recall_page.html)
        return 0
    run = common.Run(options, only_cpu="memories are read and timed on the CPU")
    sizes = QUICK if options.quick else Sizes()
    with torch.no_grad():
        error = gate()
    rows: list[Row] = []
    parts = (which, capacity, alike, distractors, exactness)
    with torch.no_grad():
        for part in parts:
            rows += _watched(part(sizes))
    rows += _watched(times(sizes, run.device, run.budget))
    rows += _watched(trained(sizes, torch.get_num_threads()))
    summary = {"error": error, **summarised(rows)}
    shifted = all(summary["offset_returned"][f"SKA K={power}"] == power for power in POWERS)
    print(f"K returns the value K after the key's own: {'holds' if shifted else 'MISSED'}")
    run.write(rows, summary, dataclasses.asdict(sizes))
    common.write_page(run.target, recall_page.html)
    return 0 if shifted and math.isfinite(error) else 1


def _watched(rows: Iterator[Row]) -> list[Row]:
    found = []
    for row in rows:
        found.append(row)
        print(show(row), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())

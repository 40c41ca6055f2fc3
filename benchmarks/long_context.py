"""Small models trained on 512 tokens, read on 32k: perplexity by position, time and memory of ways to meet fewer keys
(experiment 5 of the REWA paper).

Each model reads whole stretches of held-out text, in one call, with its own attention and with the same weights
restricted to a window, to the 256 largest of a row, met exactly (at a part of the length, since torch selects them) or
found by hash tables, and, for softmax, to a window and the first tokens of the text (local + global, in blocks of fused
attention). Time and memory are of one layer's attention on its own queries, keys and values of such a stretch, against
torch's fused softmax attention on the same, the prefix read at once and one token after it. Times are processor time,
the least of a few turns; memory is what the process grows by at its peak. First of all, every way is compared with the
dense definition in float64.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zonal
from benchmarks import captured, common, page
from zonal import Memory, Operator, store
from zonal.algebra.anchor import TopK
from zonal.algebra.hashing import LSH
from zonal.algebra.prior import Window
from zonal.cli.generate import checkpoint_in
from zonal.errors import ArgumentError
from zonal.evaluation import spread
from zonal.execution.paths.coverage import measured
from zonal.models import CausalLM
from zonal.nn import Attention
from zonal.tasks.text import Text
from zonal.training import load_model

PREDICTED = {
    "perplexity": "the sparse path matches or beats local + global attention",
    "speed": "5 to 10 times faster inference than full attention at 128k tokens",
    "memory": "O(N log N) against O(N^2)",
}
TOP, SEARCH = 256, LSH()
ALL, NEAR, LARGEST, FOUND, BOTH, FUSED = (
    "all keys",
    "window",
    "largest, exact",
    "largest, hashed",
    "local + global",
    "fused softmax",
)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """length: of the text that is read; exact: of that on which the largest are met exactly; lengths: those that are
    timed; window, first: keys of local + global.
    """

    length: int = 32768
    exact: int = 4096
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32768)
    window: int = 512
    first: int = 64
    stretches: int = 1
    steps: int = 16
    search: LSH = SEARCH


QUICK = Sizes(length=512, exact=256, lengths=(128, 512), window=64, first=8, stretches=1, steps=2)


def local_global(q: Tensor, k: Tensor, v: Tensor, window: int, first: int) -> Tensor:
    """softmax(q . k / sqrt D) over the ``window`` keys up to a query's own and the ``first`` of all, for the last T of
    S positions, by blocks of fused attention.
    """
    before, rows = k.shape[2] - q.shape[2], []
    for t0 in range(0, q.shape[2], window):
        t1 = min(t0 + window, q.shape[2])
        s0 = max(before + t0 - window + 1, 0)
        head = min(first, s0)
        t, s = (
            torch.arange(before + t0, before + t1)[:, None],
            torch.cat([torch.arange(head), torch.arange(s0, before + t1)]),
        )
        seen = (s <= t) & ((t - s < window) | (s < first))
        near = (torch.cat([x[:, :, :head], x[:, :, s0 : before + t1]], 2) for x in (k, v))
        rows.append(F.scaled_dot_product_attention(q[:, :, t0:t1], *near, attn_mask=seen))
    return torch.cat(rows, 2)


def ways(operator: Operator, sizes: Sizes) -> dict[str, tuple[Operator, str]]:
    """way -> (operator, path). What a layer has learned stays."""
    return {
        ALL: (operator, "tiled"),
        NEAR: (operator.replace(prior=(*operator.prior, Window(left=sizes.window - 1))), "tiled"),
        FOUND: (operator.replace(anchor=TopK(TOP, sizes.search)), "sparse"),
        LARGEST: (operator.replace(anchor=TopK(TOP)), "tiled"),
    }


class Local(nn.Module):
    """A layer of softmax attention that meets a window and the first keys only: its own projections around
    ``local_global``.
    """

    def __init__(self, layer: Attention, sizes: Sizes) -> None:
        super().__init__()
        self.layer, self.sizes = layer, sizes

    def forward(self, x: Tensor, memory: None, **others: Any) -> Tensor:
        q, k, v, *_ = self.layer._projected(x)
        return self.layer._read_out(local_global(q, k, v, self.sizes.window, self.sizes.first))


class Subject:
    """A trained model that attends in any way. path: of the calls of the way it was put to."""

    def __init__(self, name: str, model: CausalLM, sizes: Sizes) -> None:
        self.name, self.model, self.sizes = name, model, sizes
        self.layers: list[Attention] = [block.attention for block in model.blocks]  # type: ignore[union-attr]
        self.own = [layer.operator for layer in self.layers]
        self.path = "tiled"

    @property
    def ways(self) -> tuple[str, ...]:
        return (*ways(self.own[0], self.sizes), *((BOTH,) if self.own[0].score.bilinear else ()))

    def put(self, way: str) -> None:
        for block, layer, operator in zip(self.model.blocks, self.layers, self.own, strict=True):
            if way != BOTH:
                layer.operator, self.path = ways(operator, self.sizes)[way]
            block.attention = Local(layer, self.sizes) if way == BOTH else layer  # type: ignore[union-attr]

    @torch.no_grad()
    def gate(self) -> float:
        """The worst error of any way against the definition, on 300 tokens; the hashed one with a window that has every
        key.
        """
        small, worst = dataclasses.replace(self.sizes, window=64, first=5, search=LSH(window=300)), 0.0
        q, k, v = torch.randn(
            3, 1, self.layers[0].heads, 300, self.layers[0].key_dim, generator=torch.Generator().manual_seed(0)
        ).unbind(0)
        exact = tuple(x.double() for x in (q, k, v))
        for way, (operator, path) in ways(self.own[0], small).items():
            anchor = operator.anchor
            operator = (
                operator.replace(anchor=dataclasses.replace(anchor, k=48)) if isinstance(anchor, TopK) else operator
            )
            wanted = zonal.attention(*exact, operator, causal=True, path="dense")
            worst = max(
                worst,
                common.gate(
                    f"{self.name}, {way}", zonal.attention(q, k, v, operator, causal=True, path=path), wanted, 2e-4
                ),
            )
        t, s = torch.arange(300)[:, None], torch.arange(300)
        wanted = F.scaled_dot_product_attention(*exact, attn_mask=(s <= t) & ((t - s < 64) | (s < 5)))
        return max(worst, common.gate(BOTH, local_global(q, k, v, 64, 5), wanted, 2e-4))


def edges(length: int) -> list[int]:
    """Where the ranges of positions end: 512, 1024, 2048 ... length."""
    return [*itertools.takewhile(lambda n: n < length, (512 * 2**i for i in range(32))), length]


@torch.no_grad()
def read(
    subject: Subject, text: str, stretch: int, tokens: Tensor, targets: Tensor, kept: Sequence[Row]
) -> Iterator[Row]:
    """Nats a token by position of every way on a stretch that is not among the rows kept."""
    done = {(row["model"], row["way"], row["text"], row["stretch"]) for row in kept if row["part"] == "read"}
    for way in subject.ways:
        if (subject.name, way, text, stretch) in done:
            continue
        subject.put(way)
        length = min(tokens.shape[1], subject.sizes.exact if way == LARGEST else tokens.shape[1])
        begun = time.process_time()
        nats = subject.model.predict(tokens[:, :length], targets[:, :length], path=subject.path).loss
        found = {
            str(stop): float(nats[start:stop].double().mean())
            for start, stop in itertools.pairwise([0, *edges(length)])
        }
        yield {
            "part": "read",
            "model": subject.name,
            "way": way,
            "text": text,
            "stretch": stretch,
            "tokens": length,
            "nats": found,
            "processor_seconds": time.process_time() - begun,
        }


class Reader:
    """A layer's attention in one way: ``prefix`` at once, then ``step`` after step of one token. nbytes: of what it
    holds between steps.
    """

    def __init__(self, prefix: Callable[[], object], step: Callable[[], object], nbytes: int) -> None:
        self.prefix, self.step, self.nbytes = prefix, step, nbytes
        self.seconds: list[float] = []
        self.step_seconds: list[float] = []
        self.peak: int | None = None

    def read(self) -> None:
        if self.peak is None:
            self.peak = common.peak_bytes(lambda: _clocked(self.prefix, self.seconds))
        else:
            _clocked(self.prefix, self.seconds)


def _clocked(work: Callable[[], object], seconds: list[float]) -> object:
    begun = time.process_time()
    made = work()
    seconds.append(time.process_time() - begun)
    return made


def readers(subject: Subject, q: Tensor, k: Tensor, v: Tensor, length: int) -> dict[str, Reader]:
    """way -> its reader of the first ``length`` tokens and of the one after them, which is read again and again."""
    sizes, made = subject.sizes, {}
    before, new = [x[:, :, :length] for x in (q, k, v)], [x[:, :, length : length + 1] for x in (q, k, v)]
    whole = [torch.cat([a, b], 2) for a, b in zip(before[1:], new[1:], strict=True)]

    def decoder(operator: Operator) -> tuple[Callable[[], object], int]:
        held = [Memory.empty(operator, 1, k.shape[1], k.shape[3], v.shape[3], torch.float32).absorb(*before[1:])]

        def step() -> object:  # from memory to memory, which costs no copy
            y, held[0] = zonal.attention(*new, operator, causal=True, memory=held[0])
            return y

        return step, held[0].nbytes

    for way, (operator, path) in ways(subject.own[-1], sizes).items():
        if way != LARGEST or length <= sizes.exact:
            made[way] = Reader(
                functools.partial(zonal.attention, *before, operator, causal=True, path=path), *decoder(operator)
            )
    kept = sum(x.nbytes for x in before[1:])
    fused = functools.partial(F.scaled_dot_product_attention, new[0], *whole)
    made[FUSED] = Reader(functools.partial(F.scaled_dot_product_attention, *before, is_causal=True), fused, kept)
    if BOTH in subject.ways:
        few = functools.partial(local_global, new[0], *whole, sizes.window, sizes.first)
        made[BOTH] = Reader(
            functools.partial(local_global, *before, sizes.window, sizes.first),
            few,
            kept * min(sizes.window + sizes.first, length) // length,
        )
    return made


@torch.no_grad()
def timed(subject: Subject, tokens: Tensor, kept: Sequence[Row]) -> Iterator[Row]:
    """Processor seconds and bytes of the last layer's attention, in turns over the ways."""
    done = {row["tokens"] for row in kept if row["part"] == "time" and row["model"] == subject.name}
    lengths = [length for length in subject.sizes.lengths if length not in done]
    if not lengths:
        return
    subject.put(NEAR)  # what comes before the last layer is of no account for its times, and a window is soon read
    q, k, v = captured.of_layers(subject.model, tokens)[-1]
    for length in lengths:
        made = readers(subject, q, k, v, length)
        for _ in range(1 if length > 10000 else 2 if length > 2000 else 4):
            for reader in made.values():
                reader.read()
        for _, reader in itertools.product(range(subject.sizes.steps), made.values()):
            _clocked(reader.step, reader.step_seconds)
        least = {way: (min(reader.seconds), min(reader.step_seconds)) for way, reader in made.items()}
        for way, reader in made.items():
            row = {
                "part": "time", "model": subject.name, "way": way, "tokens": length, "prefix_seconds": least[way][0],
                "to_fused": least[way][0] / least[FUSED][0], "peak_bytes": reader.peak,
                "step_seconds": least[way][1], "step_to_fused": least[way][1] / least[FUSED][1],
                "held_bytes": reader.nbytes,
            }  # fmt: skip
            if way == FOUND:
                operator = ways(subject.own[-1], subject.sizes)[FOUND][0]
                row |= dataclasses.asdict(measured(operator, q[:, :, :length], k[:, :, :length], causal=True, rows=64))
            yield row


def show(row: Row) -> str:
    """One line for who watches."""
    if row["part"] == "read":
        return (
            f"{row['model']:<9}{row['way']:<17}{row['text'][:12]:<13}{row['processor_seconds']:7.1f} s  "
            + "  ".join(f"to {stop}: {math.exp(nats):.3f}" for stop, nats in row["nats"].items())
        )
    return (
        f"{row['model']:<9}{row['way']:<17}{row['tokens']:>6} tokens  "
        f"{row['prefix_seconds'] / row['tokens'] * 1e6:9.2f} µs a token, {row['to_fused']:6.2f} of fused, "
        f"{row['peak_bytes'] / 1e6:8.1f} MB; "
        f"a step {row['step_seconds'] * 1e6:8.1f} µs, {row['step_to_fused']:6.2f}, {row['held_bytes'] / 1e6:.2f} "
        "MB held" + (f"; mass {row['mass']:.3f}" if "mass" in row else "")
    )


def perplexity(rows: Sequence[Row], model: str, way: str, text: str, stop: str) -> tuple[float, float | None] | None:
    """Mean over stretches, and what the ratio to all keys deviates by over them; None where it was not read."""

    def nats(which: str) -> dict[int, float]:
        return {
            row["stretch"]: row["nats"][stop]
            for row in rows
            if row["part"] == "read"
            and (row["model"], row["way"], row["text"]) == (model, which, text)
            and stop in row["nats"]
        }

    own, base = nats(way), nats(ALL)
    if not own:
        return None
    found = spread([own[index] - base[index] for index in own])
    return math.exp(sum(own.values()) / len(own)), found.deviation


def summarised(rows: Sequence[Row], errors: Mapping[str, float]) -> dict[str, Any]:
    """Perplexity at the farthest positions, time to fused attention at the greatest length and how memory grows, by
    model and way.
    """
    reads, times = ([row for row in rows if row["part"] == part] for part in ("read", "time"))
    stop = max((stop for row in reads for stop in row["nats"]), key=int, default="0")
    far: dict[str, dict[str, float]] = {}
    for row in reads:
        found = perplexity(rows, row["model"], row["way"], row["text"], stop)
        if found is not None:
            far.setdefault(row["text"], {})[f"{row['model']}, {row['way']}"] = found[0]
    longest = max((row["tokens"] for row in times), default=0)
    speed = {f"{row['model']}, {row['way']}": row["to_fused"] for row in times if row["tokens"] == longest}
    return {
        "gate_errors": dict(errors),
        "predicted": PREDICTED,
        f"perplexity_to_{stop}": far,
        f"time_to_fused_at_{longest}": speed,
    }


def tables(rows: Sequence[Row]) -> list[page.Table]:
    """What the page shows."""
    reads, times = ([row for row in rows if row["part"] == part] for part in ("read", "time"))
    made = []
    for text in dict.fromkeys(row["text"] for row in reads):
        stops = list(next(row["nats"] for row in reads if row["text"] == text and row["way"] == ALL))
        body = []
        for model, way in dict.fromkeys((row["model"], row["way"]) for row in reads):
            found = [perplexity(rows, model, way, text, stop) for stop in stops]
            body.append([model, way, *("" if f is None else f"{f[0]:.3f}" for f in found)])
        stretches = len({row["stretch"] for row in reads if row["text"] == text})
        made.append(
            page.Table(
                f"Perplexity of a byte by position, {text}",
                f"Mean over stretches: {stretches}. A column is of the positions after the last one's, up to its own.",
                ["model", "way", *stops],
                body,
            )
        )
    header = [
        "model",
        "way",
        "tokens",
        "µs a token, prefix",
        "of fused",
        "MB at the peak",
        "µs a step",
        "of fused",
        "MB held",
        "mass kept",
    ]
    body = [
        [
            row["model"], row["way"], str(row["tokens"]), f"{row['prefix_seconds'] / row['tokens'] * 1e6:.2f}",
            f"{row['to_fused']:.2f}", f"{row['peak_bytes'] / 1e6:.1f}", f"{row['step_seconds'] * 1e6:.0f}",
            f"{row['step_to_fused']:.2f}", f"{row['held_bytes'] / 1e6:.2f}",
            f"{row['mass']:.3f}" if "mass" in row else "",
        ]
        for row in times
    ]  # fmt: skip
    made.append(
        page.Table(
            "Time and memory of a layer's attention",
            "All heads of the last layer; fused: torch's softmax attention on the same queries, keys and values.",
            header,
            body,
        )
    )
    return made


def write_page(options: argparse.Namespace) -> None:
    """The page beside the JSON."""
    target = Path(options.out)
    value = store.read_json(target)
    about = [paragraph.replace("\n", " ") for paragraph in value["about"].split("\n\n")] + [
        f"Predicted: {'; '.join(PREDICTED.values())}."
    ]
    command = " ".join(
        [
            "zonal bench long_context --threads 1",
            *(f"--model {page.shown(path)}" for path in options.model),
            *(f"--text {page.shown(Path(text))}" for text in options.text),
        ]
    )
    page.write(target.with_suffix(".md"), "Long context with fewer keys", about, tables(value["rows"]), value, command)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and write its JSON and page."""
    parser = common.parser(__doc__ or "", "long_context", "page", "resume")
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        required=True,
        help="run of `zonal train --task text` on bytes; may be given several times",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        help="a text beside the embedded novel, of whose end stretches are read; may be given several times",
    )
    parser.add_argument(
        "--stretches", type=int, default=Sizes().stretches, help="stretches of each text (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    if options.page:
        write_page(options)
        return 0
    run = common.Run(options, only_cpu="processor time and peak memory are those of a process on the CPU")
    sizes = QUICK if options.quick else dataclasses.replace(Sizes(), stretches=options.stretches)
    texts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for source in ("novel", *options.text):
        task = Text(source, "byte", sizes.length, evaluation_bytes=sizes.stretches * sizes.length)
        texts[task.title.partition(" (")[0].removesuffix(".txt")] = [
            (batch.tokens, batch.targets) for batch in task.evaluation_batches(1)
        ]
    models = {}
    for path in options.model:
        model, config = load_model(checkpoint_in(path))
        if config["operator"] in models:
            raise ArgumentError(
                f"bench long_context: each --model must have another operator, by which rows are named; {path} is a "
                f"second one of {config['operator']}. Leave it out, or measure it with another --out."
            )
        models[config["operator"]] = (model, config)
    subjects = [Subject(name, model, sizes) for name, (model, _) in models.items()]
    errors = {subject.name: subject.gate() for subject in subjects}
    settings = {
        "models": {
            name: {"parameters": sum(p.numel() for p in model.parameters()), **config["identity"]["model"]}
            for name, (model, config) in models.items()
        }
    }
    settings |= {"sizes": dataclasses.asdict(sizes), "top": TOP, "clock": "processor time", "dtype": "float32"}
    rows = common.kept(run.target, options.resume, settings, run.device)
    stretch = torch.cat([next(iter(texts.values()))[0][0], next(iter(texts.values()))[0][1][:, -1:]], 1)
    parts: list[Iterator[Row]] = []
    for subject in subjects:
        parts += [
            read(subject, text, index, *stretches[index], rows[:])
            for text, stretches in texts.items()
            for index in range(len(stretches))
        ]
        parts.append(timed(subject, stretch, rows[:]))
    for row in itertools.chain.from_iterable(parts):
        rows.append(row)
        print(show(row), flush=True)
        # after each, since they take minutes; those of one length belong together
        if row["part"] == "read" or row["way"] in (FUSED, BOTH):
            run.write(rows, summarised(rows, errors), settings)
    if run.target != "-":
        write_page(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

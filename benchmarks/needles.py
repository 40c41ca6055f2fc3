"""Facts in a haystack far longer than the sequences of training, found by runs of a comparison.

Each run's checkpoint reads sequences of one kind of retrieval (``zonal tasks show needle``) in pieces, each from the
memory of those before, and names the value that is asked at the end. A row is a run and a length. After the comparison:

    python -m benchmarks.needles --threads 1 runs/echo-1m/runs/*/seed-*
    python -m benchmarks.needles --threads 1 --out common.json --kind common-value --pairs 4 runs/echo-1m/runs/*/seed-*
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common
from zonal import store
from zonal.cli.generate import checkpoint_in
from zonal.errors import ArgumentError
from zonal.evaluation import evaluate_transfer, spread
from zonal.tasks import Retrieval, Shape, Stage
from zonal.tasks.retrieval import KINDS
from zonal.training import load_model


def task(lengths: Sequence[int], examples: int, vocab_size: int, kind: str = "needle", pairs: int = 1) -> Retrieval:
    """Sequences of a kind at each of the lengths; what is trained on is not used."""
    shapes = [Shape(kind, pairs, length) for length in lengths]
    return Retrieval(
        [Stage(0, (Shape("needle", 1, 64),))], transfer_shapes=shapes, transfer_examples=examples, vocab_size=vocab_size
    )


def numbers(text: str) -> list[int]:
    """Lengths from one text; argparse says in one line what it cannot read."""
    return [int(number) for number in text.split(",")]


def main(argv: Sequence[str]) -> int:
    """Run; 0 when it went through."""
    parser = common.parser(__doc__ or "", "needles")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, each with a checkpoint")
    parser.add_argument("--kind", default="needle", choices=tuple(KINDS), help="of sequences (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=1, help="things to remember (default: %(default)s)")
    parser.add_argument("--lengths", type=numbers, default="4096,16384,65536", help="tokens (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=100, help="sequences of a length (default: %(default)s)")
    parser.add_argument("--piece", type=int, default=512, help="tokens read at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    run = common.Run(options)
    lengths = [128, 256] if options.quick else options.lengths
    rows = []
    for folder in options.runs:
        model, config = load_model(checkpoint_in(folder, "bench needles"))
        trained = config["identity"]["task"]["task"]
        if trained != Retrieval.kind:
            raise ArgumentError(f"bench needles: {folder} must be a run on retrieval, and is one on {trained!r}.")
        record = store.read_json(folder / "run.json")
        found = task(lengths, options.examples, model.config.vocab_size, options.kind, options.pairs)
        for cell in evaluate_transfer(model.to(run.device), found, batch_size=16, piece=options.piece):
            rows.append({
                "operator": record["label"], "seed": record["seed"], "learning_rate": record["learning_rate"],
                "steps": record["steps"], "tokens": cell["length"], "examples": cell["examples"],
                "accuracy": cell["accuracy"],
            })  # fmt: skip
            print(f"{record['label']}, seed {record['seed']}, rate {record['learning_rate']:g}: "
                  f"{cell['length']:,} tokens, {cell['accuracy']:.3f}", flush=True)  # fmt: skip
    summary = {}
    for name, rate, length in dict.fromkeys((row["operator"], row["learning_rate"], row["tokens"]) for row in rows):
        values = [
            row["accuracy"]
            for row in rows
            if (row["operator"], row["learning_rate"], row["tokens"]) == (name, rate, length)
        ]
        total = spread(values)
        summary[f"{name}, rate {rate:g}, {length} tokens"] = {
            "mean": total.mean, "deviation": total.deviation, "worst": min(values), "seeds": len(values)
        }  # fmt: skip
    settings = {"kind": options.kind, "pairs": options.pairs, "lengths": lengths}
    run.write(rows, summary, {**settings, "examples": options.examples, "piece": options.piece})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

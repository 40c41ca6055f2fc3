"""Language models of comparisons on the whole of their validation text, on each of ten stretches of it, and by place.

A comparison measures its models on a sample of the validation text. Here each run's checkpoint reads all of it, or its
first --tokens, in windows of its length or of --length tokens. A row is a run. "places" are mean losses of the tokens
at places 0 to 63 of a window, 64 to 127, 128 to 255, and so on, each range twice as long as the one before and the last
cut off by the window's end; a model that uses far tokens has a lower loss at later places. After comparisons:

    python -m benchmarks.held_out --threads 1 runs/text-10m/runs/*/seed-*
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import common
from zonal import store, tasks
from zonal.cli.generate import checkpoint_in
from zonal.errors import ArgumentError
from zonal.evaluation import spread
from zonal.models import LanguageModel
from zonal.tasks import Text
from zonal.training import load_model

STRETCHES = 10
FIRST_PLACES = 64
READ_AT_ONCE = 4096
"""Tokens of a batch."""


def losses(model: LanguageModel, text: Text, windows: int | None = None) -> np.ndarray:
    """The loss of each token of the evaluation windows of ``text``, or of the first of them, (windows, length), in
    nats.
    """
    device, found = next(model.parameters()).device, []
    # a batch has one window or more
    for batch in itertools.islice(text.evaluation_batches(max(1, READ_AT_ONCE // text.length)), windows):
        _, _, _, loss = model.predict(batch.tokens.to(device), batch.targets.to(device))
        found.append(loss.double().cpu().reshape(batch.targets.shape).numpy())
    return np.concatenate(found)[:windows]


def by_place(found: np.ndarray) -> dict[str, float]:
    """The mean of ``found``, (windows, length), in each range of places, by the range's name, "64-127" for one."""
    places, begin, end = {}, 0, FIRST_PLACES
    while begin < found.shape[1]:
        part = found[:, begin:end]
        places[f"{begin}-{begin + part.shape[1] - 1}"] = float(part.mean())
        begin, end = end, 2 * end
    return places


def main(argv: Sequence[str]) -> int:
    """Run; 0 when it went through."""
    parser = common.parser(__doc__ or "", "held_out")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, each with a checkpoint")
    parser.add_argument("--length", type=int, default=None, help="tokens of a window (default: those of the run)")
    parser.add_argument("--tokens", type=int, default=None, help="read whole windows of the first so many tokens alone")
    options = parser.parse_args(argv)
    run = common.Run(options)
    rows = []
    for folder in options.runs:
        model, config = load_model(checkpoint_in(folder, "bench held_out"))
        record = store.read_json(folder / "run.json")
        task = config["identity"]["task"]
        if task["task"] != Text.kind:
            raise ArgumentError(f"bench held_out: {folder} must be a run on text, and is one on {task['task']!r}")
        trained_length = task["length"]
        text = tasks.from_config({
            **task, "length": trained_length if options.length is None else options.length,
            "evaluation_bytes": task["evaluation_bytes"] if options.quick else None,
        })  # fmt: skip
        assert isinstance(text, Text)
        if options.tokens is not None and options.tokens < text.length:
            raise ArgumentError(
                f"bench held_out: --tokens must be at least a window of {text.length}, got {options.tokens}"
            )
        found = losses(model.to(run.device), text, None if options.tokens is None else options.tokens // text.length)
        rows.append({
            "operator": record["label"], "seed": record["seed"], "learning_rate": record["learning_rate"],
            "steps": record["steps"], "trained_length": trained_length, "length": text.length, "tokens": found.size,
            "loss": float(found.mean()),
            "stretches": [float(part.mean()) for part in np.array_split(found, min(STRETCHES, len(found)))],
            "places": by_place(found),
            "loss_of_the_comparison": record["final"]["loss"],
        })  # fmt: skip
        print(f"{record['label']}, seed {record['seed']}, rate {record['learning_rate']:g}: "
              f"{found.mean():.3f} nats a token of {found.size:,}", flush=True)  # fmt: skip
    summary = {}
    for name, rate in dict.fromkeys((row["operator"], row["learning_rate"]) for row in rows):
        total = spread([row["loss"] for row in rows if (row["operator"], row["learning_rate"]) == (name, rate)])
        summary[f"{name}, rate {rate:g}"] = {"mean": total.mean, "deviation": total.deviation}
    run.write(rows, summary, {"stretches": STRETCHES, "tokens": options.tokens})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

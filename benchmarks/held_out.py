"""Language models of comparisons on the whole of their validation text, and on each of ten stretches of it.

A comparison measures its models on a sample of the validation text. Here each run's checkpoint reads all of it, in
windows of its length. A row is a run. After comparisons:

    python -m benchmarks.held_out --threads 1 runs/text-10m/runs/*/seed-*
"""

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


def losses(model: LanguageModel, text: Text, batch_size: int) -> np.ndarray:
    """The mean loss of each evaluation window of ``text``, in nats per token."""
    device, found = next(model.parameters()).device, []
    for batch in text.evaluation_batches(batch_size):
        _, _, _, loss = model.predict(batch.tokens.to(device), batch.targets.to(device))
        found.append(loss.double().cpu().reshape(batch.targets.shape).mean(1).numpy())
    return np.concatenate(found)


def main(argv: Sequence[str]) -> int:
    """Run; 0 when it went through."""
    parser = common.parser(__doc__ or "", "held_out")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, each with a checkpoint")
    options = parser.parse_args(argv)
    run = common.Run(options)
    rows = []
    for folder in options.runs:
        model, config = load_model(checkpoint_in(folder, "bench held_out"))
        record = store.read_json(folder / "run.json")
        task = config["identity"]["task"]
        text = tasks.from_config(task if options.quick else {**task, "evaluation_bytes": None})
        if not isinstance(text, Text):
            raise ArgumentError(f"bench held_out: {folder} must be a run on text, and is one of {text.describe()}")
        found = losses(model.to(run.device), text, 16)
        rows.append({
            "operator": record["label"], "seed": record["seed"], "learning_rate": record["learning_rate"],
            "steps": record["steps"], "tokens": len(found) * text.length, "loss": float(found.mean()),
            "stretches": [float(part.mean()) for part in np.array_split(found, STRETCHES)],
            "loss_of_the_comparison": record["final"]["loss"],
        })  # fmt: skip
        print(f"{record['label']}, seed {record['seed']}, rate {record['learning_rate']:g}: "
              f"{found.mean():.3f} nats a token of {len(found) * text.length:,}", flush=True)  # fmt: skip
    summary = {}
    for name, rate in dict.fromkeys((row["operator"], row["learning_rate"]) for row in rows):
        total = spread([row["loss"] for row in rows if (row["operator"], row["learning_rate"]) == (name, rate)])
        summary[f"{name}, rate {rate:g}"] = {"mean": total.mean, "deviation": total.deviation}
    run.write(rows, summary, {"stretches": STRETCHES})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Compare two operators on associative recall from Python: the same data, seeds and initial weights, and a report page.

    python examples/compare_two_operators.py [FOLDER]

Run it twice with a folder: the second time finds everything done and only writes the report anew.
"""

import sys
import tempfile

from zonal import report, tasks
from zonal.models import ModelConfig
from zonal.training import Comparison, ComparisonSpec, TrainConfig, events

OPERATORS = ("softmax", "ska(power=1)")


def show(event: events.Event) -> None:
    """Print each run as it ends."""
    if isinstance(event, events.RunFinished) and event.final is not None:
        print(f"  {event.label:<14} seed {event.seed}: accuracy {event.final['accuracy']:.2f}")


def main(folder: str) -> None:
    task = tasks.resolve(
        "mqar-demo", tasks.TaskSettings(vocab_size=64, length=32, train_examples=4000, test_examples=100)
    )
    print(task.describe())
    spec = ComparisonSpec(
        task=task,
        # no convolution: the value stands one token after its key, which a Koopman operator of power 1 reaches by
        # itself
        model=ModelConfig(task.vocab_size, dim=32, layers=("softmax",) * 2, heads=2, mlp="none"),
        training=TrainConfig(steps=60, batch_size=32, learning_rate=1e-2, eval_every=20, tensorboard=False),
        operators=OPERATORS,
        seeds=(0, 1, 2),
        title="Associative recall without a convolution",
    )
    result = Comparison(folder, spec).run(on_event=show, threads=1)  # tensors this small gain nothing from more
    assert result.status == "done"

    summary = report.summarise(report.load(folder))
    print(f"\n{summary.headline}")
    for sentence in summary.sentences:
        print(f"  {sentence}")
    print(f"Report: {report.write(folder).html}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)

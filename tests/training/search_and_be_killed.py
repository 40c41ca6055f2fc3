"""A small search, for tests: as a value, and as a process that prints a line an update and can be killed.

python search_and_be_killed.py FOLDER
"""

import sys
from pathlib import Path

from zonal import tasks
from zonal.models import ModelConfig
from zonal.training import TrainConfig, events
from zonal.training.search import Search, SearchSpec


def a_search(**changes):
    settings = {
        "task": tasks.resolve(
            "mqar", tasks.TaskSettings(vocab_size=32, length=16, pairs=2, train_examples=64, test_examples=16)
        ),
        "model": ModelConfig(32, dim=16, layers=("softmax",), heads=2, mlp="none", conv=2, init_std=0.1),
        "training": TrainConfig(steps=4, batch_size=4, eval_every=4, learning_rate=1e-2, tensorboard=False,
        checkpoint_every=1, checkpoint_seconds=None),
        "seeds": (0, 1), "rounds": 2, "width": 2, "measure": "loss", "kinds": ("score", "learning_rate"),
        "rule": "metropolis", "temperature": 0.1,
    }  # fmt: skip
    return SearchSpec(**{**settings, **changes})


def say(event):
    if isinstance(event, events.StepDone | events.Judged):
        sys.stdout.write(f"{type(event).__name__}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Search(Path(sys.argv[1]), a_search()).run(on_event=say, threads=1)
